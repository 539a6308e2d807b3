"""Tests the index and predicted costs as tables of pyarrow and polars."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import dflop

try:
    import polars
    import pyarrow
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing


class Tables(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        shards, model = Path(directory.name, "shards"), Path(directory.name, "model")
        dflop.example.write_shards(shards, samples=40, shards=3)
        dflop.example.write_model(model)
        cls.ds, cls.cost = dflop.Dataset(shards), dflop.CostModel(model)

    def test_the_index_is_a_table_with_a_row_a_sample(self) -> None:
        table, frame = pyarrow.table(self.ds), polars.DataFrame(self.ds)
        self.assertEqual((table.num_rows, frame.height), (40, 40))
        keys = sorted(frame["key"].to_list())
        self.assertEqual(keys, [f"{number:06}" for number in range(40)])
        self.assertEqual(table["key"].to_pylist(), frame["key"].to_list())
        self.assertEqual(table["offset"].to_pylist(), frame["offset"].to_list())
        self.assertEqual(
            frame["fields"].list.len().sum(), sum(len(row) for row in table["fields"].to_pylist())
        )

    def test_costs_are_a_table_whose_rows_are_those_of_the_index(self) -> None:
        costs = self.cost.annotate(self.ds)
        frame = polars.DataFrame(costs)
        self.assertEqual(frame.columns, costs.column_names)
        self.assertEqual(frame["key"].to_list(), polars.DataFrame(self.ds)["key"].to_list())
        self.assertEqual(frame["refused"].null_count(), 40)
        times = [f"{module}_ns" for module in self.cost.modules]
        self.assertEqual(times, ["vision_ns", "llm_ns"])
        self.assertTrue((frame["llm_ns"] > 0).all())
        # One in four samples has no image, and then no work for the encoder.
        self.assertTrue(((frame["vision_ns"] == 0) == (frame["encoder_items"] == 0)).all())
        self.assertTrue(0 < frame.filter(polars.col("encoder_items") == 0).height < 40)

    def test_a_table_outlives_what_it_was_made_of(self) -> None:
        table = pyarrow.table(self.cost.annotate(self.ds))
        expected = polars.DataFrame(self.cost.annotate(self.ds))["tokens"].to_list()
        self.assertEqual(table["tokens"].to_pylist(), expected)


if __name__ == "__main__":
    unittest.main()
