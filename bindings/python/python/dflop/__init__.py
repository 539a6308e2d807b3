"""Streams multimodal training data, predicts sample costs, and balances global batches over microbatches.

Three ways to use it:

- `Loader` streams shards into any trainer, decoded on its own threads;
- `BalancedLoader` delivers every data-parallel rank its share of each global batch as balanced microbatches;
- `train` runs encoder and LLM stages on this machine, and `plan_parallelism`, `simulate`, `stats` and `CostModel` predict
  the cost of training before it runs.

Their settings are in groups: `Plan`, `Order`, `Processor` and `Read`.

`dflop.torch` adds what needs PyTorch: profiles of your own modules, timers, a ``Dataset`` for its
``DataLoader``. `dflop.monitor` shows what a loader does while it runs.

Every name has examples, which run in a directory with the ``shards/`` and the ``model/`` of `dflop.example`:

    >>> import os
    >>> import dflop
    >>> os.chdir(dflop.example.directory())
    >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, steps=1)
    >>> for step in loader:
    ...     for microbatch in step.microbatches:  # ``loss = model(**microbatch)``
    ...         tokens = microbatch["input_ids"].shape
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping as _Mapping
from typing import TYPE_CHECKING

from dflop._native import (
    Array,
    Augment,
    BalancedLoader,
    BatchIterator,
    CostModel,
    Dataset,
    Image,
    Loader,
    Mixture,
    RoleStep,
    Route,
    SampleTransform,
    Schedule,
    StepIterator,
    StepPlan,
    Table,
    Transform,
    __version__,
    balance,
    mix,
)
from dflop.batches import Audio, Batch, ExchangedMedium, Medium, Microbatch, Sample, Step, Video
from dflop.custom import Custom, ModelDescription
from dflop.errors import (
    ConfigError,
    DataError,
    Error,
    ErrorBudgetError,
    ForkError,
    ModelError,
    PipelineError,
    PlanError,
    ReadError,
    SharedError,
    StageError,
    StalledError,
    StateError,
    UserCodeError,
)
from dflop.schedule import (
    Action,
    MediumRows,
    MicrobatchRows,
    RankRole,
    RoleInputs,
    RoleMicrobatch,
    RoutedMedium,
)
from dflop.settings import CustomProcessor, Order, Plan, Processor, Read

if TYPE_CHECKING:
    from dflop import example, hugging_face, monitor, torch
    from dflop.commands import models, plan_parallelism, profile, simulate, stats
    from dflop.data_in import (
        from_huggingface,
        from_image_folder,
        from_jsonl,
        from_litdata,
        from_mds,
        from_parquet,
    )
    from dflop.offline import index, pack
    from dflop.results import DatasetStats, ModelSupport, ParallelismPlan, Simulation
    from dflop.shared import SharedLoader
    from dflop.training import TrainResult, TrainStep, train
    from dflop.writer import Writer

__all__ = [
    "Action",
    "Array",
    "Audio",
    "Augment",
    "BalancedLoader",
    "Batch",
    "BatchIterator",
    "ConfigError",
    "CostModel",
    "Custom",
    "CustomProcessor",
    "DataError",
    "Dataset",
    "DatasetStats",
    "Error",
    "ErrorBudgetError",
    "ExchangedMedium",
    "ForkError",
    "Image",
    "Loader",
    "Medium",
    "MediumRows",
    "Microbatch",
    "MicrobatchRows",
    "Mixture",
    "ModelDescription",
    "ModelError",
    "ModelSupport",
    "Order",
    "ParallelismPlan",
    "PipelineError",
    "Plan",
    "PlanError",
    "Processor",
    "RankRole",
    "Read",
    "ReadError",
    "RoleInputs",
    "RoleMicrobatch",
    "RoleStep",
    "Route",
    "RoutedMedium",
    "Sample",
    "SampleTransform",
    "Schedule",
    "SharedError",
    "SharedLoader",
    "Simulation",
    "StageError",
    "StalledError",
    "StateError",
    "Step",
    "StepIterator",
    "StepPlan",
    "Table",
    "TrainResult",
    "TrainStep",
    "Transform",
    "UserCodeError",
    "Video",
    "Writer",
    "__version__",
    "balance",
    "example",
    "from_huggingface",
    "from_image_folder",
    "from_jsonl",
    "from_litdata",
    "from_mds",
    "from_parquet",
    "hugging_face",
    "index",
    "mix",
    "models",
    "monitor",
    "pack",
    "plan_parallelism",
    "profile",
    "simulate",
    "stats",
    "torch",
    "train",
]

_MODULES = ("example", "hugging_face", "monitor", "torch")
_LAZY: _Mapping[str, str] = {
    "SharedLoader": "dflop.shared",
    "TrainResult": "dflop.training",
    "TrainStep": "dflop.training",
    "Writer": "dflop.writer",
    "DatasetStats": "dflop.results",
    "ModelSupport": "dflop.results",
    "ParallelismPlan": "dflop.results",
    "Simulation": "dflop.results",
    "from_huggingface": "dflop.data_in",
    "from_image_folder": "dflop.data_in",
    "from_jsonl": "dflop.data_in",
    "from_litdata": "dflop.data_in",
    "from_mds": "dflop.data_in",
    "from_parquet": "dflop.data_in",
    "index": "dflop.offline",
    "models": "dflop.commands",
    "pack": "dflop.offline",
    "plan_parallelism": "dflop.commands",
    "profile": "dflop.commands",
    "simulate": "dflop.commands",
    "stats": "dflop.commands",
    "train": "dflop.training",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"dflop.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name == "plan":
        raise AttributeError("`dflop.plan` is now `dflop.plan_parallelism`")
    raise AttributeError(f"module `dflop` has no attribute `{name}`")


def __dir__() -> list[str]:
    return __all__
