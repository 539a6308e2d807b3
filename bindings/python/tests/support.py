"""Shards and directories for tests."""

import io
import tarfile
import tempfile
import unittest
from pathlib import Path

from dflop import example


class InFolder(unittest.TestCase):
    """Every test has an empty directory of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def shard(self, samples: dict[str, bytes], name: str = "a.tar") -> Path:
        """Writes entries by name, in order, to a shard."""
        path = self.folder / name
        with tarfile.open(path, "w") as tar:
            for entry, content in samples.items():
                member = tarfile.TarInfo(entry)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return path


class WithExample(unittest.TestCase):
    """All tests of a class share the example's shards and model."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.shards, cls.model = cls.folder / "shards", cls.folder / "model"
        example.write_shards(cls.shards, samples=96, shards=3)
        example.write_model(cls.model)
