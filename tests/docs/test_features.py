"""docs/features.md names what exists and nothing else, and its examples run."""

import ast
import asyncio
import inspect
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from jaxserve import models
from jaxserve.engine import Engine
from jaxserve.generation import parsing
from jaxserve.sampling_params import SAMPLING_PARAMS
from server.auth import OPEN_SERVICES
from server.commands import cli
from server.compat import tgi_schemas
from server.grpc.server import ROUTER_SERVICES
from server.http import schemas
from server.proto.inference import open_inference_grpc_pb2
from server.proto.jaxserve.v1 import inference_pb2
from server.proto.vllm.grpc.engine import vllm_engine_pb2
from tests.docs import sampling_table
from tests.docs.conftest import served
from tests.fixtures import notebook

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
# Fields that are accepted without effect, refused by name, or not read.
NO_FEATURES = {
    "openai": {"suffix"},
    "tgi": {"parameters", "adapter_id", "watermark"},
    "vllm": {
        *("sampling_params", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "data_parallel_rank"),
        "structural_tag",
    },
}


def table(heading: str) -> dict[str, list[str]]:
    """What a section's table has in backticks, by column."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r" ?\| ?", line.strip("| \n")) for line in section.splitlines() if line.startswith("|")]
    columns = rows[0] if rows[0][0] else rows[0][1:]
    names: dict[str, list[str]] = {column: [] for column in columns}
    for row in rows[2:]:
        assert len(row) == len(columns) + 1, row
        for column, cell in zip(columns, row[1:], strict=True):
            names[column] += re.findall(r"`([^`]+)`", cell)
            assert "`" in cell or cell in ("–", "the call's own"), (row[0], column)
    return names


def flags_of(*commands: str) -> set[str]:
    """Every flag of some commands but --help."""
    parser = cli.parser()
    (choices,) = (action.choices for action in parser._actions if action.choices)
    actions: list[Any] = [action for command in commands for action in choices[command]._actions]  # type: ignore[index]
    return {flag for action in actions for flag in action.option_strings if flag not in ("-h", "--help")}


def fields_of(*messages: Any) -> set[str]:
    return {field.name for message in messages for field in message.DESCRIPTOR.fields}


def methods_of(module: Any, service: str) -> set[str]:
    return {method.name for method in module.DESCRIPTOR.services_by_name[service].methods}


def assert_tests_exist(names: list[str]) -> None:
    for name in names:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def runs_the_fake_engine(path: str, name: str) -> bool:
    """Whether a test is answered by an engine of tests/server/fake_engine.py, or another that stands for one."""
    source = (ROOT / "tests" / path).read_text(encoding="utf-8")
    (test,) = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef) and each.name == name)
    fixtures = {"serve", "serve_http", "serve_port", "run_remote"} & {argument.arg for argument in test.args.args}
    return path.startswith("server/") and (
        bool(fixtures)
        or "admission_model" in source
        or "class Watched" in source
        or "FakeEngine" in (ast.get_source_segment(source, test) or "")
    )


def test_every_row_has_a_test_without_the_fake_engine() -> None:
    for line in PAGE.splitlines():
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
        if line.startswith("|") and tests:
            assert not all(runs_the_fake_engine(*test) for test in tests), line


def test_request_fields_are_complete() -> None:
    names = table("Request fields")
    assert_tests_exist(names["test"])
    for column in ("command line", "OpenAI", "TGI", "vLLM"):
        names[column] += [name for param in SAMPLING_PARAMS.values() for name in sampling_table.names(column, param)]
    names["gRPC"] += SAMPLING_PARAMS
    names["Python"] += SAMPLING_PARAMS
    assert set(names["gRPC"]) == fields_of(inference_pb2.GenerateRequest) | {"GenerateStream"}
    terms = {
        name
        for method in (Engine.generate, Engine.beam_search, Engine.stream)
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    python = {*SAMPLING_PARAMS, *terms, *parsing.PROMPT_FIELDS, "id"}
    assert set(names["Python"]) == python | {"Engine.stream", "Engine.beam_search"}
    sampling = flags_of("generate") & flags_of("client")
    assert set(names["command line"]) == sampling | {"--prompt", "--model"}
    openai = {*schemas.CompletionBody.model_fields, *schemas.ChatBody.model_fields} - NO_FEATURES["openai"]
    assert set(names["OpenAI"]) == openai
    tgi = {*tgi_schemas.TgiParameters.model_fields, *tgi_schemas.TgiBody.model_fields} - NO_FEATURES["tgi"]
    assert set(names["TGI"]) == tgi | {"/generate_stream"}
    vllm = fields_of(vllm_engine_pb2.GenerateRequest, vllm_engine_pb2.SamplingParams) - NO_FEATURES["vllm"]
    assert set(names["vLLM"]) == vllm


def test_sampling_table_is_current() -> None:
    assert sampling_table.page(PAGE) == PAGE, "make docs-tables writes it"


def test_calls_are_complete() -> None:
    names = table("Calls")
    assert_tests_exist(names["test"])
    assert {*names["gRPC"], "GenerateStream"} == methods_of(inference_pb2, "Inference") | {f"{OPEN_SERVICES[0]}/Check"}
    vllm, kserve = (service.rpartition(".")[2] for service in ROUTER_SERVICES)
    routers = {f"{vllm}/{name}" for name in methods_of(vllm_engine_pb2, vllm)}
    routers |= {f"{kserve}/{name}" for name in methods_of(open_inference_grpc_pb2, kserve)}
    assert set(names["routers"]) == routers
    for name in names["Python"]:
        attribute = name.removeprefix("Engine.")
        assert hasattr(Engine, attribute) or f"self.{attribute}" in (ROOT / "jaxserve/engine.py").read_text(), name
    for command in names["command line"]:
        words = command.split()
        assert set(words[2:]) <= flags_of(words[1]), command


def test_models_are_complete() -> None:
    section = PAGE.split("\n## Models\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert sorted(row[2].strip(" `") for row in rows) == sorted(models.families())


def test_server_flags_are_complete() -> None:
    names = table("Server flags")
    assert_tests_exist(names["test"])
    assert set(names["flags of `jaxserve serve`"]) == flags_of("serve")


def test_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.toml").write_text("max-rows = 8\n")
    commands = lines("jaxserve")
    assert len(commands) > 5
    for _, *words in commands:
        cli.parser(benchmark=words[1] if words[0] == "bench" else None).parse_args(
            words
        )  # ends the test with what is wrong


def blocks(page: str = PAGE) -> list[tuple[str, str]]:
    """(language, content) of a page's code blocks, in order."""
    found: list[tuple[str, str]] = []
    inside = False
    for line in page.splitlines(keepends=True):
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append((line.strip("`\n"), ""))
        elif inside:
            found[-1] = found[-1][0], found[-1][1] + line
    assert not inside
    return found


