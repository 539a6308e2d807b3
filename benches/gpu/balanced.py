#!/usr/bin/env python3
"""Trains one model on the same global batches, cut in several ways, and measures what balancing gains on one GPU.

    balanced.py --out DIR                                 # Qwen2.5-VL-7B on a GPU, at most 6 minutes
    balanced.py --out DIR --model tiny --device cpu       # CPU time of a small model, in seconds

Data-parallel ranks are emulated: each runs its microbatches in turn on the one device, forward and backward, and a step takes
as long as its slowest rank. Sums of gradients and the optimizer are not part of it. Cuts: `blind` (by number of samples),
`tokens` (equal LLM tokens), `lpt` and `preset` (the search) by stated rates, `profile` by times that are measured first in the
same call, and `corrected`: stated rates, corrected by the times of the first half of the steps, on the batches of the second
half. Every cut has the promise of its own cost model, the predicted step of the data-blind cut over that of this cut;
speed-ups are medians over the steps. Times are those of events on a GPU, and CPU time of the thread on a CPU. Weights and
contents are random, sizes are published ones (`balanced_data.py`, or `--shapes FILE`).

Writes `summary.json`, `profile/`, and `microbatches.jsonl` with `samples.json`, which `predict_recorded.py` reads, to `--out`.
Needs the package `dflop`, PyTorch and transformers. Where the time ends before `--steps`, says so and reports fewer steps.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import threading
import time

import balanced_data

CUTS = ("blind", "tokens", "lpt", "preset", "profile", "corrected")
# Settings with a default for each kind of device.
BY_DEVICE = ("dp", "global_batch", "steps", "scale", "profile_seconds", "tokens_max")
DEFAULTS = {"cuda": (8, 64, 6, 1.0, 45.0, 8192), "cpu": (4, 16, 6, 0.15, 4.0, 256)}
# A step is not begun where it may end later than this before the limit.
RESERVE_SECONDS = 10.0
# Steps from the last reported one to the first that is planned with its corrections.
LEAD_STEPS = 9


class Clock:
    """Times of the device: events on a GPU, CPU time of the thread on a CPU."""

    def __init__(self, torch, device):
        self.torch, self.on_gpu = torch, device.type == "cuda"

    def mark(self):
        """Returns a mark at the end of the work that is queued."""
        if not self.on_gpu:
            return time.thread_time()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self):
        """Waits until the device is idle."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def ms(self, start, end):
        """Returns the milliseconds between two marks."""
        return start.elapsed_time(end) if self.on_gpu else 1e3 * (end - start)


class Reports:
    """Stands in for a loader that `StageTimer` reports to."""

    def __init__(self):
        self.seconds = []

    def report_stage_seconds(self, step, seconds, *, interval=32):
        """Keeps the times of a rank."""
        self.seconds.append(seconds)

    def of_ranks(self):
        """Returns the times of all ranks, and forgets them."""
        found = {name: [one[name][0] for one in self.seconds] for name in self.seconds[0]}
        self.seconds = []
        return found


