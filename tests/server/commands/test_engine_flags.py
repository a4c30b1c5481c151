"""Flags of the engine and of sampling, which mean the same in every command."""

import argparse

import pytest

from jaxserve.fields import Param
from jaxserve.sampling_params import SAMPLING_PARAMS
from server.commands import cli, flags, request_flags


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["bench", "offline"]])
def test_engine_flags_are_the_same_for_every_command(command: list[str]) -> None:
    given = (
        "--dtype bfloat16 --kv-cache-dtype int8 --max-rows 3 --slots 640 --block-size 16 --slot-policy reserve "
        "--buckets 8,64 --token-budget 32 --target-tpot 80ms --prefix-cache off --max-context 100 "
        "--max-queued-requests 5 --max-queued-tokens 600 --scheduler request --no-scoring --attention xla "
        "--tensor 4 --stages 2 --replicas 3 --in-flight 2 --compilation-cache off "
        "--speculate ngram --speculate-tokens 3"
    )
    args = cli.parser(benchmark="offline").parse_args([*command, *given.split()])
    config = flags.engine_config(args)
    assert (config.dtype, config.max_rows, config.slots, config.block_size) == ("bfloat16", 3, 640, 16)
    assert config.kv_cache_dtype == "int8"
    assert (config.slot_policy, config.buckets, config.token_budget) == ("reserve", (8, 64), 32)
    assert (config.prefix_cache, config.max_context, config.scheduler) == (False, 100, "request")
    assert (config.max_queued_requests, config.max_queued_tokens) == (5, 600)
    assert (config.tensor, config.stages, config.replicas) == (4, 2, 3)
    assert (config.target_tpot, config.in_flight) == (0.08, 2)
    assert (config.speculate, config.speculate_tokens) == ("ngram", 3)
    assert (config.scoring, config.attention, config.compilation_cache) == (False, "xla", None)


@pytest.mark.parametrize("param", SAMPLING_PARAMS.values(), ids=lambda param: param.name)
def test_sampling_flag(param: Param) -> None:
    values = {int: ("3", 3), float: ("0.5", 0.5), bool: (None, True), tuple[str, ...]: ("x", ["x"])}
    values |= {tuple[int, ...]: ("1,2", (1, 2)), tuple[tuple[int, float], ...]: ('{"5": 1.5}', {"5": 1.5})}
    flag = "--json-object" if param.name == "grammar" else "--" + param.name.replace("_", "-")
    text, value = values.get(param.kind, (None, {"type": "json_object"}))
    args = cli.parser().parse_args(["generate", "--prompt", "a", flag, *([text] if text else [])])
    assert request_flags.sampling(args) == {param.name: value}


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["bench", "offline"]])
def test_deterministic_takes_the_slot_policy_it_needs(command: list[str]) -> None:
    parser = cli.parser(benchmark="offline")
    config = flags.engine_config(parser.parse_args([*command, "--deterministic"]))
    assert (config.deterministic, config.slot_policy) == (True, "reserve")
    config = flags.engine_config(parser.parse_args(command))
    assert (config.deterministic, config.slot_policy) == (False, "grow")
    with pytest.raises(ValueError, match="slot_policy is grow; with deterministic it must be reserve"):
        flags.engine_config(parser.parse_args([*command, "--deterministic", "--slot-policy", "grow"]))


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("64GiB", 64 << 30), ("500MB", 500_000_000), ("1.5K", 1500), ("4096", 4096), ("0.5KiB", 512), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert flags.size(text) == bytes_


@pytest.mark.parametrize("text", ["0", "0.5", "-1GiB", "GiB", "64 gib", "12iB", "1e9", "5XB", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r} is no size above 0 such as 64GiB or 500MB$"):
        flags.size(text)