def lines(program: str) -> list[list[str]]:
    """The words of each line that calls a program."""
    plain = [line for language, content in blocks() if not language for line in content.splitlines()]
    return [shlex.split(line) for line in plain if line.startswith(f"{program} ")]


def test_python_examples_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    all_blocks = blocks()
    pairs = [
        (code, shown)
        for (language, code), (after, shown) in itertools.pairwise(all_blocks)
        if (language, after) == ("python", "")
    ]
    assert len(pairs) == sum(language == "python" for language, _ in all_blocks) > 5
    monkeypatch.setattr(Engine, "from_checkpoint", lambda path: engine)  # one for all of them
    with served(engine) as (port, _):
        cells = [code.replace("127.0.0.1:50051", f"127.0.0.1:{port}") for code, _ in pairs]
        shown = asyncio.run(asyncio.wait_for(notebook.run(cells, {}), 120))
    assert shown == [expected for _, expected in pairs]


def test_http_examples_run(engine: Engine) -> None:
    calls = lines("curl")
    assert len(calls) > 10
    with served(engine) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for words in calls:
            url = next(word for word in words if word.startswith("http://"))
            path = url.removeprefix("http://127.0.0.1:8000")
            if "-d" in words:
                answer = client.post(path, json=json.loads(words[words.index("-d") + 1]))
            else:
                answer = client.get(path)
            assert (answer.status_code, "error" in answer.text[:20]) == (200, False), (words, answer.text)
