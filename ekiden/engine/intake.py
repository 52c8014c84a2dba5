"""From a request to what the engine works on, refused here if it can never be served."""

from __future__ import annotations

from ekiden.cache.prefix_index import KeyChain
from ekiden.core.config import EngineConfig
from ekiden.core.hashes import root_hash
from ekiden.core.types import Request
from ekiden.engine.advance import ChoiceState, TextFactory
from ekiden.engine.checks import check_fits, check_request
from ekiden.engine.job import Job, Role
from ekiden.engine.scheduling.sequence import Gate, Sequence


class Intake:
    """Makes jobs and their sequences; knows the model's and the replica's bounds."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        model_fingerprint: str,
        text_factory: TextFactory,
    ) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._fingerprint = model_fingerprint
        self._text_factory = text_factory
        self._arrivals = 0

    def chain(self, request: Request) -> KeyChain:
        """The keys of the request's blocks; those of another tenant or model never match."""
        return self.chain_of(request.salt)

    def chain_of(self, salt: str) -> KeyChain:
        """The keys of blocks under a tenant's salt."""
        root = root_hash(self._fingerprint, salt=salt)
        return KeyChain(root, self._config.block_size, self._config.granule)

    def job(self, request: Request, role: Role, now: float) -> Job:
        """A new job, without sequences.

        Raises:
            BadRequest: a field is wrong, or the request can never fit.
        """
        self.check(request, role)
        self._arrivals += 1
        states = [self._choice(request) for _ in range(request.sampling.n)]
        return Job(request, role, self._arrivals, states, now)

    def check(self, request: Request, role: Role) -> None:
        """Raise BadRequest unless this replica can serve ``request`` in ``role``."""
        # Prefill only needs room for the prompt, and for one token more than the hand-off token
        # if there will be one: then the same thing ends a choice here as on the other replica.
        wanted = request.sampling.max_tokens
        check_request(
            request,
            vocab_size=self._vocab_size,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._max_model_len,
            answer=min(wanted, 2) if role is Role.PREFILL else wanted,
        )
        check_fits(
            request,
            0 if role is Role.PREFILL else wanted,
            blocks=self._num_blocks,
            block_size=self._config.block_size,
        )

    def _choice(self, request: Request) -> ChoiceState:
        return ChoiceState(
            request.sampling,
            eos_token_ids=self._eos,
            max_output=min(request.sampling.max_tokens, self._max_model_len - len(request.prompt)),
            text_factory=self._text_factory,
        )

    def trunk(self, job: Job, gate: Gate = Gate.NONE) -> Sequence:
        """The sequence that stands for all choices while the prompt has no KV."""
        return self.sequence(job, (), list(range(len(job.states))), gate)

    def sequence(
        self, job: Job, output: tuple[int, ...], choices: list[int], gate: Gate = Gate.NONE
    ) -> Sequence:
        """A sequence of ``job`` for ``choices``, all of which have ``output`` so far."""
        request = job.request
        sequence = Sequence(
            request_id=request.request_id,
            order=(request.priority, job.arrival, choices[0]),
            tokens=request.prompt + output,
            choices=choices,
            chain=self.chain(request),
            max_tokens=len(request.prompt) + request.sampling.max_tokens,
            gate=gate,
        )
        job.sequences.append(sequence)
        return sequence
