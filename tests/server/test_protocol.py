"""The generated files are those of the committed protocol, and the wheel carries them under their own name."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from jaxserve.sampling_params import SAMPLING_PARAMS
from server.proto.generate import MESSAGES, PROTOS, ROOT, generate
from server.proto.jaxserve.v1 import inference_pb2

FOLDER = Path("server/proto/jaxserve/v1")


def test_committed_files_are_what_the_pinned_tools_generate(tmp_path: Path) -> None:
    generate(tmp_path)
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")}
    modules = [Path(proto).with_suffix("") for proto in (*PROTOS, *MESSAGES)]
    expected = {Path(f"{module}_pb2{end}") for module in modules for end in (".py", ".pyi")}
    assert written == expected | {Path(proto.replace(".proto", "_pb2_grpc.py")) for proto in PROTOS}
    protos = [path for package in ("server", "jaxserve") for path in (ROOT / package).rglob("*.proto")]
    assert set(modules) == {path.relative_to(ROOT).with_suffix("") for path in protos}
    for path in written:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path}: run `make proto`"


def test_required_versions_match_generated_code() -> None:
    needed = {
        "protobuf": re.search(r"Protobuf Python Version: (\S+)", (ROOT / FOLDER / "inference_pb2.py").read_text()),
        "grpcio": re.search(r"GRPC_GENERATED_VERSION = '(\S+)'", (ROOT / FOLDER / "inference_pb2_grpc.py").read_text()),
    }
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, version in needed.items():
        assert version is not None
        assert f"{name}>={version[1]}" in required


def test_request_has_every_sampling_field() -> None:
    fields = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    assert set(SAMPLING_PARAMS) <= set(fields)
    absent = [name for name in SAMPLING_PARAMS if not fields[name].is_repeated]
    assert all(fields[name].has_presence for name in absent), "absent must differ from zero"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools leaves a build folder, whose stale files would be packed next time
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "out"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_imports_engine_and_protocol_side_by_side(wheel: Path, tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {site!r})\n"  # before any path hook
        "import jaxserve, server.proto.jaxserve.v1.inference_pb2 as pb, server.proto.jaxserve.v1.inference_pb2_grpc\n"
        "import jaxserve.request\n"
        "print(jaxserve.__file__, pb.__file__, pb.GenerateRequest(prompt='a').prompt)"
    )
    environment = {"PYTHONPATH": site, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    engine, protocol, prompt = done.stdout.split()
    assert engine == str(tmp_path / "site/jaxserve/__init__.py")
    assert protocol == str(tmp_path / "site" / FOLDER / "inference_pb2.py")
    assert prompt == "a"


@pytest.mark.long
def test_wheel_benchmarks_need_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """Runs `jaxserve bench` from the wheel, in a process that cannot see the checkout."""
    benchmarks = ("", "offline", "serve", "step", "accuracy")
    site = str(tmp_path / "site")
    zipfile.ZipFile(wheel).extractall(site)
    checkout = str(Path(ROOT).resolve())
    code = (
        f"import sys; sys.path[:] = [{site!r}, *(path for path in sys.path if path not in ('', {checkout!r}))]\n"
        f"sys.meta_path = [each for each in sys.meta_path if 'editable' not in repr(each).lower()]\n"
        "from server.commands import cli\n"
        f"for benchmark in {benchmarks!r}:\n"
        "    try: cli.main(['bench', *benchmark.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, benchmark\n"
        "    else: sys.exit(benchmark)\n"
        "    assert not {name.split('.')[0] for name in sys.modules} & {'benchmarks', 'examples', 'tests'}\n"
        f"assert cli.__file__.startswith({site!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for benchmark in benchmarks:
        assert " ".join(["usage: jaxserve bench", *benchmark.split()]) in done.stdout


def test_wheel_holds_packages_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"jaxserve", "server", "sharding", "pallas_kernels"} <= tops
    assert all(top.endswith(".dist-info") for top in tops - {"jaxserve", "server", "sharding", "pallas_kernels"})
    protos = (*PROTOS, *MESSAGES)
    assert {*protos, *(proto.replace(".proto", "_pb2.py") for proto in protos)} <= set(names)
    assert "jaxserve/demo/held_out.txt" in names
    assert metadata.version("jaxserve") in wheel.name
