"""Creates shards and directories for tests."""

import io
import tarfile
import tempfile
import unittest
from pathlib import Path

from dflop import example


class InFolder(unittest.TestCase):
    """Test case with an empty directory per test."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def shard(self, samples: dict[str, bytes], name: str = "a.tar") -> Path:
        """Writes entries by name, in order, to a shard."""
        path = self.directory / name
        with tarfile.open(path, "w") as tar:
            for entry, content in samples.items():
                member = tarfile.TarInfo(entry)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return path


class WithExample(unittest.TestCase):
    """Test case whose tests share the example's shards and model."""

    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        cls.shards, cls.model = cls.directory / "shards", cls.directory / "model"
        example.write_shards(cls.shards, samples=96, shards=3)
        example.write_model(cls.model)
