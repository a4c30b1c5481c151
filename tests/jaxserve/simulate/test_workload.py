"""Workloads: their distributions, and trace files as their publishers write them."""

import math
from pathlib import Path

import numpy as np
import pytest

from jaxserve.simulate import workload as load

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:15:48.6805900,5000,0
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 2500, "input_length": 1030, "output_length": 500, "hash_ids": [7, 9, 10]}

{"timestamp": 2500, "input_length": 40, "output_length": 3, "hash_ids": [11]}
"""


def trace(tmp_path: Path, text: str, **settings) -> load.Workload:
    path = tmp_path / "trace"
    path.write_text(text)
    return load.read_trace(path, **{"max_context": 2048, "vocab_size": 100, "seed": 3, **settings})


def test_uniform_lengths_cover_their_range():
    workload = load.uniform(
        requests=500, prompt=load.Range.parse("3:6"), output=load.Range.parse("2"), vocab_size=50, seed=1
    )
    assert {len(job.prompt) for job in workload.jobs} == {3, 4, 5, 6}
    assert {job.max_tokens for job in workload.jobs} == {2}
    assert all(job.prompt.tokens().min() >= 0 and job.prompt.tokens().max() < 50 for job in workload.jobs)
    assert {job.arrival for job in workload.jobs} == {0.0}
    assert workload.longest == 8


def test_a_seed_fixes_the_workload():
    settings = {"requests": 4, "prompt": load.Range(low=1, high=9), "output": load.Range(low=1, high=9)}
    first, again = (load.uniform(**settings, vocab_size=50, seed=5) for _ in range(2))
    other = load.uniform(**settings, vocab_size=50, seed=6)
    assert all(
        np.array_equal(a.prompt.tokens(), b.prompt.tokens()) for a, b in zip(first.jobs, again.jobs, strict=True)
    )
    assert any(
        not np.array_equal(a.prompt.tokens(), b.prompt.tokens()) for a, b in zip(first.jobs, other.jobs, strict=True)
    )


def test_poisson_arrivals_have_the_rate_and_the_spread():
    base = load.uniform(
        requests=4000, prompt=load.Range(low=1, high=1), output=load.Range(low=1, high=1), vocab_size=9, seed=0
    )
    workload = load.poisson(base, rate=8.0, seed=0)
    gaps = np.diff([0.0] + [job.arrival for job in workload.jobs])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)  # of an exponential distribution, the mean again


@pytest.mark.parametrize("text", ["", "a:b", "0:3", "5:4", "3:", "1:2:3"])
def test_length_ranges_are_checked(text):
    with pytest.raises(ValueError, match="length range"):
        load.Range.parse(text)


def test_azure_trace(tmp_path):
    workload = trace(tmp_path, AZURE)
    assert [job.arrival for job in workload.jobs] == pytest.approx([0.0, 2.0, 4.25])
    assert [len(job.prompt) for job in workload.jobs] == [374, 2047, 396]
    assert [job.max_tokens for job in workload.jobs] == [44, 1, 109]
    lost = 5001 - 2048
    assert "1 of 3 requests" in workload.notes[0]
    assert f"{100 * lost / (418 + 5001 + 505):.1f}%" in workload.notes[0]


def test_azure_trace_without_a_header(tmp_path):
    header, *rows = AZURE.splitlines(keepends=True)
    assert "TIMESTAMP" in header
    with_header, without = trace(tmp_path, AZURE), trace(tmp_path, "".join(rows))
    lengths = [[(job.arrival, len(job.prompt), job.max_tokens) for job in each.jobs] for each in (with_header, without)]
    assert lengths[0] == lengths[1]
    with pytest.raises(ValueError, match="line 4"):
        trace(tmp_path, "".join(rows) + "yesterday,1,2\n")


def test_columns_have_the_names_that_are_given(tmp_path):
    columns = {"time": "at", "prompt": "in", "output": "out", "tenant": "who"}
    text = "who,out,at,in\nb,3,2026-01-01 00:00:02,7\na,4,2026-01-01 00:00:00.5,9\n"
    seconds = text.replace("2026-01-01 00:00:0", "")
    for each in (text, seconds):
        jobs = trace(tmp_path, each, columns=columns).jobs
        assert [(job.arrival, len(job.prompt), job.max_tokens, job.tenant) for job in jobs] == [
            (0.0, 9, 4, "a"),
            (1.5, 7, 3, "b"),
        ]
    with pytest.raises(ValueError, match="there is no column in; the first line names who, out, at, inn"):
        trace(tmp_path, text.replace(",in\n", ",inn\n"), columns=columns)
    with pytest.raises(ValueError, match=r"line 3: not a request of this trace: at is nan"):
        trace(tmp_path, seconds.replace("0.5", "nan"), columns=columns)
    with pytest.raises(ValueError, match="--columns time="):
        trace(tmp_path, text)


def test_trace_limit_and_speed(tmp_path):
    workload = trace(tmp_path, AZURE, limit=2, speed=2.0)
    assert [job.arrival for job in workload.jobs] == pytest.approx([0.0, 2.125])
    assert not workload.notes


def test_a_short_trace_is_repeated_with_other_tokens(tmp_path):
    workload = trace(tmp_path, AZURE, limit=8, speed=2.0)
    times = [0.0, 1.0, 2.125]
    period = 1.5 * 2.125  # one mean gap after the last
    assert [job.arrival for job in workload.jobs] == pytest.approx(
        [n * period + t for n in range(3) for t in times][:8]
    )
    assert [len(job.prompt) for job in workload.jobs] == 2 * [374, 2047, 396] + [374, 2047]
    assert [job.max_tokens for job in workload.jobs] == 2 * [44, 1, 109] + [44, 1]
    assert "3 of 8 requests were clipped" in workload.notes[0]
    assert "has 3 requests" in workload.notes[1]
    first, copy, another = (workload.jobs[n].prompt.tokens() for n in (0, 3, 6))
    assert not np.array_equal(first, copy)
    assert not np.array_equal(copy, another)
    with pytest.raises(IndexError):
        workload.jobs[8]


def test_copies_of_shared_prefixes_share_theirs(tmp_path):
    jobs = trace(tmp_path, MOONCAKE, limit=6).jobs
    first, _, _, third, fourth, _ = (job.prompt.tokens()[:512] for job in jobs)
    assert np.array_equal(third, fourth)
    assert not np.array_equal(first, third)


def test_mooncake_trace_shares_prefixes(tmp_path):
    first, second, third = trace(tmp_path, MOONCAKE).jobs
    assert [job.arrival for job in (first, second, third)] == pytest.approx([0.0, 1.5, 1.5])
    assert [len(job.prompt) for job in (first, second, third)] == [600, 1030, 40]
    assert np.array_equal(first.prompt.tokens()[:512], second.prompt.tokens()[:512])
    assert not np.array_equal(first.prompt.tokens()[512:600], second.prompt.tokens()[512:600])
    assert not np.array_equal(first.prompt.tokens()[:40], third.prompt.tokens())


def test_clipping_keeps_the_output_and_the_shared_head(tmp_path):
    first, second, _ = trace(tmp_path, MOONCAKE, max_context=700).jobs
    assert (len(first.prompt), first.max_tokens) == (600, 5)
    assert (len(second.prompt.tokens()), second.max_tokens) == (200, 500)
    assert np.array_equal(first.prompt.tokens()[:200], second.prompt.tokens())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,tokens\n1,2\n", "unknown trace format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n', "line 2"),
        ('{"timestamp": 1\n', "line 1"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}\n', "line 1.*timestamp is nan"),
        ('{"timestamp": 1, "input_length": 1e999, "output_length": 3}\n', "line 1"),
        ("[" + "1" * 200_000 + "]\n", "the trace is not CSV: field larger than field limit"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        trace(tmp_path, text)


def test_a_trace_that_is_no_text_is_named(tmp_path):
    (path := tmp_path / "trace").write_bytes(b"\xa3" * 9)
    with pytest.raises(ValueError, match=r"trace: the trace is not text: 'utf-8' codec"):
        load.read_trace(path, max_context=9, vocab_size=9, seed=0)


@pytest.mark.parametrize("rate", [0.0, math.inf, math.nan])
def test_a_rate_is_a_number_above_0(rate):
    workload = load.uniform(
        requests=1, prompt=load.Range.parse("1"), output=load.Range.parse("1"), vocab_size=9, seed=0
    )
    with pytest.raises(ValueError, match=f"rate is {rate:g}; it must be above 0"):
        load.poisson(workload, rate=rate, seed=0)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.csv.*cannot be read"):
        load.read_trace(tmp_path / "absent.csv", max_context=8, vocab_size=9, seed=0)


@pytest.mark.parametrize("vocab_size", [7, 256, 300])
def test_drawn_tokens_are_spread_over_the_vocabulary(vocab_size):
    prompt = load.DrawnPrompt(100 * vocab_size, vocab_size, 0, 1)
    tokens = prompt.tokens()
    assert prompt.tolist() == tokens.tolist()
    counts = np.bincount(tokens, minlength=vocab_size)
    assert tokens.dtype == np.int32
    assert len(counts) == vocab_size
    assert 50 < counts.min() <= counts.max() < 150
    assert not np.array_equal(tokens, prompt.shifted(1).tokens())
