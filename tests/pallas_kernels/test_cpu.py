"""The native backend: how it is built and what happens where it cannot be, what the compiled program does with the
pool, and what its results do not depend on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner import native_kernels
from pallas_kernels import api
from pallas_kernels.cpu import build
from tests.pallas_kernels.subjects import backend

# Writes what it is asked for in two parts, and what it was asked in a log.
_SLOW_COMPILER = """\
#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print("slow 1.0")
else:
    with open("{log}", "a") as log:
        log.write(" ".join(sys.argv) + "\\n")
    out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    with out.open("w") as file:
        file.write("first half, ")
        file.flush()
        time.sleep(0.2)
        file.write("second half")
"""
_FULL_DISK = """\
#!/bin/sh
echo "attention.cc: In function: some note" >&2
echo "c++: fatal error: error writing to x.s: No space left on device" >&2
exit 1
"""


COMPILED = build.compiled(build.cache_folder())  # before a test changes where that is


def shape(**kw):
    base = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "dtype": jnp.float32, "pool_dtype": jnp.float32}
    return api.AttentionShape(**(base | {"alibi": True, "block_size": 16, "max_blocks": 8} | kw))


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """A folder that is all of PATH, and the outcome of a build forgotten."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_outcome", [])
    return folder


def install(folder: Path, text: str) -> None:
    path = folder / "c++"
    path.write_text(text)
    path.chmod(0o755)


def slow_compiler(compilers: Path) -> Path:
    """Installs it; returns its log."""
    log = compilers / "log"
    install(compilers, _SLOW_COMPILER.format(python=sys.executable, log=log))
    return log


def check_fallback(words: str) -> None:
    selection = api.select("auto", shape(), "cpu")
    assert selection.backend.name == "xla"
    assert re.search(f"xla is the first that serves cpu.*not cpu: {words}", selection.reason)
    assert "\n" not in selection.reason
    with pytest.raises(ValueError, match=f"'cpu' cannot serve: {words}"):
        api.select("cpu", shape(), "cpu")


def test_without_a_compiler_plain_jax_serves_and_says_why(compilers):
    check_fallback(r"no C\+\+ compiler")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compilers):
    install(compilers, _FULL_DISK)
    check_fallback(".*c\\+\\+ cannot build it: .*No space left on device")
    assert list(build.cache_folder().iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(compilers, tmp_path):
    slow_compiler(compilers)
    (tmp_path / "cache").write_text("a file where a folder should be")
    check_fallback(f".*{tmp_path}/cache")


def test_a_library_that_cannot_be_loaded_is_named(compilers):
    slow_compiler(compilers)
    check_fallback(".*native-.*so")


def test_many_at_once_see_the_library_whole_or_not_at_all(compilers, tmp_path):
    slow_compiler(compilers)
    folder = tmp_path / "native"
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(build.compiled, folder) for _ in range(4)]
        while not all(future.done() for future in waiting):
            for library in folder.glob("*.so"):
                assert library.read_text() == "first half, second half"
            time.sleep(0.01)
    (library,) = folder.iterdir()
    assert {future.result() for future in waiting} == {library}
    assert library.read_text() == "first half, second half"


def test_what_was_compiled_is_kept_for_this_kind_of_cpu(compilers, tmp_path, monkeypatch):
    log = slow_compiler(compilers)
    mine = build.compiled(tmp_path)
    assert build.compiled(tmp_path) == mine
    count = len(log.read_text().splitlines())
    assert count == len(build._sources(".cc")) + 1  # each by itself, and the library
    assert build.level() in mine.name
    assert "-march=native" not in log.read_text()
    monkeypatch.setattr(build, "level", lambda: "x86-64")
    other = build.compiled(tmp_path)
    assert (other != mine) == ("-x86-64-v" in mine.name or "x86" not in mine.name)
    assert "-march=x86-64 " in log.read_text()


def test_a_first_start_says_what_it_compiles(compilers):
    slow_compiler(compilers)
    told = []
    for _ in range(2):
        with native_kernels.compiling(lambda *step: told.append(step)):
            pass
    assert told == [(native_kernels.STEP, 0, 1), (native_kernels.STEP, 1, 1)]
    assert len(list(build.cache_folder().glob("*.so"))) == 1


def test_a_start_without_a_compiler_compiles_nothing(compilers):
    with native_kernels.compiling(lambda *_: pytest.fail("there is nothing to compile with")):
        pass


def test_a_wheels_library_needs_no_compiler(compilers, tmp_path, monkeypatch):
    """It is taken if it was made from these sources and can be loaded."""
    library = tmp_path / "prebuilt" / build._shipped(build.level()).name
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setattr(build, "_digest", lambda *_: library.stem.rpartition("-")[2])
    assert not build.is_shipped()
    library.parent.mkdir()
    library.write_text("of an older system")
    assert build.is_shipped()
    assert "no C++ compiler" in str(build.refusal())
    monkeypatch.setattr(build, "_outcome", [])
    shutil.copy(COMPILED, library)
    registered = []  # a process can register one library only
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    assert build.refusal() is None
    assert set(registered) == build._calls().keys()


