"""Streams a dataset, predicts the costs of its samples, balances global batches; needs NumPy and pyarrow."""

from pathlib import Path

import dflop
import pyarrow


def main() -> None:
    directory = dflop.example.directory(samples=128)  # your shards and your model's directory go here

    # 1. Stream: batches of images and other fields, decoded on threads of this process.
    read = dflop.Read(fields=["images", "cls"])
    loader = dflop.Loader(directory / "shards", batch_size=32, image=dflop.Image(size=64), read=read)
    for batch in loader:
        print(
            "batch of",
            len(batch.samples),
            "samples:",
            batch["image"].shape,
            batch["image"].dtype,
            batch["cls"][:5],
        )

    # 2. Predict: the index has the shape of every sample from its headers, the cost model predicts its cost.
    dataset = dflop.Dataset(directory / "shards").count_tokens(model=directory / "model")
    costs = pyarrow.table(dflop.CostModel(directory / "model").annotate(dataset))
    tokens = costs.column("tokens").to_pylist()
    print(
        f"{len(tokens)} samples of {min(tokens)} to {max(tokens)} tokens, fingerprint {dataset.fingerprint}"
    )

    # 3. Balance: every rank requests its share of each global batch; all ranks compute the same plan.
    slowest = {
        strategy: predicted_seconds(dataset, directory / "model", strategy)
        for strategy in ("data-blind", "search")
    }
    ratio = slowest["data-blind"] / slowest["search"]
    print(f"predicted: balanced steps are {ratio:.2f} times as fast as data-blind ones")


def predicted_seconds(dataset: dflop.Dataset, model: Path, strategy: str) -> float:
    """Returns the predicted seconds of four steps on two ranks; a step ends with its slowest rank."""
    plan = dflop.Plan(strategy=strategy)
    settings = {"global_batch_size": 32, "microbatches": 2, "plan": plan, "steps": 4}
    ranks = [
        dflop.BalancedLoader(dataset, model=model, dp_rank=rank, dp_size=2, **settings) for rank in range(2)
    ]
    steps = zip(*ranks, strict=True)
    return sum(max(sum(mb.cost_seconds for mb in share.microbatches) for share in step) for step in steps)


if __name__ == "__main__":
    main()
