#!/usr/bin/env python3
"""Compares Parquet images, read in place by dflop, with `datasets` streaming and a litdata copy.

Every round runs each loader once in a process of its own, in an order that rotates: `dflop.Loader` on the
Parquet file; `datasets`, streaming the same file, in a torch `DataLoader`; litdata's `StreamingDataLoader` on
a copy that `litdata.optimize` made of the same JPEG bytes. Ratios are taken within a round.

    pip install ./bindings/python torch torchvision pillow datasets litdata pyarrow        # into VENV
    OMP_NUM_THREADS=1 VENV/bin/python benches/in_place.py --out out.txt
    OMP_NUM_THREADS=1 VENV/bin/python benches/in_place.py --photos 512 --rounds 3 --workers 4

All decode each JPEG at full size, scale its shorter side to 224 pixels (bilinear, antialiased), crop the
center, normalize, and deliver float32 `[32, 3, 224, 224]` with the number of each photo; dflop by its own
codec, the others by Pillow and torchvision. Times are of one pass over all photos, from the creation of the
loader to its end, without imports; CPU figures are user + system time of all processes of a loader. Size and
writing time of the file and of the copy are printed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rounds import cpu_seconds, photo, printer, run_alone, spread, versions

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
LOADERS = ("dflop", "datasets", "litdata")
BATCH, SIZE, ROW_GROUP = 32, 224, 64
CHUNK_BYTES = "64MB"


def main() -> None:
    """Writes the photos, runs the rounds and prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="threads of dflop, processes of the others")
    parser.add_argument("--out", type=Path, help="file for a copy of the output")
    parser.add_argument("--run", nargs=2, metavar=("LOADER", "DIRECTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measured(args.run[0], Path(args.run[1]), args.workers, args.photos)))
        return
    tell = printer(args.out)
    tell(versions("dflop", "datasets", "litdata", "torch", "torchvision", "PIL"))
    with tempfile.TemporaryDirectory() as scratch:
        seconds = write_photos(Path(scratch), args.photos)
        sizes = {name: sum(path.stat().st_size for path in Path(scratch, name).iterdir()) for name in seconds}
        shown = ", ".join(f"{name} {sizes[name] / 1e6:.1f} MB in {seconds[name]:.1f} s" for name in seconds)
        tell(f"{args.photos} photos, {args.workers} workers; written: {shown}")
        rounds = []
        for number in range(args.rounds):
            order = LOADERS[number % 3 :] + LOADERS[: number % 3]
            rounds.append({name: one(name, Path(scratch), args, tell) for name in order})
    report(rounds, tell)


def write_photos(directory: Path, count: int) -> dict[str, float]:
    """Writes photos as Parquet and as litdata chunks; returns the seconds of both."""
    import litdata
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    random = np.random.default_rng(11)
    photos = [photo(random) for _ in range(count)]
    seconds = {}
    began = time.perf_counter()
    features = {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}
    stored = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": content, "path": f"{number}.jpg"} for number, content in enumerate(photos)]
    table = pa.table({"image": pa.array(rows, stored), "label": range(count)})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    (directory / "parquet").mkdir()
    pyarrow.parquet.write_table(
        table, directory / "parquet" / "train.parquet", row_group_size=ROW_GROUP, compression="none"
    )
    seconds["parquet"] = time.perf_counter() - began
    began = time.perf_counter()
    litdata.optimize(
        fn=lambda number: {"image": photos[number], "label": number},
        inputs=list(range(count)),
        output_dir=str(directory / "litdata"),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )
    return seconds | {"litdata": time.perf_counter() - began}


def one(name: str, directory: Path, args: argparse.Namespace, tell: Any) -> dict[str, float]:
    """Measures a loader in a process of its own."""
    run = ("--run", name, directory, "--workers", args.workers, "--photos", args.photos)
    done = run_alone(__file__, *run)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    tell(
        f"{name:10} {found['photos_per_second']:8.1f} photos/s {found['wall_ms']:8.3f} ms wall "
        f"{found['cpu_ms']:8.3f} ms CPU  load {os.getloadavg()[0]:.1f}"
    )
    return found


def measured(name: str, directory: Path, workers: int, photos: int) -> dict[str, float]:
    """Runs a loader over all photos and returns its speed and CPU time, by photo."""
    import torch
    import torchvision  # noqa: F401 imports do not count

    torch.set_num_threads(1)
    create = {"dflop": dflop_batches, "datasets": datasets_batches, "litdata": litdata_batches}[name]
    create(directory, workers, imports_only=True)
    before, began = cpu_seconds(), time.perf_counter()
    labels: set[int] = set()
    for images, found in create(directory, workers):
        assert images.shape[1:] == (3, SIZE, SIZE) and images.dtype == torch.float32, images.shape
        labels.update(map(int, found))
    seconds = time.perf_counter() - began
    if labels != set(range(photos)):
        sys.exit(f"{len(labels)} of {photos} photos were delivered")
    used = cpu_seconds() - before
    return {
        "photos_per_second": photos / seconds,
        "wall_ms": 1e3 * seconds / photos,
        "cpu_ms": 1e3 * used / photos,
    }


def dflop_batches(directory: Path, workers: int, imports_only: bool = False) -> Iterable[tuple[Any, Any]]:
    """Reads the Parquet file in place."""
    import dflop

    if imports_only:
        return ()
    settings = {"image": dflop.Image(SIZE), "read": dflop.Read(workers=workers, error_budget=0.0)}
    loader = dflop.Loader(
        directory / "parquet" / "train.parquet", batch_size=BATCH, array_type="torch", **settings
    )
    return ((batch["image"], [key.rpartition("/")[2] for key in batch.sample_keys]) for batch in loader)


def datasets_batches(directory: Path, workers: int, imports_only: bool = False) -> Iterable[tuple[Any, Any]]:
    """Streams the Parquet file through a torch `DataLoader`."""
    import datasets
    import torch

    prepare = transform()
    if imports_only:
        return ()
    files = {"train": str(directory / "parquet" / "train.parquet")}
    rows = datasets.load_dataset("parquet", data_files=files, streaming=True, split="train")
    # A file is divided between workers by row groups.
    rows = rows.reshard() if hasattr(rows, "reshard") else rows

    def prepared(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": prepare(row["image"].convert("RGB")), "label": row["label"]}

    loader = torch.utils.data.DataLoader(rows.map(prepared), batch_size=BATCH, num_workers=workers)
    return ((batch["image"], batch["label"]) for batch in loader)


def litdata_batches(directory: Path, workers: int, imports_only: bool = False) -> Iterable[tuple[Any, Any]]:
    """Reads the copy through `StreamingDataLoader`."""
    import litdata
    from PIL import Image

    prepare = transform()
    if imports_only:
        return ()

    class Photos(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Any, int]:
            item = super().__getitem__(index)
            return prepare(Image.open(io.BytesIO(item["image"])).convert("RGB")), item["label"]

    photos = Photos(str(directory / "litdata"), shuffle=False)
    return iter(litdata.StreamingDataLoader(photos, batch_size=BATCH, num_workers=workers))


def transform() -> Any:
    """Returns the transform of a Pillow image that dflop's `Image` makes."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize(SIZE),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def report(rounds: list[dict[str, dict[str, float]]], tell: Any) -> None:
    """Prints the ratios within rounds: least, median, largest."""
    for figure, unit in (("wall_ms", "wall time"), ("cpu_ms", "CPU time")):
        for peer in LOADERS[1:]:
            low, middle, high = spread(one[peer][figure] / one["dflop"][figure] for one in rounds)
            tell(f"{unit} per photo: {peer} / dflop {low:.2f} {middle:.2f} {high:.2f}")


if __name__ == "__main__":
    main()
