"""``ekiden models``: pull, list, path, import-gguf."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ekiden.cli.bar import Bar
from ekiden.cli.command import MODEL_HELP, add_command
from ekiden.core.errors import SetupError

_EXAMPLES = """examples:
  ekiden models list
  ekiden models pull smollm2-135m-instruct
  ekiden models import-gguf model.Q8_0.gguf --out ./model
"""
_PULL = """examples:
  ekiden models pull smollm2-135m-instruct

EKIDEN_CACHE, if set, is the folder that it is put into.
"""
_LIST = """examples:
  ekiden models list
"""
_PATH = """examples:
  ekiden models path smollm2-135m-instruct
"""
_IMPORT = """examples:
  ekiden models import-gguf model.Q8_0.gguf --out ./model
  ekiden models import-gguf model.Q8_0.gguf --out ./model --tokenizer ./original
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "models", "fetch, import and find models", _EXAMPLES)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    pull = add_command(verbs, "pull", "fetch a model of the catalogue into the cache", _PULL)
    pull.add_argument("name", metavar="NAME", help="as `ekiden models list` has it")
    pull.set_defaults(run=_pull)
    listing = add_command(verbs, "list", "print the catalogue, and what is here already", _LIST)
    listing.set_defaults(run=_list)
    path = add_command(
        verbs, "path", "print the directory of a model, fetching it if missing", _PATH
    )
    path.add_argument("name", metavar="NAME", help=MODEL_HELP)
    path.set_defaults(run=_path)
    _add_import(verbs)


def _add_import(verbs: Any) -> None:
    does = "write a Hugging Face directory from a Llama-architecture GGUF file"
    verb = add_command(verbs, "import-gguf", does, _IMPORT)
    verb.add_argument("file", metavar="FILE", type=Path, help="the GGUF file")
    verb.add_argument("--out", metavar="DIR", type=Path, required=True, help="must not exist yet")
    verb.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="take tokenizer.json from here instead of from the file",
    )
    verb.set_defaults(run=_import_gguf)


def _pull(args: argparse.Namespace) -> int:
    from ekiden.models.hub import is_pulled, pull

    if is_pulled(args.name):
        print(f"{args.name} is here: {pull(args.name)}")
        return 0
    bar = Bar()
    path = pull(args.name, bar=bar)
    bar.close()
    print(f"{args.name} is ready: {path}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from ekiden.models.catalogue import CATALOGUE
    from ekiden.models.hub import is_pulled, model_path

    for name, entry in CATALOGUE.items():
        where = str(model_path(name)) if is_pulled(name) else "not pulled"
        print(f"{name}  {entry.licence}  {entry.summary}  [{where}]")
    return 0


def _path(args: argparse.Namespace) -> int:
    """Only the path goes to stdout, so that a shell can take it."""
    print(resolve(args.name))
    return 0


def resolve(model: str) -> Path:
    """``resolve_model`` with the command line's own progress, all of it on stderr."""
    from ekiden.models.hub import resolve_model

    bar = Bar()
    try:
        return resolve_model(model, say=lambda text: print(text, file=sys.stderr), bar=bar)
    finally:
        bar.close()


def _import_gguf(args: argparse.Namespace) -> int:
    """Into a folder beside ``--out`` first: a failed import leaves nothing behind."""
    from ekiden.models.gguf_import import import_gguf

    out: Path = args.out
    if out.exists():
        raise SetupError(f"--out {out} exists already: choose a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    bar = Bar()
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.tmp-", dir=out.parent))
    try:
        import_gguf(
            args.file,
            work / "model",
            tokenizer_dir=args.tokenizer,
            progress=lambda done, total: bar("import", done, total),
        )
        (work / "model").rename(out)
    finally:
        bar.close()
        shutil.rmtree(work, ignore_errors=True)
    print(f"{args.file.name} is imported: {out}")
    return 0
