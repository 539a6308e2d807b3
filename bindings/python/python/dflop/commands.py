"""Runs commands of the command line and returns their JSON: plans, simulations, statistics, profiles."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dflop import _native
from dflop._description import implicit
from dflop.custom import ModelDescription
from dflop.results import DatasetStats, ModelSupport, ParallelismPlan, Simulation

if TYPE_CHECKING:
    from dflop._native import Dataset
    from dflop.plan_schedule import PlanSource

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Model = Names | ModelDescription | Sequence[str | os.PathLike[str] | ModelDescription]


def plan_parallelism(
    *,
    shapes: str | os.PathLike[str],
    gpus: int,
    global_batch_size: int,
    profile: str | os.PathLike[str] | None = None,
    model: Model | None = None,
    device: str | None = None,
    gpus_per_node: int = 8,
    memory_gib: float | None = None,
    trainer: Literal["dflop", "torch"] = "dflop",
    **flags: Any,
) -> ParallelismPlan:
    """Finds the parallelism of encoder and LLM for a cluster and the shapes of a dataset.

    Args:
        shapes: CSV file of samples, ``tiles,seq_len``, or ``patches,seq_len`` for models that see images in
            their own resolution.
        gpus: number of GPUs in the cluster, ``gpus_per_node`` per node, with ``memory_gib`` GiB each, by
            default as many as the device has.
        global_batch_size: samples of a step, over all ranks.
        profile: directory of a measured profile; alternatively a ``model`` and a ``device`` with a stated
            FLOP rate, by default ``"h100"``.
        trainer: ``"torch"`` for a plan that ``dflop.torch.Pipeline`` runs, with the memory of eager PyTorch
            modules.
        flags: any other flag of ``dflop plan``, with underscores, and groups of settings, such as
            ``space={"placement": "any", "zero1": True}``.

    Returns:
        `ParallelismPlan`: ``encoder`` and ``llm`` with ``tp``, ``pp`` and ``dp``, ``microbatches``,
        ``step_seconds``, ``step_seconds_p95``, ``lower_bound_seconds``, ``search_seconds``, and the reasons;
        in ``data_parallel`` DDP, ZeRO, FSDP and HSDP on the same batches, and in ``fastest`` the fastest
        layout, or ``pipeline``; for PyTorch, in ``trainer`` what to pass to ``dflop.torch.Pipeline``.

    Raises:
        ConfigError: flags are invalid.
        Error: no plan fits, or a file cannot be used.

    Examples:
        >>> with open("shapes.csv", "w") as file:
        ...     print("tiles,seq_len", file=file)
        ...     for tiles, tokens in [(4, 3003), (11, 2203), (2, 1552), (8, 5879), (0, 512)]:
        ...         print(tiles, tokens, sep=",", file=file)
        >>> job = {"gpus": 4, "global_batch_size": 4, "model": "llava-ov-qwen2.5-7b", "device": "h100"}
        >>> answer = dflop.plan_parallelism(
        ...     shapes="shapes.csv", space={"kinds": "basic"}, batches=4, **job
        ... )
        >>> answer.encoder, answer.llm.tp, answer["llm"]["tp"], answer.microbatches
        ({'tp': 4, 'pp': 1, 'dp': 1}, 4, 4, 1)
    """
    flags |= {
        "shapes": shapes,
        "gpus": gpus,
        "global_batch_size": global_batch_size,
        "profile": profile,
        "model": model,
    }
    flags |= {"device": device, "gpus_per_node": gpus_per_node, "memory_gib": memory_gib}
    if trainer != "dflop":
        flags["trainer"] = trainer
    return ParallelismPlan(_run("plan", [], flags))


def simulate(
    dataset: Dataset | Names | None = None,
    *,
    global_batch_size: int | None = None,
    model: Model | None = None,
    gpus: int | None = None,
    dp_size: int | None = None,
    microbatches: int | None = None,
    stages: Sequence[int] | None = None,
    steps: int | None = None,
    schedule: str | None = None,
    plan: PlanSource | Sequence[str] | None = None,
    **flags: Any,
) -> Simulation:
    """Simulates FSDP or pipelines on global batches of a dataset: data-blind, LPT and dflop.

    Args:
        dataset: a `Dataset`, or shards. Without one, but with ``gpus`` and the flag ``shapes``, whole methods
            are compared.
        global_batch_size: samples of a step, over all ranks. Default, with ``gpus``: 8 per microbatch.
        model: preset, directory of a checkpoint, or a `ModelDescription`. Default: ``"omni-7b"``; with shapes
            and a ``profile``, the model that the profile's files name.
        gpus: number of GPUs that each run the whole model, in place of ``dp_size``: FSDP, DDP with
            ``plan={"schedule": "step"}``, HSDP with ``plan={"schedule": "microbatch:N"}``.
        dp_size: number of data-parallel ranks, with ``microbatches`` each and ``stages`` pipeline stages per
            module.
        steps: number of steps to simulate. Default: an epoch, 50 at most.
        schedule: ``gpipe``, ``1f1b``, ``interleaved:V`` or ``zb-h1``. Default: that of the ``plan``, else
            ``1f1b``.
        plan: plan to simulate with ``shapes`` in place of a search: what `plan_parallelism` returned, its file, or
            degrees of each module, such as ``["llm=tp4,pp2", "vision=dp8"]``; else settings of the group, such as
            ``{"strategy": "lpt"}``.
        flags: any other flag of ``dflop simulate``, with underscores, and groups of settings, such as
            ``order={"shuffle": "none"}``.

    Returns:
        `Simulation`: ``strategies`` with ``name``, ``step_seconds``, ``step_seconds_p95``,
        ``bubble_fraction``, ``speedup`` each; with ``gpus`` also a balance by tokens, ``lower_bound_seconds``, ``communication``, and
        ``layouts`` and ``memory`` of DDP, ZeRO, FSDP and HSDP.

    Raises:
        ConfigError: flags are invalid.
        Error: the data cannot be read, or a step cannot be planned.

    Examples:
        >>> answer = dflop.simulate(
        ...     "shards/", model="model/", global_batch_size=64, dp_size=2, microbatches=8, stages=[1, 2], steps=2
        ... )
        >>> [(strategy.name, round(strategy.speedup, 2)) for strategy in answer.strategies]
        [('data-blind', 1.0), ('lpt', 1.05), ('dflop', 1.06)]
        >>> dflop.simulate("shards/", model="model/", gpus=4, steps=1).layout
        'FSDP over 4 GPUs'
    """
    flags |= {
        "global_batch_size": global_batch_size,
        "model": model,
        "gpus": gpus,
        "dp_size": dp_size,
        "microbatches": microbatches,
    }
    settings: dict[str, Any] = {"stages": stages, "schedule": schedule}
    if plan is None or (isinstance(plan, Mapping) and "modules" not in plan):
        flags |= {"steps": steps, "plan": settings | {"schedule": schedule or "1f1b"} | dict(plan or {})}
        return Simulation(_run("simulate", _shards(dataset, flags), flags))
    flags |= {"steps": steps, "plan": settings}
    with tempfile.TemporaryDirectory() as directory:
        if isinstance(plan, Mapping):
            path = os.path.join(directory, "plan.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(plan, file)
            plan = path
        given = [os.fspath(plan)] if isinstance(plan, str | os.PathLike) else list(plan)
        return Simulation(_run("simulate", [*_shards(dataset, flags), "--plan", *given], flags))


def stats(
    dataset: Dataset | Names, *, model: Model = "omni-7b", sample: int | None = None, **flags: Any
) -> DatasetStats:
    """Returns the distributions of shapes, tokens and predicted costs of a dataset, and its outliers.

    Args:
        dataset: a `Dataset`, or shards.
        model: preset, directory of a checkpoint, or a `ModelDescription`.
        sample: number of samples to profile, drawn at random. Default: all.
        flags: any other flag of ``dflop stats``, with underscores, and groups of settings, such as
            ``cost={"freeze": "vision"}``.

    Returns:
        `DatasetStats`: ``quantiles`` of all quantities, histograms, outliers, and in ``data_parallel`` how long 8 GPUs wait
        for each other in random batches.

    Raises:
        ConfigError: flags are invalid.
        Error: the data cannot be read.

    Examples:
        >>> answer = dflop.stats("shards/", model="model/")
        >>> tokens = answer.quantiles["tokens"]
        >>> tokens.n, tokens.p50, tokens["max"]
        (256, 82.0, 448.0)
    """
    flags |= {"model": model, "sample": sample}
    return DatasetStats(_run("stats", _shards(dataset, flags), flags))


def profile(*, model: Model, out: str | os.PathLike[str], **flags: Any) -> dict[str, Any]:
    """Measures the modules of a model, as the executor runs them, on this machine's CPU into a profile.

    For your own modules, and for GPUs, see ``dflop.torch.profile``.

    Args:
        model: preset, directory of a checkpoint, or a `ModelDescription`.
        out: directory of the profile.
        flags: any other flag of ``dflop profile``, with underscores, such as ``tokens_max``, ``seconds_max``,
            ``check=True``.

    Returns:
        ``points``, ``seconds``, and with ``check`` the errors of the profile's predictions.

    Raises:
        ConfigError: flags are invalid.
        Error: the profile cannot be written.

    Examples:
        >>> report = dflop.profile(model="tiny", out="profiles/", seconds_max=60)  # doctest: +SKIP
        >>> costs = dflop.CostModel("tiny", device="profiles/")  # doctest: +SKIP
    """
    return _run("profile", [], flags | {"model": model, "out": out})


def models(model: Model | None = None) -> ModelSupport:
    """Lists the model families that are known and how far each is supported, or explains one model.

    Args:
        model: preset, directory of a checkpoint, a `ModelDescription`, or a list of these. Default: the list.

    Returns:
        `ModelSupport`: ``families``, each with ``family``, ``model_types``, ``presets``, ``levels`` (of ``cost``, ``plan``,
        ``inputs`` and ``train``), ``level``, the last of them, ``lacks`` (each other ``level``, ``because``),
        and ``transformers``, the version that it was compared with. Of one model the same of its ``family``,
        and its ``model``, the ``files`` that were read, ``parameters``, ``active_parameters``, ``modules``
        and tokens of ``examples``.

    Raises:
        ConfigError: the model is unknown, or a field of its files is invalid.

    Examples:
        >>> [family.family for family in dflop.models().families][:2]
        ['clip', 'composed']
        >>> answer = dflop.models("model/")
        >>> answer.family, answer.levels, answer["parameters"]
        ('qwen2_vl', ['cost', 'plan', 'inputs', 'train'], 380800)
    """
    return ModelSupport(_run("models", [], {"model": model}))


def _run(command: str, arguments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    words = [command, *arguments, "--json"]
    flags = flags | {"model": implicit.model(flags.get("model"))}
    for name, value in flags.items():
        words += _words("--" + name.replace("_", "-"), value)
    answer: dict[str, Any] = json.loads(_native.command(words))
    return answer


def _words(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, ModelDescription):
        return [f"{flag}={value.to_json()}"]
    if isinstance(value, str | os.PathLike):
        return [f"{flag}={os.fspath(value)}"]
    if isinstance(value, Mapping):
        given = ((key, setting) for key, setting in value.items() if setting is not None)
        return [word for key, setting in given for word in ("--set", f"{flag[2:]}.{key}={_setting(setting)}")]
    if isinstance(value, Sequence):
        if all(isinstance(item, int) for item in value):
            return [f"{flag}={','.join(map(str, value))}"]
        return [word for item in value for word in _words(flag, item)]
    return [f"{flag}={value}"]


def _setting(value: Any) -> str:
    return os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value)


def _shards(dataset: Dataset | Names | None, flags: dict[str, Any]) -> list[str]:
    """Returns the shards as arguments, and adds the index of a `Dataset` to the flags."""
    if dataset is None:
        return []
    if isinstance(dataset, _native.Dataset):
        if dataset.index_path is not None:
            flags["index"] = {"directory": os.path.dirname(dataset.index_path)} | flags.get("index", {})
        return dataset.shards
    if isinstance(dataset, str | os.PathLike):
        return [os.fspath(dataset)]
    return [os.fspath(shards) for shards in dataset]