def test_another_compiler_makes_another_library(compilers, tmp_path):
    slow_compiler(compilers)
    one = build.compiled(tmp_path)
    install(compilers, (compilers / "c++").read_text().replace("slow 1.0", "slow 1.1"))
    assert build.compiled(tmp_path) != one


LAYERS, BLOCKS = 3, 2048  # blocks of a layer: their scales alone take more than what a step needs beside the pool


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "int8"])
def test_a_donated_pool_is_never_copied_in_a_loop_over_layers(pool_dtype):
    native, dtype = backend("cpu"), "float32" if pool_dtype == "int8" else pool_dtype
    asked = shape(dtype=jnp.dtype(dtype), pool_dtype=jnp.dtype(pool_dtype))

    def step(x, pool, batch):
        meta = native.prepare(batch, asked)

        def layer(i, carry):
            x, pool = carry
            options = {"slopes": np.ones(4, np.float32), "scale": 0.2, "first_block": i * BLOCKS}
            return native.attend(x, x * 2, x + 1, pool, meta, asked, **options)

        return jax.lax.fori_loop(0, LAYERS, layer, (x, pool))

    pool = native.pool(asked, LAYERS * BLOCKS)
    batch = api.AttentionBatch(*(jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((9,), (8,), (8, 8), (24,), (24,))))
    x = jax.ShapeDtypeStruct((24, 4, 32), asked.dtype)
    program = jax.jit(step, donate_argnums=1).lower(x, pool, batch).compile()
    leaves = jax.tree.leaves(pool)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)
    dims = [f"[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    made = re.findall(r"= (\(.*?\)|\S+) ([a-z][\w-]*)\(", program.as_text())
    touching = {opcode for result, opcode in made if any(d in result for d in dims)}
    assert touching <= {"parameter", "get-tuple-element", "tuple", "while", "custom-call", "bitcast"}


@pytest.mark.parametrize(
    ("dtype", "pool", "kv_heads", "dim", "windows"),
    [
        ("float32", "float32", 4, 64, (None,)),
        ("float32", "int8", 2, 40, (None,)),
        ("float32", "bfloat16", 4, 7, (None, 37)),
        ("bfloat16", None, 2, 39, (None,)),
        ("bfloat16", None, 2, 39, (130, 37)),
    ],
)
def test_a_token_does_not_depend_on_the_chunk_it_comes_in(harness, dtype, pool, kv_heads, dim, windows):
    """To the bit: a prompt in one piece, in several, and token by token."""
    model = {"dtype": dtype, "pool": pool, "kv_heads": kv_heads, "dim": dim, "windows": windows}
    if windows != (None,):
        model |= {"soft_cap": 3.0, "sinks": True}
    h = harness("cpu", **model, block=24, bucket=300, n_blocks=50)
    qkv = tuple(h.draw(heads, 300) for heads in (4, kv_heads, kv_heads))
    results = []
    for lengths in ([300], [1] * 150 + [150], [7, 60, 1, 200, 32]):
        row, at, out = h.add_row(), 0, []
        for length in lengths:
            out += h.step([(row, length)], tuple(x[at : at + length] for x in qkv))[0]
            at += length
        results.append(np.concatenate(out))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


_ONE_CORE = """\
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.pallas_kernels.test_cpu import attended
sys.stdout.buffer.write(attended().tobytes())
"""


def attended() -> np.ndarray:
    """A batch large enough that threads share it."""
    native, asked = backend("cpu"), shape(head_dim=64, max_blocks=64)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((310, 4, 64)), jnp.float32)
    offsets = np.array([0, 1, 2, 202, 310], np.int32)
    tables = rng.permutation(4 * 64).reshape(4, 64).astype(np.int32)
    unused = np.zeros(310, np.int32)
    batch = api.AttentionBatch(*map(jnp.asarray, (offsets, np.array([900, 3, 800, 108]), tables, unused, unused)))
    pool = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), native.pool(asked, 4 * 64))
    meta = native.prepare(batch._replace(kv_lens=batch.kv_lens.astype(jnp.int32)), asked)
    out, _ = jax.jit(lambda pool: native.attend(x, x, x, pool, meta, asked, slopes=None, scale=0.125))(pool)
    return np.asarray(out)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one core")
def test_results_do_not_depend_on_the_number_of_threads():
    backend("cpu")
    done = subprocess.run([sys.executable, "-c", _ONE_CORE], capture_output=True, check=True)
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), attended().ravel())


def test_the_slot_before_a_window_may_hold_nan(harness):
    """Blocks of one slot, so that the slot before the first visible one is another row's. Some CPUs multiply pairs."""
    h = harness("cpu", dtype="bfloat16", block=1, windows=(6,), max_blocks=40, bucket=16)
    a, b = h.add_row(), h.add_row()
    h.check([(a, 9), (b, 7)])
    for _ in range(4):
        h.check([(a, 1), (b, 3)])
