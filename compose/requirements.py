"""Prints requirements of pyproject.toml, so that an image can install them before the code.

    requirements.py PYPROJECT GROUP...

A group is ``base`` (the project's dependencies) or the name of an extra.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, groups: list[str]) -> list[str]:
    """The requirements of ``groups``, in order. KeyError for a group that is not there."""
    project = tomllib.loads(pyproject)["project"]
    known = {"base": project["dependencies"], **project["optional-dependencies"]}
    return [line for group in groups for line in known[group]]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(), sys.argv[2:])))
