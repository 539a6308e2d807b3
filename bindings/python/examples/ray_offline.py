"""Packs and indexes on a Ray cluster: here two local workers, elsewhere `ray.init()` finds the cluster.

Tasks are independent and return a small result; all workers must see source and shards. Other mapping
functions work too: of a `concurrent.futures` executor, of `multiprocessing.Pool`, of Spark.
"""

import os
import tarfile
import tempfile
from pathlib import Path

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import dflop
import ray


def on_ray(function, items):
    """Runs a function on every item, each as a task of the cluster."""
    task = ray.remote(lambda item: function(item))  # Ray takes plain functions only
    return ray.get([task.remote(item) for item in items])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "source")
        for shard in (dflop.example.directory() / "shards").glob("*.tar"):
            with tarfile.open(shard) as tar:
                tar.extractall(source, filter="data")
        packed = dflop.pack(source, f"{directory}/shards", shard_samples=32, index=False, map=on_ray, tasks=4)
        print(f"packed {packed['samples']} samples into {len(packed['shards'])} shards")
        ds = dflop.Dataset(f"{directory}/shards")
        made = dflop.index(ds, map=on_ray, shards_per_task=2)
        print(f"indexed {made['samples']} samples of {made['shards']} shards into {Path(made['path']).name}")
        alone = dflop.index(f"{directory}/shards", rebuild=True, index=f"{directory}/index")
        print("one process makes the same index:", alone["fingerprint"] == made["fingerprint"])
    ray.shutdown()
