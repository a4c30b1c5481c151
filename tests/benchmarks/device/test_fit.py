"""The constants for a device are those that its recorded steps give."""

from pathlib import Path

import pytest

from benchmarks.device import __main__ as command
from benchmarks.device import fit, records
from jaxserve.planning.calibration import FITS, calibration
from jaxserve.planning.planner import deployment
from jaxserve.planning.predict import predict
from sharding.devices import DEVICES

RECORDS = Path("benchmarks/results/2026-11-26-h200.jsonl")


@pytest.fixture(scope="module")
def steps():
    return fit.steps(records.read(RECORDS))


def test_the_constants_of_an_h200_are_fitted(steps):
    kept = [step for step in steps if not step.waits]
    found, ours = fit.fitted(kept), FITS["h200"]
    assert ours.efficiency == pytest.approx(found.efficiency, abs=0.005)
    assert ours.layer_seconds == pytest.approx(found.layer_seconds, abs=0.5e-6)
    models = " and ".join(dict.fromkeys(step.model for step in kept))
    told = f"{len(kept)} steps of {models}, worst error {fit.worst_error(kept, ours):.0%}"
    assert told in calibration(DEVICES["h200"])


def test_two_all_reduces_have_the_published_overhead():
    ours = FITS["h200"]
    assert ours.layer_seconds + 2 * ours.collective_seconds == pytest.approx(FITS["a100-40g"].layer_seconds)
    assert ours.of_links == FITS["a100-40g"].of_links


def test_the_sampler_takes_what_was_measured():
    (record,) = (each for each in records.read(RECORDS) if "temperature alone" in each["name"])
    assert record["name"].startswith("32 x 250880")  # as in BLOOM
    (bucket,) = (plan := predict(deployment("bloom-7b1", "h200:1", max_rows=32, buckets=(32,)))).buckets
    assert 1e3 * plan.sampling(bucket) == pytest.approx(record["ms"], rel=0.02)


def test_the_errors_of_all_steps_are_in_the_results(steps, capsys):
    assert command.main(["fit", "--records", str(RECORDS)]) == 0
    told = capsys.readouterr().out.splitlines()
    page = RECORDS.with_suffix(".md").read_text()
    rows = [line for line in told if line.startswith("|")]
    assert len(rows) == 2 + len(steps) == 17
    for line in told:
        assert line in page


def test_unknown_devices_have_no_negative_overheads(steps):
    kept = [step for step in steps if not step.waits]
    overlapped = fit.fitted(kept, overlapped=True)
    assert overlapped.layer_seconds == 0.0
    closer = [fit.worst_error(kept, each) for each in (overlapped, FITS["h200"], fit.BEFORE)]
    assert closer == sorted(closer)
    with pytest.raises(ValueError, match="GTX is not in the table of devices"):
        fit.steps([{"name": "device", "device": "GTX"}])
