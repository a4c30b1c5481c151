"""The demo model, whose weights are trained and shipped, gives the logprobs that transformers gives."""

import json

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from tests.fixtures.make_demo_logprobs import ANSWERS, TOKENS, pages


@pytest.mark.long
def test_logprobs_of_held_out_pages_are_those_of_transformers() -> None:
    config = EngineConfig(dtype="float32", buckets=(TOKENS,), slots=4096, max_rows=4, max_context=256)
    with Engine.from_checkpoint(DEMO_MODEL, config) as engine:
        assert engine.tokenizer is not None
        prompts = pages(engine.tokenizer.encode((DEMO_MODEL / "held_out.txt").read_text(encoding="utf-8")))
        asked = [{"prompt_token_ids": page} for page in prompts]
        completions = engine.generate(asked, max_tokens=1, prompt_logprobs=0, temperature=0.0)
    expected = np.array(json.loads(ANSWERS.read_text())["logprobs"])
    found = np.array([completion.prompt_logprobs[1:] for completion in completions], np.float64)
    assert found.shape == (50, TOKENS - 1) == expected.shape
    worst = np.abs(found - expected).max()
    print(f"worst difference {worst:.1e} over {expected.size} tokens; mean logprob {expected.mean():.4f}")
    assert worst < 1e-3
