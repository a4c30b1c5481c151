"""Runs one job of `jaxserve bench peers` with the transformers library. Stands alone: its environment has no jaxserve.

python peer_transformers.py JOB.json      (see peers.py for what a job is and what is printed)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps that are not counted


def main(path: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype, device = getattr(torch, job["dtype"]), "cuda" if torch.cuda.is_available() else "cpu"
    if "entries" in job:  # of a config.json: weights are drawn
        with torch.device(device):
            config = transformers.AutoConfig.for_model(**job["entries"])
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).to(device).eval()
    result: dict[str, Any] = {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    with torch.inference_mode():
        if "sequences" in job:
            result["scores"] = check(torch, model, job["sequences"], job["prompt_length"])
        else:
            result["milliseconds"] = [time_case(torch, model, case, job["steps"]) for case in job["cases"]]
    # Outside of inference mode, which the thread that generates is not in. Models that cannot set their attention,
    # BLOOM among them, would answer without their context.
    if job.get("continuous") and model._can_set_attn_implementation():
        decodes = [case for case in job["cases"] if not case["prompt"]]
        model.set_attn_implementation("sdpa")
        result["continuous"] = [time_continuous(torch, transformers, model, case, job["steps"]) for case in decodes]
    result["peak_rss"] = peak_rss()
    print(json.dumps(result))


def time_case(torch, model, case: dict, steps: int) -> list[float]:
    """Milliseconds of each step. The library has no mixed batches: a prompt and the decodes are two calls."""
    vocabulary, device = model.config.vocab_size, model.device
    cache = last = None
    if case["decodes"]:
        context = torch.randint(vocabulary, (case["decodes"], case["context"]), device=device)
        answer = model(input_ids=context, use_cache=True, logits_to_keep=1)
        cache, last = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
    prompt = torch.randint(vocabulary, (1, case["prompt"]), device=device) if case["prompt"] else None
    times = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        if prompt is not None:
            model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        if last is not None:
            answer = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
            last = answer.logits[:, -1].argmax(-1, keepdim=True)
            last.tolist()  # the tokens must be there before the next step
        times.append(1000 * (time.perf_counter() - started))
    return times[WARM_UP:]


def time_continuous(torch, transformers, model, case: dict, steps: int) -> float:
    """Milliseconds of a step of the library's continuous batching: what so many tokens more of each row take."""
    prompts = torch.randint(model.config.vocab_size, (case["decodes"], case["context"])).tolist()

    def seconds(tokens: int) -> float:
        settings = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started = time.perf_counter()
        answers = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        assert [len(answer.generated_tokens) for answer in answers.values()] == [tokens] * len(prompts)
        return time.perf_counter() - started

    seconds(WARM_UP)
    return 1000 * (seconds(WARM_UP + steps) - seconds(WARM_UP)) / steps


def check(torch, model, sequences: list[list[int]], prompt_length: int) -> list[dict]:
    """Scores sequences of one length as a batch: their prompts in one call, then token by token through the cache."""
    tokens = torch.tensor(sequences, device=model.device)
    answer = model(input_ids=tokens[:, :prompt_length], use_cache=True)
    logits = [answer.logits.float()]
    for position in range(prompt_length, tokens.shape[1] - 1):
        answer = model(
            input_ids=tokens[:, position : position + 1], past_key_values=answer.past_key_values, use_cache=True
        )
        logits.append(answer.logits.float())
    logprobs = torch.cat(logits, dim=1).log_softmax(-1)  # [sequences, length - 1, vocabulary]
    chosen = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return [
        {"logprobs": row.tolist(), "likeliest": best.tolist()}
        for row, best in zip(chosen, logprobs.argmax(-1), strict=True)
    ]


def peak_rss() -> int | None:
    """Most bytes this process ever held resident (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


if __name__ == "__main__":
    main(sys.argv[1])
