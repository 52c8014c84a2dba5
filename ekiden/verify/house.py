"""What all replicas of one process share, and what they say of themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from ekiden import __version__
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.config import EngineConfig
from ekiden.core.hashes import SCHEME
from ekiden.models.config import ModelConfig
from ekiden.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from ekiden.models.layout import kv_layout
from kv_transfer.description import WIRE_VERSION, ReplicaDescription

WIRES = ("memory", "shm", "tcp")
"""Between replicas of one process: the fake, a mapped pool that decode reads itself, sockets."""
SWITCH_S = 0.0005
"""Ranks wait for one another many times a step: a thread that computes in Python lets go of the
interpreter after so long (Python's own 5 ms make a step of four ranks half as slow again)."""


class House(msgspec.Struct, frozen=True, kw_only=True):
    """What all replicas of this process share."""

    model: ModelConfig
    model_fingerprint: str
    tokenizer_fingerprint: str
    clock: Clock
    bell: threading.Event
    """Rings whenever a port has said something."""
    wire: str = WIRES[0]

    @classmethod
    def of(cls, config: EngineConfig, wire: str = WIRES[0]) -> House:
        """Reads the checkpoint's headers. Raises SetupError if it cannot be read."""
        directory = config.model_dir
        return cls(
            model=ModelConfig.from_dir(directory),
            model_fingerprint=model_fingerprint(directory, config.quantization),
            tokenizer_fingerprint=tokenizer_fingerprint(directory),
            clock=MonotonicClock(),
            bell=threading.Event(),
            wire=wire,
        )

    def describe(
        self,
        config: EngineConfig,
        role: str,
        name: str,
        epoch: int = 0,
        endpoints: tuple[bytes, ...] = (),
    ) -> ReplicaDescription:
        """What a replica says of itself; without ``endpoints``, what one that is not open would.

        Raises:
            SetupError: the layout cannot work with this model.
        """
        layout = kv_layout(self.model, config.check())
        return ReplicaDescription(
            replica_id=name,
            role=role,
            epoch=epoch,
            version=__version__,
            wire_version=WIRE_VERSION,
            model=config.model_name,
            model_fingerprint=self.model_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            granule=config.granule,
            hash_scheme=SCHEME,
            dtype=self.model.resolve_dtype(config),
            kv=layout,
            wires=(self.wire,),
            endpoints=endpoints or (b"",) * len(layout.ranks),
            max_model_len=self.model.resolve_max_model_len(config),
            vocab_size=self.model.vocab_size,
        )


@contextmanager
def quiet_threads() -> Iterator[None]:
    """One thread of torch for each rank, and short turns at the interpreter."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        sys.setswitchinterval(interval)
