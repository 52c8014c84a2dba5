"""compose.yaml: valid by the compose schema, in step with the command line, and locked down."""

from __future__ import annotations

import argparse
import copy
import json
import re
import shlex
from importlib import resources
from typing import Any

import pytest
from compose_files import ROOT, Document
from jsonschema import Draft202012Validator

from ekiden.cli.main import build_parser

SERVICES = {"redis", "model", "prefill", "decode", "gateway"}
LONG_RUNNING = sorted(SERVICES - {"model"})
ROLES = ("prefill", "decode", "gateway")


@pytest.fixture(scope="session")
def schema() -> Draft202012Validator:
    """The schema that the compose specification publishes, as check-jsonschema carries it."""
    vendored = resources.files("check_jsonschema.builtin_schemas") / "vendor"
    return Draft202012Validator(json.loads((vendored / "compose-spec.json").read_text()))


def arguments(compose: Document, service: str) -> argparse.Namespace:
    """What the real parser makes of a service's command."""
    return build_parser().parse_args(shlex.split(compose["services"][service]["command"]))


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_the_file_is_valid_compose(compose: Document, schema: Draft202012Validator) -> None:
    assert [error.message for error in schema.iter_errors(compose)] == []


def test_the_schema_notices_a_misspelt_key(compose: Document, schema: Draft202012Validator) -> None:
    broken = copy.deepcopy(compose)
    broken["services"]["decode"]["stop_grace"] = "40s"
    assert [error.json_path for error in schema.iter_errors(broken)] == ["$.services.decode"]


def test_the_services_are_the_documented_ones(compose: Document) -> None:
    assert set(compose["services"]) == SERVICES


@pytest.mark.parametrize("role", ROLES)
def test_the_command_line_takes_the_services_commands(compose: Document, role: str) -> None:
    args = arguments(compose, role)
    assert args.host == "0.0.0.0"
    assert args.model in ("smollm2-135m-instruct", ["smollm2-135m-instruct"])  # gateway: several


def test_the_model_service_fetches_what_the_others_serve(compose: Document) -> None:
    assert arguments(compose, "model").name == arguments(compose, "decode").model


def test_the_pools_differ_in_layout_so_that_the_first_run_is_a_reshard(compose: Document) -> None:
    layouts = [arguments(compose, role).tensor_parallel_size for role in ("prefill", "decode")]
    assert layouts == [2, 1]


@pytest.mark.parametrize("role", ROLES)
def test_a_service_has_longer_to_stop_than_its_drain_takes(compose: Document, role: str) -> None:
    grace = seconds(compose["services"][role]["stop_grace_period"])
    assert grace >= arguments(compose, role).drain_grace_s + 5


@pytest.mark.parametrize("role", ROLES)
def test_the_health_check_asks_the_port_that_is_served(compose: Document, role: str) -> None:
    check = compose["services"][role]["healthcheck"]["test"]
    assert f"127.0.0.1:{arguments(compose, role).port}" in check[-1]


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_runs_on_is_checked_and_restarted(compose: Document, name: str) -> None:
    service = compose["services"][name]
    assert service["healthcheck"]["test"][:2] == ["CMD", "probe"]
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_can_write_its_root_or_gain_a_privilege(compose: Document, name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True


def test_only_the_model_service_can_write_the_models(compose: Document) -> None:
    writers = {
        name
        for name, service in compose["services"].items()
        if "models:/models" in service.get("volumes", [])
    }
    assert writers == {"model"}


def test_nothing_that_can_be_scaled_is_tied_to_one_container(compose: Document) -> None:
    for role in ("prefill", "decode"):
        assert not {"container_name", "ports", "hostname"} & set(compose["services"][role])


def test_only_the_gateway_is_published_and_on_loopback_unless_asked(compose: Document) -> None:
    published = {n: s["ports"] for n, s in compose["services"].items() if s.get("ports")}
    assert published == {"gateway": ["127.0.0.1:8000:8000"]}


def test_kv_and_redis_are_on_a_network_without_a_way_out(compose: Document) -> None:
    assert compose["networks"]["inside"] == {"internal": True}
    for name in ("redis", "prefill", "decode"):
        assert compose["services"][name]["networks"] == ["inside"]


def test_workers_have_room_for_what_their_ranks_share(compose: Document) -> None:
    for role in ("prefill", "decode"):
        assert compose["services"][role]["shm_size"] == "1gb"


def test_secrets_are_passed_on_and_stand_in_no_command(compose: Document) -> None:
    for role in ROLES:
        service: dict[str, Any] = compose["services"][role]
        assert service["environment"]["EKIDEN_SECRET"] is None  # from the caller, if set there
        assert "SECRET" not in service["command"]
    assert compose["services"]["gateway"]["environment"]["EKIDEN_API_KEY"] is None


def test_each_image_is_built_once_and_never_asked_of_a_registry(compose: Document) -> None:
    builders: dict[str, list[str]] = {}
    for name, service in compose["services"].items():
        builders.setdefault(service["image"], [])
        if "build" in service:
            builders[service["image"]].append(name)
        else:
            assert service["pull_policy"] == "never"
    assert builders == {"ekiden-gateway:local": ["model"], "ekiden-worker:local": ["decode"]}


def test_no_service_waits_for_another_but_the_model(compose: Document) -> None:
    waits = {n: set(s["depends_on"]) for n, s in compose["services"].items() if "depends_on" in s}
    assert waits == {role: {"model"} for role in ROLES}


def test_every_setting_is_documented(compose: Document, compose_text: str) -> None:
    settings = set(re.findall(r"\$\{(\w+)", compose_text))
    settings |= set(compose["x-build"]["args"])
    settings |= {"EKIDEN_SECRET", "EKIDEN_API_KEY", "EKIDEN_LOG"}
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "deploy.md").read_text()))
    assert settings - documented == set()
