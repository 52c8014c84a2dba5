"""Block hashes of known tokens: a replica that hashed otherwise would share no KV with others."""

from __future__ import annotations

from ekiden.core.hashes import SCHEME, block_hashes, granule_hashes, root_hash
from ekiden.doctor.preflight.check import Check, failure, ok

MODEL, SALT = "ekiden", "golden"
TOKENS = tuple(range(0, 64 * 1021, 1021))
"""64 of them, some beyond two bytes."""
BLOCK = 32
GOLDEN = "be23e001ada08fc23092962a0931770b0687d71bffa8779c14b4bd8276faf680"
"""Of the last block, under SCHEME."""


def hashes() -> Check:
    found = block_hashes(granule_hashes(root_hash(MODEL, salt=SALT), TOKENS), BLOCK)[-1].hex()
    if found != GOLDEN:
        return failure(
            "hashes", f"{SCHEME} gives {found[:16]} where {GOLDEN[:16]} is right",
            "install ekiden anew: this one would find no KV that others know",
        )  # fmt: skip
    return ok("hashes", f"{SCHEME} of known tokens is {GOLDEN[:16]}")
