#!/usr/bin/env python3
"""Checks `dflop.torch` on a CUDA device: page-locked memory, registered buffers, and `StageTimer`.

    dflop_torch.py                # exit status 4 and the reason if the package, PyTorch or a device is missing
    dflop_torch.py --device cpu   # what needs no device

Results are JSON lines as those of `gpu-check`, the last one a summary. Needs the package `dflop` and PyTorch.
"""

import argparse
import statistics
import sys
from types import SimpleNamespace

from pytorch_side import result, summary

PART = "dflop.torch"
ASKED = "page-locked copies that overlap, times of stages within 20 % of events"
ROWS, WIDTH, LAYERS = 4096, 2048, 4
STEPS = 6
# Largest relative difference between the timer's seconds and those of events around the same passes.
DIFFERENCE_MAX = 0.2


class Loader:
    """Keeps what the timer reports."""

    def __init__(self):
        self.reports = []

    def report_stage_seconds(self, step, seconds, *, interval=32):
        self.reports.append(seconds)


def pinned(dflop_torch, torch, device):
    """Checks `pin` and `HostRegistry`; returns what is wrong."""
    batch = {"image": torch.arange(1 << 20, dtype=torch.float32), "names": ["a"]}
    kept = dflop_torch.pin(batch)
    if device == "cpu":
        return [] if kept is batch else ["`pin` changed a batch without a device"]
    faults = []
    if not kept["image"].is_pinned():
        faults.append("`pin` left a tensor in pageable memory")
    copied = kept["image"].to(device, non_blocking=True)
    torch.cuda.synchronize()
    if not torch.equal(copied.cpu(), batch["image"]):
        faults.append("a page-locked copy has other numbers")
    own = torch.arange(1 << 20, dtype=torch.float32)
    with dflop_torch.HostRegistry() as registry:
        registry.register({"image": own})
        registry.register({"image": own})
        if len(registry) != 1 or not own.is_pinned():
            faults.append("`HostRegistry` did not register a buffer once")
    if own.is_pinned():
        faults.append("`HostRegistry` left a buffer registered")
    return faults


def staged(dflop_torch, torch, device):
    """Checks `StageTimer` against times around the same passes; returns what is wrong, and the ratio."""
    width = WIDTH if device == "cuda" else 256
    rows = ROWS if device == "cuda" else 128
    layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*layers).to(device)
    loader = Loader()
    expected = []
    with dflop_torch.StageTimer(loader, llm=module) as timer:
        for number in range(STEPS):
            for _ in range(2):
                x = torch.randn(rows, width, device=device, requires_grad=True)
                marks = [mark(torch, device)]
                module(x).square().mean().backward()
                marks.append(mark(torch, device))
                expected.append(marks)
            timer.step(SimpleNamespace(step=number, microbatches=[None, None]))
    if len(loader.reports) != STEPS:
        return [f"{len(loader.reports)} reports of {STEPS} steps"], 0.0
    if device == "cpu":
        return [], 1.0
    torch.cuda.synchronize()
    taken = [start.elapsed_time(end) / 1e3 for start, end in expected]
    found = [seconds for report in loader.reports for seconds in report["llm"][0]]
    # the first step loads code
    ratio = statistics.median(a / b for a, b in zip(found[2:], taken[2:], strict=True))
    is_good = abs(ratio - 1) < DIFFERENCE_MAX
    return ([] if is_good else [f"times of stages are {ratio:.2f} of those of events"]), ratio


def mark(torch, device):
    """Returns an event of the device, recorded."""
    if device == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    try:
        import dflop.torch as dflop_torch
        import torch
    except ImportError as error:
        return summary(PART, "skipped", f"{error}", ASKED)
    if device == "cuda" and not torch.cuda.is_available():
        return summary(PART, "skipped", f"PyTorch {torch.__version__} finds no CUDA device", ASKED)
    faults = pinned(dflop_torch, torch, device)
    more, ratio = staged(dflop_torch, torch, device)
    faults += more
    result(PART, stage_timer_ratio=ratio, faults=faults)
    if faults:
        return summary(PART, "failed", "; ".join(faults), ASKED)
    return summary(PART, "passed", f"page-locked memory; times of stages are {ratio:.2f} of events'", ASKED)


if __name__ == "__main__":
    sys.exit(main())
