"""Measures what `dflop.torch.Pipeline` costs beside `torch.distributed.pipelining`; counts bytes on the wire.

    python3 benches/pipeline_overhead.py [--runs 10] [--steps 5] [--parts step action bytes] [--out FILE]

Four processes with one thread each exchange messages over gloo. The package, PyTorch and transformers are
needed.

- `step`: CPU time of a step on the same modules, stages of a Qwen2 decoder, under `Pipeline` and
  `Schedule1F1B`: process time, summed over ranks, with all threads. Microbatches are of one length, as
  `Schedule1F1B` requires. Steps of both alternate; the ratio is the median over runs. Both have the same
  gradients, which is checked. `next` is the CPU time of the threads that ask the iterator of `Pipeline` for a step:
  digests are compared, counts summed, tensors and route built.
- `action`: the same with stages of one small matrix: CPU time of a step, less the passes of the modules
  alone, over the actions of all ranks: passes, both ends of messages, gradient sums.
- `bytes`: what four ranks with encoder and LLM send for a batch of real sizes, widths as in Qwen2-VL-7B in
  float32: features and their gradients under a colocated `Pipeline`; pixels, features and gradients under
  `BalancedEncoder`; and what an exchange of decoded pixels would send to encode the media of the batch on the
  same ranks as `Pipeline` does. Sizes are tables of COCO images and SROIE scans under `--shapes`, otherwise
  drawn as in `encoder_exchange.py`.
"""

import argparse
import csv
import io
import json
import math
import multiprocessing
import pathlib
import random
import statistics
import struct
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from unittest import mock

import dflop
import dflop.torch
import torch
import torch.distributed as dist
import transformers
from encoder_exchange import DATA
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

RANKS = 4
WORDS = 240
# Width, layers, microbatches, and stages and replicas of a decoder.
DECODERS = [
    (64, 4, 8, (4, 1)),
    (64, 4, 32, (4, 1)),
    (64, 4, 8, (2, 2)),
    (256, 8, 8, (4, 1)),
    (256, 8, 8, (2, 2)),
]
STEPS = 6
ACTIONS = [(8, (4, 1)), (32, (4, 1)), (8, (2, 2)), (32, (2, 2))]
TINY = 8
PATCH, MERGED, FEATURES = 1176, 4, 3584
PIXELS_MAX = 1280 * 28 * 28
SIZES = {"photos": ("coco_mini_sizes.csv", "short"), "scans": ("sroie_receipt_sizes.csv", "long")}


class Tiny(torch.nn.Module):
    """A stage that is a small matrix."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.linear, self.is_first, self.is_last = torch.nn.Linear(TINY, TINY), is_first, is_last

    def forward(self, rows, microbatch):
        if self.is_first:
            rows = microbatch["input_ids"][0, :, None].expand(-1, TINY).float()
        rows = self.linear(rows)
        return rows.sum() if self.is_last else rows


class Keywords(torch.nn.Module):
    """A stage as `PipelineStage` calls it."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, rows=None, *, microbatch):
        return self.stage(rows, microbatch)


