"""``ekiden serve prefill|decode|gateway``: one service in this process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from ekiden.cli.command import MODEL_HELP, SERVED_NAME_HELP, add_command
from ekiden.cli.kv_options import check_shared_folder
from ekiden.cli.models import resolve
from ekiden.cli.options import (
    ENGINE_OPTIONS,
    LOCAL_PREFILL,
    SERVICE_OPTIONS,
    add_options,
    add_redis,
    add_switches,
    default_of,
    engine_config,
    port_number,
    redis_url,
    seconds,
    size,
)
from ekiden.core import env
from ekiden.core.config import EngineConfig, GatewayConfig, ServiceConfig
from ekiden.core.errors import SetupError

_EXAMPLES = """examples:
  ekiden serve prefill --model smollm2-135m-instruct -tp 2 --redis redis://127.0.0.1:6379/0
  ekiden serve decode  --model /models/llama --redis redis://10.0.0.5:6379/0 \\
      --host 0.0.0.0 --port 7000 --advertise 10.0.0.7:7000
  ekiden serve gateway --model /models/llama --redis redis://10.0.0.5:6379/0 --port 8000

EKIDEN_SECRET, if set, must be the same for all services. EKIDEN_API_KEY is what clients of the
gateway must send. Neither is ever an option, because command lines can be read by others.
"""
_WORKER = """examples:
  ekiden serve {role} --model smollm2-135m-instruct -tp 2 --redis redis://127.0.0.1:6379/0
  ekiden serve {role} --model /models/llama --redis redis://10.0.0.5:6379/0 \\
      --host 0.0.0.0 --port 7000 --advertise 10.0.0.7:7000

EKIDEN_SECRET, if set, is what the services must show one another.
"""
_GATEWAY = """examples:
  ekiden serve gateway --model smollm2-135m-instruct --redis redis://127.0.0.1:6379/0
  ekiden serve gateway --model /models/llama --model /models/qwen \\
      --redis redis://10.0.0.5:6379/0 --host 0.0.0.0

EKIDEN_SECRET, if set, is what the services must show one another; EKIDEN_API_KEY what clients must
send.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "serve", "run one service: prefill, decode or gateway", _EXAMPLES
    )
    roles = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    _add_worker(roles, "prefill", "compute prompts and send their KV to decode replicas")
    decode = _add_worker(roles, "decode", "turn prompts into tokens; the gRPC service of clients")
    add_options(decode, [LOCAL_PREFILL], ServiceConfig)
    _add_gateway(roles)


def _add_worker(roles: Any, role: str, help_text: str) -> argparse.ArgumentParser:
    parser = add_command(roles, role, help_text, _WORKER.format(role=role))
    add_model(parser)
    engine = parser.add_argument_group("engine")
    add_options(engine, ENGINE_OPTIONS, EngineConfig)
    add_switches(engine)
    service = parser.add_argument_group("service")
    _add_address(service, ServiceConfig)
    service.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        default="",
        help="what peers dial, where it differs from --host and --port",
    )
    service.add_argument(
        "--replica-id", metavar="ID", default="", help="default: the role and a random number"
    )
    add_redis(service)
    add_options(service, SERVICE_OPTIONS, ServiceConfig)
    service.add_argument(
        "--enable-kv-debug",
        action="store_true",
        help="let peers read KV blocks back, for `ekiden verify`; never on a shared network",
    )
    parser.set_defaults(run=_run_worker, role=role)
    return parser


def add_model(parser: Any) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=MODEL_HELP,
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        default="",
        help=SERVED_NAME_HELP,
    )


def _add_address(group: Any, config: type[ServiceConfig] | type[GatewayConfig]) -> None:
    host, port = default_of(config, "host"), default_of(config, "port")
    group.add_argument(
        "--host", default=host, metavar="HOST", help=f"address to listen on (default: {host})"
    )
    group.add_argument(
        "--port",
        type=port_number,
        default=port,
        metavar="N",
        help=f"port to listen on; 0: a free one (default: {port})",
    )
    group.add_argument(
        "--ready-file",
        metavar="FILE",
        default="",
        help="written once the service serves; for supervisors",
    )


