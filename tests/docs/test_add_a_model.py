"""docs/add-a-model.md: two files that are written from the page alone serve a new family."""

import json
import re
from pathlib import Path

import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from sharding import specs
from tests.fixtures import parity
from tests.jaxserve.models.test_parity import TOLERANCE, check

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-model.md").read_text(encoding="utf-8")
CASES = sorted(parity.FOLDER.glob("qwen3-*.json"))


def found(pattern: str) -> str:
    """The one place of the page that matches: its group."""
    (text,) = re.findall(pattern, PAGE, re.MULTILINE | re.DOTALL)
    return text


def written_by_the_page(family: str) -> str:
    """Llama's file with what the page says of Qwen3, for a family of another name."""
    changes = {
        r'decoder.sizes(fields, "llama")': found(r"`(decoder\.sizes\(fields, \"qwen3\"[^`]*)`"),
        "from jaxserve.models.rotary": found(r"`(from jaxserve\.models\.qwen2 import windows)`")
        + "\nfrom jaxserve.models.rotary",
        'ffn_bias=fields.flag("mlp_bias", default=False),': "windows=windows(fields), "
        + found(r"Qwen3 without `(head_norm=True)`"),
        '"mlp_bias": config.ffn_bias,': "",
        '"LlamaForCausalLM")': '"Qwen3ForCausalLM") | ' + found(r"`(decoder\.window_entries\(config\) \| [^`]*)`"),
    }
    code = found(r"^```python\n([^`]*def parse_config[^`]*)```$")
    for before, after in changes.items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code.replace('"qwen3"', f'"{family}"')


@pytest.fixture
def newcomer(tmp_path, monkeypatch) -> str:
    """The name of a family that only the two files know."""
    for package, code in (
        (models, written_by_the_page("newcomer")),
        (specs, found(r"`(from sharding\.specs\.llama import SPEC)`")),
    ):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "newcomer.py").write_text(code, encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    return "newcomer"


def checkpoint(case: parity.Case, family: str, path: Path) -> Path:
    config = case.write(path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))
    return path


def test_a_family_by_the_page_answers_like_the_library(newcomer, tmp_path):
    assert newcomer in models.families()
    for case in map(parity.read, CASES):
        check(checkpoint(case, newcomer, tmp_path / case.name), case.answers)


def test_its_configuration_survives_being_written(newcomer):
    for case in map(parity.read, CASES):
        config = models.parse_config(case.config | {"model_type": newcomer})
        assert models.parse_config(models.family(newcomer).hf_config(config)) == config


@pytest.mark.long
def test_the_engine_serves_it_over_two_devices(newcomer, tmp_path):
    case = parity.read(CASES[0].with_name("qwen3-grouped.json"))
    settings = EngineConfig(
        max_rows=3, block_size=4, slots=512, buckets=(8,), max_context=96, dtype="float32", tensor=2
    )
    with Engine.from_checkpoint(checkpoint(case, newcomer, tmp_path / "model"), settings) as engine:
        for answer in case.answers:
            (ours,) = engine.generate(
                [answer.prompt_tokens], max_tokens=len(answer.tokens), temperature=0.0, ignore_eos=True, logprobs=0
            )
            assert min(answer.gaps) > TOLERANCE
            assert list(ours.token_ids) == answer.tokens
