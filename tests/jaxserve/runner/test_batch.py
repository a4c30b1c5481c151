"""What a plan may not ask of a device."""

import pytest

from jaxserve.iteration import Admission, Chunk, IterationPlan, SamplerVariant, TableChange
from jaxserve.runner.batch import BatchLayout, pack
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.cache_groups import CacheGroups

GROUPS = CacheGroups(block_size=4, max_context=16, n_rows=4, most_tokens=8)
LAYOUT = BatchLayout(bucket=8, max_rows=2, n_rows=2, groups=GROUPS)
N_BLOCKS = 6


def plan(change: TableChange, blocks: tuple[int, ...] = ()) -> IterationPlan:
    admission = Admission(
        row=1, request_id="a", tokens=(5,), prompt_length=1, blocks=blocks, sampling=SamplingParams(max_tokens=4)
    )
    return IterationPlan(
        sequence=7,
        bucket=8,
        admissions=(admission,),
        chunks=(Chunk(1, 0, 1, True),),
        table_changes=(TableChange(1, 0, 5), change),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )


@pytest.mark.parametrize(
    ("wild", "told"),
    [
        (plan(TableChange(1, 1, 6)), "plan 7 sets entry 1 of row 1 to block 6; there are 2 rows of 4 entries and 6 bl"),
        (plan(TableChange(1, 1, -1)), "entry 1 of row 1 to block -1"),
        (plan(TableChange(1, 4, 0)), "entry 4 of row 1"),
        (plan(TableChange(2, 0, 0)), "entry 0 of row 2"),
        (plan(TableChange(1, 1, 0), (3, 6)), "plan 7 gives row 1 block 6; there are 2 rows of 4 entries and 6 blocks"),
    ],
)
def test_a_wild_table_entry_is_caught_before_launch(wild: IterationPlan, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        pack(wild, LAYOUT, N_BLOCKS)


def test_the_last_block_row_and_entry_are_none_too_many() -> None:
    packed = pack(plan(TableChange(1, 3, N_BLOCKS - 1), (N_BLOCKS - 1,)), LAYOUT, N_BLOCKS)
    assert packed.iteration.size == LAYOUT.size
