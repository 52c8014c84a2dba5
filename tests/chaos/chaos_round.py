"""One fault: a request brought into a state, the fault, and the audit that follows."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from chaos_clients import BROKEN, LATE, LEFT, RIGHT, Ask, Outcome
from chaos_faults import Fault, name_of
from chaos_relay import Trap
from chaos_stages import REACH_S, STAGES, Scene, Stage, fill_seats
from chaos_world import EVERYBODY, LOOK_S, REPLICAS, World

NEXT = 20
END_WITHIN_S = 40.0
"""For a process that was killed, or told to drain, to end."""
NOT_REACHED = "not reached"
PROBED, PROBE_S = ("gateway", "redis"), 5.0
"""Who is replaced when it has not answered a probe for this long."""


class Row(msgspec.Struct, kw_only=True):
    """What came of one fault. ``breaches`` is empty if all was as it must be."""

    seed: int = 0
    fault: str
    state: str
    seen: list[str] = []
    """The states in the books of both replicas just before the fault."""
    outcome: str = NOT_REACHED
    others: list[str] = []
    details: list[str] = []
    """Why each of them failed, or was served another way than asked."""
    recovery_s: float = 0.0
    breaches: list[str] = []
    requests: int = 0


class Round:
    """Use once: ``await Round(world, fault, stage, number).run()``."""

    def __init__(self, world: World, fault: Fault, stage: Stage, number: int) -> None:
        self._world, self._fault, self._stage, self._number = world, fault, stage, number
        ask = Ask(number=number, length=stage.length, max_tokens=stage.max_tokens)
        self._scene = Scene(world, ask, Trap(ask.prompt, stage.point))
        self._starts = dict(world.starts)
        self._victims = {name: s.child.ended for name, s in world.services.items()}
        self.row = Row(
            fault=fault.name, state=stage.name, seen=[], others=[], details=[], breaches=[]
        )

    async def run(self) -> Row:
        loop, world, scene = asyncio.get_running_loop(), self._world, self._scene
        world.traps.append(scene.trap)
        companions = self._companions()
        if self._stage.rate:
            scene.slow_down(self._stage.rate)
        if self._stage.hogs and not await fill_seats(scene):
            return await self._give_up([])
        tasks = [asyncio.ensure_future(world.client.ask(scene.ask, leave=scene.leave))]
        if not await self._reach():
            return await self._give_up(tasks)
        self.row.seen = sorted(await world.states(*scene.sides))
        tasks += [asyncio.ensure_future(world.client.ask(ask)) for ask in companions]
        await self._until_in_flight(len(companions))
        began = loop.time()
        self._inject()
        if self._fault.lasts_s:
            await asyncio.sleep(self._fault.lasts_s)
            self._undo()
        outcomes = await self._until_all_have_ended(tasks)
        await self._restore()
        await self._audit()
        self.row.recovery_s = loop.time() - began
        await self._judge([scene.ask, *companions], outcomes)
        return self.row

    def _companions(self) -> list[Ask]:
        """The load beside it: several lengths, kinds and choices."""
        if self._stage.hogs:
            return []
        base = 1_000_000 + 10 * self._number
        return [
            Ask(number=base, length=300, max_tokens=12),
            Ask(number=base + 1, length=90, max_tokens=16, n=3, temperature=0.8),
            Ask(number=base + 2, length=700, stream=False),
        ]

    async def _reach(self) -> bool:
        try:
            async with asyncio.timeout(REACH_S):
                reached = await self._stage.reach(self._scene)
                await self._scene.trap.seen.wait()
                return reached
        except TimeoutError:
            return False

    async def _until_in_flight(self, count: int) -> None:
        """The companions are on their way; they wait where the slow link makes them wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REACH_S):
                while await self._world.client.metric("ekiden_gateway_in_flight") < count:
                    await asyncio.sleep(LOOK_S)

    def _inject(self) -> None:
        scene = self._scene
        self._fault.inject(scene)
        scene.trap.spring(self._fault.lie)
        scene.speed_up() if "throttled" not in self._fault.name else None
        for hog in scene.hogs:
            hog.cancel()
        if self._stage.gone and not self._fault.frozen:
            self._lift_stage()

    def _lift_stage(self) -> None:
        """The ranks that stood still for the stage move on, unless the fault stops them too."""
        if not self._fault.name.startswith("SIGSTOP"):
            self._world.cont_all()

    def _undo(self) -> None:
        self._world.cont_all()
        self._world.net.mend()

    async def _until_all_have_ended(self, tasks: list[asyncio.Task[Outcome]]) -> list[Outcome]:
        """An orchestrator's probe sees a gateway or a Redis that stands still; whether a replica
        does is for the others to find out, each by its own deadlines."""
        if self._fault.frozen in PROBED:
            await asyncio.wait(tasks, timeout=PROBE_S)
            await self._world.replace(self._fault.frozen)
        return await asyncio.gather(*tasks)

    async def _restore(self) -> None:
        """Undo what is left; see to it that what had to end has, and was started anew."""
        world, fault = self._world, self._fault
        if fault.frozen and fault.frozen not in PROBED:
            await self._world.replace(name_of(self._scene, fault.frozen))
        self._undo()
        if fault.ends:
            await self._until_ended(name_of(self._scene, fault.ends))
        if not await world.until_ready():
            await self._revive()

    async def _until_ended(self, name: str) -> None:
        """The process is gone, and so is a drained one, with exit code 0."""
        done, _ = await asyncio.wait({self._victims[name]}, timeout=END_WITHIN_S)
        if not done:
            self.row.breaches.append(f"{name} did not end within {END_WITHIN_S:g} s")
            await self._world.replace(name)
        elif "SIGTERM" in self._fault.name and (code := self._victims[name].result()):
            self.row.breaches.append(f"{name} ended its drain with exit code {code}")

    async def _revive(self) -> None:
        """Something that was not killed does not serve: a breach; start it anew to go on."""
        known = {record.id: record.status for record in self._world.members.replicas()}
        self.row.breaches.append(f"not ready again without a restart: members {known}")
        await asyncio.gather(*map(self._world.replace, EVERYBODY))
        await self._world.until_ready()

    async def _audit(self) -> None:
        """Nothing is held by anybody, nobody was restarted who was not killed, all is well."""
        world, fault = self._world, self._fault
        await nothing_is_held(world, self.row)
        meant = {name_of(self._scene, side) for side in (fault.ends, fault.frozen) if side}
        for name in EVERYBODY:
            if name not in meant and world.starts[name] != self._starts[name]:
                self.row.breaches.append(f"{name} ended though nobody killed it")
        await next_are_right(world, self.row, self._number)

    async def _judge(self, asks: list[Ask], outcomes: list[Outcome]) -> None:
        judged = [
            await self._world.truth.judge(ask, outcome)
            for ask, outcome in zip(asks, outcomes, strict=True)
        ]
        self.row.outcome, *self.row.others = [outcome.name for outcome in judged]
        self.row.details = [outcome.detail for outcome in judged if outcome.detail]
        self.row.requests += len(judged)
        for number, outcome in enumerate(judged):
            who = f"companion {number}" if number else "the request"
            if not self._allowed(outcome, is_victim=not number):
                self.row.breaches.append(f"{who}: {outcome.name}: {outcome.detail}")

    def _allowed(self, outcome: Outcome, *, is_victim: bool) -> bool:
        fault = self._fault
        if outcome.kind == RIGHT:
            return True
        if outcome.kind == LEFT:
            return is_victim and self._scene.leave.is_set()
        if outcome.kind in (BROKEN, LATE):
            return "gateway" in (fault.ends, fault.frozen)
        return outcome.honest and not fault.promise

    async def _give_up(self, tasks: list[asyncio.Task[Outcome]]) -> Row:
        """The state did not come about: let everything go, and say so."""
        self._scene.trap.spring()
        self._scene.leave.set()
        for hog in self._scene.hogs:
            hog.cancel()
        self._undo()
        await asyncio.gather(*tasks)
        if self._scene.trap in self._world.traps:
            self._world.traps.remove(self._scene.trap)
        await self._audit()
        return self.row


