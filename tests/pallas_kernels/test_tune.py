from __future__ import annotations

import pytest

from pallas_kernels.tpu import cuts, tune
from pallas_kernels.tpu.cuts import Cut


def shape(heads=7, pool="bfloat16"):
    return tune.shape_of(heads, heads, 128, pool, "TPU v9")


def test_the_fastest_that_compiles_is_found():
    def timer(_, cut, load):
        if cut.units == 8:
            raise RuntimeError("out of memory")
        about_prompts = load.prompts > 0
        return abs(cut.tile - 128) + 1 / cut.tile_slots if about_prompts else 1 / (cut.units * cut.unit_slots)

    found = tune.best(shape(), timer)
    assert (found.tile, found.tile_slots) == (128, 1024)
    assert found.units < 8
    others = [cut for cut in cuts.candidates(shape()) if cut.units < 8]
    assert found.units * found.unit_slots == max(cut.units * cut.unit_slots for cut in others)


def test_nothing_that_compiles_is_told():
    def timer(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(ValueError, match=r"no cut of .* compiles"):
        tune.best(shape(), timer)


def test_the_table_printed_is_the_table_read(capsys, monkeypatch):
    tune.main(["--heads", "7"], timer=lambda _shape, cut, _load: cut.units + cut.unit_slots + cut.tile + cut.tile_slots)
    printed = capsys.readouterr().out
    monkeypatch.setattr(cuts, "MEASURED", eval(f"{{{printed}}}", vars(cuts).copy()))
    ((key, cut),) = cuts.MEASURED.items()
    assert key.lanes == 7 * 128
    assert cuts.cut(tune.shape_of(7, 7, 128, "bfloat16", key.device_kind), 4096) == cut


def test_a_machine_without_a_tpu_is_told(capsys):
    with pytest.raises(SystemExit):
        tune.main([])
    assert "no TPU here" in capsys.readouterr().err


@pytest.mark.parametrize("heads", [1, 7, 32])
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "int8"])
def test_cuts_are_whole_blocks_and_fit(heads, pool):
    for n_tokens in (1, 16, 300, 4096):
        cut = cuts.cut(shape(heads, pool), n_tokens)
        size = shape(heads, pool).block_size
        assert cut.unit_slots % size == 0
        assert cut.tile_slots % size == 0
        assert cut.tile % 16 == 0
        assert 2 * cut.units * cut.unit_slots * cuts.slot_bytes(shape(heads, pool)) <= cuts.BUFFER_BYTES


def test_known_devices_are_cut_as_measured(monkeypatch):
    measured = Cut(units=2, unit_slots=256, tile=512, tile_slots=512, part_rows=256, part_slots=512)
    monkeypatch.setattr(cuts, "MEASURED", {cuts.key(shape()): measured})
    assert cuts.cut(shape(), 4096) == measured
    assert cuts.cut(shape(), 100).tile == 112


UNITS = [(1, (4, 256)), (7, (4, 256)), (8, (3, 256)), (16, (3, 128)), (32, (1, 128))]


@pytest.mark.parametrize(("heads", "units"), UNITS)
def test_units_of_decodes_are_large_where_no_less_is_copied(heads, units):
    assert cuts.cut(shape(heads, "bfloat16"), 16)[:2] == units