def _add_gateway(roles: Any) -> None:
    parser = add_command(roles, "gateway", "serve OpenAI's HTTP surface", _GATEWAY)
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        metavar="MODEL",
        help="as for a worker; repeat it to serve several models",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="one for each --model, in the same order (default: as for a worker)",
    )
    _add_address(parser, GatewayConfig)
    add_redis(parser)
    parser.add_argument(
        "--max-body-bytes",
        type=size,
        default=default_of(GatewayConfig, "max_body_bytes"),
        metavar="SIZE",
        help="longest request body (default: 8 MiB)",
    )
    parser.add_argument(
        "--request-timeout",
        dest="request_timeout_s",
        type=seconds,
        default=default_of(GatewayConfig, "request_timeout_s"),
        metavar="SECONDS",
        help="after which a request ends with an error (default: 600)",
    )
    parser.add_argument(
        "--drain-grace",
        dest="drain_grace_s",
        type=seconds,
        default=default_of(GatewayConfig, "drain_grace_s"),
        metavar="SECONDS",
        help="how long SIGTERM waits for what is in flight (default: 30)",
    )
    parser.set_defaults(run=_run_gateway)


def name_of(model: str, given: str) -> str:
    """The name clients use: the given one, else the one the model suggests."""
    from ekiden.models.hub import served_name

    return given or served_name(model)


def gateway_models(models: list[str], names: list[str]) -> dict[str, Path]:
    """Served name -> directory. Raises SetupError when names and models do not pair up."""
    if names and len(names) != len(models):
        raise SetupError(
            f"--served-model-name is given {len(names)} times and --model {len(models)} times: "
            "give one name for each model, or none"
        )
    pairs = zip(models, names or [""] * len(models), strict=True)
    named = {name_of(model, name): resolve(model) for model, name in pairs}
    if len(named) < len(models):
        raise SetupError("two models would be served by one name: give --served-model-name")
    return named


def service_config(args: argparse.Namespace, model_dir: Path, model_name: str) -> ServiceConfig:
    engine = engine_config(args, model_dir, model_name)
    options = list(SERVICE_OPTIONS) + ([LOCAL_PREFILL] if args.role == "decode" else [])
    return ServiceConfig(
        role=args.role,
        engine=msgspec.structs.replace(engine, prefill_only=args.role == "prefill"),
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        redis_url=redis_url(args),
        replica_id=args.replica_id,
        secret=env.secret(),
        ready_file=args.ready_file,
        enable_kv_debug=args.enable_kv_debug,
        **{option.field: getattr(args, option.field) for option in options},
    )


def gateway_config(args: argparse.Namespace, models: dict[str, Path]) -> GatewayConfig:
    if not (url := redis_url(args)):
        raise SetupError("the gateway finds its replicas in Redis: give --redis URL or REDIS_URL")
    return GatewayConfig(
        models=models,
        host=args.host,
        port=args.port,
        redis_url=url,
        secret=env.secret(),
        api_key=env.api_key(),
        max_body_bytes=args.max_body_bytes,
        request_timeout_s=args.request_timeout_s,
        drain_grace_s=args.drain_grace_s,
        ready_file=args.ready_file,
    )


def _run_worker(args: argparse.Namespace) -> int:
    check_shared_folder(args.kv_shm_dir)
    name = name_of(args.model, args.served_model_name)
    config = service_config(args, resolve(args.model), name)
    if args.role == "prefill":
        from prefill_svc.main import run
    else:
        from decode_svc.main import run
    return run(config)


def _run_gateway(args: argparse.Namespace) -> int:
    config = gateway_config(args, gateway_models(args.model, args.served_model_name))
    env.poll_grpc_in_one_thread()
    from gateway.main import run

    return run(config)
