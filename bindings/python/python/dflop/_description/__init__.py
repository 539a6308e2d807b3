"""Describes any model that transformers builds, by itself: see `dflop.hugging_face.describe`."""
