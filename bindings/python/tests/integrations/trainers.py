"""Shares helpers of trainer tests: examples as modules, jobs of processes, comparison of gradients."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from dflop import Microbatch, Step
from dflop import example as made_up

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Imports an example without running it as a program."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: object, seconds: float = 300) -> str:
    """Returns the output of a Python program; all its processes end with it, or after `seconds`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("it hangs:\n" + "\n".join(process.communicate())) from None
    if process.returncode != 0:
        raise AssertionError(f"exit status {process.returncode}:\n{printed}\n{errors}")
    return printed


def torchrun(program: str, *arguments: object, ranks: int) -> str:
    """Runs a program on `ranks` ranks."""
    job = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run(*job, program, *arguments)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns gradients by parameter, without the name prefix of DDP."""
    found = {name.removeprefix("module."): one.grad for name, one in model.named_parameters()}
    return {name: torch.zeros(()) if one is None else one.detach().clone() for name, one in found.items()}


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest relative distance of two gradients of a parameter."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp(min=1e-4)) for name, one in wanted.items())


class WithData(unittest.TestCase):
    """Test case whose tests share shards and a model."""

    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        made_up.write_shards(cls.directory / "shards", samples=64, shards=2)
        made_up.write_model(cls.directory / "model")


def has_images(microbatch: Microbatch) -> bool:
    """Returns whether a microbatch has images of its own."""
    return any("<image>" in json.dumps(sample["json"]) for sample in microbatch.samples)


def keys_of(steps: Iterable[Step]) -> list[set[str]]:
    """Returns the keys of the samples of each step."""
    return [{key for one in step.microbatches for key in one.sample_keys} for step in steps]
