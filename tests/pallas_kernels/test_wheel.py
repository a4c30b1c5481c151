"""`make wheel` for real: the CPU kernels in it serve where there is no compiler, and those for ARM compute there."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu import build

ROOT = Path(__file__).parents[2]
ARM = "aarch64"
ARM_TOOLS = f"{ARM}-linux-gnu-g++", f"qemu-{ARM}"
ARM_LIBRARIES = f"/usr/{ARM}-linux-gnu"
CALLER = Path(__file__).with_name("call_product.cc")
SOURCES = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "jaxserve", "sharding", "pallas_kernels", "server")
SERVE = """
import pallas_kernels
from jaxserve import Engine, startup
from jaxserve.config import EngineConfig
from pallas_kernels.cpu import build

assert build.is_shipped(), build.level()
config = EngineConfig(buckets=(4, 16), slots=512, max_rows=2, max_context=64, compilation_cache=None)
with Engine.from_checkpoint(config=config, progress=startup.silent) as engine:
    (completion,) = engine.generate("It was a", max_tokens=4, temperature=0.0)
print(pallas_kernels.__file__, engine.report.attention, len(completion.token_ids))
"""


@pytest.mark.long
@pytest.mark.skipif(not all(map(shutil.which, ("make", "c++"))), reason="needs make and a C++ compiler")
@pytest.mark.skipif(jax.default_backend() != "cpu" or build.level() == "x86-64", reason="no kernels are shipped for it")
def test_a_wheels_kernels_serve_without_a_compiler(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in SOURCES:
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(path, source / name, ignore=ignored) if path.is_dir() else shutil.copy(path, source)
    # With the environment of these tests, which is not made anew.
    environment = Path(sys.prefix)
    made = ["make", "wheel", f"VENV={environment}", "-o", str(environment / ".installed")]
    quiet = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    done = subprocess.run(made, cwd=source, env=os.environ | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "dist").iterdir()
    assert not wheel.stem.endswith("any")
    assert not (source / "pallas_kernels" / "cpu" / "prebuilt").exists()
    zipfile.ZipFile(wheel).extractall(target)
    shutil.rmtree(source)
    levels = {path.name.removeprefix("native-").rpartition("-")[0] for path in target.rglob("prebuilt/*.so")}
    assert levels == set(build._LEVELS) - {"x86-64"} if build.level() in build._LEVELS else {build.level()}

    served = subprocess.run(
        [sys.executable, "-P", "-c", SERVE],
        cwd=tmp_path,
        env=os.environ | {"PATH": "", "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert served.returncode == 0, served.stderr
    file, attention, tokens = served.stdout.split()
    assert Path(file).is_relative_to(target)
    assert (attention, tokens) == ("cpu", "4")
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
@pytest.mark.skipif(not all(map(shutil.which, ARM_TOOLS)), reason=f"needs {' and '.join(ARM_TOOLS)}")
def test_kernels_for_arm_are_made_elsewhere(tmp_path: Path) -> None:
    """All link, and a product is as exact as here."""
    shutil.copytree(ROOT / "pallas_kernels", tmp_path / "pallas_kernels", ignore=shutil.ignore_patterns("prebuilt"))
    code = f"from pallas_kernels.cpu import build; build.ship({ARM!r})"
    path = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=path, check=True)
    (library,) = tmp_path.rglob("prebuilt/*.so")
    assert library.name.startswith(f"native-{ARM}-")
    errors, here = {}, build.compiled(build.cache_folder())
    for compiler, run, made in (("c++", [], here), (ARM_TOOLS[0], [ARM_TOOLS[1], "-L", ARM_LIBRARIES], library)):
        caller = tmp_path / compiler
        source = [str(CALLER), "-isystem", jax.ffi.include_dir(), "-ldl"]
        subprocess.run([compiler, "-std=c++17", "-O1", "-o", str(caller), *source], check=True)
        command = [*run, str(caller), str(made), *build._SYMBOLS.values()]
        errors[compiler] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0 < max(errors.values()) < 1e-6, errors
