"""What the host has, or the container: the smallest limit around us counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiden.engine.host_memory import available_bytes

GIB = 1 << 30


class System:
    """A /proc and a /sys of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, limit: int | str, usage: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 7\n")

    def v1(self, group: str, limit: int, usage: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 3\ntotal_inactive_file {cache}\n")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_control_groups_the_host_counts(system: System) -> None:
    assert available_bytes(system.root) == 16 * GIB


def test_a_container_of_the_second_kind_limits(system: System) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.v2("", 8 * GIB, 3 * GIB, cache=GIB)
    assert available_bytes(system.root) == 6 * GIB


def test_a_container_of_the_first_kind_limits(system: System) -> None:
    system.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    system.v1("/docker/abc", 4 * GIB, GIB, cache=GIB // 2)
    assert available_bytes(system.root) == 3 * GIB + GIB // 2


def test_a_path_that_only_the_host_can_see_stands_for_the_top_of_the_mount(system: System) -> None:
    system.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    system.v1("", 2 * GIB, GIB)
    assert available_bytes(system.root) == GIB


def test_the_groups_around_ours_limit_too(system: System) -> None:
    system.write("proc/self/cgroup", "0::/slice/unit\n")
    system.v2("/slice/unit", "max", GIB)
    system.v2("/slice", 5 * GIB, 4 * GIB)
    assert available_bytes(system.root) == GIB


def test_no_limit_leaves_the_host(system: System) -> None:
    system.write("proc/self/cgroup", "4:memory:/\n0::/unit\n")
    system.v1("", 0x7FFFFFFFFFFFF000, GIB)
    system.v2("/unit", "max", GIB)
    assert available_bytes(system.root) == 16 * GIB


def test_a_group_over_its_limit_has_nothing_rather_than_less(system: System) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.v2("", GIB, 2 * GIB)
    assert available_bytes(system.root) == 0


def test_a_system_that_tells_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_machine_tells_something_possible() -> None:
    room = available_bytes()
    assert room is None or 0 <= room < 1 << 60
