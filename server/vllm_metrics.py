"""Metrics that only vLLM has, made of ours, for its dashboards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from jaxserve.startup_report import StartupReport
from jaxserve.stats import Load

ENGINE = {"engine": "0"}  # a label of all its metrics: which of several engines behind one server


class _Figure(NamedTuple):
    """Values of one metric, by the value of a label.

    Attributes:
      label: "" if there is but one value.
    """

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    label: str
    values: Mapping[str, float]


def families(
    model: str, load: Load, *, healthy: bool, block_size: int, drafts: int, accepted: Sequence[int]
) -> list[Metric]:
    """The metrics of one moment.

    Args:
      model: value of the label model_name.
      healthy: whether the engine serves; a board shows one that tells no state as down.
      block_size: tokens of a block.
      drafts: decodes that had drafted tokens behind them.
      accepted: how many tokens at each place of a draft were chosen; empty without speculation.
    """
    computed, cached = load.prompt_tokens, load.cached_tokens
    from_host = min(cached, load.host_cache_loaded * block_size)
    by_source = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
    by_tier = {"device": cached - from_host, "host": from_host}
    states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0} if healthy else {}
    count, gauge = CounterMetricFamily, GaugeMetricFamily
    found = (
        _Figure(count, "prompt_tokens", "Prompt tokens, computed or cached.", "", {"": computed + cached}),
        _Figure(count, "prompt_tokens_by_source", "Prompt tokens, by where they came from.", "source", by_source),
        _Figure(count, "prompt_tokens_cached", "Prompt tokens found in the prefix cache.", "", {"": cached}),
        _Figure(count, "prompt_tokens_cached_by_source", "The same by the memory they were in.", "source", by_tier),
        _Figure(count, "prefix_cache_queries", "Prompt tokens looked for in it.", "", {"": computed + cached}),
        _Figure(
            gauge,
            "num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for.",
            "reason",
            {"capacity": load.waiting, "deferred": 0},
        ),
        _Figure(gauge, "engine_sleep_state", "Whether the engine is awake, which it always is.", "sleep_state", states),
        _Figure(count, "spec_decode_num_drafts", "Decodes with drafted tokens.", "", {"": drafts}),
        _Figure(
            count,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were chosen, by their place in the draft.",
            "position",
            {str(place): number for place, number in enumerate(accepted)},
        ),
    )
    return [_family(model, figure) for figure in found]


def _family(model: str, figure: _Figure) -> Metric:
    label = (figure.label,) if figure.label else ()
    family = figure.kind(f"vllm:{figure.name}", figure.text, labels=("model_name", *ENGINE, *label))
    for value, number in figure.values.items():
        family.add_metric((model, *ENGINE.values(), *((value,) if label else ())), number)
    return family


def cache_config(model: str, report: StartupReport, *, prefix_cache: bool) -> Metric:
    """The sizes and settings of the pool, as labels."""
    labels = ENGINE | {
        "block_size": str(report.block_size),
        "num_gpu_blocks": str(report.slots * report.replicas // report.block_size),
        "cache_dtype": report.kv_cache_dtype,
        "enable_prefix_caching": str(prefix_cache),
    }
    text = "Slots of a block, blocks, and settings of the prefix cache, as labels."
    info = GaugeMetricFamily("vllm:cache_config_info", text, labels=("model_name", *labels))
    info.add_metric((model, *labels.values()), 1.0)
    return info


def renamed(metric: Metric, name: str) -> Metric:
    """A metric under another name."""
    found = Metric(name, metric.documentation, metric.type)
    found.samples = [
        Sample(name + each.name.removeprefix(metric.name), each.labels | ENGINE, each.value, each.timestamp)
        for each in metric.samples
    ]
    return found
