from __future__ import annotations

import pytest

from benchmarks.device import tpu_tune
from pallas_kernels.tpu import cuts


def shape(heads=7, pool="bfloat16"):
    return tpu_tune.shape_of(heads, heads, 128, pool, "TPU v9")


def test_the_fastest_that_compiles_is_found():
    def timer(_, cut, load):
        if cut.units == 8:
            raise RuntimeError("out of memory")
        about_prompts = load.prompts > 0
        return abs(cut.tile - 128) + 1 / cut.tile_slots if about_prompts else 1 / (cut.units * cut.unit_slots)

    found = tpu_tune.best(shape(), timer)
    assert (found.tile, found.tile_slots) == (128, 2048)
    assert found.units < 8
    others = [cut for cut in tpu_tune.candidates(shape()) if cut.units < 8]
    assert found.units * found.unit_slots == max(cut.units * cut.unit_slots for cut in others)


def test_nothing_that_compiles_is_told():
    def timer(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(ValueError, match=r"no cut of .* compiles"):
        tpu_tune.best(shape(), timer)


def test_the_table_printed_is_the_table_read(capsys, monkeypatch):
    tpu_tune.main(
        ["--heads", "7"], timer=lambda _shape, cut, _load: cut.units + cut.unit_slots + cut.tile + cut.tile_slots
    )
    printed = capsys.readouterr().out
    monkeypatch.setattr(cuts, "TABLE", eval(f"{{{printed}}}", vars(cuts).copy()))
    ((key, cut),) = cuts.TABLE.items()
    assert key.lanes == 7 * 128
    assert cuts.cut(tpu_tune.shape_of(7, 7, 128, "bfloat16", "TPU v9"), 4096) == cut


def test_a_machine_without_a_tpu_is_told(capsys):
    with pytest.raises(SystemExit):
        tpu_tune.main([])
    assert "no TPU here" in capsys.readouterr().err