class Cut:
    """One way to cut global batches: the loaders of all ranks, and one that counts what the data-blind cut would take."""

    def __init__(self, name, bench, cost_model, plan):
        self.name = name
        self.loaders = [bench.loader(rank, cost_model, plan(strategy_of(name))) for rank in range(bench.args.dp)]
        uncounted = bench.dflop.Processor(dtype="none")
        self.blind = bench.loader(0, cost_model, plan("data-blind"), uncounted)
        self.steps, self.blind_steps = [iter(loader) for loader in self.loaders], iter(self.blind)
        self.measured = {}

    def next(self):
        """Returns the next step of every rank, and the data-blind one, unread."""
        return [next(steps) for steps in self.steps], next(self.blind_steps)

    def read(self):
        """Reads the next step of every rank into memory."""
        ranks, blind = self.next()
        threads = [threading.Thread(target=hold, args=(ranks, rank)) for rank in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faults = [rank for rank in ranks if isinstance(rank, Exception)]
        if faults:
            raise faults[0]
        return ranks, blind

    def add(self, number, ranks, blind, times):
        """Adds a measured step: milliseconds by rank and microbatch, forward and backward."""
        rank_ms = [sum(map(sum, of_rank)) for of_rank in times]
        microbatches = [one for step in ranks for one in step.microbatches]
        measured = [sum(passes) for of_rank in times for passes in of_rank]
        self.measured[number] = {
            "step_ms": max(rank_ms),
            "idle": 1 - statistics.mean(rank_ms) / max(rank_ms),
            "promised": blind.makespan_seconds / ranks[0].makespan_seconds,
            "errors": [1e3 * one.cost_seconds / ms - 1 for one, ms in zip(microbatches, measured, strict=True)],
        }

    def learn(self, seconds, blind_seconds):
        """Reports measured times to the loaders, and those of the data-blind cut to the loader that counts it."""
        ranks, blind = self.next()
        for loader, step in zip(self.loaders, ranks, strict=True):
            loader.report_stage_seconds(step, seconds, interval=1)
        self.blind.report_stage_seconds(blind, blind_seconds, interval=1)

    def skip(self, steps):
        """Goes on without reading."""
        for _ in range(steps):
            self.next()

    def row(self, blind):
        """Returns the figures of this cut beside those of the data-blind one."""
        steps = self.measured.values()
        speedups = [blind.measured[number]["step_ms"] / step["step_ms"] for number, step in self.measured.items()]
        row = {
            "cut": self.name,
            "steps": len(steps),
            "step_ms": [step["step_ms"] for step in steps],
            "speedups": speedups,
            "speedup": statistics.median(speedups),
            "promised": statistics.median(step["promised"] for step in steps),
            "idle": statistics.mean(step["idle"] for step in steps),
        }
        if self.name != "tokens":  # its costs are no times
            errors = sorted(abs(error) for step in steps for error in step["errors"])
            row["error_median"] = statistics.median(errors)
            row["error_p95"] = errors[math.ceil(0.95 * len(errors)) - 1]
        return row

    def close(self):
        """Ends the threads of the loaders."""
        for loader in (*self.loaders, self.blind):
            loader.close()


def hold(ranks, rank):
    """Replaces the step of a rank by one in memory, or by the error."""
    try:
        ranks[rank] = ranks[rank].hold()
    except Exception as error:  # noqa: BLE001 - raised by the main thread
        ranks[rank] = error


def strategy_of(name):
    """Returns the strategy of a cut."""
    return {"blind": "data-blind", "lpt": "lpt"}.get(name, "search")


class Bench:
    """The model, its data, and what is measured of them."""

    def __init__(self, args, began):
        import dflop
        import torch

        self.args, self.began, self.torch, self.dflop = args, began, torch, dflop
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.clock = Clock(torch, self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        self.directory = args.out / "model"
        self.samples = {}

    def left(self):
        """Returns the seconds until the limit."""
        return self.args.seconds_max - (time.monotonic() - self.began)

    def say(self, line):
        """Prints progress."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {line}", file=sys.stderr, flush=True)

    def make_data(self):
        """Writes shards and model files, and opens the dataset."""
        args = self.args
        count = args.global_batch * args.steps
        settings = (count, args.scale, args.seed)
        shapes = balanced_data.read_shapes(args.shapes, *settings) if args.shapes else balanced_data.drawn_shapes(*settings)
        balanced_data.write_model(self.directory, args.model)
        balanced_data.write_shards(args.out / "shards", shapes, args.seed)
        self.dataset = self.dflop.Dataset(args.out / "shards")
        self.say(f"{count} samples with {sum(len(images) for images, _ in shapes)} images")

    def make_model(self):
        """Builds the model with random weights, attention over packed rows and activation checkpointing."""
        import packed_attention
        from transformers import AutoConfig, AutoModelForImageTextToText

        self.attention = packed_attention
        config = AutoConfig.from_pretrained(self.directory)
        with self.torch.device(self.device):
            self.model = AutoModelForImageTextToText.from_config(config, dtype=self.dtype)
        self.model.to(self.device).train()
        packed_attention.use(self.model)
        if self.args.recompute == "layers":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        parameters = sum(one.numel() for one in self.model.parameters())
        self.say(f"{self.args.model}: {parameters / 1e9:.2f} B parameters on {self.device_name()}")

    def device_name(self):
        """Returns the name of the device."""
        return self.torch.cuda.get_device_name(self.device) if self.clock.on_gpu else "one CPU thread"

    def loader(self, rank, cost_model, plan, processor=None):
        """Returns the loader of a rank."""
        args, dflop = self.args, self.dflop
        dtype = str(self.dtype).removeprefix("torch.")
        return dflop.BalancedLoader(
            self.dataset, model=cost_model, global_batch_size=args.global_batch, microbatches=args.microbatches,
            dp_rank=rank, dp_size=args.dp, tokenizer=str(self.directory), order=dflop.Order(shuffle="none"),
            processor=processor or dflop.Processor(dtype=dtype), plan=plan, array_type="torch",
            read=dflop.Read(workers=1, steps_ahead=1),
        )

    def tokens(self, samples):
        """Returns costs in proportion to LLM tokens; keeps tokens and patches of the samples for `samples.json`."""
        for one in samples:
            media = one["tokens"] - one["text_tokens"] - 2 * len(one["images"])
            self.samples[one["key"]] = [one["tokens"], 4 * max(media, 0)]
        return [{"vision": 0.0, "llm": 1e-6 * one["tokens"]} for one in samples]

    def llm_inputs(self, lengths):
        """Returns a packed row of texts for the profile, with targets everywhere."""
        torch, count = self.torch, sum(lengths)
        edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=self.device)
        self.attention.SAMPLES.boundaries = (edges, max(lengths))
        ids = torch.randint(0, balanced_data.WORDS, (1, count), device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        return {"input_ids": ids, "labels": ids, "position_ids": positions.expand(3, 1, count), "use_cache": False}

    def profile(self):
        """Measures the tower and the LLM with its head and loss; returns the cost model."""
        args, directory = self.args, self.args.out / "profile"
        import dflop.torch

        try:
            measured = dflop.torch.profile(
                llm=self.model, encoder=self.model.model.visual, model=args.model, tokens_max=args.tokens_max,
                seconds_max=args.profile_seconds, make_inputs={"llm": self.llm_inputs}, progress=self.say,
            )
        finally:
            self.attention.SAMPLES.boundaries = None
            self.model.train()
            self.model.zero_grad(set_to_none=True)
        measured.write(directory)
        return dflop.CostModel(str(self.directory), device=str(directory))

    def make_cuts(self):
        """Returns the cuts that are asked for."""
        dflop, args = self.dflop, self.args
        wanted = args.cuts.split(",")
        preset = dflop.CostModel(str(self.directory), device=args.preset, recompute=args.recompute)

        def plan(**settings):
            return lambda strategy: dflop.Plan(strategy=strategy, **settings)

        made = {
            "tokens": lambda: (preset, plan(cost=self.tokens)),
            "profile": lambda: (self.profile(), plan()),
            "corrected": lambda: (preset, plan()),
        }
        return [Cut(name, self, *made.get(name, lambda: (preset, plan()))()) for name in CUTS if name in wanted]

    def run(self, microbatch, step):
        """Runs a microbatch, forward and backward; returns three marks."""
        self.attention.SAMPLES.boundaries = (microbatch.cu_seqlens, microbatch.max_seqlen)
        start = self.clock.mark()
        loss = self.dflop.torch.loss(self.model, microbatch, step)
        middle = self.clock.mark()
        loss.backward()
        return start, middle, self.clock.mark()

    def step(self, ranks, timer):
        """Runs a step, one rank after another; returns milliseconds of the passes by rank and microbatch."""
        self.model.zero_grad(set_to_none=False)
        found = []
        for step in ranks:
            moved = [one.to(self.device, self.dtype) for one in step.microbatches]
            self.clock.wait()
            marks = []
            for index, microbatch in enumerate(moved):
                timer.microbatch(index)
                marks.append(self.run(microbatch, step))
            timer.step(step)
            self.clock.wait()
            found.append([[self.clock.ms(a, b), self.clock.ms(b, c)] for a, b, c in marks])
        return found

    def steps_in_time(self, numbers, later=0.0):
        """Yields numbers of steps, as far as the time reaches; says so where it does not.

        - `later`: part of a step that is to be measured afterwards for each of these
        """
        longest = 0.0
        for done, number in enumerate(numbers, 1):
            if self.left() - RESERVE_SECONDS < 1.1 * longest * (1 + later * done):
                self.say(f"the time is over before step {number}, of {self.args.steps}")
                return
            began = time.monotonic()
            yield number
            longest = max(longest, time.monotonic() - began)

    def warm_up(self, ranks):
        """Runs microbatches of the first step that are not counted: the longest, and the first."""
        longest = max((one for step in ranks for one in step.microbatches), key=lambda one: one.tokens)
        for microbatch in (longest, ranks[0].microbatches[0], longest):
            self.run(microbatch.to(self.device, self.dtype), ranks[0])
        self.clock.wait()


def measure(bench, cuts):
    """Measures all cuts step by step; returns the recorded microbatches."""
    import dflop.torch

    modules = {"encoder": bench.model.model.visual, "llm": bench.model.model.language_model}
    recorded, reports = [], Reports()
    with dflop.torch.StageTimer(reports, delay_steps=0, **modules) as timer:

        def one(cut, number):
            ranks, blind = cut.read()
            if not recorded:
                with timer.paused():
                    bench.warm_up(ranks)
            times = bench.step(ranks, timer)
            cut.add(number, ranks, blind, times)
            recorded.extend(lines(cut.name, number, ranks, times))
            return reports.of_ranks()

        in_turn = {cut.name: cut for cut in cuts}
        corrected = in_turn.pop("corrected", None)
        learned = bench.args.steps // 2
        for number in bench.steps_in_time(range(bench.args.steps), 0.5 / len(in_turn) if corrected else 0.0):
            # forth and back, so that a drift of the device is no cut's advantage
            order = list(in_turn)[:: -1 if number % 2 else 1]
            seconds = {name: one(in_turn[name], number) for name in order}
            if corrected and number < learned:
                corrected.learn(seconds["preset"], seconds["blind"])
            shown = [f"{cut.name} {cut.measured[number]['step_ms']:.0f} ms" for cut in in_turn.values()]
            bench.say(f"step {number}: " + ", ".join(shown))
        if corrected and len(in_turn["blind"].measured) > learned:
            # the corrections are in force when the batches of the second half come again
            epochs = -(-LEAD_STEPS // bench.args.steps)
            corrected.skip(epochs * bench.args.steps)
            for number in bench.steps_in_time(range(learned, len(in_turn["blind"].measured))):
                one(corrected, number)
    return recorded


def lines(name, number, ranks, times):
    """Describes the microbatches of a step, as `predict_recorded.py` reads them."""
    for rank, (step, of_rank) in enumerate(zip(ranks, times, strict=True)):
        for index, (one, (forward, backward)) in enumerate(zip(step.microbatches, of_rank, strict=True)):
            grids = one.get("image_grid_thw", [])
            patches = one["pixel_values"].shape[0] if "pixel_values" in one else 0
            yield {
                "step": number, "set": name, "rank": rank, "mb": index, "keys": list(one.sample_keys),
                "tokens": one.tokens, "longest": int(one.max_seqlen), "patches": int(patches), "images": len(grids),
                "fwd": round(forward, 3), "bwd": round(backward, 3), "predicted": round(1e3 * one.cost_seconds, 3),
                "modules": dict(one.module_seconds),
            }


def table(rows):
    """Prints the figures of all cuts."""
    print(f"{'cut':10} {'steps':>5} {'median ms':>9} {'speed-up':>9} {'promised':>9} {'error median':>13} {'p95':>7} {'idle':>6}")
    for row in rows:
        errors = [f"{row[name]:.1%}" if name in row else "-" for name in ("error_median", "error_p95")]
        print(
            f"{row['cut']:10} {row['steps']:5} {statistics.median(row['step_ms']):9.1f} {row['speedup']:9.3f} "
            f"{row['promised']:9.3f} {errors[0]:>13} {errors[1]:>7} {row['idle']:6.1%}"
        )


def arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="new directory of data and results")
    add("--model", choices=balanced_data.MODELS, default="qwen2.5-vl-7b")
    add("--device", default="cuda", help="device of PyTorch")
    add("--cuts", default=",".join(CUTS), help="cuts to measure; `blind` is always one")
    add("--dp", type=int, help="emulated data-parallel ranks [default: 8, 4 on a CPU]")
    add("--global-batch", type=int, help="samples of a step [default: 64, 16 on a CPU]")
    add("--microbatches", type=int, default=1, help="microbatches of a rank and step")
    add("--steps", type=int, help="steps [default: 6]")
    add("--scale", type=float, help="factor of image sides and text lengths [default: 1, 0.15 on a CPU]")
    add("--profile-seconds", type=float, help="seconds of the profile [default: 45, 4 on a CPU]")
    add("--tokens-max", type=int, help="longest pack of the profile [default: 8192, 256 on a CPU]")
    add("--seconds-max", type=float, default=350.0, help="limit of everything")
    add("--preset", default=None, help="stated rate [default: that of the GPU, `cpu` on a CPU]")
    add("--recompute", choices=("layers", "none"), default="layers", help="activation checkpointing")
    add("--shapes", type=pathlib.Path, help="CSV with `images` (640x480;500x375) and `words`, drawn from at random")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="prints the summary as JSON")
    args = parser.parse_args()
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    for name, value in zip(BY_DEVICE, DEFAULTS[kind], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    unknown = set(args.cuts.split(",")) - set(CUTS)
    if unknown:
        parser.error(f"unknown cut `{min(unknown)}`, known are {', '.join(CUTS)}")
    args.cuts += ",blind,preset" if "corrected" in args.cuts else ",blind"
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"`{args.out}` is not empty")
    return args


def preset_of(name):
    """Returns the device preset of a GPU by its name."""
    return next((preset for preset in ("a100", "h200", "b200") if preset.upper() in name), "h100")


def main():
    """Measures, and prints the table."""
    began, args = time.monotonic(), arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    bench = Bench(args, began)
    if args.preset is None:
        args.preset = preset_of(bench.device_name()) if bench.clock.on_gpu else "cpu"
    bench.make_data()
    bench.make_model()
    cuts = bench.make_cuts()
    recorded = measure(bench, cuts)
    if not cuts[0].measured:
        sys.exit("balanced.py: no step was measured: raise --seconds-max or lower --profile-seconds")
    rows = [cut.row(cuts[0]) for cut in cuts if cut.measured]
    summary = {
        "model": args.model, "device": bench.device_name(), "torch": bench.torch.__version__, "preset": args.preset,
        "recompute": args.recompute, "dp": args.dp, "global_batch": args.global_batch, "microbatches": args.microbatches,
        "steps": len(cuts[0].measured), "steps_asked": args.steps, "seconds": time.monotonic() - began, "cuts": rows,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (args.out / "microbatches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded))
    (args.out / "samples.json").write_text(json.dumps(bench.samples))
    for cut in cuts:
        cut.close()
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"{args.model} on {summary['device']}: {summary['steps']} of {args.steps} steps, {summary['seconds']:.0f} s")
        table(rows)


if __name__ == "__main__":
    main()
