"""PyTorch integration: profiles of your own modules, stage times for the loader, datasets for `DataLoader`.

Modules are imported on first use, PyTorch too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.torch.dataset import IterableDataset as IterableDataset
    from dflop.torch.dataset import keep as keep
    from dflop.torch.microbatches import Microbatches as Microbatches
    from dflop.torch.pinning import HostRegistry as HostRegistry
    from dflop.torch.pinning import pin as pin
    from dflop.torch.profiling import Profile as Profile
    from dflop.torch.profiling import profile as profile
    from dflop.torch.sharing import shared_loader as shared_loader
    from dflop.torch.stage_timer import StageTimer as StageTimer

_PLACES = {
    "HostRegistry": "pinning",
    "IterableDataset": "dataset",
    "Microbatches": "microbatches",
    "Profile": "profiling",
    "StageTimer": "stage_timer",
    "keep": "dataset",
    "pin": "pinning",
    "profile": "profiling",
    "shared_loader": "sharing",
}

__all__ = [
    "HostRegistry",
    "IterableDataset",
    "Microbatches",
    "Profile",
    "StageTimer",
    "keep",
    "pin",
    "profile",
    "shared_loader",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
