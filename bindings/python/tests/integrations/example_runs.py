"""Runs examples as modules and as processes, which end with their test."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """Imports an example again."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, timeout_seconds: float = 240, **environment: str) -> str:
    """Runs the interpreter with arguments and returns what it prints; its process group ends with it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
            **environment,
        },
    )
    try:
        out, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    if process.returncode != 0:
        raise AssertionError(f"{arguments} ended with {process.returncode}:\n{out[-2000:]}\n{errors[-4000:]}")
    return out
