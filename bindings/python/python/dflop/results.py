"""Answers of planning commands: dictionaries, as the commands print them, whose fields are also attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class Result(dict[str, Any]):
    """A dictionary whose fields are also attributes, and so are those of dictionaries in it.

    Classes name the fields that are documented; all others that a command prints are there in the same way.
    """

    # Classes of dictionaries in a field, alone or in a list, and of dictionaries by names in a field.
    _parts: ClassVar[Mapping[str, type[Result]]] = {}
    _parts_by_name: ClassVar[Mapping[str, type[Result]]] = {}

    def __init__(self, fields: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /) -> None:
        super().__init__({name: self._part(name, value) for name, value in dict(fields).items()})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"`{type(self).__name__}` has no `{name}`; it has {', '.join(self)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *filter(str.isidentifier, self)})

    def _part(self, name: str, value: Any) -> Any:
        part = self._parts.get(name, Result)
        if name in self._parts_by_name:
            return Result((key, self._parts_by_name[name](inner)) for key, inner in value.items())
        if isinstance(value, dict):
            return value if isinstance(value, Result) else part(value)
        if isinstance(value, list):
            return [part(item) if isinstance(item, dict) else item for item in value]
        return value


class Degrees(Result):
    """Degrees of parallelism of a module: tensor parallel, pipeline stages, replicas."""

    tp: int
    pp: int
    dp: int


class DataParallelLayout(Result):
    """A step of DDP, ZeRO, FSDP or HSDP on the same batches as a plan.

    - `ratio`: step time over that of the plan
    - `gib`: memory of a GPU; `fits`: whether a GPU has it
    - `trainer`: how to train so
    """

    layout: str
    microbatches: int
    step_seconds: float
    ratio: float
    gib: float
    fits: bool
    trainer: str


class TrainerLines(Result):
    """What to pass to `dflop.torch.Pipeline` for a plan.

    - `name`: ``torch``
    - `is_sharded`: whether the replicas of a stage share weights and optimizer state, which then have 32 bits
    - `times_factor`: factor on the times of the device preset; left out for measured times
    - `launch`: commands that start the ranks
    - `python`: lines of a training script
    """

    name: str
    is_sharded: bool
    times_factor: float
    launch: list[str]
    python: list[str]


class ParallelismPlan(Result):
    """Answer of `plan_parallelism`: the fastest parallelism that fits, and what it was compared with.

    A dictionary with the fields of ``dflop plan --json``, which are also attributes. Notebooks show it as a
    table and a chart.

    Attributes:
        encoder: degrees of the encoders: ``tp``, ``pp`` and ``dp``.
        llm: degrees of the LLM.
        microbatches: microbatches of a step and replica.
        placement: ``disaggregated``, ``joint`` or ``colocated``.
        schedule: schedule of the pipeline.
        step_seconds: predicted time of a step, in the mean.
        step_seconds_p95: 95th percentile of the same.
        lower_bound_seconds: lower bound on the mean, for this plan.
        search_seconds: time that the search took.
        gpus_used: number of GPUs that the plan uses.
        memory: ``limit_gib`` of a GPU, and ``gib`` that ``encoder`` and ``llm`` need.
        fastest: fastest layout of all: ``pipeline``, or one of `data_parallel`.
        data_parallel: DDP, ZeRO, FSDP and HSDP on the same batches.
        runner_up: the second plan and the reason why it came second; ``None`` without one.
        trainer: of a plan for PyTorch, what to pass to ``dflop.torch.Pipeline``: a `TrainerLines`; other plans
            have no such field.
        model: the model.
        times_from: source of the times.

    Examples:
        >>> plan = dflop.ParallelismPlan({"llm": {"tp": 4, "pp": 1, "dp": 2}, "microbatches": 8})
        >>> plan.llm.tp, plan["llm"]["tp"], plan.microbatches
        (4, 4, 8)
    """

    _parts: ClassVar[Mapping[str, type[Result]]] = {
        "encoder": Degrees,
        "llm": Degrees,
        "data_parallel": DataParallelLayout,
        "trainer": TrainerLines,
    }

    encoder: Degrees
    llm: Degrees
    microbatches: int
    placement: str
    schedule: str
    step_seconds: float
    step_seconds_p95: float
    lower_bound_seconds: float
    search_seconds: float
    gpus_used: int
    memory: Result
    fastest: str
    data_parallel: list[DataParallelLayout]
    runner_up: Result | None
    trainer: TrainerLines
    model: str
    times_from: str

    def _repr_html_(self) -> str:
        from dflop import _html

        return _html.plan(self)


class Strategy(Result):
    """Steps of a strategy of `simulate`; `speedup` over the first one, data-blind."""

    name: str
    step_seconds: float
    step_seconds_p95: float
    bubble_fraction: float
    speedup: float


class Simulation(Result):
    """Answer of `simulate`: the same batches by strategies, and with ``gpus`` in layouts.

    A dictionary with the fields of ``dflop simulate --json``, which are also attributes. Notebooks show it as
    charts.

    Attributes:
        steps: number of simulated steps.
        layout: what was simulated, such as ``FSDP over 8 GPUs``.
        model: the model.
        device: device, or the name of a profile.
        is_measured: whether times are from measurements, and not from a stated rate.
        strategies: ``name``, ``step_seconds``, ``step_seconds_p95``, ``bubble_fraction`` and ``speedup`` of
            each strategy: data-blind, balanced by tokens (with ``gpus``), LPT and dflop.
        lower_bound_seconds: lower bound on the mean step of every partition.
        layouts: DDP, ZeRO, FSDP and HSDP with dflop, each with ``step_seconds``, ``speedup``,
            ``memory_bytes``, ``fits`` and ``trainer``; with ``gpus``.
        memory: bytes of parameters, gradients, optimizer and activations by layout; with ``gpus``.

    Examples:
        >>> answer = dflop.simulate("shards/", model="model/", gpus=4, steps=2)
        >>> answer.layout, answer.strategies[-1].name, answer["strategies"][-1]["name"]
        ('FSDP over 4 GPUs', 'dflop', 'dflop')
        >>> answer.strategies[-1].speedup >= 1
        True
    """

    _parts: ClassVar[Mapping[str, type[Result]]] = {"strategies": Strategy}

    steps: int
    layout: str
    model: str
    device: str
    is_measured: bool
    strategies: list[Strategy]
    lower_bound_seconds: float
    layouts: list[Result]
    memory: list[Result]

    def _repr_html_(self) -> str:
        from dflop import _html

        return _html.simulation(self)


class Quantiles(Result):
    """Mean and quantiles of a quantity over `n` samples."""

    n: int
    mean: float
    min: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float
    max: float


class DatasetStats(Result):
    """Answer of `stats`: distributions of shapes, tokens and predicted costs, and outliers.

    A dictionary with the fields of ``dflop stats --json``, which are also attributes. Notebooks show it as
    histograms and a table of the most expensive samples.

    Attributes:
        samples: number of samples.
        model: the model whose costs are predicted.
        device: device, or the name of a profile.
        modules: modules of the model.
        quantiles: ``n``, ``mean``, ``min``, ``p5`` to ``p99`` and ``max`` of each quantity, such as
            ``tokens``, ``images`` and ``cost_seconds``.
        histograms: ``min``, ``max`` and ``counts`` of each quantity.
        outliers: the most expensive samples: ``key``, ``shard``, ``cost_seconds``, ``times_median``.
        data_parallel: how long 8 GPUs wait for each other in random batches: ``idle_fraction``.
        refused: samples that the model rejects.

    Examples:
        >>> answer = dflop.stats("shards/", model="model/")
        >>> answer.samples, answer.quantiles["tokens"].p50, answer["quantiles"]["tokens"]["p50"]
        (256, 82.0, 82.0)
    """

    _parts_by_name: ClassVar[Mapping[str, type[Result]]] = {"quantiles": Quantiles, "histograms": Result}

    samples: int
    model: str
    device: str
    modules: list[str]
    quantiles: dict[str, Quantiles]
    histograms: dict[str, Result]
    outliers: list[Result]
    data_parallel: Result
    refused: list[Result]

    def _repr_html_(self) -> str:
        from dflop import _html

        return _html.stats(self)


class ModelSupport(Result):
    """Answer of `models`: how far models are supported; of one model also its sizes.

    A dictionary with the fields of ``dflop models --json``, which are also attributes. Notebooks show it as a
    table.

    Attributes:
        families: of the list of all families: ``family``, ``model_types``, ``presets``, ``level`` and
            ``levels`` of each.
        model: of one model: its name.
        family: of one model: its family.
        level: the last of `levels`.
        levels: of one model: what can be done with it, of ``cost``, ``plan``, ``inputs`` and ``train``.
        parameters: number of parameters.
        active_parameters: number of parameters that a token uses.
        modules: ``module`` and ``parameters`` of each module.
        examples: ``medium`` and ``tokens`` of some media.

    Examples:
        >>> dflop.models("model/").parameters, dflop.models().families[0].family
        (380800, 'clip')
    """

    families: list[Result]
    model: str
    family: str
    level: str
    levels: list[str]
    parameters: int
    active_parameters: int
    modules: list[Result]
    examples: list[Result]

    def _repr_html_(self) -> str:
        from dflop import _html

        return _html.models(self)
