"""Chooses sizes of the TPU kernels' steps from their code: python -m tests.aot.tune [v5e v6e ...].

It compiles each choice without a device and follows a load through the kernel's steps. A bundle of instructions is a
cycle. A step takes the bundles of the blocks that it goes through, or the time of its copies where that is longer. The
model leaves out the latency of copies, so steps of decodes hold no fewer bytes than the rule's. It prints entries of
`cuts.TABLE`: those that take at least 3% fewer cycles than the rule, for decodes or for prompts. Others are commented.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.device.tpu_tune import DECODING, PROMPTING, TuningLoad, shape_of
from jaxserve.planning import targets
from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu import BACKEND, cuts
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.layout import head_span
from sharding import devices
from tests.aot import bundles, test_tpu, tpus

TOKENS, ROWS, CONTEXT = 2048, 64, 8192
# Query heads, KV heads and head_dim on a device: BLOOM-560m, BLOOM-7b1, BLOOM-176B over 16, Llama-3-8B, Qwen3-32B over
# 4, Gemma-2-9B, gpt-oss-20b.
SHAPES = [(16, 16, 64), (32, 32, 128), (7, 7, 128), (32, 8, 128), (16, 2, 128), (16, 8, 256), (64, 8, 64)]
PROMPTS = (*PROMPTING, TuningLoad(decodes=0, context=4096, prompts=1, length=1024, weight=1.0))
WORTH = 0.97


class StepCode(NamedTuple):
    """Bundles of the code of a step.

    Attributes:
      decodes: of a step of decodes, with every branch.
      around: of a step of prompts, without the products.
      alone / masked / joint: of a part's products; without a mask, with one, and of parts that are computed together.
    """

    decodes: int
    around: int
    alone: int
    masked: int
    joint: int


class Core(NamedTuple):
    """A core of a chip: the bytes that it reads from memory in a cycle, and how many cores share the work."""

    bytes_a_cycle: float
    cores: int

    @classmethod
    def of(cls, name: str, shape: AttentionShape) -> Core:
        device, cores = devices.DEVICES[name], chip(shape).cores
        of_cycle = 524_288 if chip(shape).is_wide else 131_072  # operations of its matrix units
        clock = device.flops["bfloat16"] / cores / of_cycle
        return cls(device.bandwidth / cores / clock, cores)


def decode_cycles(shape: AttentionShape, cut: Cut, code: StepCode, load: TuningLoad, core: Core) -> float:
    """Cycles of a core's rows, each of which decodes a token at `load.context`."""
    rows = -(-load.decodes // core.cores)
    steps = -(-rows * -(-load.context // cut.unit_slots) // cut.units)
    copies = rows * load.context * cuts.slot_bytes(shape) / core.bytes_a_cycle
    return copies / steps + max(steps * code.decodes, copies)


def prompt_cycles(shape: AttentionShape, cut: Cut, code: StepCode, load: TuningLoad, core: Core) -> float:
    """Cycles of the core with the most.

    The order is the kernel's: tiles, chunks, steps, parts (`prompts.add_step`).
    """
    part, of_core = cuts.part_of_tile(shape, cut), [0.0] * core.cores
    slot_cycles = 2 * head_span(shape) * shape.pool_dtype.itemsize / core.bytes_a_cycle
    for at, chunk in product(range(-(-load.prompts * load.length // cut.tile)), range(load.prompts)):
        begin = max(chunk * load.length, at * cut.tile)
        end = min((chunk + 1) * load.length, (at + 1) * cut.tile)
        position = load.context - chunk * load.length  # of a flat token
        for before in range(0, position + end if begin < end else 0, cut.tile_slots):
            cycles = code.around
            for i in range(shape.group * cut.tile // part.rows):
                first = at * cut.tile + i * part.rows % cut.tile
                low, high = max(begin, first), min(end, first + part.tokens)
                if low < high:
                    cycles += _cycles(low + position - before, high + position - before, part.slots, cut, code)
            copies = min(end + position - before, cut.tile_slots) * slot_cycles
            of_core[at % core.cores] += max(cycles, copies)
    return max(of_core) * shape.num_kv_heads


def _cycles(first: int, end: int, slots: int, cut: Cut, code: StepCode) -> int:
    """Bundles for a part's tokens at positions from `first` to `end`, counted from the step's first slot."""
    cycles, j, most = 0, 0, min(cut.joint_parts, cut.tile_slots // slots)
    while j * slots < min(end, cut.tile_slots):
        if (j + most) * slots <= min(first + 1, cut.tile_slots):
            cycles, j = cycles + code.joint, j + most
        else:
            cycles, j = cycles + (code.alone if (j + 1) * slots <= first + 1 else code.masked), j + 1
    return cycles


class TunedKernels:
    """The kernels of a shape for a TPU generation, compiled into `folder`."""

    def __init__(self, name: str, heads: int, kv_heads: int, dim: int, folder: Path) -> None:
        self.device, self.folder = targets.devices_of(devices.parse(tpus.GENERATIONS[name]))[0], folder
        shape = shape_of(heads, kv_heads, dim, "bfloat16", self.device.device_kind)
        shape = replace(shape, alibi=heads == kv_heads, max_rows=ROWS)
        self.shape = shape.with_blocks(shape.block_size, CONTEXT)
        self.core, self.code = Core.of(name, self.shape), cache(self._code)

    def _code(self, cut: Cut) -> StepCode | None:
        """None if it does not compile."""
        for path in self.folder.iterdir():
            path.unlink()
        try:
            test_tpu.compiled_attention(self.device, self.shape, TOKENS, ROWS, 64, replace(BACKEND, cut=cut))
        except RuntimeError:
            return None
        decodes = sum(block.bundles for block in bundles.blocks(self.folder, "attention_decodes") if block.depth)
        prompts = bundles.blocks(self.folder, "attention_prompts")
        alone, masked, *joint = sorted(block.bundles for block in prompts if block.products)
        around = sum(block.bundles for block in prompts if not block.products)
        return StepCode(decodes, around, alone, masked, joint[0] if joint else alone)

    def cycles(self, cut: Cut, load: TuningLoad) -> float:
        code, of_load = self.code(cut), decode_cycles if load.decodes else prompt_cycles
        return float("inf") if code is None else of_load(self.shape, cut, code, load, self.core)

    def ratio(self, cut: Cut, rule: Cut, loads: Sequence[TuningLoad]) -> float:
        """The weighted mean of a cut's cycles over the rule's."""
        ratios = (load.weight * self.cycles(cut, load) / self.cycles(rule, load) for load in loads)
        return sum(ratios) / sum(load.weight for load in loads)

    def best(self) -> tuple[Cut, list[float]]:
        """The cut with the fewest cycles, and its ratios for decodes and for prompts."""
        rule = found = cuts.fitted(cuts.by_rule(self.shape), self.shape, TOKENS)
        ratios = []
        for loads, choices in ((DECODING, self.of_decodes(rule)), (PROMPTS, self.of_prompts())):
            better = found
            for values in choices:
                ways = (cuts.fitted(better._replace(**each), self.shape, TOKENS) for each in values)
                better = min([better, *ways], key=lambda cut: self.ratio(cut, rule, loads))
            ratios.append(self.ratio(better, rule, loads))
            found = better if ratios[-1] <= WORTH else found
        return found, ratios

    def of_decodes(self, rule: Cut) -> Iterator[Iterable[dict[str, int]]]:
        """Sizes to choose from: no fewer bytes in a step than the rule's, and at most twice as many."""
        most = cuts.buffer_bytes(self.shape) // (2 * cuts.slot_bytes(self.shape))
        yield [
            {"units": units, "unit_slots": slots}
            for units, slots in product((1, 2, 3, 4, 6, 8), (128, 256, 512))
            if rule.units * rule.unit_slots <= units * slots <= min(most, 2 * rule.units * rule.unit_slots)
        ]

    def of_prompts(self) -> Iterator[Iterable[dict[str, int]]]:
        """Sizes to choose from, one after the other."""
        yield [{"tile": max(16, rows // self.shape.group // 16 * 16)} for rows in (512, 1024, 2048)]
        yield [{"part_rows": rows, "joint_parts": parts} for rows, parts in product((256, 512), (1, 2, 4))]
        yield [{"tile_slots": slots} for slots in (1024, 2048)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("generations", nargs="*", default=list(tpus.GENERATIONS))
    folder = Path(tempfile.mkdtemp())
    bundles.dump_to(folder)
    for name, size in product(parser.parse_args().generations, SHAPES):
        kernels = TunedKernels(name, *size, folder)
        best, (decodes, prompts) = kernels.best()
        entry = "#" if min(decodes, prompts) > WORTH else " "
        print(f"  {entry} {cuts.entry(kernels.shape, best)}  # {decodes:.2f}, {prompts:.2f}", flush=True)


if __name__ == "__main__":
    main()
