"""HTML of objects for notebooks: no scripts, no network, everything from data escaped.

Texts have the color of the page, so that they are readable on light and dark pages, and charts become narrower with
the page.
"""

from dflop._html.objects import cost_model, dataset, step
from dflop._html.results import models, plan, simulation, stats
from dflop._html.samples import batch, microbatch, sample

__all__ = [
    "batch",
    "cost_model",
    "dataset",
    "microbatch",
    "models",
    "plan",
    "sample",
    "simulation",
    "stats",
    "step",
]
