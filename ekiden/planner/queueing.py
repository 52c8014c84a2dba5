"""How long requests wait for one of several servers, at percentiles.

M/G/c: arrivals at random, any distribution of service, c servers, one queue. The mean wait is
Allen and Cunneen's: that of M/M/c times (1 + cv^2) / 2. The tail is taken as exponential.
"""

from __future__ import annotations

import math

import msgspec


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request: how long it keeps a server, and what it takes beside waiting; seconds."""

    share: float
    busy: float
    latency: float


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """``servers`` that requests reach ``rate`` times a second together."""

    servers: int
    rate: float
    services: tuple[Service, ...]

    @property
    def busy(self) -> float:
        """Mean seconds of a server for one request."""
        return sum(s.share * s.busy for s in self.services)

    @property
    def load(self) -> float:
        """Share of the time for which a server is busy; from 1 on the queue grows for ever."""
        return self.rate * self.busy / self.servers

    @property
    def variation(self) -> float:
        """Squared coefficient of variation of the service."""
        mean = self.busy
        square = sum(s.share * s.busy**2 for s in self.services)
        return square / mean**2 - 1 if mean else 0.0

    @property
    def waits(self) -> float:
        """Probability that a request waits at all (Erlang C)."""
        return erlang_c(self.servers, self.rate * self.busy)

    @property
    def tail(self) -> float:
        """Mean wait, in seconds, of those that wait."""
        if self.load >= 1:
            return math.inf
        return self.busy / (self.servers * (1 - self.load)) * (1 + self.variation) / 2

    def quantile(self, share: float) -> float:
        """Seconds within which that share of all requests has waited and had its latency."""
        if self.load >= 1:
            return math.inf
        tail = self.tail
        waits = self.waits if tail else 0.0
        ordered = sorted((s.latency, s.share) for s in self.services)
        ends = [latency for latency, _ in ordered[1:]]
        asked = late = found = 0.0
        for (latency, part), end in zip(ordered, [*ends, math.inf], strict=True):
            # Of those whose latency is over by now, ``late`` still waited when it was.
            late = late * math.exp((found - latency) / tail) if tail else 0.0
            asked, late, found = asked + part, late + part * waits, latency
            if asked - late >= share:
                return latency
            if tail and asked > share:
                when = latency + tail * math.log(late / (asked - share))
                if when < end:
                    return when
        return found


EXACT_SERVERS = 128
"""Up to which the recursion is taken; beyond, its limit for many servers is as good."""


def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting with ``offered`` Erlangs of work for ``servers``."""
    if offered <= 0:
        return 0.0
    if offered >= servers:
        return 1.0
    if servers > EXACT_SERVERS:
        return many_servers(servers, offered)
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)


def many_servers(servers: int, offered: float) -> float:
    """The same in the limit of Halfin and Whitt (Operations Research 29, 1981)."""
    spare = (servers - offered) / math.sqrt(servers)
    density = math.exp(-spare * spare / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(spare / math.sqrt(2))) / 2
    return density / (density + spare * below)


NORMAL = {50: 0.0, 95: 1.645, 99: 2.326}
"""Standard deviations above the mean, by percentile, of a normal distribution."""


def poisson_quantile(mean: float, percentile: int) -> float:
    """Of a count that is ``mean`` on average, by the normal distribution that it comes near."""
    return mean + NORMAL[percentile] * math.sqrt(mean)
