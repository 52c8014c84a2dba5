"""Building the library: once, whole, and with the reason when it cannot be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ekiden.core.file_lock import file_lock
from ekiden.layers.backends.native import build
from ekiden.layers.backends.native.build import NativeUnavailable, check_cpu, library_file

SOURCE = 'extern "C" int answer() { return 42; }\n'


class Compiler:
    """The real one, behind a script that keeps count; ``before`` is what it does first."""

    def __init__(self, folder: Path, before: str = "") -> None:
        self.log = folder / "calls"
        self.log.touch()
        script = folder / "compiler"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho x >> {self.log}\n'
            f'{before}\nexec {build.COMPILER} "$@"\n'
        )
        script.chmod(0o755)
        self.path = str(script)

    @property
    def calls(self) -> int:
        return len(self.log.read_text().split())


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """One small source of its own, and an empty cache."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    return folder


def leftovers(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.suffix not in (".so", ".lock")]


def test_a_library_is_built_once_and_found_again(tmp_path, sources):
    compiler = Compiler(tmp_path)
    path = library_file(compiler.path)
    assert path.is_file()
    assert (library_file(compiler.path), compiler.calls) == (path, 2)  # compile and link
    assert leftovers(path.parent) == []


def test_who_waits_for_the_compiler_is_told_so_and_only_then(tmp_path, sources, caplog):
    caplog.set_level("INFO")
    compiler = Compiler(tmp_path)
    library_file(compiler.path)
    assert [record.message for record in caplog.records] == [build.COMPILING]
    library_file(compiler.path)
    assert len(caplog.records) == 1


def test_one_that_was_built_ahead_needs_no_compiler(tmp_path, sources, monkeypatch):
    ahead = build.build_ahead(tmp_path / "ahead")
    monkeypatch.setenv("EKIDEN_NATIVE", str(tmp_path / "ahead"))
    assert library_file("no-such-compiler") == ahead
    (sources / "one.cpp").write_text(SOURCE.replace("42", "43"))
    with pytest.raises(NativeUnavailable, match="no-such-compiler cannot be run"):
        library_file("no-such-compiler")  # of other sources, so it is not taken


@pytest.mark.parametrize("change", ["source", "header", "flags", "compiler"])
def test_what_it_is_built_from_names_it(tmp_path, sources, monkeypatch, change):
    compiler = Compiler(tmp_path)
    before = library_file(compiler.path)
    if change == "source":
        (sources / "one.cpp").write_text(SOURCE.replace("42", "43"))
    elif change == "header":
        (sources / "new.h").write_text("#pragma once\n")
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    else:
        script = Path(compiler.path)
        script.write_text(script.read_text().replace("1.0", "2.0"))
    assert library_file(compiler.path) != before


def test_ranks_that_start_together_build_one_library(tmp_path, sources):
    compiler, found = Compiler(tmp_path, before="sleep 0.2"), []
    ranks = [
        threading.Thread(target=lambda: found.append(library_file(compiler.path))) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert compiler.calls == 2


def test_a_builder_that_hangs_is_waited_for_no_longer_than_a_build(tmp_path, sources, monkeypatch):
    compiler, waits = Compiler(tmp_path), []

    def impatient(path, timeout_s):
        waits.append(timeout_s)
        return file_lock(path, 0.3)

    monkeypatch.setattr(build, "file_lock", impatient)
    path = build.cache_dir() / "native" / f"ekiden-{build._key(compiler.path)}.lock"
    path.parent.mkdir(parents=True)
    with file_lock(path, 1.0) as held:
        assert held
        assert library_file(compiler.path).is_file()
    assert waits == [build.COMPILE_TIMEOUT_S]


def test_no_compiler_is_the_reason(sources):
    with pytest.raises(NativeUnavailable, match=r"no-such-compiler cannot be run"):
        library_file("no-such-compiler")


def test_what_the_compiler_says_is_the_reason(tmp_path, sources):
    (sources / "one.cpp").write_text("int broken( { }\n")
    with pytest.raises(NativeUnavailable, match=r"one\.cpp:1:.*error"):
        library_file()
    assert leftovers(tmp_path / "cache/native") == []


def test_a_compiler_that_hangs_is_ended(tmp_path, sources, monkeypatch):
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.2)
    compiler = Compiler(tmp_path, before="sleep 60")
    with pytest.raises(NativeUnavailable, match=r"compiling took over"):
        library_file(compiler.path)


def test_a_cache_that_cannot_be_written_is_the_reason(tmp_path, sources):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(NativeUnavailable, match="cannot be written"):
        library_file()


def test_a_cpu_that_lacks_something_is_told_what(tmp_path):
    flags = [feature for feature in build.FEATURES if feature != "avx512_bf16"]
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nflags\t\t: fpu {' '.join(flags)}\n")
    with pytest.raises(NativeUnavailable, match=r"this CPU lacks avx512_bf16$"):
        check_cpu(info)


def test_a_cpu_that_has_all_is_taken(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {' '.join(build.FEATURES)}\n")
    check_cpu(info)


def test_another_kind_of_cpu_lacks_all(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("Features : asimd\n")
    with pytest.raises(NativeUnavailable, match="this CPU lacks avx512f, "):
        check_cpu(info)


def test_another_system_is_told(monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(NativeUnavailable, match="for Linux, not darwin"):
        check_cpu()
