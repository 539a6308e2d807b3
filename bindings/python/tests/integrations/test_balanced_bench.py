"""Runs `benches/gpu/balanced.py` with a small model on the CPU: what it measures, and that its files can be predicted from."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from collections import defaultdict
from pathlib import Path

BENCHES = Path(__file__).resolve().parents[4] / "benches"
CUTS = ["blind", "tokens", "lpt", "preset", "profile", "corrected"]


def run(script: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, *map(str, args)], capture_output=True, text=True, check=False
    )


class Balanced(unittest.TestCase):
    directory: tempfile.TemporaryDirectory[str]
    out: Path
    summary: dict

    @classmethod
    def setUpClass(cls) -> None:
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        cls.out = Path(cls.directory.name) / "out"
        shapes = Path(cls.directory.name) / "shapes.csv"
        shapes.write_text("images,words\n640x480,40\n,900\n500x375;375x500,60\n,15\n480x900,200\n")
        settings = ("--model", "tiny", "--device", "cpu", "--steps", 2, "--dp", 2, "--global-batch-size", 12)
        done = run(
            BENCHES / "gpu" / "balanced.py",
            *settings,
            *("--microbatches", 2, "--profile-seconds", 1, "--shapes", shapes),
            *("--out", cls.out, "--json"),
        )
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        cls.summary = json.loads(done.stdout)

    def test_every_cut_has_times_and_a_promise(self) -> None:
        cuts = {row["cut"]: row for row in self.summary["cuts"]}
        self.assertEqual(list(cuts), CUTS)
        self.assertEqual((self.summary["steps"], self.summary["steps_asked"]), (2, 2))
        for name, row in cuts.items():
            with self.subTest(name):
                self.assertEqual(row["steps"], 1 if name == "corrected" else 2)
                self.assertTrue(all(ms > 0 for ms in row["step_ms"]))
                self.assertTrue(0 <= row["idle"] < 0.5)
                self.assertEqual("error_median" in row, name != "tokens")
        self.assertEqual((cuts["blind"]["speedup"], cuts["blind"]["promised"]), (1, 1))
        # By its own cost model no search is slower than the data-blind cut.
        self.assertTrue(all(cuts[name]["promised"] >= 1 for name in ("preset", "profile")))

    def test_what_was_learned_changes_the_prediction(self) -> None:
        lines = [json.loads(line) for line in (self.out / "microbatches.jsonl").read_text().splitlines()]
        predicted = {
            name: sum(line["predicted"] for line in lines if (line["set"], line["step"]) == (name, 1))
            for name in ("blind", "preset", "corrected")
        }
        # The same samples cost the same by the same rates, however they are cut.
        self.assertAlmostEqual(predicted["preset"] / predicted["blind"], 1, places=3)
        self.assertGreater(abs(predicted["corrected"] / predicted["preset"] - 1), 0.02)

    def test_cuts_divide_the_same_samples(self) -> None:
        lines = [json.loads(line) for line in (self.out / "microbatches.jsonl").read_text().splitlines()]
        samples = json.loads((self.out / "samples.json").read_text())
        keys = defaultdict(list)
        for line in lines:
            keys[line["step"], line["set"]] += line["keys"]
            # In training, texts have an end; images are patches of 14 pixels, 4 to a token.
            self.assertGreaterEqual(line["tokens"], sum(samples[key][0] for key in line["keys"]) - 2)
            self.assertGreaterEqual(line["patches"], sum(samples[key][1] for key in line["keys"]))
        for (step, name), found in keys.items():
            self.assertEqual(sorted(found), sorted(keys[step, "blind"]), (step, name))
        self.assertEqual(len(keys), 2 * (len(CUTS) - 1) + 1)

    def test_the_balancers_cut_is_as_good_as_the_recorded_ones(self) -> None:
        [vision] = (self.out / "profile").glob("*vision*.csv")
        [llm] = (self.out / "profile").glob("*llm*.csv")
        arguments = ["--model", self.out / "model", "--vision", vision, "--llm", llm]
        arguments += [
            "--microbatches",
            self.out / "microbatches.jsonl",
            "--samples",
            self.out / "samples.json",
        ]
        done = run(BENCHES / "predict_recorded.py", *arguments, "--cut")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"dflop +\d+\.\d")
        refused = run(BENCHES / "predict_recorded.py", *arguments, "--cut", "--json")
        self.assertIn("leave out `--json`", refused.stderr)
        plain = run(BENCHES / "predict_recorded.py", *arguments, "--json")
        self.assertEqual(list(json.loads(plain.stdout)), ["predicted_ms"])

    def test_what_cannot_be_measured_is_refused(self) -> None:
        script = BENCHES / "gpu" / "balanced.py"
        self.assertIn("is not empty", run(script, "--out", self.out).stderr)
        unknown = run(script, "--out", self.out / "other", "--cuts", "blind,best")
        self.assertIn("unknown cut `best`", unknown.stderr)


if __name__ == "__main__":
    unittest.main()