class Job:
    """Both runners on the same stage of a rank.

    - `build`, `layers`: as for `Pipeline`; `width` of the rows between stages
    - `sizes`: stages and replicas
    """

    def __init__(self, directory, build, layers, width, microbatches, sizes) -> None:
        stages, replicas = sizes
        rank = dist.get_rank()
        schedule = dflop.Schedule(
            {"llm": {"stages": stages, "dp": replicas}}, microbatches=microbatches, schedule="1f1b"
        )
        self.actions = sum(len(schedule.actions(rank)) for rank in range(RANKS))

        def loader(role):
            batch = {"global_batch_size": microbatches * replicas, "steps": STEPS, "array_type": "torch"}
            return dflop.BalancedLoader(directory / "shards", model=directory / "model", role=role, **batch)

        self.pipeline = dflop.torch.Pipeline(build, schedule, loader, layers=layers)
        seconds, steps, iterator = [], [], iter(self.pipeline)
        for _ in range(STEPS):
            start = time.thread_time()
            steps.append(next(iterator))
            seconds.append(time.thread_time() - start)
        assert next(iterator, None) is None  # no thread of the loader runs any more
        self.inputs, self.next_seconds = steps[0], summed(statistics.median(seconds))
        self.module = next(iter(self.pipeline.module["llm"].values()))
        own = self.inputs.microbatches["llm"]
        self.microbatches = [own[number] for number in sorted(own)]
        self.targets = self.inputs.target_tokens
        lengths = {one.tokens for one in self.microbatches}
        assert len(lengths) == 1, f"expected microbatches of one length, found {lengths}"
        rows = torch.zeros(*lengths, width, requires_grad=True)
        (self.role,) = schedule.roles(rank)
        (stage,) = self.role.stages
        self.is_first, self.is_last = stage == 0, stage + 1 == stages
        tables = [schedule.stage_ranks(own) for own in range(stages)]
        for replica in range(replicas):
            group = dist.new_group([table[replica][0] for table in tables])
            self.group = group if replica == self.role.replica else self.__dict__.get("group")
        for table in tables:
            ranks = [own for (own,) in table]
            group = dist.new_group(ranks)
            self.replicas = group if rank in ranks else self.__dict__.get("replicas")
        part = PipelineStage(
            Keywords(self.module),
            stage,
            stages,
            torch.device("cpu"),
            input_args=() if self.is_first else (rows,),
            output_args=(torch.zeros((), requires_grad=True),) if self.is_last else (rows,),
            group=self.group,
        )
        loss_of = lambda loss, _: loss / self.targets
        self.schedule = Schedule1F1B(part, microbatches, loss_fn=loss_of, scale_grads=False)
        self.rows = rows

    def dflop(self) -> float:
        loss = self.pipeline.step(self.inputs)
        return loss

    def torch(self) -> float:
        losses: list[torch.Tensor] = []
        keywords = [{"microbatch": one} for one in self.microbatches]
        targets = [one["labels"] for one in self.microbatches] if self.is_last else None
        self.schedule.step(
            kwarg_mbs=keywords,
            target_mbs=targets,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        if dist.get_world_size(self.replicas) > 1:
            gradients = [one.grad for one in self.module.parameters()]
            flat = torch.cat([one.flatten() for one in gradients])
            dist.all_reduce(flat, group=self.replicas)
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return sum(float(loss.detach()) for loss in losses)

    def alone(self) -> None:
        """Runs the passes of the modules without a runner."""
        for one in self.microbatches:
            rows = None if self.is_first else self.rows.detach().requires_grad_()
            output = self.module(rows, one)
            output.backward(None if self.is_last else self.rows.detach())

    def check(self) -> None:
        """Checks that both have the same gradients."""
        found = []
        for run in (self.dflop, self.torch):
            run()
            found.append([one.grad.clone() for one in self.module.parameters()])
            self.module.zero_grad()
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)

    def compared(self, names: list[str], runs: int, steps: int) -> dict[str, list[float]]:
        """Returns the CPU times of a step on all ranks, by run: steps alternate in a run."""
        self.check()
        found = {name: [] for name in names}
        for run in range(runs + 1):
            seconds = dict.fromkeys(names, 0.0)
            for step in range(steps):
                for name in names if (run + step) % 2 else names[::-1]:
                    dist.barrier()
                    start = time.process_time()
                    getattr(self, name)()
                    self.module.zero_grad()
                    seconds[name] += time.process_time() - start
            for name in names if run else ():  # the first run warms up
                found[name].append(summed(seconds[name] / steps))
        return found


def summed(seconds: float) -> float:
    """Returns the sum over ranks."""
    own = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(own)
    return float(own)


