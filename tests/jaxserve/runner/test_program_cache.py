"""Compiled programs kept between starts: found by what they are made from, and by nothing else."""

import dataclasses
import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.planning import compiled
from jaxserve.planning.predict import predict
from jaxserve.runner import cache_folder, compiler_options, program_cache
from jaxserve.runner.lowering import StagePrograms
from server.commands import cli
from tests.fixtures.tiny import BLOOM
from tests.jaxserve.planning.questions import BLOOM as TINY
from tests.jaxserve.planning.questions import question

# Sizes of no other test: what jax has loaded from its own cache is not kept.
MODEL = dataclasses.replace(BLOOM, vocab_size=93)
CONFIG = EngineConfig(dtype="float32", max_rows=2, buckets=(9,), max_context=96, slots=384, scoring=False)
KEPT_IN = startup.program_cache  # tests replace it
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13]]


@pytest.fixture(scope="module", autouse=True)
def _no_cache_of_jax(tmp_path_factory):
    """What jax has loaded from an earlier run is not kept."""
    earlier = jax.config.jax_compilation_cache_dir
    use_cache_of_jax(tmp_path_factory.mktemp("compiled"))
    yield
    use_cache_of_jax(earlier)


def use_cache_of_jax(folder) -> None:
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))


@pytest.fixture(scope="module")
def params():
    return models.build(MODEL).init(0, "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


LOWER_CHOOSE = StagePrograms.lower_choose


def start(params, folder, **settings) -> Engine:
    config = dataclasses.replace(CONFIG, compilation_cache=str(folder), **settings)
    return Engine.from_params(MODEL, params, config)


def counts(engine: Engine) -> tuple[int, int]:
    return engine.report.programs, engine.report.programs_loaded


def answers(engine: Engine) -> list[tuple]:
    with engine:
        told = engine.generate(PROMPTS, max_tokens=12, temperature=0.7, seed=3, logprobs=0, ignore_eos=True)
    assert engine.load().compiled_after_ready == 0
    return [(each.token_ids, each.logprobs) for each in told]


@pytest.fixture(scope="module")
def first(params, folder, tmp_path_factory):
    """What the engine that filled the folder answered, and how many programs it has."""
    use_cache_of_jax(tmp_path_factory.mktemp("compiled"))  # other tests may have compiled some of its programs
    engine = start(params, folder)
    programs, loaded = counts(engine)
    assert loaded == 0
    assert len(list(folder.iterdir())) == programs
    return answers(engine), programs


def test_a_second_start_compiles_nothing_and_answers_the_same(params, folder, first) -> None:
    expected, programs = first
    engine = start(params, folder)
    assert counts(engine) == (programs, programs)
    assert answers(engine) == expected


def test_replicas_load_what_one_has_compiled(params, folder, first) -> None:
    expected, programs = first
    engine = start(params, folder, replicas=2)
    assert counts(engine) == (2 * programs, 2 * programs)
    pools = [jax.tree.leaves(loop.pipeline.stages[0].pool)[0] for loop in engine._loops]
    assert [pool.devices() for pool in pools] == [{jax.devices()[0]}, {jax.devices()[1]}]
    assert answers(engine) == expected


@pytest.mark.long
def test_replicas_share_programs_without_a_folder(monkeypatch) -> None:
    made: list[program_cache.ProgramCache | None] = []
    monkeypatch.setattr(startup, "program_cache", lambda config: made.append(KEPT_IN(config)) or made[-1])
    # Sizes of no other engine here: what jax has loaded is not kept.
    model = dataclasses.replace(MODEL, vocab_size=91)
    config = dataclasses.replace(CONFIG, max_rows=3, buckets=(10,), max_context=100, replicas=2)
    engine = Engine.from_params(model, models.build(model).init(0, "float32"), config)
    programs, loaded = counts(engine)
    assert loaded == programs // 2 > 0
    with engine:
        one, other = engine.generate(PROMPTS[:1] * 2, max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert all(load.generated_tokens for load in engine.loads())
    assert made[0] is not None
    assert not made[0]._held  # they are needed during the start only
    assert KEPT_IN(dataclasses.replace(config, replicas=1, compilation_cache=None)) is None


def test_engine_and_plan_compile_with_the_same_options(params, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiler_options, "of", lambda *_, **__: {"xla_no_such_option": True})
    with pytest.raises(RuntimeError, match="xla_no_such_option"):
        start(params, tmp_path)
    plan = predict(question(TINY))
    with pytest.raises(ValueError, match=r"stage 0 does not compile: .*xla_no_such_option"):
        compiled.compile_stages(plan, jax.devices()[:1], lambda *_: None)


def test_the_sampler_has_options_of_its_own(params, tmp_path, monkeypatch) -> None:
    lowered, asked, of = [], [], compiler_options.of

    def lower_choose(programs, *sizes):
        lowered.append(sizes)
        return LOWER_CHOOSE(programs, *sizes)

    def record(platform, *, sampler):
        asked.append(sampler)
        return of(platform, sampler=sampler)

    monkeypatch.setattr(StagePrograms, "lower_choose", lower_choose)
    monkeypatch.setattr(compiler_options, "of", record)
    engine = start(params, tmp_path)
    assert asked.count(True) == len(lowered) > 0
    assert len(asked) == engine.report.programs
    assert of("cpu", sampler=True) == (
        {} if jax.__version_info__ >= (0, 11) else {"xla_cpu_use_fusion_emitters": False}
    )
    assert of("cpu") == of("gpu", sampler=True) == {}


@pytest.mark.parametrize(("platform", "shared"), [("tpu", False), ("cpu", True), ("cuda", True)])
def test_programs_of_tpus_depend_on_their_places(platform, shared) -> None:
    first, second = ([SimpleNamespace(id=i, platform=platform)] for i in range(2))
    assert (program_cache._places(first) == program_cache._places(second)) == shared


@pytest.mark.long
def test_engine_and_command_share_a_cache_folder(params, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache_folder, "default", lambda: tmp_path / "cache")
    weights.write_hf(tmp_path / "model", MODEL, params)
    # Neither the fixture's sizes nor another test's.
    config = EngineConfig(dtype="float32", max_rows=2, buckets=(7,), max_context=64, slots=320, scoring=False)
    assert Engine.from_params(MODEL, params, config).report.programs_loaded == 0
    assert not (tmp_path / "cache").exists()  # weights in memory are an experiment
    config = dataclasses.replace(config, max_rows=5, max_context=112, slots=448, buckets=(10,))
    for setting, loaded in (("auto", False), ("auto", True), (None, False)):
        told = dataclasses.replace(config, compilation_cache=setting)
        programs, found = counts(Engine.from_checkpoint(tmp_path / "model", told))
        assert found == (programs if loaded else 0)
        assert len(list((tmp_path / "cache").iterdir())) == programs
    args = cli.parser().parse_args(["serve"])
    assert config.compilation_cache == "auto"
    assert Path(args.compilation_cache).parts[-2:] == ("jaxserve", "xla")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 3},
        {"max_context": 160},
        {"kv_cache_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"scoring": True},
        {"tensor": 3},
    ],
)
def test_a_setting_that_changes_programs_is_another_key(settings) -> None:
    model = models.build(MODEL)
    (before,), _ = startup.replica_programs(CONFIG, model)
    *_, after = startup.replica_programs(dataclasses.replace(CONFIG, **settings), model)[0]
    assert after[0].made_from() != before[0].made_from()
    assert before[0].made_from() == startup.replica_programs(CONFIG, model)[0][0][0].made_from()
    assert " at 0x" not in after[0].made_from()  # no object's place in memory