async def audited(world: World, row: Row, number: int) -> None:
    """Nothing is held by anybody, and the next requests are right."""
    await nothing_is_held(world, row)
    await next_are_right(world, row, number)


async def nothing_is_held(world: World, row: Row) -> None:
    """What leaks is started anew, so that the next round begins with whole books."""
    if held := await world.until_settled():
        row.breaches.append(f"leaked: {held}")
        await world.replace(next((name for name in REPLICAS if name in held), "gateway"))
        await world.until_ready()


async def next_are_right(world: World, row: Row, number: int) -> None:
    """Twenty requests at once that nobody disturbs."""
    base = 5_000_000 + NEXT * number
    asks = [
        Ask(number=base + i, length=20 + 9 * i, stream=i % 3 > 0, n=1 + (i % 7 == 0))
        for i in range(NEXT)
    ]
    outcomes = await asyncio.gather(*(world.client.ask(ask) for ask in asks))
    for ask, outcome in zip(asks, outcomes, strict=True):
        if (await world.truth.judge(ask, outcome)).kind != RIGHT:
            row.breaches.append(f"afterwards: {outcome.name}: {outcome.detail}")
    row.requests += NEXT


def round_of(world: World, fault: Fault, state: str, number: int) -> Round:
    return Round(world, fault, STAGES[state], number)
