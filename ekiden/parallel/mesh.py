"""Where a rank stands among the ranks that together hold one model."""

from __future__ import annotations

from ekiden.parallel.communicator import Communicator, Solo
from ekiden.parallel.pipeline import Pipeline, SingleStage


class Mesh:
    """One rank's view: ``rank == pp_rank * tp.size + tp_rank``."""

    def __init__(self, tp: Communicator | None = None, pp: Pipeline | None = None) -> None:
        self.tp = tp or Solo()
        self.pp = pp or SingleStage()

    @property
    def tp_rank(self) -> int:
        return self.tp.rank

    @property
    def pp_rank(self) -> int:
        return self.pp.rank

    @property
    def rank(self) -> int:
        return self.pp.rank * self.tp.size + self.tp.rank

    @property
    def size(self) -> int:
        return self.tp.size * self.pp.size

    @property
    def is_first_stage(self) -> bool:
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        return self.pp.is_last

    @property
    def is_sampler(self) -> bool:
        """Whether this is the one rank that gets logits: TP rank 0 of the last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def abort(self, reason: str) -> None:
        """Fail every rank that waits for this one, now rather than at its deadline."""
        self.tp.abort(reason)
        self.pp.abort(reason)

    def close(self) -> None:
        """Let go of shared memory and connections. Not a collective; idempotent."""
        self.tp.close()
        self.pp.close()
