"""Generate the gRPC stubs from proto/, or check that those in the tree are a fresh generation."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = Path("ekiden/rpc")
KINDS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if they differ")
    args = parser.parse_args()
    if not args.check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differing(Path(folder) / STUBS, ROOT / STUBS)
    for name in stale:
        print(f"{STUBS / name} is not a fresh generation: run `make proto`", file=sys.stderr)
    return 1 if stale else 0


def generate(out: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *flags, *protos]
    subprocess.run(command, cwd=ROOT, check=True)


def differing(fresh: Path, kept: Path) -> list[str]:
    """Names that are only on one side or whose bytes differ."""
    names = {path.name for folder in (fresh, kept) for kind in KINDS for path in folder.glob(kind)}
    return sorted(name for name in names if content(fresh / name) != content(kept / name))


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
