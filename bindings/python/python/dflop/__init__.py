"""Streams multimodal training data, knows what every sample costs, and cuts global batches into balanced microbatches."""

from dflop._native import __version__

__all__ = ["__version__"]
