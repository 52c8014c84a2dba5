"""The Dockerfile: what its images may hold and how they are built."""

from __future__ import annotations

import re
import tomllib

import pytest
from compose_files import COMPOSE, ROOT, Document, load_script

requirements = load_script("requirements").requirements


@pytest.fixture(scope="module")
def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def stages(dockerfile: str) -> dict[str, str]:
    """Stage name -> its instructions."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", dockerfile, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_ends_as_an_ordinary_user(dockerfile: str, target: str) -> None:
    instructions = stages(dockerfile)[target].strip().splitlines()
    assert instructions[-1] == "USER 10001:10001"


def test_the_gateway_image_asks_for_no_torch(pyproject: str) -> None:
    wanted = requirements(pyproject, ["base", "models"])
    assert wanted
    assert not [line for line in wanted if line.startswith("torch")]


def test_the_worker_image_asks_for_what_the_worker_extra_says(pyproject: str) -> None:
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    assert requirements(pyproject, ["worker"]) == extras["worker"]


def test_an_unknown_group_is_not_an_empty_list(pyproject: str) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        requirements(pyproject, ["base", "nonsense"])


def test_the_lists_are_made_from_the_groups_that_the_images_need(dockerfile: str) -> None:
    made = stages(dockerfile)["requirements"]
    assert "base models > /lists/gateway.txt" in made
    assert "worker > /lists/worker.txt" in made


def test_every_build_argument_of_compose_exists(dockerfile: str, compose: Document) -> None:
    declared = set(re.findall(r"^ARG (\w+)", dockerfile, flags=re.MULTILINE))
    assert set(compose["x-build"]["args"]) == declared


def test_the_build_needs_no_registry_and_names_no_index(dockerfile: str) -> None:
    assert "# syntax=" not in dockerfile  # would be fetched from a registry before anything else
    assert not re.search(r"https?://|--index-url|--extra-index-url", dockerfile)


def test_every_package_of_the_wheel_reaches_the_build(pyproject: str) -> None:
    build = tomllib.loads(pyproject)["tool"]["hatch"]["build"]["targets"]["wheel"]
    sent = (COMPOSE / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{package}" for package in build["packages"]} <= set(sent)
    assert "*" in sent  # what is not named stays here


def test_the_pinned_torch_is_the_one_that_is_tested(dockerfile: str) -> None:
    pinned = re.findall(r"^(torch==\S+)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(\S+)$", dockerfile, re.MULTILINE) == pinned
