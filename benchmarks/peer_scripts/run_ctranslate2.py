"""Runs one job of `python -m benchmarks peers` with CTranslate2.

The script stands alone: its environment has no jaxserve.

    python run_ctranslate2.py JOB.json      (see engines.py for what a job is and what is printed)

The library batches requests: it serves a batch to its end, though rows that have ended leave it. Of prompts of
different lengths it computes as many tokens at once as the shortest has, and the rest one by one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from peer_common import WARM_UP, peak_rss, read_job
from peer_traffic import Traffic, serve_by_batches


def main(path: str) -> None:
    """Runs a job and prints its answer."""
    import ctranslate2  # pyright: ignore[reportMissingImports]

    job = read_job(path)
    device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    dtypes = ctranslate2.get_supported_compute_types(device)
    result: dict[str, Any] = {"version": f"CTranslate2 {ctranslate2.__version__}"}
    if "ask" in job:
        if job["dtype"] not in dtypes:
            result["cannot"] = f"it computes in {', '.join(sorted(dtypes))} on this {device}, not in {job['dtype']}"
        print(json.dumps(result))
        return
    model = ctranslate2.Generator(
        job["model"], device=device, compute_type=job["dtype"], intra_threads=job["threads"], inter_threads=1
    )
    if "sequences" in job:
        result["scores"] = check(ctranslate2, model, job["sequences"], job["prompt_length"])
    elif "load" in job:
        serve(model, Traffic.rehearsal(job["load"]))
        traffic = Traffic(job["load"])
        serve(model, traffic)
        result |= traffic.result()
    else:
        rng = np.random.default_rng(0)
        result["milliseconds"] = [time_case(model, case, job, rng) for case in job["cases"]]
    result["peak_rss"] = peak_rss()
    print(json.dumps(result))


def generate(model, prompts: list[list[int]], length: int, callback) -> None:
    """Generates `length` tokens for each prompt, or fewer where `callback` returns True."""
    model.generate_batch(
        [[f"<{token}>" for token in prompt] for prompt in prompts],
        max_length=length,
        end_token=[],  # nothing ends early, and no token is forbidden so that nothing does
        include_prompt_in_result=False,
        callback=callback,
    )


def serve(model, traffic: Traffic) -> None:
    """Serves a load."""

    def batch(requests: list[int]) -> None:
        generate(
            model,
            [traffic.prompts[request] for request in requests],
            max(traffic.outputs[request] for request in requests),
            lambda step: traffic.add(requests[step.batch_id], step.token_id),
        )

    serve_by_batches(traffic, batch)


def time_case(model, case: dict, job: dict, rng: np.random.Generator) -> list[float]:
    """Milliseconds of each step; without mixed batches, a prompt and the decodes are two calls."""
    steps, decodes = job["steps"], case["decodes"]
    total = [0.0] * steps
    if decodes:
        times: dict[int, float] = {}
        prompts = rng.integers(job["vocab_size"], size=(decodes, case["context"])).tolist()

        def note(step) -> bool:
            times[step.step] = time.perf_counter()  # that of the step's last row stays
            return False

        generate(model, prompts, WARM_UP + steps + 1, note)
        total = (1000 * np.diff([times[step] for step in sorted(times)])).tolist()[WARM_UP:]
    if case["prompt"]:
        prompt = rng.integers(job["vocab_size"], size=(1, case["prompt"])).tolist()
        alone = []
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            generate(model, prompt, 1, None)
            alone.append(1000 * (time.perf_counter() - started))
        total = [decode + prefill for decode, prefill in zip(total, alone[WARM_UP:], strict=True)]
    return total


def check(library, model, sequences: list[list[int]], prompt_length: int) -> list[dict]:
    """Scores sequences of one length as a batch.

    The likeliest tokens of the generated part come from generation, which restarts after every token that is not the
    sequence's.
    """
    length = len(sequences[0])
    lengths = library.StorageView.from_array(np.full(len(sequences), length, np.int32))
    tokens = library.StorageView.from_array(np.asarray(sequences, np.int32))
    scored = model.forward_batch(tokens, lengths, return_log_probs=True)
    logprobs = np.array(scored.to_device(library.Device.cpu), np.float32)  # [sequences, length, vocabulary]
    scores = []
    for sequence, rows in zip(sequences, logprobs, strict=True):
        likeliest = rows[:-1].argmax(-1).tolist()
        at = prompt_length
        while at < length:
            found: list[int] = []
            generate(model, [sequence[:at]], length - at, lambda step, found=found: found.append(step.token_id))
            for token in found:
                likeliest[at - 1] = token
                at += 1
                if token != sequence[at - 1]:
                    break
        chosen = np.take_along_axis(rows[:-1], np.asarray(sequence[1:])[:, None], -1)[:, 0]
        scores.append({"logprobs": chosen.tolist(), "likeliest": likeliest})
    return scores


if __name__ == "__main__":
    main(sys.argv[1])
