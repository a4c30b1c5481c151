"""The transformers library's answers, asked of the whole engine: paged, chunked, batched, sampled on the device."""

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig
from tests.fixtures import parity

TOLERANCE = 1e-3
CASES = (
    "bloom-7-heads",
    "gpt2-4-heads",
    "gpt_neox-4-heads",
    "opt-post-norm",
    "llama-grouped",
    "qwen2-grouped",
    "mistral-windows",
    "gemma3_text-pattern",
)
# What is particular to these is the model's, which has tests of its own against the same answers.
VARIANTS = (
    "bloom-untied",
    "bloom-post-norm",
    "gpt2-by-layer",
    "gpt_neox-tied",
    "opt-untied",
    "llama-yarn",
    "llama-linear",
    "qwen2-windows",
    "phi3-grouped",
    "gemma2-capped",
)
# 7 heads, vocabularies of 101 and 257, KV heads that are repeated: 2 over 4 devices, 3 over 2 and 6
PADDED = (
    ("bloom-7-heads", 4),
    ("gpt2-4-heads", 2),
    ("llama-grouped", 4),
    ("llama-3", 6),
    ("llama-dynamic", 8),
    ("qwen3-grouped", 4),
    ("phi3-partly-rotated", 8),
    ("gemma2-capped", 4),
)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(pytest.param(name, 1, marks=pytest.mark.long if i else ()) for i, name in enumerate(CASES)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in PADDED),
        *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in VARIANTS),
    ],
)
def test_the_engine_answers_like_the_library(name, tensor, tmp_path) -> None:
    case = parity.read(parity.FOLDER / f"{name}.json")
    (tmp_path / "pad.toml").write_text("[pad]\nheads = true\nffn = true\n")
    config = EngineConfig(
        max_rows=3,
        block_size=4,
        slots=512,
        buckets=(8,),
        max_context=96,
        dtype="float32",
        tensor=tensor,
        sharding=str(tmp_path / "pad.toml") if tensor > 1 else None,
    )
    with Engine.from_checkpoint(case.write(tmp_path / "model"), config) as engine:
        completions = engine.generate(
            [answer.prompt_tokens for answer in case.answers],
            max_tokens=max(len(answer.tokens) for answer in case.answers),
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
        )
        assert engine.load().compiled_after_ready == 0
        assert ("held as" in engine.report.padding) == (tensor > 1)
    for completion, answer in zip(completions, case.answers, strict=True):
        assert completion.prompt_logprobs is not None
        assert completion.logprobs is not None
        scored = completion.prompt_logprobs[1:]
        np.testing.assert_allclose(scored, answer.prompt_logprobs, rtol=0, atol=TOLERANCE)
        unclear = [i for i, gap in enumerate(answer.gaps) if gap <= TOLERANCE]
        until = unclear[0] if unclear else len(answer.tokens)
        assert list(completion.token_ids[:until]) == answer.tokens[:until]
        np.testing.assert_allclose(completion.logprobs[:until], answer.logprobs[:until], rtol=0, atol=TOLERANCE)
