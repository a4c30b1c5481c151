"""The compilation cache filled ahead: what is started afterwards compiles nothing."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks import checkpoints
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from server.commands import cli

SETTINGS = {"max_rows": 2, "buckets": (7,), "max_context": 104, "slots": 416}
FLAGS = ["--max-rows", "2", "--buckets", "7", "--max-context", "104", "--slots", "416", "--no-scoring"]


@pytest.fixture
def empty_jax_cache(tmp_path: Path) -> Iterator[None]:
    """jax's own cache is empty: a program that jax loads from it is not kept."""
    earlier = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", earlier)


def test_compile_ahead(tmp_path, capsys, empty_jax_cache: None) -> None:
    model, cache = checkpoints.checkpoint("tiny", tmp_path), tmp_path / "cache"
    command = ["compile", "--model", str(model), "--compilation-cache", str(cache), *FLAGS]
    assert cli.main(command) == 0
    kept = len(list(cache.iterdir()))
    assert f"{kept} programs compiled, 0 found, in {cache}" in capsys.readouterr().err
    engine = Engine.from_checkpoint(model, EngineConfig(compilation_cache=str(cache), scoring=False, **SETTINGS))
    assert engine.report.programs == engine.report.programs_loaded == kept
    assert cli.main(command) == 0
    assert f"0 programs compiled, {kept} found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5p:2x2x1"], "--topology v5p:2x2x1 is not here: this machine has 8 x cpu"),
        (["--topology", "v5q:2x2"], "device 'v5q' is not known; did you mean v5"),
        (["--compilation-cache", "off"], "compiled programs need a directory"),
        (["--compilation-cache", "/proc/no"], "the compilation cache /proc/no cannot be written to: No such file"),
    ],
)
def test_mistakes(arguments, message, capsys) -> None:
    assert cli.main(["compile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shared_cache_directory_is_refused(tmp_path, capsys) -> None:
    tmp_path.chmod(0o777)
    assert cli.main(["compile", "--compilation-cache", str(tmp_path)]) == 2
    assert f"{tmp_path} may be written to by others: nothing is kept there" in capsys.readouterr().err


def test_devices_that_are_here_are_taken(monkeypatch) -> None:
    from server.commands.compile import check_here
    from sharding.devices import parse

    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")] * 8)
    check_here(parse("h200:8"))
