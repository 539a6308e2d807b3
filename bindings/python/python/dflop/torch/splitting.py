"""Splits a model of transformers into the stages of a `dflop.torch.Pipeline`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dflop.errors import ConfigError, ModelError
from dflop.plan_schedule import PlanSource
from dflop.torch import _stage_deepstack as deepstack
from dflop.torch._stage_cut import LLM, Passage, Share, Structure, cut
from dflop.torch._stage_modules import EncoderStage, LlmStage
from dflop.torch._stage_plan import StagePlan
from dflop.torch._stage_weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BESIDE_ROWS = {
    "hidden_size_per_layer_input": "inputs of their own for each token",
    "num_kv_shared_layers": "keys and values of other layers",
    "cross_attention_layers": "encoder states of their own",
}
"""Settings of LLMs whose layers read more than the rows of the layer before, and what they read."""


def split(
    model: str | os.PathLike[str] | PreTrainedConfig | PreTrainedModel,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    plan: PlanSource | None = None,
) -> Split:
    """Splits a model of ``transformers`` into the stages of a `Pipeline`, by its structure.

    The LLM needs a list of layers; encoders too, and a function such as ``get_image_features`` that returns
    one row for each LLM token. Every stage runs the model's own code on its layers, on packed rows with the
    positions that the loader delivers. Only the weights of a stage are created and read.

    Args:
        model: directory of a checkpoint with safetensors; a configuration, for random weights; or a model in
            memory, whose weights are copied.
        dtype: type of the weights. Default: that of the checkpoint, the configuration or the model.
        attn_implementation: attention, as in ``from_pretrained``; it has to keep packed samples apart, as
            ``sdpa`` and ``flash_attention_2`` do.
        seed: seed of random weights, which do not depend on the layout.
        trust_remote_code: whether Python code in the checkpoint may run.
        plan: a plan of ``dflop plan --trainer torch``, or its file: stages recompute the layers that it
            recomputes. If replicas share weights and optimizer state in it, stages have weights in float32,
            compute in ``dtype``, and are sharded by ``fully_shard`` over their replicas.

    Returns:
        Split: ``build`` for a pipeline.

    Raises:
        ModelError: the checkpoint cannot be read, or the model cannot be split.
        ConfigError: ``model`` is something else, or the plan is for another model or trainer.

    Examples:
        >>> import torch, transformers
        >>> store = torch.distributed.HashStore()  # ``torchrun`` sets up a real job
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> build = dflop.torch.split(transformers.AutoConfig.from_pretrained("model/"))
        >>> build.layers
        {'llm': 2, 'vision': 2}
        >>> def loader(role):
        ...     settings = {"model": "model/", "global_batch_size": 8, "steps": 1}
        ...     return dflop.BalancedLoader("shards/", role=role, array_type="torch", **settings)
        >>> schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
        >>> pipeline = dflop.torch.Pipeline(build, schedule, loader, layers=build.layers, timeout=60)
        >>> losses = [pipeline.step(step) for step in pipeline]
        >>> pipeline.close()
        >>> torch.distributed.destroy_process_group()
    """
    settings = {"dtype": dtype, "attn_implementation": attn_implementation}
    return Split(Weights(model, settings, seed, trust_remote_code), plan)


class Split:
    """Builds the stages of a model: ``build`` for a `Pipeline`, from `split`.

    A stage is a ``torch.nn.Module`` with the cut model as ``stage.model``, whose weights keep their names.
    Freeze them, or call ``stage.model.gradient_checkpointing_enable()``, in a function around this one.

    Attributes:
        layers: number of layers by module, for ``Pipeline(layers=…)``.

    Examples:
        >>> import transformers
        >>> split = dflop.torch.split(transformers.AutoConfig.from_pretrained("model/"))
        >>> def build(module, *place):
        ...     stage = split(module, *place)
        ...     return stage.requires_grad_(module == "llm")  # the encoder is frozen
        >>> stage = build("vision", range(0, 1), True, False)
        >>> any(one.requires_grad for one in stage.model.parameters())
        False
    """

    def __init__(self, weights: Weights, plan: PlanSource | None = None) -> None:
        self._weights = weights
        structure = Structure(weights.skeleton())
        self._config: Any = structure.parts.model.config
        text = self._config.get_text_config()
        for setting, read in BESIDE_ROWS.items():
            if getattr(text, setting, None):
                raise ModelError(f"LLM layers with `{setting}` read {read}, expected rows only")
        if getattr(text, "output_router_logits", False):
            raise ModelError("`output_router_logits` adds a loss of routers: set it to false for stages")
        self.layers = {name: len(layers) for name, layers in structure.layers.items()}
        self._layer_paths = structure.layer_paths
        self._plan = StagePlan() if plan is None else StagePlan.read(plan, self.layers)

    def __call__(
        self, module: str, layers: range | None, is_first: bool, is_last: bool, mesh: DeviceMesh | None = None
    ) -> torch.nn.Module:
        """Builds a stage, on the CPU.

        Raises:
            ConfigError: the model has no such module or layers, or the mesh has several TP ranks.
            ModelError: the checkpoint lacks a weight.
        """
        share = self._share(module, layers, is_first, is_last)
        if mesh is not None and mesh["tp"].size() > 1:
            reason = f"`{module}` has tp={mesh['tp'].size()}, and a split model is whole on each rank"
            advice = "in a function around `split`, call it without the mesh, then `parallelize_module`"
            raise ConfigError(f"{reason}: {advice}", "config")
        found: list[tuple[Structure, Passage]] = []

        def leave_out(model: Any) -> None:
            structure = Structure(model)
            has_levels = deepstack.has_levels(structure)
            kind = deepstack.passage_class(structure, share) if has_levels else Passage
            found.append((structure, kind(structure.layers[module], share.layers)))
            cut(model, structure, share, found[0][1])

        model = self._weights.build(leave_out)
        structure, passage = found[0]
        stage: torch.nn.Module
        if deepstack.has_levels(structure):
            stage = deepstack.stage(model, structure, share, passage)
        else:
            stage = (LlmStage if module == LLM else EncoderStage)(model, structure, share, passage)
        own = [structure.layers[module][number] for number in share.layers]
        self._plan.apply(stage, module, own, mesh)
        return stage

    def _layers_in(self, stage: Any, module: str, numbers: range) -> list[torch.nn.Module]:
        """Returns layers of a stage, by their numbers in the module."""
        layers = stage.model.get_submodule(self._layer_paths[module])
        return [layers[number] for number in numbers]

    def _share(self, module: str, layers: range | None, is_first: bool, is_last: bool) -> Share:
        if module not in self.layers:
            raise ConfigError(f"the model has no `{module}`, only {', '.join(self.layers)}", "config")
        count = self.layers[module]
        if layers is None:
            if not (is_first and is_last):
                raise ConfigError(
                    f"nothing gives the layers of a stage of `{module}`: pass `layers=build.layers` to the "
                    "pipeline",
                    "config",
                )
            layers = range(count)
        is_whole = (layers.start == 0) == is_first and (layers.stop == count) == is_last
        if not layers or layers.stop > count or not is_whole:
            raise ConfigError(
                f"the stages of `{module}` have layers up to {layers.stop - 1}, the model {count} layers: "
                "pass `layers=build.layers` to the pipeline",
                "config",
            )
        self._check_features(module, layers)
        return Share(module, layers, is_first, is_last)

    def _check_features(self, module: str, layers: range) -> None:
        """Checks that a last stage has received the hidden states that features are made of."""
        if module != "vision" or layers.stop < self.layers[module]:
            return
        settings = ("vision_feature_layer", "vision_feature_layers")
        found = (getattr(self._config, name, None) for name in settings)
        chosen = next((one for one in found if one is not None), ())
        for state in [chosen] if isinstance(chosen, int) else chosen:
            # State 0 is what the first layer reads; the last one is what the last layer returns.
            needed = state if state >= 0 else state + self.layers[module] + 1
            if needed < layers.start:
                raise ModelError(
                    f"`vision_feature_layer` {state} is before the last stage, which starts at layer "
                    f"{layers.start}: use fewer stages of `vision`"
                )