def pack(directory: pathlib.Path, samples: list[dict[str, bytes]]) -> None:
    directory.mkdir(parents=True)
    with tarfile.open(directory / "000.tar", "w") as tar:
        for number, fields in enumerate(samples):
            for name, content in fields.items():
                member = tarfile.TarInfo(f"{number:06}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def conversation(images: int, words: int) -> bytes:
    question = "<image>\n" * images + "w1 w2"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": " ".join(["w3"] * words)}]
    return json.dumps({"conversations": turns}).encode()


def write_decoder(directory: pathlib.Path, width: int, layers: int) -> None:
    """Writes a decoder and samples of one length."""
    dflop.example.write_model(directory / "model")
    (directory / "model/preprocessor_config.json").unlink()
    transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=640,
        tie_word_embeddings=False,
        use_cache=False,
    ).save_pretrained(directory / "model")
    pack(directory / "shards", [{"json": conversation(0, WORDS)}] * 128)


def prepared(directory: pathlib.Path, width: int, layers: int) -> pathlib.Path:
    """Returns the directory of a decoder, which the first rank writes."""
    found = directory / f"{width}-{layers}"
    if dist.get_rank() == 0 and not found.exists():
        write_decoder(found, width, layers)
    dist.barrier()
    return found


def measure_steps(directory: pathlib.Path, options: argparse.Namespace, say) -> None:
    say("# CPU time of a step, ms, summed over 4 ranks: steps alternate; medians over runs, in brackets")
    say("# lowest and highest ratio; next: what the iterator of `Pipeline` takes once per step")
    columns = (
        ("width", 8),
        ("layers", 8),
        ("stages x dp", 13),
        ("microbatches", 14),
        ("tokens", 8),
        ("next", 7),
    )
    columns += (("Pipeline", 10), ("1F1B", 10))
    say("#" + "".join(f"{name:>{width}}" for name, width in columns)[1:] + "    ratio")
    for width, layers, microbatches, sizes in DECODERS:
        data = prepared(directory, width, layers)
        split = dflop.torch.split(transformers.AutoConfig.from_pretrained(data / "model"))
        job = Job(data, split, split.layers, width, microbatches, sizes)
        found = job.compared(["dflop", "torch"], options.runs, options.steps)
        ratios = [ours / theirs for ours, theirs in zip(found["dflop"], found["torch"], strict=True)]
        ours, theirs = (1e3 * statistics.median(found[name]) for name in ("dflop", "torch"))
        place = f"{sizes[0]} x {sizes[1]}"
        say(
            f"{width:>8}{layers:>8}{place:>13}{microbatches:>14}{job.microbatches[0].tokens:>8}{1e3 * job.next_seconds:>7.1f}"
            f"{ours:>10.1f}{theirs:>10.1f}    {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def measure_actions(directory: pathlib.Path, options: argparse.Namespace, say) -> None:
    say(
        "# CPU time of a step with tiny stages, less their passes, over the actions of all ranks, in microseconds"
    )
    say(
        f"# {'stages x dp':>12}{'microbatches':>14}{'actions':>9}{'passes, ms':>12}{'Pipeline':>10}{'1F1B':>8}"
    )
    data = prepared(directory, *DECODERS[0][:2])
    for microbatches, sizes in ACTIONS:
        build = lambda module, layers, is_first, is_last, mesh: Tiny(is_first, is_last)
        job = Job(data, build, None, TINY, microbatches, sizes)
        found = job.compared(["dflop", "torch", "alone"], options.runs, options.steps)
        alone = statistics.median(found["alone"])
        ours, theirs = (
            1e6
            * statistics.median(own - one for own, one in zip(found[name], found["alone"], strict=True))
            / job.actions
            for name in ("dflop", "torch")
        )
        place = f"{sizes[0]} x {sizes[1]}"
        say(f"{place:>14}{microbatches:>14}{job.actions:>9}{1e3 * alone:>12.1f}{ours:>10.0f}{theirs:>8.0f}")


class Tower(torch.nn.Module):
    """Features of real width, from the mean of the patches that become a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, FEATURES))

    def forward(self, rows, grid_thw):
        return rows.view(-1, MERGED * PATCH).mean(1, keepdim=True) * self.weight


class TowerStage(Tower):
    def forward(self, rows, microbatch):
        return super().forward(microbatch["pixel_values"], None)


class Reader(torch.nn.Module):
    """An LLM that only reads its media."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(FEATURES))

    def forward(self, rows, microbatch):
        return self.weight.sum() if rows is None else (rows * self.weight).sum()


class Wire:
    """Counts the bytes that this rank sends to others, by what they are."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._isend, self._all_to_all = dist.isend, dist.all_to_all_single
        self._is_backward = False

    def isend(self, rows, dst, group=None, tag=0):
        is_rows = rows.ndim == 2 and rows.shape[1] == FEATURES
        kind = ("gradients" if self._is_backward else "features") if is_rows else "headers"
        self.bytes[kind] += rows.numel() * rows.element_size()
        return self._isend(rows, dst, group=group, tag=tag)

    def all_to_all(self, out, rows, received, sent, group=None):
        kind = "pixels" if rows.shape[1] == PATCH else "gradients" if self._is_backward else "features"
        self._is_backward = kind == "features"
        others = sum(sent) - sent[dist.get_rank()]
        self.bytes[kind] += others * rows.shape[1] * rows.element_size()
        return self._all_to_all(out, rows, received, sent, group=group)

    def at(self, action) -> None:
        self._is_backward = action.kind == "send_gradient"

    def total(self) -> dict[str, float]:
        """Returns megabytes by kind on all ranks."""
        kinds = ("pixels", "features", "gradients", "headers")
        found = torch.tensor([self.bytes[kind] for kind in kinds], dtype=torch.float64)
        dist.all_reduce(found)
        return dict(zip(kinds, (found / 1e6).tolist(), strict=True))


def sizes_of(kind: str, shapes: pathlib.Path, rng: random.Random) -> list[tuple[int, int]]:
    """Returns sizes of the images of a sample: from the table, or drawn."""
    name, drawn = SIZES[kind]
    found = DATA[drawn](rng)
    if (shapes / name).exists():
        with (shapes / name).open() as file:
            rows = [(int(row["width"]), int(row["height"])) for row in csv.DictReader(file)]
        found = [rng.choice(rows) for _ in found]
    return found


def image(width: int, height: int) -> bytes:
    """Returns a gray PNG."""
    row = b"\0" + b"\x80" * (3 * width)
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(row * height, 1), b"IEND")
    parts = (struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def write_media(directory: pathlib.Path, kind: str, shapes: pathlib.Path, samples: int) -> None:
    """Writes a model with the widths of Qwen2-VL-7B, and samples of which four in five have images."""
    model = directory / "model"
    dflop.example.write_model(model)
    config = json.loads((model / "config.json").read_text())
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 28, "num_key_value_heads": 4}
    config["text_config"] |= text
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": FEATURES, "num_heads": 16, "mlp_ratio": 4}
    config["vision_config"] |= vision
    (model / "config.json").write_text(json.dumps(config | text))
    preprocessor = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(preprocessor | {"max_pixels": PIXELS_MAX}))
    rng, made = random.Random(1), []
    for _ in range(samples):
        sizes = sizes_of(kind, shapes, rng) if rng.random() < 0.8 else []
        words = round(min(max(96 * math.exp(0.9 * rng.gauss(0, 1)), 12), 444))
        fields = {f"{place}.png": image(*size) for place, size in enumerate(sizes)}
        made.append({**fields, "json": conversation(len(sizes), words)})
    pack(directory / "shards", made)


def colocated_bytes(settings: dict, schedule: dflop.Schedule) -> tuple[dict[str, float], float]:
    """Returns megabytes that a colocated pipeline sends, and the pixels of the media that are encoded elsewhere."""

    def build(module, *place):
        return TowerStage() if module == "vision" else Reader()

    def loader(role):
        return dflop.BalancedLoader(role=role, **settings)

    pipeline, wire, moved = dflop.torch.Pipeline(build, schedule, loader), Wire(), 0
    at = pipeline._at
    pipeline._at = lambda action: (wire.at(action), at(action)) if hasattr(action, "kind") else at(action)
    with mock.patch.object(dist, "isend", wire.isend):
        for step in pipeline:
            pipeline.step(step)
            for routed in step.route.media:
                if routed.encoder_ranks[0] != routed.llm_ranks[0]:
                    moved += routed.medium.rows * MERGED * PATCH * 4
    pipeline.close()
    return wire.total(), moved / 1e6


def exchanged_bytes(settings: dict, microbatches: int) -> dict[str, float]:
    """Returns megabytes that encoders exchange under DDP or FSDP."""
    loader = dflop.BalancedLoader(
        dp_rank=dist.get_rank(),
        dp_size=RANKS,
        microbatches=microbatches,
        plan=dflop.Plan(schedule="microbatch"),
        **settings,
    )
    tower, wire = Tower(), Wire()
    encoder = dflop.torch.BalancedEncoder(tower, loader)
    with mock.patch.object(dist, "all_to_all_single", wire.all_to_all):
        for step in loader:
            for microbatch in encoder.microbatches(step):
                tower(microbatch["pixel_values"], microbatch["image_grid_thw"]).sum().backward()
    encoder.close()
    return wire.total()


def count_bytes(directory: pathlib.Path, options: argparse.Namespace, say) -> None:
    say("# Megabytes that 4 ranks send to each other in a step, float32: 2 microbatches per rank")
    say(
        f"# {'media':<8}{'samples':>8}  {'job':<44}{'pixels':>9}{'features':>10}{'gradients':>11}{'headers':>9}{'sum':>9}"
    )
    for kind in SIZES:
        for samples in (1, 4):
            data = directory / f"{kind}-{samples}"
            if dist.get_rank() == 0:
                write_media(data, kind, options.shapes, 2 * RANKS * samples)
            dist.barrier()
            settings = {"dataset": data / "shards", "model": data / "model", "array_type": "torch"}
            settings |= {"global_batch_size": 2 * RANKS * samples, "steps": 1}
            modules = {"vision": {"dp": RANKS}, "llm": {"dp": RANKS}}
            schedule = dflop.Schedule(modules, microbatches=2, placement="colocated")
            found, moved = colocated_bytes(settings, schedule)
            rows = {
                "Pipeline, colocated": found,
                "decoded pixels to the same ranks": found | {"pixels": moved, "headers": 0.0},
                "BalancedEncoder": exchanged_bytes(settings, 2),
            }
            for name, counts in rows.items():
                say(
                    f"{kind:<10}{samples:>8}  {name:<44}{counts['pixels']:>9.1f}{counts['features']:>10.1f}"
                    f"{counts['gradients']:>11.1f}{counts['headers']:>9.3f}{sum(counts.values()):>9.1f}"
                )


PARTS = {"step": measure_steps, "action": measure_actions, "bytes": count_bytes}


def rank_of_job(rank: int, directory: pathlib.Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    store = dist.FileStore(str(directory / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    out = options.out.open("w") if options.out is not None and rank == 0 else None

    def say(line: str) -> None:
        if rank == 0:
            print(line, file=out, flush=True)

    say(
        f"# python3 benches/pipeline_overhead.py, PyTorch {torch.__version__}, transformers {transformers.__version__}"
    )
    for part in options.parts:
        PARTS[part](directory, options, say)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", type=pathlib.Path, default=pathlib.Path("../shared/shapes"))
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (pathlib.Path(directory), options)
        # Ranks are forked from a process that has imported packages, but started no threads.
        multiprocessing.set_forkserver_preload(
            ["torch", "transformers.modeling_utils", "dflop.torch.pipeline"]
        )
        torch.multiprocessing.start_processes(rank_of_job, arguments, RANKS, start_method="forkserver")


if __name__ == "__main__":
    main()
