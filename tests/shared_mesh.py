"""A shared-memory mesh inside one process: threads hold the ends that processes would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from ekiden.parallel.mesh import Mesh
from ekiden.parallel.rendezvous import host_mesh, open_mesh

T = TypeVar("T")


@contextmanager
def shm_meshes(tp: int, pp: int, timeout_s: float = 20.0, **sizes: int) -> Iterator[list[Mesh]]:
    with host_mesh(tp, pp, timeout_s=timeout_s, backend="shm", **sizes) as host:
        meshes = [open_mesh(host.spec, rank) for rank in range(tp * pp)]
        yield meshes
        for mesh in meshes:
            mesh.close()


def on_all(meshes: list[Mesh], work: Callable[[Mesh], T]) -> list[T]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(work, meshes))
