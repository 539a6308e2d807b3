"""Builds models of transformers without weights, and reads the weights that are left after a cut.

Weights come from safetensors, from a model in memory, or are random: then those of a module only depend on
the seed and on its name, so that all replicas and layouts have the same.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflop._description import checkpoint
from dflop.errors import ConfigError, ModelError

Cut = Callable[[Any], None]
"""Leaves weights out of a model on the meta device."""


class Weights:
    """A model of transformers whose stages are built one by one.

    - `source`: directory of a checkpoint, configuration, or model in memory
    - `settings`: ``dtype`` and ``attn_implementation``, if set
    - `seed`: of random weights
    """

    def __init__(self, source: Any, settings: dict[str, Any], seed: int, trust_remote_code: bool) -> None:
        checkpoint.check_packages()
        import transformers

        self._transformers, self._settings, self._seed = transformers, settings, seed
        self._directory: Path | None = None
        self._model: Any = None
        if isinstance(source, (str, os.PathLike)):
            self._directory = Path(source)
            document = checkpoint.read_config(self._directory, trust_remote_code)
            with checkpoint.offline():
                self._config = checkpoint.parsed_config(self._directory, document, trust_remote_code)
                self._class = checkpoint.find_class(self._config, trust_remote_code)
        elif isinstance(source, transformers.PreTrainedModel):
            self._model, self._config, self._class = source, source.config, type(source)
        elif isinstance(source, transformers.PreTrainedConfig):
            self._config = source
            self._class = checkpoint.find_class(source, trust_remote_code)
        else:
            found = type(source).__name__
            raise ConfigError(
                f"model: expected a checkpoint directory, or a model or configuration of transformers, "
                f"found {found}",
                "config",
            )

    def skeleton(self) -> Any:
        """Returns the whole model on the meta device."""
        settings = {name: value for name, value in self._settings.items() if value is not None}
        if self._model is not None:
            settings.setdefault("dtype", self._model.dtype)
        with torch.device("meta"), checkpoint.without_initial_values(self._transformers):
            return self._class._from_config(copy.deepcopy(self._config), **settings)

    def build(self, cut: Cut) -> Any:
        """Builds a model, cuts it, and reads the weights that are left.

        Raises:
            ModelError: the checkpoint lacks a weight.
        """
        if self._directory is not None:
            return self._loaded(self._directory, cut)
        model = self.skeleton()
        cut(model)
        if self._model is not None:
            _copy(self._model, model)
        else:
            _randomize(self._transformers, model, self._seed)
        return model

    def _loaded(self, directory: Path, cut: Cut) -> Any:
        """Loads a model whose class cuts it before transformers looks for its weights."""
        base = self._class

        def initialize(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            base.__init__(model, config, *args, **kwargs)
            # Weights of other stages are not reported.
            model._keys_to_ignore_on_load_unexpected = {".*"}
            cut(model)

        names = {"__init__": initialize, "__module__": base.__module__, "__qualname__": base.__qualname__}
        stage_class: Any = type(base.__name__, (base,), names)
        try:
            with checkpoint.offline():
                model, report = stage_class.from_pretrained(
                    directory,
                    config=copy.deepcopy(self._config),
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    **{name: value for name, value in self._settings.items() if value is not None},
                )
        except (OSError, RuntimeError) as error:
            raise ModelError(f"could not load {directory}: {error}") from error
        if report["missing_keys"]:
            name = min(report["missing_keys"])
            raise ModelError(f"{directory} has no weight for `{name}`")
        model.__class__ = base
        return model.train()


def _copy(source: torch.nn.Module, model: torch.nn.Module) -> None:
    """Copies the weights and buffers that a cut model has left; tied weights stay tied."""
    copies: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        own = source.get_submodule(path)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in copies:
                found = own.get_parameter(name)
                made = found.detach().to(parameter.dtype, copy=True)
                copies[id(parameter)] = torch.nn.Parameter(made, found.requires_grad)
            module._parameters[name] = copies[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = own.get_buffer(name).detach().clone()


@torch.no_grad()
def _randomize(transformers: Any, model: Any, seed: int) -> None:
    """Creates the weights that a cut model has left, by the rules of its classes."""
    model.to_empty(device="cpu")
    owners: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for path, module in model.named_modules():
            is_model = isinstance(module, transformers.PreTrainedModel)
            owners[path] = module if is_model else owners[path.rpartition(".")[0]]
            torch.manual_seed(zlib.crc32(f"{seed} {path}".encode()))
            owners[path]._initialize_weights(module)
    model.tie_weights(recompute_mapping=False)
