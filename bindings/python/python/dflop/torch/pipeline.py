"""A pipeline over ranks whose stages are modules of PyTorch, run by a schedule of dflop."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dflop._native import BalancedLoader, Route, Schedule
from dflop.errors import ConfigError, PipelineError
from dflop.plan_schedule import PlanSource
from dflop.schedule import RankRole, RoleMicrobatch
from dflop.torch._pipeline_gradients import StageGradients
from dflop.torch._pipeline_job import Job
from dflop.torch._pipeline_layout import RankLayout
from dflop.torch._pipeline_messages import Links
from dflop.torch._pipeline_state import OptimizerState, StageNames, load_model, model_state, stage_names
from dflop.torch._pipeline_step import StepRun, move
from dflop.torch._pipeline_tied import TiedWeights

Build = Callable[[str, range | None, bool, bool, DeviceMesh], torch.nn.Module]


@dataclass(frozen=True)
class PipelineStep:
    """Inputs of a rank in a step.

    Attributes:
        step: number of the step, from 0.
        target_tokens: targets of the global batch.
        microbatches: by module and number, the microbatches of this rank, on its device.
        skipped: keys and reasons of samples that a rank could not prepare, which all ranks leave out.
        route: rows of every message.
        trained: by stage of the job, whether it has parameters that require gradients.
    """

    step: int
    target_tokens: int
    microbatches: dict[str, dict[int, RoleMicrobatch]]
    skipped: list[tuple[str, str]]
    route: Route = field(repr=False)
    trained: tuple[bool, ...] = field(repr=False)


class Pipeline:
    """Trains PyTorch modules on the ranks of a plan, with different data parallelism by module.

    Every rank of ``torch.distributed`` creates one. A stage is a module that is called as
    ``stage(rows, microbatch)`` with a `dflop.RoleMicrobatch`:

    - the first stage of an encoder gets ``None`` for the rows and encodes the media of the microbatch;
    - the first stage of the LLM gets the media rows, to be put at ``microbatch.media_rows`` of the packed
      row, or ``None`` without media;
    - every other stage gets what the stage before it returned.

    A stage returns rows ``[rows, ...]``: one for each LLM token of its media from the last stage of an
    encoder, one for each token from an LLM stage, any number between stages of an encoder. The last stage of
    the LLM returns the loss, summed over the targets. A stage does not run for a microbatch without samples
    or, in an encoder, without media.

    Stages may use ``torch.utils.checkpoint`` and ``torch.compile``, and have frozen parameters.
    ``parallelize_module`` over ``mesh["tp"]`` in ``build`` divides a stage over TP ranks, which all get the
    same rows, whole, and have to return the same rows and gradients of rows, whole. ``fully_shard`` over
    ``mesh["dp"]`` divides parameters and optimizer state over the replicas (PyTorch 2.15), after
    ``parallelize_module`` if there are both: parameters are gathered once per step, as replicas may run
    different numbers of passes. A weight that several stages have equal copies of gets the gradient of
    all if each stage names it in ``tied_weights``. With ``zb-h1`` each backward pass runs through the stage
    twice, once for the rows and once for the weights.

    A failure on a rank, in its data or in a stage, ends the step on all ranks with a `dflop.PipelineError`
    that names rank, step and action, at the latest after the timeout; the job cannot go on then.

    Args:
        build: creates a stage: ``build(module, layers, is_first, is_last, mesh)`` with the module name,
            its layers in the stage or ``None`` if nothing gives their number, whether the stage is the first
            or last one of the module, and the ranks of the stage as a mesh with dimensions ``dp`` and ``tp``.
        plan: what ``dflop.plan_parallelism`` returned, a file with the output of ``dflop plan --json``, or a
            ``dflop.Schedule``: the same on all ranks, for as many ranks as there are. If ``tp`` is above 1,
            ``build`` divides the stage; a stage that is whole on each of its TP ranks is a warning.
        loader: creates the loader for a role of this rank: ``dflop.BalancedLoader(..., role=role)``.
        layers: number of layers by module, cut evenly into stages. Default: ``layers`` of the plan.
        device: device of the stages. Default: the current CUDA device unless the process group has gloo only.
        timeout: time that ranks wait for each other, in seconds.

    Raises:
        ConfigError: the plan is invalid or cannot run, or has another number of ranks, or ranks have
            different ones.
        PipelineError: ``build`` or ``loader`` failed on a rank.

    Examples:
        >>> import torch, torch.distributed.checkpoint
        >>> store = torch.distributed.HashStore()  # ``torchrun`` sets up a real job
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> class Vision(torch.nn.Linear):
        ...     def forward(self, rows, microbatch):
        ...         return super().forward(microbatch["pixel_values"].unflatten(0, (-1, 4)).mean(1))
        >>> class Language(torch.nn.Embedding):
        ...     def forward(self, rows, microbatch):
        ...         hidden = super().forward(microbatch["input_ids"][0])
        ...         if rows is not None:
        ...             hidden = hidden.index_copy(0, microbatch.media_rows, rows)
        ...         logits, labels = hidden[:-1] @ self.weight.T, microbatch["labels"][0, 1:]
        ...         return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> def build(module, layers, is_first, is_last, mesh):
        ...     return Vision(1176, 16) if module == "vision" else Language(640, 16)
        >>> def loader(role):
        ...     settings = {"model": "model/", "global_batch_size": 8, "steps": 2}
        ...     return dflop.BalancedLoader("shards/", role=role, **settings)
        >>> schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
        >>> pipeline = dflop.torch.Pipeline(build, schedule, loader, timeout=60)
        >>> optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-3)
        >>> for step in pipeline:
        ...     loss = pipeline.step(step)
        ...     norm = pipeline.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> pipeline.load_state_dict(pipeline.state_dict())
        >>> state = {"pipeline": pipeline, "optimizer": pipeline.optimizer_state(optimizer)}
        >>> _ = torch.distributed.checkpoint.save(state, checkpoint_id="checkpoint/")
        >>> pipeline.close()
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        build: Build,
        plan: Schedule | PlanSource,
        loader: Callable[[RankRole], BalancedLoader],
        *,
        layers: dict[str, int] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
    ) -> None:
        limit = timedelta(seconds=timeout)
        self._job = Job(plan, limit)
        is_host = dist.get_backend() == "gloo" or not torch.cuda.is_available()
        default = "cpu" if is_host else f"cuda:{torch.cuda.current_device()}"
        self._device = torch.device(device if device is not None else default)
        self._layout = RankLayout(self._job.schedule, self._job.rank)
        self._groups = self._layout.groups(self._device, limit)
        self._links = Links(self._layout, dist.new_group(timeout=limit), self._job.host, self._device)
        self._stages: dict[int, torch.nn.Module] = {}
        self._loaders: list[BalancedLoader] = []
        self._gradients: dict[int, StageGradients] = {}
        self._has_run = False
        self.module = torch.nn.ModuleDict()
        self._start(build, loader, layers)
        self._tied = TiedWeights(self._layout, self._stages, self._job, limit)

    def _start(
        self, build: Build, loader: Callable[[RankRole], BalancedLoader], layers: dict[str, int] | None
    ) -> None:
        """Builds stages and loaders; all ranks know whether any of them failed."""
        failure: Exception | None = None
        try:
            for stage in self._layout.own:
                self._job.action = f"build stage {stage} of `{self._layout.modules[stage]}`"
                self._build(build, stage, layers)
            for role in self._layout.roles:
                self._job.action = f"create the loader of `{role.module}`"
                self._loaders.append(loader(role))
        except Exception as error:  # noqa: BLE001 - raised below, after all ranks know
            failure = error
        failed = None if failure is None else self._job.failed(failure)
        texts = self._job.gather(None if failed is None else (str(failed), failed.fields))
        first = next((text for text in texts if text is not None), None)
        if failed is not None:
            raise failed from failure
        if first is not None:
            raise PipelineError(first[0], "pipeline", first[1])
        ranks = {stage: self._layout.schedule.stage_ranks(stage)[0][0] for stage in self._stages}
        own = {
            stage: stage_names(one) for stage, one in self._stages.items() if ranks[stage] == self._job.rank
        }
        self._names = StageNames(self._layout, self._job.gather(own))

    def _build(self, build: Build, stage: int, layers: dict[str, int] | None) -> None:
        layout, groups = self._layout, self._groups[stage]
        name, number = layout.modules[stage], layout.number(stage)
        is_ends = layout.is_first(stage), layout.is_last(stage)
        built = build(name, layout.layers(stage, layers), *is_ends, groups.mesh)
        if not isinstance(built, torch.nn.Module):
            raise TypeError(f"expected a torch.nn.Module, found {type(built).__name__}")
        built.to(self._device)
        others = {id(one) for other in self._stages.values() for one in other.parameters()}
        for parameter, one in built.named_parameters():
            if id(one) in others:
                raise ConfigError(f"`{parameter}` is a parameter of two stages", "config")
        self._gradients[stage] = StageGradients(built, groups)
        self._stages[stage] = built
        if groups.mesh["tp"].size() > 1 and not any(isinstance(one, DTensor) for one in built.parameters()):
            warnings.warn(
                f"stage {number} of `{name}` is whole on each of its {groups.mesh['tp'].size()} TP ranks, "
                'which all compute the same: call `parallelize_module` over `mesh["tp"]` in `build`',
                UserWarning,
                stacklevel=4,
            )
        if name not in self.module:
            self.module[name] = torch.nn.ModuleDict()
        stages = self.module[name]
        assert isinstance(stages, torch.nn.ModuleDict)
        stages[str(number)] = built

    def __iter__(self) -> Iterator[PipelineStep]:
        iterators = [iter(loader) for loader in self._loaders]
        while True:
            self._job.action, self._job.step = "read", self._loaders[0].step
            failure: Exception | None = None
            steps: list[Any] = []
            try:
                steps = [next(iterator, None) for iterator in iterators]
            except Exception as error:  # noqa: BLE001 - raised below, after all ranks know
                failure = error
            try:
                step = self._inputs(steps, failure)
            except ConfigError:
                raise
            except Exception as error:
                raise self._job.failed(error) from error
            if step is None:
                return
            yield step

    def _inputs(self, steps: list[Any], failure: Exception | None) -> PipelineStep | None:
        trained = [False] * len(self._layout.modules)
        for stage, own in self._stages.items():
            trained[stage] = any(one.requires_grad for one in own.parameters())
        trained = self._job.exchange(steps, failure, trained)
        if not trained:
            return None
        counts = self._job.sum(sum(torch.as_tensor(step.counts) for step in steps))  # type: ignore[arg-type]
        inputs = [step.inputs(counts) for step in steps]
        microbatches = {
            role.module: {number: move(one, self._device) for number, one in own.microbatches.items()}
            for role, own in zip(self._layout.roles, inputs, strict=True)
        }
        first = inputs[0]
        return PipelineStep(
            steps[0].step, first.target_tokens, microbatches, first.skipped, first.route, tuple(trained)
        )

    def step(self, step: PipelineStep) -> float:
        """Runs a step; adds the gradients of its mean loss to the modules.

        Gradients are those of the mean over the targets of the global batch, on all replicas.

        Args:
            step: step of this pipeline.

        Returns:
            float: mean loss over the targets of the global batch, on all ranks.

        Raises:
            PipelineError: an action failed on this rank, or a rank that it waits for has failed or ended.
        """
        self._job.step = step.step
        earlier = self._set_aside()
        run = StepRun(
            self._links,
            self._stages,
            step.route,
            step.microbatches,
            divisor=step.target_tokens,
            needs=self._layout.needs_gradient(step.trained),
            reduce=lambda stage: self._gradients[stage].start_sum(),
            at=self._at,
        )
        try:
            self._job.action = "gather parameters"
            for own in self._gradients.values():
                own.gather()
            loss = run.run()
            self._job.action = "sum of gradients"
            for own in self._gradients.values():
                own.finish_sum()
                if not self._has_run:
                    own.refuse_parts()
            self._has_run = True
            self._tied.sum()
            self._job.action = "sum of losses"
            share = loss / len(self._layout.schedule.stage_ranks(len(self._layout.modules) - 1)[0])
            total = self._job.sum(torch.tensor([share], dtype=torch.float64))
        except Exception as error:
            raise self._job.failed(error) from error
        for parameter, gradient in earlier:
            if parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = gradient
        return float(total) / max(step.target_tokens, 1)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales all gradients so that their norm over all modules is at most ``max_norm``.

        Args:
            max_norm: largest norm.

        Returns:
            float: norm before, over all modules, the same on all ranks.
        """
        squares = torch.zeros(1, dtype=torch.float64)
        for stage, module in self._stages.items():
            norms = [_norm(one.grad) for one in self._tied.once(module) if one.grad is not None]
            if norms:
                ranks = sum(map(len, self._layout.schedule.stage_ranks(stage)))
                squares += float(torch.stack(norms).double().square().sum()) / ranks
        norm = float(self._job.sum(squares).sqrt())
        if not norm <= max_norm:
            for one in self.module.parameters():
                if one.grad is not None:
                    one.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Returns modules and loader, for ``torch.distributed.checkpoint`` or ``torch.save`` on each rank.

        Names are ``module.llm.…``, without the stage, so that a job with other degrees, or FSDP over other
        ranks, resumes through ``torch.distributed.checkpoint``. This needs stages that name their layers by
        the number in the module. If two stages of a module use a name, names have the number of the stage,
        ``module.llm.1.…``, and only a job with the same stages resumes.
        """
        entries = model_state(self.module, self._names)
        state: dict[str, Any] = {f"module.{name}": value for name, value in entries.items()}
        state["loader"] = json.dumps(self._loaders[0].state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets modules and loader; a running iterator is not affected."""
        own = {name.removeprefix("module."): value for name, value in state_dict.items() if name != "loader"}
        load_model(self.module, self._names, own)
        for loader in self._loaders:
            loader.load_state_dict(json.loads(state_dict["loader"]))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Returns the state of an optimizer of this pipeline, to be saved and loaded beside it.

        Names are those of the parameters in ``state_dict``, so that a job with other degrees resumes.

        Args:
            optimizer: optimizer of ``module``.

        Returns:
            OptimizerState: has ``state_dict`` and ``load_state_dict``.
        """
        return OptimizerState(self.module, optimizer, self._names)

    def close(self) -> None:
        """Stops the loaders."""
        for loader in self._loaders:
            loader.close()

    def _at(self, action: Any) -> None:
        self._job.action = action

    def _set_aside(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Removes gradients of earlier steps, which must not be summed again."""
        found = [(one, one.grad) for one in self.module.parameters() if one.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        return found


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