@pytest.mark.long
def test_programs_over_several_devices_and_stages_are_found(params, tmp_path) -> None:
    settings = {"tensor": 3, "stages": 2}
    fresh = start(params, tmp_path, **settings)
    engine = start(params, tmp_path, **settings)
    assert counts(fresh) == (fresh.report.programs, 0)
    assert counts(engine) == (fresh.report.programs, fresh.report.programs)
    assert answers(engine) == answers(fresh)


def test_a_broken_entry_is_told_and_compiled_anew(params, folder, first, caplog) -> None:
    expected, programs = first
    broken = min(folder.iterdir())
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        engine = start(params, folder)
    assert f"{broken} cannot be loaded" in caplog.text
    assert counts(engine) == (programs, programs - 1)
    assert answers(engine) == expected
    broken.write_bytes(whole)


def test_what_jax_has_loaded_is_not_kept(params, first, tmp_path) -> None:
    """It would not be whole."""
    _, programs = first
    assert counts(start(params, tmp_path)) == (programs, 0)
    assert list(tmp_path.iterdir()) == []


def test_key_has_code_versions_flags_and_settings(monkeypatch) -> None:
    device = jax.devices()[0]
    seen = {program_cache.surroundings(device)}
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "_code", lambda: "other code")
        seen.add(program_cache.surroundings(device))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_other")
        seen.add(program_cache.surroundings(device))
    with monkeypatch.context() as patch:
        patch.setattr(program_cache.metadata, "version", lambda name: "0")
        seen.add(program_cache.surroundings(device))
    with jax.default_matmul_precision("highest"):
        seen.add(program_cache.surroundings(device))
    assert len(seen) == 5
    assert program_cache.surroundings(device) in seen


def test_where_a_host_listens_is_no_part_of_the_key() -> None:
    """It is another port at every start."""
    name, device = "jax_cross_host_transfer_socket_address", jax.devices()[0]
    before, address = program_cache.surroundings(device), jax.config.values[name]
    jax.config.update(name, "127.0.0.1:4711")
    try:
        assert program_cache.surroundings(device) == before
    finally:
        jax.config.update(name, address)


def test_a_change_of_one_file_changes_the_digest_of_the_code(monkeypatch, tmp_path) -> None:
    def digest() -> str:
        program_cache._code.cache_clear()
        return program_cache._code()

    monkeypatch.setattr(program_cache, "_ROOT", tmp_path)
    for name in ("jaxserve/a.py", "server/commands/bench/b.py", "pallas_kernels/tpu/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = digest()
    (tmp_path / "server/commands/bench/b.py").write_text("2")  # nothing is traced from benchmarks
    assert digest() == before
    (tmp_path / "pallas_kernels/tpu/c.py").write_text("2")
    assert digest() != before
    program_cache._code.cache_clear()


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_shared_folder_is_not_used(tmp_path, caplog, mode) -> None:
    cache = program_cache.ProgramCache(tmp_path)
    lowered = jax.jit(lambda x: x + 41).lower(1.0)
    tmp_path.chmod(mode)
    for _ in range(2):
        assert cache.get("a", jax.devices()[:1], lowered.compile)(1.0) == 42
    assert (cache.loaded, cache.compiled, list(tmp_path.iterdir())) == (0, 2, [])
    assert "written to by others" in caplog.text


def test_a_folder_that_is_read_only_stops_no_start(tmp_path, monkeypatch, caplog):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for write in ("mkdir", "write_bytes", "unlink"):
        monkeypatch.setattr(program_cache.Path, write, read_only)
    monkeypatch.setattr(program_cache.serialize_executable, "serialize", lambda program: program)
    program: Any = ()
    assert program_cache.ProgramCache(tmp_path).get("a", jax.devices()[:1], lambda: program) == program
    assert "a compiled program is not kept: [Errno 30] Read-only file system" in caplog.text
