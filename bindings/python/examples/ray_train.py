"""Trains on a Ray cluster: an actor per rank, each of which runs `dflop train` as a rank of the job.

    python ray_train.py CONFIG.toml --ranks 2 [--gpus] [--resume …]

Further arguments are those of `dflop train`. Without any, a small language model is trained on two local ranks;
`ray.init()` finds a cluster where there is one. All machines must see the configuration and its files under the
same path.
"""

import argparse
import collections
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Exit status of a rank that ended because another one failed.
SECONDARY = 75
SMALL = """
steps = 4
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
llm = { stages = 2 }
"""


@ray.remote(max_concurrency=2)
class Rank:
    """A rank of the job, on the machine of its bundle."""

    def place(self) -> tuple[str, int]:
        """Returns the address of the machine and a free port on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, arguments: list[str], environment: dict[str, str]) -> int:
        """Runs the command to its end and returns its exit status."""
        package = importlib.util.find_spec("dflop")
        command = [sys.executable, "-m", "dflop"] if package and package.origin else [shutil.which("dflop")]
        self.process = subprocess.Popen([*command, *arguments], env=os.environ | environment)
        return self.process.wait()

    def stop(self) -> None:
        """Asks the job to end after its step, with a checkpoint."""
        self.process.send_signal(signal.SIGTERM)


def train(arguments: list[str], ranks: int, resources: dict[str, float]) -> list[int]:
    """Runs all ranks, each on a bundle of `resources`, and returns their exit statuses."""
    group = placement_group([resources] * ranks, strategy="PACK")
    ray.get(group.ready())
    strategies = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(ranks)
    ]
    needs = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    actors = [Rank.options(**needs, scheduling_strategy=strategy).remote() for strategy in strategies]
    places = ray.get([actor.place.remote() for actor in actors])
    on_machine = collections.Counter(address for address, _ in places)
    job = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": places[0][0],
        "DFLOP_PORT": str(places[0][1]),
        "DFLOP_JOB_TOKEN": secrets.token_hex(32),
    }
    runs = []
    started = collections.Counter()
    for rank, (actor, (address, _)) in enumerate(zip(actors, places, strict=True)):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(started[address]),
            "LOCAL_WORLD_SIZE": str(on_machine[address]),
        }
        started[address] += 1
        runs.append(actor.run.remote(arguments, job | own))
    try:
        statuses = ray.get(runs)
    except KeyboardInterrupt:
        ray.get(actors[0].stop.remote())
        statuses = ray.get(runs)
    remove_placement_group(group)
    return statuses


def main() -> int:
    """Trains, and returns the exit status of the rank that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="give every rank a GPU")
    args, arguments = parser.parse_known_args()
    if args.config is None:
        ray.init(num_cpus=args.ranks, include_dashboard=False)
    else:
        ray.init()
    resources = {"CPU": 1.0, "GPU": 1.0} if args.gpus else {"CPU": 1.0}
    with tempfile.TemporaryDirectory() as directory:
        config = args.config or Path(directory, "train.toml")
        if args.config is None:
            config.write_text(SMALL)
        statuses = train(["train", str(config.resolve()), *arguments], args.ranks, resources)
    time.sleep(1)  # Ray passes the output of actors on with a delay
    print("exit statuses by rank:", statuses)
    ray.shutdown()
    failed = [status for status in statuses if status not in (0, SECONDARY)]
    return failed[0] if failed else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
