"""Runs one job of `python -m benchmarks peers` with the transformers library.

The script stands alone: its environment has no jaxserve.

    python run_transformers.py JOB.json      (see engines.py for what a job is and what is printed)

With `continuous` in the job the library's continuous batching decodes and serves; otherwise static batches do, with
prompts padded on the left, until the longest answer ends.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from peer_common import WARM_UP, peak_rss, read_job
from peer_traffic import Traffic, serve_by_batches


def main(path: str) -> None:
    """Runs a job and prints its answer."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    job = read_job(path)
    result: dict[str, Any] = {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    if "ask" in job:
        if job.get("continuous") and job["ask"] == "bloom":
            result["cannot"] = "its continuous batching answers without the context: BLOOM's attention reads no pages"
        print(json.dumps(result))
        return
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = load_model(torch, transformers, job)
    if job.get("continuous"):
        # Outside of inference mode, which the thread that generates is not in.
        result |= continuous(torch, transformers, model, job)
    else:
        with torch.inference_mode():
            result |= static(torch, model, job)
    result["peak_rss"] = peak_rss()
    print(json.dumps(result))


def load_model(torch, transformers, job: dict):
    """The model of a job, with random weights where the job has `entries` of a config.json."""
    dtype, device = getattr(torch, job["dtype"]), "cuda" if torch.cuda.is_available() else "cpu"
    if "entries" in job:
        with torch.device(device):
            config = transformers.AutoConfig.for_model(**job["entries"])
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).to(device).eval()


def static(torch, model, job: dict) -> dict[str, Any]:
    """Runs a job with static batches."""
    if "sequences" in job:
        return {"scores": check(torch, model, job["sequences"], job["prompt_length"])}
    if "load" in job:
        serve(torch, model, Traffic.rehearsal(job["load"]))
        traffic = Traffic(job["load"])
        serve(torch, model, traffic)
        return traffic.result()
    return {"milliseconds": [time_case(torch, model, case, job["steps"]) for case in job["cases"]]}


def time_case(torch, model, case: dict, steps: int) -> list[float]:
    """Milliseconds of each step; without mixed batches, a prompt and the decodes are two calls."""
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


def check(torch, model, sequences: list[list[int]], prompt_length: int) -> list[dict]:
    """Scores sequences of one length as a batch: prompts in one call, then token by token."""
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


def serve(torch, model, traffic: Traffic) -> None:
    """Serves a load with static batches; tokens count as soon as they are computed."""

    def batch(requests: list[int]) -> None:
        width = max(len(traffic.prompts[request]) for request in requests)
        padded = [[0] * (width - len(traffic.prompts[request])) + traffic.prompts[request] for request in requests]
        kept = [
            [0] * (width - len(traffic.prompts[request])) + [1] * len(traffic.prompts[request]) for request in requests
        ]
        tokens, mask = torch.tensor(padded, device=model.device), torch.tensor(kept, device=model.device)
        positions, cache, ended = (mask.cumsum(-1) - 1).clamp(min=0), None, False
        learned = {} if model.config.model_type == "bloom" else {"position_ids": positions}
        while not ended:
            answer = model(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **learned,
            )
            cache, tokens = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            done = [traffic.add(*each) for each in zip(requests, tokens[:, 0].tolist(), strict=True)]
            ended = all(done)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=-1)
            if learned:
                learned["position_ids"] = learned["position_ids"][:, -1:] + 1

    serve_by_batches(traffic, batch)


def continuous(torch, transformers, model, job: dict) -> dict[str, Any]:
    """Runs a job with continuous batching."""
    model.set_attn_implementation("sdpa")
    if "sequences" in job:
        return {"scores": check_continuous(transformers, model, job["sequences"], job["prompt_length"])}
    if "load" in job:
        load = job["load"]
        longest = max(len(prompt) + output for prompt, output in zip(load["prompts"], load["outputs"], strict=True))
        with manager(transformers, model, load["rows"], longest) as running:
            serve_continuous(running, Traffic.rehearsal(load))
            traffic = Traffic(load)
            serve_continuous(running, traffic)
        return traffic.result()
    return {"milliseconds": [time_continuous(torch, transformers, model, case, job["steps"]) for case in job["cases"]]}


@contextlib.contextmanager
def manager(transformers, model, rows: int, longest: int) -> Iterator[Any]:
    """The library's running manager, with memory for `rows` requests of `longest` tokens."""
    settings = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=rows, num_blocks=rows * (longest // 256 + 1)
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=settings, timeout=30
    ) as running:
        yield running


def serve_continuous(running, traffic: Traffic) -> None:
    """Submits requests at their times, and takes tokens as they are generated."""

    def hand_in() -> None:
        while traffic.coming:
            for request in traffic.take(1):
                running.add_request(
                    traffic.prompts[request],
                    request_id=str(request),
                    max_new_tokens=traffic.outputs[request],
                    streaming=True,
                    eos_token_id=-1,
                )
            traffic.wait()

    traffic.begin()
    feeder = threading.Thread(target=hand_in)
    feeder.start()
    ended: set[int] = set()
    while len(ended) < len(traffic.prompts):
        output = running.get_result(timeout=1)
        if output is None:
            if not running.is_running():
                sys.exit("the library's thread that generates has ended")
            continue
        request = int(output.request_id)
        for token in output.generated_tokens[len(traffic.tokens[request]) :]:
            if traffic.add(request, token):
                ended.add(request)
    feeder.join()


def time_continuous(torch, transformers, model, case: dict, steps: int) -> list[float] | None:
    """Milliseconds of a decode step; None for prompts, which no call of the library computes alone."""
    if case["prompt"]:
        return None
    prompts = torch.randint(model.config.vocab_size, (case["decodes"], case["context"])).tolist()
    times = []
    with manager(transformers, model, case["decodes"], case["context"] + 2 * WARM_UP + steps) as running:
        traffic = Traffic(
            {
                "prompts": prompts,
                "outputs": [2 * WARM_UP + steps] * len(prompts),
                "arrivals": [0.0] * len(prompts),
                "rows": len(prompts),
            }
        )
        serve_continuous(running, traffic)
    # From where the last row has its first token on, so that all rows decode.
    begin = max(times[0] for times in traffic.times)
    steady = [[at for at in row if at >= begin] for row in traffic.times]
    times = [1000 * (row[-1] - row[0]) / (len(row) - 1) for row in steady if len(row) > WARM_UP]
    return [statistics.median(times)]


def check_continuous(transformers, model, sequences: list[list[int]], prompt_length: int) -> list[dict]:
    """The likeliest tokens of the generated part, without logprobs.

    They come from generation, which restarts after every token that is not the sequence's.
    """
    length, scores = len(sequences[0]), []
    with manager(transformers, model, 1, length) as running:
        for sequence in sequences:
            likeliest, at = [0] * (prompt_length - 1), prompt_length
            while at < length:
                load = {"prompts": [sequence[:at]], "outputs": [length - at], "arrivals": [0.0], "rows": 1}
                traffic = Traffic(load)
                serve_continuous(running, traffic)
                for token in traffic.tokens[0]:
                    likeliest.append(token)
                    at += 1
                    if token != sequence[at - 1]:
                        break
            scores.append({"logprobs": None, "likeliest": likeliest})
    return scores


if __name__ == "__main__":
    main(sys.argv[1])
