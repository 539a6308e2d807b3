"""Tests one reader for the ranks of a tensor-parallel group: the same tensors, states, failures, memory."""

from __future__ import annotations

import os
import textwrap
import unittest
from pathlib import Path

import torch
from dflop.shared import payload
from trainers import WithData, torchrun

PROGRAM = """
import hashlib, sys, dflop, dflop.torch, torch, torch.distributed as dist

dist.init_process_group("gloo")
shards, model = sys.argv[1:3]
tp, dp = 2, dist.get_world_size() // 2
dp_rank, tp_rank = divmod(dist.get_rank(), tp)
groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, dp * tp, tp)]

def make(**settings):
    settings = {"processor": dflop.Processor(dtype="bfloat16")} | settings
    return dflop.BalancedLoader(
        shards, model=model, tokenizer=model, global_batch_size=16, microbatches=2, dp_rank=dp_rank, dp_size=dp,
        array_type="torch", epochs=2, **settings
    )

def digest(mb):
    hasher = hashlib.sha256()
    for name, value in sorted({**mb, "cu_seqlens": mb.cu_seqlens}.items()):
        if isinstance(value, torch.Tensor):
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()

def everything(loader):
    return [(step.step, [digest(mb) for mb in step.microbatches], loader.state_dict()) for step in loader]
"""


class SharedLoaders(WithData):
    def ranks(self, code: str, ranks: int) -> str:
        program = Path(self.directory) / "program.py"
        program.write_text(PROGRAM + textwrap.dedent(code) + "\ndist.destroy_process_group()\n")
        return torchrun(str(program), self.directory / "shards", self.directory / "model", ranks=ranks)

    def test_every_rank_of_a_group_has_what_its_own_loader_would_deliver(self) -> None:
        code = """
            expected = everything(make())
            with dflop.torch.shared_loader(make, groups[dp_rank]) as loader:
                assert (loader.loader is None) == (tp_rank > 0)
                assert everything(loader) == expected and expected
                loader.load_state_dict(expected[1][2])
                assert everything(loader) == expected[2:]
            print("rank", dist.get_rank(), len(expected))
        """
        printed = self.ranks(code, 4)
        self.assertEqual(
            sorted(line for line in printed.splitlines() if line), [f"rank {rank} 8" for rank in range(4)]
        )

    def test_microbatches_of_a_shared_loader_are_a_dataset_of_torch(self) -> None:
        code = """
            expected = [digest(mb) for mb in dflop.torch.Microbatches(make())]
            loader = dflop.torch.shared_loader(make, groups[dp_rank])
            microbatches = dflop.torch.Microbatches(loader)
            assert len(microbatches) == len(expected)
            epoch = torch.utils.data.DataLoader(microbatches, batch_size=None, collate_fn=dflop.torch.keep)
            assert [digest(mb) for mb in epoch] == expected
            loader.close()
        """
        self.ranks(code, 2)

    def test_a_loader_that_cannot_be_made_is_an_error_on_all_ranks(self) -> None:
        code = """
            try:
                dflop.torch.shared_loader(lambda: make(processor=dflop.Processor(layout="dense")), groups[dp_rank])
            except dflop.Error as error:
                # One write, so that the lines of two ranks stay apart.
                sys.stdout.write(f"{type(error).__name__} {'layout' in str(error)}\\n")
        """
        printed = sorted(self.ranks(code, 2).split("\n"))
        self.assertEqual([line for line in printed if line], ["ConfigError True", "SharedError True"])


class Tensors(unittest.TestCase):
    def test_tensors_of_all_kinds_arrive(self) -> None:
        base = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
        tensors = {
            "plain": base,
            "bfloat16": base.bfloat16(),
            "bool": base > 7,
            "every second": base[::2, ::3],
            "transposed": base.T,
            "complex": torch.complex(base, base),
            "scalar": torch.tensor(3),
            "empty": torch.empty(0, 4, dtype=torch.int32),
            "gradient": base.clone().requires_grad_(),
        }
        memory = payload.write(tensors)
        self.addCleanup(os.close, memory)
        for name, tensor in payload.read(memory).items():
            self.assertEqual(tensor.dtype, tensors[name].dtype, name)
            self.assertTrue(torch.equal(tensor, tensors[name].detach()), name)
        with self.assertRaisesRegex(TypeError, r"cannot share the object\['sparse'\], .* dense CPU tensors"):
            payload.write({"sparse": torch.eye(3).to_sparse()})

    def test_a_tensor_is_a_view_that_may_be_written_to(self) -> None:
        memory = payload.write(torch.zeros(100_000))
        self.addCleanup(os.close, memory)
        first, second = payload.read(memory), payload.read(memory)
        first += 1
        self.assertEqual((first.sum().item(), second.sum().item()), (100_000, 0))
        self.assertEqual(first.data_ptr() % payload.ALIGNMENT, 0)


if __name__ == "__main__":
    unittest.main()
