"""What is read from a scheduled program: which collectives run while the device multiplies, and what they send."""

from collections import Counter

from jaxserve.planning import hlo, overlap

HLO = """
%all-reduce-scatter.1 (input: bf16[8,2]) -> bf16[2,2] {
  ROOT %all-reduce.9 = bf16[8,2]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}
}

%on_sparse_core (input: bf16[8]) -> bf16[8] {
  ROOT %all-gather.9 = bf16[8]{0} all-gather(%input), replica_groups={{0,1,2,3}}
}

%body (p: (bf16[4], bf16[4])) -> (bf16[4], bf16[4]) {
  %one = (bf16[4], bf16[4], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %product = bf16[4]{0} fusion(%p), kind=kOutput, calls=%multiply
  %one_done = bf16[4]{0} collective-permute-done(%one)
  %two = (bf16[4], bf16[4], u32[], u32[]) collective-permute-start(%one), source_target_pairs={{0,3},{1,0},{2,1},{3,2}}
  %cheap = bf16[4]{0} fusion(%p), kind=kLoop, calls=%add
  %two_done = bf16[4]{0} collective-permute-done(%two)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %kernel = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %scattered = bf16[2,2]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %loop = (bf16[4], bf16[4]) while(%x), condition=%until, body=%body
  %gather = ((bf16[2], token[]), bf16[8]) call-start(%x), to_apply=%on_sparse_core
  %attention = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %gathered = bf16[8]{0} call-done(%gather)
}
"""


def test_collectives_are_told_apart_by_what_runs_meanwhile():
    found = Counter(overlap.exchanges(HLO))
    assert found == {
        ("all-reduce", 2 * 3 / 4 * 32, False): 1,
        ("reduce-scatter", 3 / 4 * 32, False): 1,
        ("collective-permute", 8, True): 2,
        ("collective-permute", 8, False): 2,
        ("all-gather", 3 / 4 * 16, True): 1,
    }


STEPS = """
%start (input: bf16[2]) -> (bf16[2], bf16[8]) {
  %all-gather.1 = bf16[8]{0} all-gather(%input), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %begin = (bf16[2], bf16[8]) custom-call(%input, %all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (input: bf16[2]) -> (bf16[4], bf16[8]) {
  %all-gather.2 = bf16[8]{0} all-gather(%input), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %both = (bf16[4], bf16[8]) tuple(%input, %all-gather.2)
}

%end (input: bf16[2]) -> bf16[8] {
  %all-gather.3 = bf16[8]{0} all-gather(%input), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %done = bf16[8]{0} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[2]) -> bf16[8] {
  %async-collective-start.1 = (bf16[2], bf16[8]) fusion(%x), kind=kCustom, calls=%start
  %fusion.1 = (bf16[4], bf16[8]) fusion(%x), kind=kOutput, calls=%meanwhile
  %async-collective-done.1 = bf16[8]{0} fusion(%x), kind=kCustom, calls=%end
  %other = bf16[8]{0} all-gather(%x), channel_id=8, replica_groups={{0,1,2,3}}
}
"""


def test_a_gather_in_several_fusions_is_one():
    """So TPUs have those that run beside a product."""
    assert Counter(overlap.exchanges(STEPS)) == {("all-gather", 12, True): 1, ("all-gather", 12, False): 1}
    assert hlo.collectives(STEPS) == [hlo.CollectiveOp("all-gather", "bf16[8]", 16, 2, 4)]
    alone = STEPS.replace("kind=kOutput", "kind=kLoop")
    assert Counter(overlap.exchanges(alone)) == {("all-gather", 12, False): 2}
