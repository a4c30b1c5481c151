"""Tables and plots of what was recorded on a device.

Shares are of the ceilings measured on the same device: the bandwidth of a copy, the rate of a bfloat16 matmul. Those
of float32 are of the same rate, of which three products of TF32 numbers can reach a sixth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.device.models import CHOICE
from benchmarks.device.records import Record

# Targets on an H200 as shares of the measured ceilings.
DECODE_TARGET, PREFILL_TARGET, STEP_TARGET = 0.90, 0.60, 0.85
_DECODE, _PREFILL, _STEPS = "decode 32 x 2048, ", "prefill 4096, ", "bloom-7b1 decode "


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bytes and operations per second of the device."""

    bandwidth: float
    rate: float

    def floor_ms(self, record: Record) -> float:
        """The least milliseconds that a record's bytes and operations can take."""
        return 1e3 * max(record["nbytes"] / self.bandwidth, record["flops"] / self.rate)


def target(name: str) -> float | None:
    """The share of its floor that a kernel or a step is to reach, if there is a target; of float32 there is none."""
    if name.endswith(" float32"):
        return None
    for start, share in ((_DECODE, DECODE_TARGET), (_PREFILL, PREFILL_TARGET), (_STEPS, STEP_TARGET)):
        if name.startswith(start):
            return share
    return None


def tables(records: Sequence[Record]) -> list[str]:
    """The records as lines of Markdown.

    Raises:
      ValueError: the ceilings are missing, which everything else is a share of.
    """
    good = {record["name"]: record for record in records if "failed" not in record}
    missing = [name for name in ("device", "copy", "matmul") if name not in good]
    if missing:
        raise ValueError(f"no record of {', '.join(missing)}: run `python -m benchmarks.device kernels` first")
    device, ceilings = good["device"], Ceilings(bandwidth=good["copy"]["bytes/s"], rate=good["matmul"]["flop/s"])
    found = [
        f"{device['device']}, {device['at'][:10]}, jax {device['jax']}. A copy moves {ceilings.bandwidth / 1e9:,.0f} "
        f"GB/s (read and written together); a bfloat16 matmul does {ceilings.rate / 1e12:,.1f} TFLOP/s.",
        "",
        "| kernel | backend | ms | floor ms | reached | target | off the oracle by |",
        "|---|---|---|---|---|---|---|",
    ]
    timed = {name: record for name, record in good.items() if record["job"] == "kernels" and "ms" in record}
    for name, record in timed.items():
        if "xla_ms" not in record:
            found.append(f"| {name} | {_kernel(name, record, ceilings)} |")
    beside = {name: record for name, record in timed.items() if "xla_ms" in record}
    if beside:
        found += ["", "| product | backend | ms | floor ms | reached | target | off NumPy's by | XLA's ms |"]
        found.append("|---|---|---|---|---|---|---|---|")
    for name, record in beside.items():
        found.append(f"| {name} | {_kernel(name, record, ceilings)} | {record['xla_ms']:.4f} |")
    peers: dict[str, Record] = {}
    for record in good.values():
        if record["job"] == "transformers":
            peers.setdefault(record["peer"], {}).update(record["ms"])
    columns = ["step", "ms", "floor ms", "reached", "target", *peers]
    found += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    steps = [record for record in good.values() if record["job"] not in ("kernels", "transformers", CHOICE)]
    for record in steps:
        if "ms" in record:
            theirs = "".join(f" {_number(each.get(record['name']))} |" for each in peers.values())
            found.append(f"| {record['name']} | {_times(record['name'], record, ceilings)} |{theirs}")
    found += ["", "| choice of tokens | ms |", "|---|---|"]
    found += [f"| {name} | {record['ms']:.3f} |" for name, record in good.items() if record["job"] == CHOICE]
    started = [f"{each['name']} {each['seconds']:.0f} s" for each in steps if "seconds" in each]
    if started:
        found += ["", f"Starts, compilation included: {', '.join(started)}."]
    failures = [f"* {record['name']}: {record['failed']}" for record in records if "failed" in record]
    return [*found, *(["", "Failed:", "", *failures] if failures else [])]


def _kernel(name: str, record: Record, ceilings: Ceilings) -> str:
    return f"{record['backend']} | {_times(name, record, ceilings)} | {record['difference']:.2g}"


def _times(name: str, record: Record, ceilings: Ceilings) -> str:
    floor, wanted = ceilings.floor_ms(record), target(name)
    told = f"{record['ms']:.4f} | {floor:.4f} | {floor / record['ms']:.0%}"
    return f"{told} | {f'{wanted:.0%}' if wanted else ''}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot the share of its floor that each kernel and step reaches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = {record["name"]: record for record in records if "failed" not in record}
    ceilings = Ceilings(bandwidth=good["copy"]["bytes/s"], rate=good["matmul"]["flop/s"])
    bars = [
        (name, ceilings.floor_ms(each) / each["ms"]) for name, each in good.items() if "nbytes" in each and "ms" in each
    ]
    figure = Figure(figsize=(9, 1 + 0.22 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.barh([name for name, _ in bars], [share for _, share in bars])
    for place, (name, _) in enumerate(bars):
        if (wanted := target(name)) is not None:
            axis.plot([wanted, wanted], [place - 0.4, place + 0.4], color="black")
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.set_xlim(0, max(1.0, *(share for _, share in bars)) + 0.02)
    axis.set_xlabel("share of the measured ceiling (black: target on an H200)")
    axis.tick_params(axis="y", labelsize=7)
    axis.set_title(f"{good['device']['device']}, {good['device']['at'][:10]}", fontsize=9)
    figure.savefig(path, dpi=130)


def write(records: Sequence[Record], folder: Path | None) -> int:
    """Prints the tables, or writes them and the plot into a folder; returns the exit code."""
    try:
        found = "\n".join(tables(records)) + "\n"
    except ValueError as error:
        print(f"jaxserve: {error}")
        return 2
    if folder is None:
        print(found, end="")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.md").write_text(found)
    try:
        plot(records, folder / "device.png")
    except ModuleNotFoundError as missing:
        print(f"written: {folder / 'device.md'}; no plot, because {missing.name} is not installed")
    else:
        print(f"written: {folder / 'device.md'} and device.png")
    return 0
