"""The hand-off on a card: KV goes from one engine's cache through the host's staging to another's,
between block sizes and KV dtypes, and the tokens are those of one engine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ekiden.verify.layouts import Grid, Layout
from ekiden.verify.main import VerifyConfig
from ekiden.verify.main import run as verify
from ekiden.verify.tiny import write_tiny_model


def run(device: str, quick: bool) -> int:
    """1 if a pair is neither equal nor refused."""
    kinds = ("float32",) if quick else ("float32", "int8", "fp8")
    layouts = tuple(Layout(block_size=size, kv=kind) for kind in kinds for size in (16, 48))
    with tempfile.TemporaryDirectory() as folder:
        config = VerifyConfig(
            model_dir=write_tiny_model(Path(folder)),
            model_name="tiny",
            grid=Grid(prefill=layouts, decode=layouts),
            tiles=(),
            threads=True,
            processes=False,
            device=device,
        )
        return verify(config)
