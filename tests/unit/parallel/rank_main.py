"""A rank as a process of its own: ``rank_main.py RANK SPEC_JSON...``; prints one JSON line.

Runs the same collectives on every mesh it is given and says what came out, bit by bit. After
the line it waits on stdin; ``go`` starts one more all-reduce, whose end it prints as well.
"""

from __future__ import annotations

import hashlib
import sys

import msgspec
import torch

from ekiden.core.errors import ReplicaFailed
from ekiden.parallel.mesh import Mesh
from ekiden.parallel.rendezvous import MeshSpec, open_mesh


def bits(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def collectives(mesh: Mesh) -> list[str]:
    """Sums of several sizes and dtypes, gathers of uneven parts, several messages in flight."""
    seen: list[str] = []
    generator = torch.Generator().manual_seed(mesh.rank)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 1000, 1_100_001):  # the last one is two slots of float32
            x = torch.randn(numel, generator=generator).to(dtype)
            seen.append(bits(mesh.tp.all_reduce(x)))
    part = torch.randn(3, 5 + mesh.tp_rank, generator=generator)
    sizes = [5 + r for r in range(mesh.tp.size)]
    seen.append(bits(mesh.tp.all_gather(part, sizes, dim=1)))
    rooted = mesh.tp.gather(part, sizes, dim=1)
    seen.append("" if rooted is None else bits(rooted))
    return [*seen, *pipeline(mesh)]


def pipeline(mesh: Mesh) -> list[str]:
    seen: list[str] = []
    for numel in (7, 300_000, 1):
        x = torch.arange(numel, dtype=torch.float32)
        if not mesh.is_first_stage:
            x = mesh.pp.recv((numel,), torch.float32)
            seen.append(bits(x))
        if not mesh.is_last_stage:
            mesh.pp.send(x + 1)
    return seen


def main() -> None:
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    specs = [msgspec.json.decode(text, type=MeshSpec) for text in sys.argv[2:]]
    meshes = [open_mesh(spec, rank) for spec in specs]
    print(msgspec.json.encode([collectives(mesh) for mesh in meshes]).decode(), flush=True)
    if sys.stdin.readline().strip() == "go":
        try:
            meshes[0].tp.all_reduce(torch.ones(1))
            print("done", flush=True)
        except ReplicaFailed as error:
            print(error.message, flush=True)
    for mesh in meshes:
        mesh.close()


if __name__ == "__main__":
    main()
