"""Trains on two ranks under every launcher that is installed, and compares the losses with those of `dflop train`.

    python3 tests/python/launchers.py --dflop target/debug/dflop

Launchers: the environment by hand, torchrun, Open MPI, Slurm (if a controller
answers), Ray. Those that are missing are named. Each also runs `--check`. Needs no packages of its own.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAY_TRAIN = ROOT / "bindings/python/examples/ray_train.py"
PATIENCE_SECONDS = 120
STEPS = 4
CONFIG = """
steps = {steps}
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
hidden_act = "silu"
max_position_embeddings = 2048
rms_norm_eps = 1e-6
tie_word_embeddings = false
vocab_size = 80
[data]
global_batch_size = 8
[data.generate]
samples = 32
image_fraction = 0.0
[parallel]
microbatches = 2
llm = {{ stages = 2 }}
[checkpoint]
directory = "run"
"""


def free_port():
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Job:
    """A directory with a configuration of a short run, and an environment that finds the command."""

    def __init__(self, directory, dflop, steps=STEPS):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config = self.directory / "train.toml"
        self.config.write_text(CONFIG.format(steps=steps))
        self.environment = os.environ | {
            "PATH": f"{dflop.parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.directory.parent / "cache"),
            "DFLOP_JOB_TOKEN": "the secret of the tests of launchers",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "RAY_COLOR_PREFIX": "0",
        }

    def start(self, *command, **environment):
        """Starts a command in a process group of its own."""
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=self.directory,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *command, **environment):
        """Runs a command to a good end and returns what it prints."""
        return end(self.start(*command, **environment))

    def ranks(self):
        """Starts both ranks by hand, as a pod of each would."""
        port = free_port()
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "DFLOP_LISTEN": "127.0.0.1"}
            job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "DFLOP_PORT": port}
            yield self.start("dflop", "train", "train.toml", "--resume", "--json", **own, **job)


def end(process, status=0):
    """Waits for the end of a process, which must have this status; returns its output."""
    try:
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    found = process.returncode
    assert found == status, f"{process.args} ended with {found}:\n{out[-2000:]}\n{errors[-4000:]}"
    return out


def losses(output):
    """Returns step and loss of all lines that are steps, whatever a launcher writes in front."""
    lines = [line[line.index("{") :] for line in output.splitlines() if '{"step"' in line]
    return [(step["step"], step["loss"]) for step in map(json.loads, lines)]


def by_hand(job, check):
    """Runs the ranks by hand, with the variables of a pod."""
    if check:
        return job.run("dflop", "train", "train.toml", "--check", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    first, second = job.ranks()
    out = end(first)
    end(second)
    return out


def stopped_by_hand(dflop, directory):
    """Stops a long run by a signal to one rank: all end with its status, and a second start goes on."""
    job = Job(directory, dflop, steps=2000)
    ranks = list(job.ranks())
    line = ranks[0].stdout.readline()
    assert '{"step":0' in line, line
    ranks[1].send_signal(signal.SIGTERM)
    out = end(ranks[0], status=143)
    end(ranks[1], status=143)
    last = losses(out)[-1][0]
    assert last < 1999, "the run was stopped"
    job.config.write_text(CONFIG.format(steps=last + 3))
    first, second = job.ranks()
    resumed = losses(end(first))
    end(second)
    assert [step for step, _ in resumed] == [last + 1, last + 2], resumed


def torchrun(job, check):
    """Runs the ranks under torchrun."""
    launcher = ["torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "--no-python"]
    return job.run(*launcher, "dflop", "train", "train.toml", *arguments(check))


def mpirun(job, check):
    """Runs the ranks under Open MPI."""
    variables = ["-x", "DFLOP_JOB_TOKEN", "-x", "XDG_CACHE_HOME", "-x", "DFLOP_PORT"]
    launcher = ["mpirun", "--oversubscribe", "-n", 2, *variables]
    return job.run(*launcher, "dflop", "train", "train.toml", *arguments(check), DFLOP_PORT=free_port())


def srun(job, check):
    """Runs the ranks under Slurm."""
    return job.run("srun", "--ntasks", 2, "--kill-on-bad-exit=1", "dflop", "train", "train.toml", *arguments(check))


def ray(job, check):
    """Runs the ranks as actors of Ray."""
    return job.run(sys.executable, RAY_TRAIN, "train.toml", "--ranks", 2, *arguments(check))


def arguments(check):
    """Returns the arguments of a run, or of a check."""
    return ["--check"] if check else ["--json"]


def succeeds(*command):
    """Returns whether a command is there and succeeds."""
    found = shutil.which(command[0])
    return bool(found) and subprocess.run(command, capture_output=True, check=False).returncode == 0


LAUNCHERS = {
    by_hand: lambda: True,
    torchrun: lambda: shutil.which("torchrun"),
    mpirun: lambda: shutil.which("mpirun"),
    srun: lambda: shutil.which("srun") and succeeds("scontrol", "ping"),
    ray: lambda: succeeds(sys.executable, "-c", "import ray"),
}


def main():
    """Runs all launchers that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dflop", type=Path, required=True)
    dflop = parser.parse_args().dflop.resolve()
    run, skipped = 0, 0
    with tempfile.TemporaryDirectory() as directory:
        expected = losses(Job(f"{directory}/own", dflop).run("dflop", "train", "train.toml", "--json"))
        assert len(expected) == STEPS, expected
        for launch, is_there in LAUNCHERS.items():
            name, started = launch.__name__, time.monotonic()
            if not is_there():
                print(f"{name}: SKIPPED, it is not installed, or does not answer")
                skipped += 1
                continue
            job = Job(f"{directory}/{name}", dflop)
            report = launch(job, check=True)
            assert "ranks          2, started by" in report and "wrong" not in report, report
            found = losses(launch(job, check=False))
            assert found == expected, (name, found, expected)
            run += 1
            print(f"{name}: {len(found)} steps, the losses of `dflop train`, {time.monotonic() - started:.1f} s")
        stopped_by_hand(dflop, f"{directory}/stopped")
        print("a stopped run fails at rank 0 and goes on when it is started again")
    print(f"{run + 1} passed, 0 failed, {skipped} skipped")


if __name__ == "__main__":
    main()
