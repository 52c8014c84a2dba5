"""The house rules that no linter holds: what may be imported, read or named, and where."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ekiden", "kv_transfer", "prefill_svc", "decode_svc", "gateway")
OTHER_CODE = ("tests", "scripts", "examples", "compose")
TEXT_OUTSIDE_CODE = ("docs", "proto", ".ci")
DISTRIBUTED = ("ekiden/parallel/", "kv_transfer/transports/")
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
LIMITS = ("no", "never", "nothing", "only", "not")
# In two parts, or this file would name them.
REGISTRIES = [
    *(f"{name}.org" for name in ("pypi", "pythonhosted", "download.pytorch", "anaconda")),
    *(f"{name}.io" for name in ("docker", "ghcr", "quay", "gcr", "nvcr")),
    *(f"{name}.co" for name in ("huggingface", "hf")),
    "modelscope" + ".cn",
]


def code(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Each Python file under ``folders``: its path from the root, and what it says."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), tree_of(path)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that a module imports or uses: ``torch.distributed``, ``os.environ``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def texts() -> Iterator[Path]:
    """Every text file of the product, code or not."""
    folders = (*PACKAGES, *OTHER_CODE, *TEXT_OUTSIDE_CODE)
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for path in [*ROOT.glob("*"), *found]:
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def test_torch_distributed_is_called_by_the_mesh_and_the_wires_only():
    users = {
        path
        for path, tree in code(*PACKAGES)
        if any(within(name, "torch.distributed") for name in names(tree))
    }
    assert users, "nobody uses it? then this test looks in the wrong place"
    assert [path for path in users if not path.startswith(DISTRIBUTED)] == []


def test_environment_variables_are_read_in_one_file():
    readers = {
        path
        for path, tree in code(*PACKAGES)
        if any(within(name, variable) for name in names(tree) for variable in ENVIRONMENT)
    }
    assert readers == {"ekiden/core/env.py"}


def test_nothing_unpickles():
    found = [
        f"{path}: {name}"
        for path, tree in code(*PACKAGES, *OTHER_CODE)
        for name in names(tree)
        if name.split(".")[0] in UNPICKLERS or name == "torch.load"
    ]
    assert found == []


def test_no_file_names_a_registry():
    found = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in texts()
        for host in REGISTRIES
        if host.encode() in path.read_bytes()
    ]
    assert found == []


@pytest.mark.parametrize("path", [p for p, _ in code(*PACKAGES) if p.endswith("__init__.py")])
def test_a_package_says_what_may_not_enter(path: str):
    says = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert set(LIMITS) & set(says.lower().replace(":", " ").split()), f"{path}: {says}"


def test_every_folder_of_code_is_a_package():
    bare = {
        Path(path).parent
        for path, _ in code(*PACKAGES)
        if not (ROOT / path).with_name("__init__.py").exists()
    }
    assert bare == set()
