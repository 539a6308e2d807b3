"""What benchmarks share that compare loaders in rounds: processes, CPU time, photos, spread of ratios, a copy of the output."""

from __future__ import annotations

import importlib
import io
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Median sides of photos, in pixels.
MEDIAN_SIDES = (587, 520)


def printer(out: Path | None) -> Callable[[str], None]:
    """Returns a function that prints a line, and keeps a file with all lines so far.

    - `out`: the file; ``None`` for none
    """
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if out:
            out.write_text("\n".join(lines) + "\n")

    return tell


def versions(*packages: str) -> str:
    """Returns the names of packages with their versions."""
    found = [importlib.import_module(package) for package in packages]
    return ", ".join(f"{package.__name__} {package.__version__}" for package in found)


def photo(random: Any) -> bytes:
    """Returns a photo as JPEG, of random size: coarse shapes and fine grain.

    - `random`: NumPy generator
    """
    import numpy as np
    from PIL import Image

    width, height = (int(side * random.lognormal(0, 0.4)) for side in MEDIAN_SIDES)
    shapes = random.integers(0, 255, (height // 24 + 2, width // 24 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC))
    pixels = np.clip(smooth + random.normal(0, 6, (height, width, 1)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "jpeg", quality=90)
    return file.getvalue()


def run_alone(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, whose libraries have one thread."""
    command = [sys.executable, script, *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment
    return subprocess.run(command, check=False, env=variables, capture_output=True, text=True)


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def spread(ratios: Iterable[float]) -> tuple[float, float, float]:
    """Returns the least, the median and the largest ratio of the rounds."""
    found = list(ratios)
    return min(found), statistics.median(found), max(found)
