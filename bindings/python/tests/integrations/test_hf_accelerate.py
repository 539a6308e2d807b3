"""Tests the Accelerate example: the losses of two processes equal those of one, also after a resume."""

from __future__ import annotations

import json
import tempfile
import unittest

from example_runs import run

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing

PROGRAM = """
import json, sys, hf_accelerate as example
accelerator, directory = example.accelerate.Accelerator(), sys.argv[1]
whole = example.train(directory + "/whole", steps=4)
parts = example.train(directory + "/part", steps=2) + example.train(directory + "/part", steps=4, is_resumed=True)
accelerator.print("LOSSES", json.dumps([accelerator.num_processes, whole, parts]))
accelerator.wait_for_everyone()
accelerator.end_training()
"""


class Processes(unittest.TestCase):
    def losses(self, *launch: str) -> tuple[int, list[float], list[float]]:
        with tempfile.TemporaryDirectory() as directory:
            with open(f"{directory}/program.py", "w") as program:
                program.write(PROGRAM)
            out = run(*launch, program.name, directory, ACCELERATE_USE_CPU="1")
        (line,) = [line for line in out.splitlines() if line.startswith("LOSSES")]
        return json.loads(line.removeprefix("LOSSES"))

    def test_two_processes_train_as_one_does_and_resume_exactly(self) -> None:
        alone, whole, parts = self.losses()
        self.assertEqual((alone, whole), (1, parts))
        self.assertLess(whole[-1], whole[0] - 0.1)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        processes, whole_of_two, parts_of_two = self.losses(*launch)
        self.assertEqual(processes, 2)
        for loss, *others in zip(whole, whole_of_two, parts_of_two, strict=True):
            for other in others:
                self.assertAlmostEqual(loss, other, delta=1e-3)


if __name__ == "__main__":
    unittest.main()
