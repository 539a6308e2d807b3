"""Gradients of a stage: summed over its replicas once per step, into shards where FSDP2 has them.

Replicas may run different numbers of passes, so no pass communicates: parameters of FSDP2 are gathered before
the first pass of a step, and their gradients are summed after the last one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard

from dflop.errors import ConfigError
from dflop.torch._pipeline_layout import StageGroups

# Gradients that are summed over replicas at a time, in bytes.
BUCKET_BYTES = 64 << 20
# Relative difference of gradient norms between TP ranks that is rounding.
ROUNDING = 0.01


class StageGradients:
    """Gradients of a stage on a rank.

    - `stage`: the stage, on its device
    - `groups`: ranks of the stage
    """

    def __init__(self, stage: torch.nn.Module, groups: StageGroups) -> None:
        self._stage, self._group, self._mesh = stage, groups.replicas, groups.mesh
        self._sharded = [one for one in stage.modules() if isinstance(one, FSDPModule)]
        inner = {id(below) for one in self._sharded for below in list(one.modules())[1:]}
        self._roots = [one for one in self._sharded if id(one) not in inner]
        self._sums: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
        self._shard_sums: list[tuple[torch.nn.Parameter, DTensor]] = []
        self._refuse()
        for one in self._sharded:
            one.set_requires_gradient_sync(False, recurse=False)
            one.set_reshard_after_forward(False, recurse=False)
            one.set_reshard_after_backward(False, recurse=False)

    def _refuse(self) -> None:
        """Refuses parameters that are sharded over replicas other than by FSDP2."""
        replicas = dist.get_process_group_ranks(self._group)
        if self._sharded and not hasattr(FSDPModule, "reset_iter_state"):
            raise ConfigError(f"FSDP in a stage needs PyTorch 2.15, found {torch.__version__}", "config")
        for name, one in self._stage.named_parameters():
            if not isinstance(one, DTensor):
                continue
            ranks = one.device_mesh.mesh.flatten().tolist()
            is_whole = one.device_mesh.mesh.tolist() == self._mesh.mesh.tolist()
            if self._sharded and (is_whole or (ranks == replicas and one.device_mesh.ndim == 1)):
                continue
            if len({*replicas} & {*ranks}) > 1:
                reason = f'expected `fully_shard` over the ranks {replicas} of mesh["dp"], or over mesh["tp"]'
                raise ConfigError(f"`{name}` is sharded over the ranks {ranks}, {reason}", "config")

    def gather(self) -> None:
        """Gathers the parameters for all passes of a step."""
        for one in self._sharded:
            one.unshard()

    def start_sum(self) -> None:
        """Starts to sum the gradients over the replicas, and shards gathered parameters again."""
        whole = dict(self._stage.named_parameters())
        # FSDP drops the gradients of gathered parameters where it shards them.
        gradients = {name: one.grad for name, one in whole.items()}
        for one in self._sharded:
            one.reshard()
        for one in self._roots:
            one.reset_iter_state()
        bucket: list[torch.Tensor] = []
        filled = 0
        for name, parameter in self._stage.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter is not whole[name]:
                whole[name].grad = None
                self._start_shard(parameter, whole[name], gradients[name])
                continue
            parameter.grad = _placed(parameter, gradients[name])
            gradient = _local(parameter.grad)
            size = gradient.numel() * gradient.element_size()
            if bucket and (filled + size > BUCKET_BYTES or bucket[0].dtype != gradient.dtype):
                self._start(bucket)
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += size
        if bucket:
            self._start(bucket)

    def _start(self, bucket: list[torch.Tensor]) -> None:
        if dist.get_world_size(self._group) > 1:
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._sums.append((bucket, flat, work))

    def _start_shard(
        self, shard: torch.nn.Parameter, gathered: torch.Tensor, gradient: torch.Tensor | None
    ) -> None:
        """Starts to sum a gradient over the replicas into a shard.

        - `gathered`: the parameter over the replicas, which may be a part of a TP rank
        """
        assert isinstance(shard, DTensor)
        # FSDP divides the part of a TP rank, in the first dimension of the mesh.
        placement = Shard(shard.placements[0].dim)  # type: ignore[attr-defined]
        part = _local(_placed(gathered, gradient)).to(shard.dtype)
        whole = DTensor.from_local(part, self._mesh["dp"], [Partial()], run_check=False)
        self._shard_sums.append((shard, whole.redistribute(placements=[placement], async_op=True)))

    def finish_sum(self) -> None:
        """Waits for the sums."""
        for bucket, flat, work in self._sums:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._sums.clear()
        for shard, summed in self._shard_sums:
            local = summed.to_local()
            local = local.wait() if hasattr(local, "wait") else local
            assert isinstance(shard, DTensor)
            # No other way keeps the order in which replicas and TP ranks divide a dimension.
            shard.grad = DTensor(local, shard._spec, requires_grad=False)
        self._shard_sums.clear()

    def refuse_parts(self) -> None:
        """Refuses gradients that differ between TP ranks, of weights that are whole on each of them.

        Raises:
            ConfigError: on all TP ranks.
        """
        mesh = self._mesh["tp"]
        if mesh.size() == 1:
            return
        own = {
            name: torch.linalg.vector_norm(_local(one.grad), dtype=torch.float32)
            for name, one in self._stage.named_parameters()
            if one.grad is not None and not _is_divided(one, mesh)
        }
        if not own:
            return
        norms = torch.stack(list(own.values()))
        largest, negative = norms.clone(), -norms
        for one in (largest, negative):
            dist.all_reduce(one, dist.ReduceOp.MAX, group=mesh.get_group())
        is_part = largest + negative > ROUNDING * largest
        if is_part.any():
            name = list(own)[int(is_part.nonzero()[0])]
            raise ConfigError(
                f"the gradient of `{name}` differs between TP ranks, on each of which the weight is whole: "
                "sum it over the ranks, as with a DTensor whose gradient is partial (`SequenceParallel`)",
                "config",
            )


def _is_divided(parameter: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Returns whether a parameter is a DTensor over TP ranks, whose gradient has a place on each."""
    if not isinstance(parameter, DTensor):
        return False
    return {*mesh.mesh.flatten().tolist()} <= {*parameter.device_mesh.mesh.flatten().tolist()}


def _placed(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Returns a gradient on the TP ranks as its parameter is; zeros in place of none."""
    if gradient is None:
        # Not as the parameter, whose memory may be freed.
        local = torch.zeros(_local(parameter).shape, dtype=parameter.dtype, device=parameter.device)
        if not isinstance(parameter, DTensor):
            return local
        mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
        return DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    # A gradient may be whole on each TP rank, or with sequence parallelism a part of the sum.
    is_placed = gradient.placements == parameter.placements
    return gradient if is_placed else gradient.redistribute(placements=parameter.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
