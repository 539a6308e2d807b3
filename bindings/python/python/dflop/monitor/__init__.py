"""Shows what a loader does while it runs: progress, records, Prometheus, TensorBoard, Weights & Biases.

- `Progress` wraps a loader and shows steps, rates, time left and the bottleneck on a terminal;
- `Record` keeps the steps of a run in a file, which ``dflop top`` shows, and `steps` reads it;
- `text` and `serve` give its metrics in Prometheus' text format;
- `log` writes them to a ``SummaryWriter`` or a run of Weights & Biases;
- `export` copies a record there, after the run or while it is written.

Nothing here runs unless it is called, and nothing listens on a network but `serve`, on the loopback device.
"""

from __future__ import annotations

from dflop.monitor.export import export
from dflop.monitor.progress import Progress
from dflop.monitor.prometheus import text
from dflop.monitor.record import Record, steps
from dflop.monitor.scalars import log, scalars
from dflop.monitor.server import Server, serve

__all__ = ["Progress", "Record", "Server", "export", "log", "scalars", "serve", "steps", "text"]
