"""Metrics of a loader in Prometheus' text format.

# Source
Prometheus, "Exposition formats", text-based format, version 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from dflop.monitor._loader import metrics_of, recorded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_Rows = Iterable[tuple[Mapping[str, str], float]]
# Field of a stage's metrics, type, name and help of the metric.
_OF_STAGES = (
    ("items", "counter", "items_total", "Items that passed the stage: steps, samples or images."),
    ("bytes", "counter", "bytes_total", "Payload bytes of the items."),
    ("errors", "counter", "errors_total", "Items that were bad."),
    ("busy_seconds", "counter", "busy_seconds_total", "Time spent working, over all workers."),
    ("input_wait_seconds", "counter", "input_wait_seconds_total", "Time spent waiting for input."),
    ("output_wait_seconds", "counter", "output_wait_seconds_total", "Time spent waiting for room."),
    ("depth", "gauge", "depth", "Items that wait or are in progress."),
    ("depth_max", "gauge", "depth_max", "Largest depth so far."),
    ("workers", "gauge", "workers", "Threads or tasks that share the work of the stage."),
)
_OF_LOADER = (
    ("seconds", "counter", "iteration_seconds_total", "Time since the iteration started."),
    ("consumer_wait_seconds", "counter", "consumer_wait_seconds_total", "Time that training waited."),
    ("retries", "counter", "request_retries_total", "Requests to remote stores that were repeated."),
    ("stalls", "counter", "stalls_total", "Stalls that were reported."),
    ("undecoded_bytes", "gauge", "undecoded_bytes", "Payload bytes that wait to be decoded."),
    ("undecoded_bytes_max", "gauge", "undecoded_bytes_max", "Largest number of undecoded bytes so far."),
    ("decoded_bytes", "gauge", "decoded_bytes", "Bytes of decoded media that wait to be delivered."),
    ("decoded_bytes_max", "gauge", "decoded_bytes_max", "Largest number of decoded bytes so far."),
)
_OF_SOURCES = (
    ("samples", "source_samples_total", "Samples of the dataset that were delivered."),
    ("tokens", "source_tokens_total", "LLM positions of the samples that were delivered."),
    ("skipped_samples", "source_skipped_samples_total", "Planned samples that were not delivered."),
)


class TimesModules(Protocol):
    """The part of a `dflop.torch.StageTimer` that totals times."""

    @property
    def module_seconds(self) -> dict[str, float]:
        """Measured seconds of each module on this rank, over all reported steps."""


def text(
    loader: object, *, timer: TimesModules | None = None, labels: Mapping[str, str] | None = None
) -> str:
    """Returns the metrics of a loader in Prometheus' text format.

    Counters count since the last ``iter``, and start again with the next one, which ``rate()`` expects. Every
    metric has the label ``rank``, the data-parallel rank; stages, modules and the datasets of a mixture have
    the labels ``stage``, ``module`` and ``source``. A `Record` adds its last step: ``dflop_recorded`` has
    ``seconds``, ``loss`` and all else that was logged, by the label ``name``.

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Record` or `Progress` of one.
        timer: a `dflop.torch.StageTimer`, whose measured times of the model's modules are added.
        labels: further labels of all metrics, such as ``{"job": "pretrain"}``.

    Raises:
        TypeError: the object has no metrics.
        ValueError: a label has an invalid name, or one that is in use.
        Error: the loader is closed.

    Returns:
        str: the page, a metric with its help, type and values after the other.

    Examples:
        >>> loader = dflop.Loader("shards/", batch_size=64)
        >>> batches = list(loader)
        >>> page = dflop.monitor.text(loader, labels={"job": "pretrain"})
        >>> [line for line in page.splitlines() if line.startswith("dflop_stage_items_total")][-1]
        'dflop_stage_items_total{rank="0",job="pretrain",stage="deliver"} 256'
    """
    page = _Page(_rank_labels(loader, labels or {}))
    metrics = metrics_of(loader)
    for field, kind, name, help_text in _OF_LOADER:
        page.add(name, kind, help_text, [({}, metrics[field])])
    stages = metrics["stages"]
    for field, kind, name, help_text in _OF_STAGES:
        rows = [({"stage": stage["stage"]}, stage[field]) for stage in stages]
        page.add(f"stage_{name}", kind, help_text, rows)
    slowest = metrics["bottleneck"]
    rows = [({"stage": stage["stage"]}, stage["stage"] == slowest) for stage in stages]
    page.add("bottleneck", "gauge", "1 for the stage that limits the throughput.", rows)
    for field, name, help_text in _OF_SOURCES:
        rows = [({"source": source["source"]}, source[field]) for source in metrics.get("sources", ())]
        page.add(name, "counter", help_text, rows)
    _add_run(page, loader)
    rows = [({"name": name}, value) for name, value in recorded(loader).items() if name != "time"]
    page.add("recorded", "gauge", "Number of the last step that was recorded, such as `loss`.", rows)
    if timer is not None:
        rows = [({"module": module}, seconds) for module, seconds in timer.module_seconds.items()]
        help_text = "Measured forward and backward time of the module."
        page.add("module_seconds_total", "counter", help_text, rows)
    return page.text()


def _rank_labels(loader: object, labels: Mapping[str, str]) -> dict[str, str]:
    for name in labels:
        if name in {"rank", "stage", "source", "module", "name"} or name.startswith("__"):
            raise ValueError(f"labels: `{name}` is in use")
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"labels: expected letters, digits and underscores, found `{name}`")
    return {"rank": str(getattr(loader, "dp_rank", 0)), **labels}


def _add_run(page: _Page, loader: Any) -> None:
    """Adds the position of the run, and the accounts of samples and tokens."""
    help_text = "Samples that were not delivered, those that indexing found included."
    page.add("skipped_samples_total", "counter", help_text, [({}, loader.skipped_samples)])
    help_text = "Samples that the filter left out."
    page.add("filtered_samples", "gauge", help_text, [({}, loader.filtered_samples)])
    if not hasattr(loader, "prepare_report"):
        return
    page.add("step", "gauge", "Number of the next step.", [({}, loader.step)])
    page.add("steps_per_epoch", "gauge", "Steps that start in one epoch.", [({}, loader.steps_per_epoch)])
    report = loader.prepare_report()
    for field in ("tokens", "planned_tokens", "target_tokens"):
        if field in report:
            help_text = f"{field.replace('_', ' ').capitalize()} of prepared samples."
            page.add(f"prepared_{field}_total", "counter", help_text, [({}, report[field])])
    for field in ("truncated_samples", "dropped_samples"):
        if field in report:
            help_text = f"{field.replace('_', ' ').capitalize()}, over the token limit."
            page.add(f"{field}_total", "counter", help_text, [({}, report[field])])


class _Page:
    """Metrics in the text format."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._lines = labels, list[str]()

    def add(self, name: str, kind: str, help_text: str, rows: _Rows) -> None:
        """Adds a metric with a value for each set of labels; none without values."""
        lines = [f"dflop_{name}{_labels({**self._labels, **labels})} {_value(it)}" for labels, it in rows]
        if lines:
            self._lines += [f"# HELP dflop_{name} {help_text}", f"# TYPE dflop_{name} {kind}", *lines]

    def text(self) -> str:
        return "\n".join([*self._lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _value(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if isinstance(value, (bool, int)) else repr(value)
