"""PyTorch integration: the loss of a microbatch, trainers, datasets for `DataLoader`, profiles of modules.

Modules are imported on first use, PyTorch too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.torch.dataset import IterableDataset as IterableDataset
    from dflop.torch.dataset import keep as keep
    from dflop.torch.encoder_balance import assign_media as assign_media
    from dflop.torch.encoder_balance import encoder_cost_fn as encoder_cost_fn
    from dflop.torch.encoder_exchange import BalancedEncoder as BalancedEncoder
    from dflop.torch.megatron import MegatronIterator as MegatronIterator
    from dflop.torch.megatron import megatron_batch as megatron_batch
    from dflop.torch.megatron import megatron_bridge_provider as megatron_bridge_provider
    from dflop.torch.microbatches import Microbatches as Microbatches
    from dflop.torch.pinning import HostRegistry as HostRegistry
    from dflop.torch.pinning import pin as pin
    from dflop.torch.pipeline import Pipeline as Pipeline
    from dflop.torch.profiling import Profile as Profile
    from dflop.torch.profiling import profile as profile
    from dflop.torch.sharing import shared_loader as shared_loader
    from dflop.torch.splitting import Split as Split
    from dflop.torch.splitting import split as split
    from dflop.torch.stage_timer import StageTimer as StageTimer
    from dflop.torch.step_checkpoint import StepCheckpoint as StepCheckpoint
    from dflop.torch.titan import TitanDataLoader as TitanDataLoader
    from dflop.torch.token_loss import backward as backward
    from dflop.torch.token_loss import count_targets as count_targets
    from dflop.torch.token_loss import loss as loss
    from dflop.torch.trace import Trace as Trace
    from dflop.torch.trainer import BalancedTrainer as BalancedTrainer
    from dflop.torch.trainer import BalancedTrainerMixin as BalancedTrainerMixin

_PLACES = {
    "BalancedEncoder": "encoder_exchange",
    "BalancedTrainer": "trainer",
    "BalancedTrainerMixin": "trainer",
    "HostRegistry": "pinning",
    "IterableDataset": "dataset",
    "MegatronIterator": "megatron",
    "Microbatches": "microbatches",
    "Pipeline": "pipeline",
    "Profile": "profiling",
    "Split": "splitting",
    "StageTimer": "stage_timer",
    "StepCheckpoint": "step_checkpoint",
    "TitanDataLoader": "titan",
    "Trace": "trace",
    "assign_media": "encoder_balance",
    "backward": "token_loss",
    "count_targets": "token_loss",
    "encoder_cost_fn": "encoder_balance",
    "keep": "dataset",
    "loss": "token_loss",
    "megatron_batch": "megatron",
    "megatron_bridge_provider": "megatron",
    "pin": "pinning",
    "profile": "profiling",
    "shared_loader": "sharing",
    "split": "splitting",
}

__all__ = [
    "BalancedEncoder",
    "BalancedTrainer",
    "BalancedTrainerMixin",
    "HostRegistry",
    "IterableDataset",
    "MegatronIterator",
    "Microbatches",
    "Pipeline",
    "Profile",
    "Split",
    "StageTimer",
    "StepCheckpoint",
    "TitanDataLoader",
    "Trace",
    "assign_media",
    "backward",
    "count_targets",
    "encoder_cost_fn",
    "keep",
    "loss",
    "megatron_batch",
    "megatron_bridge_provider",
    "pin",
    "profile",
    "shared_loader",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
