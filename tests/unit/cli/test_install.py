"""The installer follows pip's configuration and never fetches CUDA where there is no GPU."""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
LINUX = ("Linux", "x86_64")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = script("install")
proto = script("proto")


@pytest.fixture
def links(tmp_path: Path) -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = f"torch-2.13.0+cpu-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
    (tmp_path / wheel).touch()
    return tmp_path


def test_pip_configuration_is_read_environment_over_files():
    text = (
        ":env:.find-links='/wheels'\n"
        "global.find-links='/old'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "install.extra-index-url='https://a.example\\nhttps://b.example'\n"
        "global.constraint='/etc/c.txt'\n"
        "freeze.user='1'\n"
    )
    config = install.parse_pip_config(text)
    assert config["find-links"] == "/wheels"
    assert install.uv_arguments(config, {}) == [
        *("--find-links", "/wheels", "--constraints", "/etc/c.txt"),
        *("--default-index", "https://mirror.example/simple"),
        *("--index", "https://a.example", "--index", "https://b.example"),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_indexes_of_uvs_own_configuration_win():
    config = {"index-url": "https://pip.example", "find-links": "/wheels"}
    arguments = install.uv_arguments(config, {"UV_DEFAULT_INDEX": "https://uv.example"})
    assert arguments == ["--find-links", "/wheels"]


def test_certificate_and_proxy_reach_uv_unless_it_has_its_own():
    config = {"cert": "/ca.pem", "proxy": "http://proxy:1"}
    assert install.uv_environment(config, {}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "ALL_PROXY": "http://proxy:1",
    }
    assert install.uv_environment(config, {"SSL_CERT_FILE": "/mine"})["SSL_CERT_FILE"] == "/mine"


def torch_arguments(setting: str, gpu: str = "", config: dict[str, str] | None = None,
                    machine: tuple[str, str] = LINUX) -> list[str]:  # fmt: skip
    return install.choose_torch(setting, gpu, config or {}, machine).args


def test_without_a_gpu_the_pinned_wheel_of_find_links_is_taken(links: Path):
    config = {"find-links": f"/nowhere {links}"}
    assert torch_arguments("auto", "", config) == ["--constraints", str(install.CONSTRAINTS)]
    assert torch_arguments("cpu", "/dev/nvidia0", config)[0] == "--constraints"


@pytest.mark.parametrize("name", ["torch-2.13.0+cpu-cp27-cp27-linux_x86_64.whl", "torch-9.whl"])
def test_a_wheel_for_another_python_or_version_is_not_taken(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    assert torch_arguments("auto", "", {"find-links": str(tmp_path)}) == ["--torch-backend", "cpu"]


def test_with_a_gpu_uv_picks_the_build_for_its_driver(links: Path):
    config = {"find-links": str(links)}
    assert torch_arguments("auto", "/dev/nvidia0", config) == ["--torch-backend", "auto"]


def test_a_configured_index_is_left_in_charge_unless_overruled():
    config = {"index-url": "https://mirror.example"}
    assert torch_arguments("auto", "", config) == []
    assert torch_arguments("cpu", "", config) == ["--torch-backend", "cpu"]


def test_the_setting_can_keep_or_name_a_build():
    assert torch_arguments("keep", "/dev/nvidia0") == []
    assert torch_arguments("cu128") == ["--torch-backend", "cu128"]


def test_where_the_index_has_no_cuda_build_nothing_is_forced():
    assert torch_arguments("auto", "", {}, ("Darwin", "arm64")) == []


def test_an_install_is_skipped_only_while_its_inputs_are_the_same(tmp_path: Path):
    stamp = tmp_path / "stamp"
    assert not install.is_installed(stamp, "local", "k")
    stamp.write_text('{"extra": "dev", "key": "k"}')
    assert install.is_installed(stamp, "local", "k")
    assert not install.is_installed(stamp, "local", "other")
    stamp.write_text('{"extra": "local", "key": "k"}')
    assert not install.is_installed(stamp, "dev", "k")
    assert install.fingerprint("auto") != install.fingerprint("cpu")


def test_stubs_that_are_stale_missing_or_left_over_are_named(tmp_path: Path):
    fresh, kept = tmp_path / "fresh", tmp_path / "kept"
    for folder, files in ((fresh, "abc"), (kept, "abd")):
        folder.mkdir()
        for name in files:
            (folder / f"{name}_pb2.py").write_text(name)
    (kept / "b_pb2.py").write_text("edited by hand")
    assert proto.differing(fresh, kept) == ["b_pb2.py", "c_pb2.py", "d_pb2.py"]
