"""One reader for several ranks of a machine: decoded microbatches in shared memory."""

from dflop.shared.loader import SharedLoader, SharedMicrobatches

__all__ = ["SharedLoader", "SharedMicrobatches"]
