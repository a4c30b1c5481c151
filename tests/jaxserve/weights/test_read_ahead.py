"""Files are read into the system's cache while the CPU kernels are compiled, before it is known where weights go."""

import threading
from pathlib import Path

import jax
import pytest

from jaxserve import startup, weights
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from pallas_kernels.cpu import build

PIECE = 4 * 2**20
COUNTERS = Path("/proc/self/io")
pytestmark = pytest.mark.skipif(not COUNTERS.exists(), reason="needs Linux's count of what a process reads")


def bytes_read() -> int:
    return int(COUNTERS.read_text().split()[1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * PIECE)
    return tmp_path


@pytest.mark.parametrize(("pieces", "read"), [(0, 0), (2, 2), (99, 5)])
def test_files_are_read_until_something_is_so(checkpoint: Path, pieces: int, read: int) -> None:
    asked: list[None] = []
    before = bytes_read()
    weights.read_ahead(checkpoint, until=lambda: asked.append(None) or len(asked) > pieces)
    assert read * PIECE <= bytes_read() - before < (read + 1) * PIECE


def test_another_checkpoint_is_left_to_its_reader(tmp_path: Path) -> None:
    weights.read_ahead(tmp_path, until=lambda: pytest.fail("there is nothing to read"))


class Loading(Exception):
    pass


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels are a CPU's")
def test_a_first_start_reads_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    has_read, wanted, read_ahead, refusal = threading.Event(), list[int](), weights.read_ahead, build.refusal

    def compile_slowly() -> str | None:
        assert has_read.wait(60)  # or it was read after the compilation
        return refusal()

    def read(path: Path, until) -> None:
        assert not until()
        before = bytes_read()
        read_ahead(path, until=until)
        wanted.append(bytes_read() - before)
        has_read.set()

    def load(*_, **__) -> None:
        raise Loading

    monkeypatch.setattr(build, "is_compiled", lambda: False)
    monkeypatch.setattr(build, "refusal", compile_slowly)
    monkeypatch.setattr(weights, "read_ahead", read)
    monkeypatch.setattr(weights, "load", load)
    with pytest.raises(Loading):
        startup.from_checkpoint(DEMO_MODEL, EngineConfig(), startup.silent)
    assert wanted[0] >= (Path(DEMO_MODEL) / "model.safetensors").stat().st_size
