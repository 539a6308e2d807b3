"""Public names of the Python package, by page of its API. Needs nothing but the package."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import NamedTuple


class Group(NamedTuple):
    """A page of the API: names of one module that belong together."""

    file: str
    title: str
    about: str
    module: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "loaders",
        "Loaders",
        "Deliver samples and balanced microbatches.",
        "dflop",
        ("Loader", "BalancedLoader", "SharedLoader", "BatchIterator", "StepIterator"),
    ),
    Group(
        "datasets",
        "Datasets",
        "Shards with their index, and mixtures of them.",
        "dflop",
        ("Dataset", "Mixture", "mix", "Table"),
    ),
    Group(
        "settings",
        "Settings",
        "Settings of the loaders, in groups, and functions of your own.",
        "dflop",
        (
            "Plan",
            "Order",
            "Processor",
            "CustomProcessor",
            "Read",
            "Image",
            "Augment",
            "Transform",
            "SampleTransform",
        ),
    ),
    Group(
        "batches",
        "Batches and steps",
        "Classes that the loaders deliver.",
        "dflop",
        (
            "Step",
            "Microbatch",
            "StepPlan",
            "Sample",
            "Batch",
            "Medium",
            "ExchangedMedium",
            "Audio",
            "Video",
            "Array",
        ),
    ),
    Group(
        "costs",
        "Costs and plans",
        "Predict costs, and answer what the planning commands answer.",
        "dflop",
        (
            "CostModel",
            "ModelDescription",
            "Custom",
            "stats",
            "DatasetStats",
            "plan_parallelism",
            "ParallelismPlan",
            "simulate",
            "Simulation",
            "balance",
            "models",
            "ModelSupport",
            "profile",
        ),
    ),
    Group(
        "schedules",
        "Schedules and routes",
        "A step over several ranks as data: what every rank does, and the rows of every message.",
        "dflop",
        (
            "Schedule",
            "schedule_from_plan",
            "Route",
            "Action",
            "RankRole",
            "MicrobatchRows",
            "MediumRows",
            "RoutedMedium",
            "RoleStep",
            "RoleInputs",
            "RoleMicrobatch",
        ),
    ),
    Group(
        "training",
        "Training",
        "Run the executor: encoder and LLM stages on this machine.",
        "dflop",
        ("train", "TrainStep", "TrainResult"),
    ),
    Group(
        "data-in",
        "Data in",
        "Make shards and their index.",
        "dflop",
        (
            "Writer",
            "from_huggingface",
            "from_image_folder",
            "from_jsonl",
            "from_litdata",
            "from_mds",
            "from_parquet",
            "index",
            "pack",
        ),
    ),
    Group(
        "errors",
        "Errors",
        "Exceptions, by what the caller does next.",
        "dflop",
        (
            "Error",
            "ConfigError",
            "DataError",
            "ErrorBudgetError",
            "ForkError",
            "ModelError",
            "PipelineError",
            "PlanError",
            "ReadError",
            "SharedError",
            "StageError",
            "StalledError",
            "StateError",
            "UserCodeError",
        ),
    ),
    Group(
        "torch",
        "dflop.torch",
        "",
        "dflop.torch",
        (
            "loss",
            "backward",
            "count_targets",
            "BalancedTrainer",
            "BalancedTrainerMixin",
            "StepCheckpoint",
            "IterableDataset",
            "Microbatches",
            "Pipeline",
            "split",
            "Split",
            "StageTimer",
            "Trace",
            "profile",
            "Profile",
            "pin",
            "HostRegistry",
            "shared_loader",
            "keep",
            "MegatronIterator",
            "megatron_batch",
            "megatron_bridge_provider",
            "TitanDataLoader",
            "assign_media",
            "encoder_cost_fn",
            "BalancedEncoder",
        ),
    ),
    Group(
        "monitor",
        "dflop.monitor",
        "",
        "dflop.monitor",
        ("Progress", "Record", "steps", "serve", "Server", "text", "log", "scalars", "export"),
    ),
    Group(
        "hugging_face",
        "dflop.hugging_face",
        "",
        "dflop.hugging_face",
        ("describe", "Inputs", "TokenCounts", "messages_of", "media_of", "aligned"),
    ),
    Group(
        "example",
        "dflop.example",
        "",
        "dflop.example",
        ("directory", "on_ranks", "write_shards", "write_model"),
    ),
)
# Names of the package that are no page's content: modules with pages of their own, and the version.
OTHERS = {"__version__", "example", "hugging_face", "monitor", "torch"}


class ApiError(Exception):
    """A public name is on no page, or on two."""


def check(*without: str) -> None:
    """Compares the pages with the public names of each module, but for the modules ``without``.

    Raises:
        ApiError: a public name is missing, or a page has a name that is not public.
    """
    for module in {group.module for group in GROUPS}.difference(without):
        listed = [name for group in GROUPS if group.module == module for name in group.names]
        public = public_names(module)
        faults = {name for name in listed if listed.count(name) > 1} | (set(listed) ^ public)
        if faults:
            raise ApiError(f"docs/site/api_names.py lists {module}.{sorted(faults)} not once, or not at all")


def public_names(module: str) -> set[str]:
    """Returns the public names of a module: ``__all__``, or the functions and classes it defines."""
    loaded = import_module(module)
    if hasattr(loaded, "__all__"):
        return set(loaded.__all__) - OTHERS
    own = inspect.getmembers(loaded, lambda one: getattr(one, "__module__", None) == module and callable(one))
    return {name for name, _ in own if not name.startswith("_") and name != "Message"}
