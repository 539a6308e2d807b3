"""Plans a grid of models, shapes, clusters and batches, and checks what `plan` and `simulate --shapes` promise.

    python3 tests/python/plan_grid.py --dflop target/release/dflop --jobs 2

Every cell of the grid runs `dflop plan` and `dflop simulate --shapes` with the same arguments; `--batches` of one is
`--steps` of the other, so both judge the same batches. Shapes are drawn here, from a fixed seed. Checks:

- `clean`: a run succeeds, or fails because no plan fits, on both commands alike; it never panics
- `equal`: the plan and the step time of "dflop" are those of `plan`
- `fits`: "dflop" fits into memory, as `plan` promises
- `slower`: "dflop" is no slower than any method that fits and whose placement is searched

Prints step times over those of "dflop" by method, then each violation with its command lines, and exits with 1 if
there is one. Needs no packages.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MODELS = [
    "llava-ov-qwen2.5-7b", "llava-ov-llama3-8b", "llava-ov-qwen2.5-32b", "llava-ov-qwen2.5-72b", "internvl3-8b",
    "internvl2.5-qwen2.5-72b", "qwen2-audio-7b",
]
# A model with a vision and an audio encoder, whose cells come on top.
SEVERAL_ENCODERS = "omni-7b"
GPUS = [8, 16, 32, 64, 256]
# Samples of a global batch per GPU.
BATCHES = [4, 8, 16]
LINKS = {
    "nvlink": {"gigabytes_per_second": 240, "latency_microseconds": 3},
    "infiniband": {"gigabytes_per_second": 12.5, "latency_microseconds": 10},
}
# Kinds of plans and costs of a cell; `{links}` is a file of links.
SPACES = {
    "basic": ["--set", "space.kinds=basic"],
    "links": ["--set", "space.kinds=basic", "--links", "{links}"],
    "full": [],
    "joint": ["--set", "space.placement=any", "--set", "space.zero1=true", "--set", "space.sequence_parallel=true"],
}
CHECKS = ["clean", "equal", "fits", "slower"]
# Largest relative difference of step times that are the same.
EQUAL = 0.001
# Largest factor by which "dflop" may be slower than another method.
SLOWER = 1.005
OURS = "dflop"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem of the grid."""

    model: str
    table: str
    gpus: int
    batch: int
    space: str

    def seed(self) -> int:
        return GPUS.index(self.gpus) * len(BATCHES) + BATCHES.index(self.batch)

    def command(self, arguments: argparse.Namespace, name: str) -> list[str]:
        """Returns the command line of `plan` or `simulate`."""
        kind = ".several" if self.model == SEVERAL_ENCODERS else ""
        shapes = str(arguments.out / f"{self.table}{kind}.csv")
        words = [str(arguments.dflop), name, "--model", self.model, "--device", "a100", "--shapes", shapes]
        words += ["--gpus", str(self.gpus), "--global-batch-size", str(self.gpus * self.batch), "--seed", str(self.seed())]
        words += ["--batches" if name == "plan" else "--steps", str(arguments.steps), "--json"]
        return words + [word.format(links=arguments.out / "links.json") for word in SPACES[self.space]]


@dataclasses.dataclass
class Answer:
    """Both answers about a cell; `None` where no plan fits."""

    cell: Cell
    plan: dict | None = None
    compared: dict | None = None
    violations: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def whole(value: float, most: int) -> int:
    return max(0, min(most, round(value)))


def tables() -> dict[str, list[tuple[int, int]]]:
    """Draws tables of tiles and tokens: from nearly even samples to heavy tails."""
    rng = random.Random(20_001)
    lognormal, pareto = rng.lognormvariate, rng.paretovariate
    text = lambda: whole(lognormal(5.0, 0.9), 4000) + 16

    def sample(tiles: int, tokens_per_tile: int = 196) -> tuple[int, int]:
        return tiles, tiles * tokens_per_tile + text()

    rows = range(3000)
    return {
        "even": [sample(rng.randint(4, 6)) for _ in rows],
        "lognormal": [sample(whole(lognormal(1.0, 0.8), 30)) for _ in rows],
        "text_mixed": [sample(whole(lognormal(1.5, 0.7), 24) if rng.random() < 0.6 else 0) for _ in rows],
        "heavy_tail": [sample(whole(pareto(1.1), 60), 256) for _ in rows],
        "two_kinds": [sample(1 if rng.random() < 0.9 else 36) for _ in rows],
        "long_text": [(whole(lognormal(0.3, 0.6), 8), 64 + whole(lognormal(6.8, 1.2), 24_000)) for _ in rows],
    }


def with_audio(rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Returns tiles, windows of audio and tokens: some samples have speech as well."""
    rng = random.Random(20_002)
    windows = [whole(rng.lognormvariate(0.6, 0.8), 40) if rng.random() < 0.4 else 0 for _ in rows]
    return [(tiles, own, tokens + 750 * own) for (tiles, tokens), own in zip(rows, windows)]


def cells(count: int) -> list[Cell]:
    """Chooses cells of the whole grid, the same ones every time, and a ninth as many with several encoders."""
    def chosen(models: list[str], count: int) -> list[Cell]:
        grid = [Cell(*part) for part in itertools.product(models, tables(), GPUS, BATCHES, SPACES)]
        random.Random(7).shuffle(grid)
        return grid[:count]

    return chosen(MODELS, count) + chosen([SEVERAL_ENCODERS], count // 9)


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a command."""

    # `None` if no plan fits, and if the run is not clean.
    answer: dict | None
    # What the command printed as an error.
    message: str
    # Why the run is not clean.
    failed: str | None
    cpu_seconds: float


def run(command: list[str], seconds: float) -> Run:
    """Runs a command, for at most this time."""
    environment = os.environ | {"RUST_BACKTRACE": "0"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0), errors.seek(0)
        printed, message = output.read(), errors.read().strip()
    cpu_seconds = usage.ru_utime + usage.ru_stime
    if process.returncode == 0:
        return Run(json.loads(printed), message, None, cpu_seconds)
    if process.returncode == -signal.SIGKILL:
        return Run(None, message, f"killed, perhaps after {seconds:.0f} s", cpu_seconds)
    if process.returncode == 1 and "no plan fits" in message and "panicked" not in message:
        return Run(None, message, None, cpu_seconds)
    return Run(None, message, f"exit status {process.returncode}: {message[:300]}", cpu_seconds)


def degrees(plan: dict) -> tuple:
    """Returns what distinguishes a plan."""
    return tuple(json.dumps(plan[name], sort_keys=True) for name in ("modules", "microbatches", "placement"))


def judge(cell: Cell, arguments: argparse.Namespace) -> Answer:
    answer = Answer(cell)
    add = lambda check, reason: answer.violations.append((check, reason))
    runs = {name: run(cell.command(arguments, name), arguments.seconds) for name in ("plan", "simulate")}
    answer.plan, answer.compared = (one.answer for one in runs.values())
    for name, one in runs.items():
        if one.failed:
            add("clean", f"{name}: {one.failed}")
    if any(one.failed for one in runs.values()):
        return answer
    if (answer.plan is None) != (answer.compared is None):
        add("clean", "only one of the commands finds that no plan fits")
    if answer.plan is None or answer.compared is None:
        return answer
    methods = {method["name"]: method for method in answer.compared["strategies"]}
    ours, promised = methods[OURS], answer.plan["step_seconds"]
    if degrees(ours["plan"]) != degrees(answer.plan):
        add("equal", "the plans differ")
    elif abs(ours["step_seconds"] / promised - 1) > EQUAL:
        add("equal", f"simulate {ours['step_seconds']:.4f} s, plan {promised:.4f} s ({ours['step_seconds'] / promised - 1:+.2%})")
    if not ours["fits"]:
        add("fits", "\"dflop\" does not fit into memory")
    for name, method in methods.items():
        # Plans of a placement that is not searched may be faster.
        is_searched = cell.space == "joint" or method["plan"]["placement"] == "disaggregated"
        if method["fits"] and is_searched and ours["step_seconds"] > SLOWER * method["step_seconds"]:
            add("slower", f"\"dflop\" takes {ours['step_seconds'] / method['step_seconds'] - 1:.2%} longer than \"{name}\"")
    return answer


def print_table(title: str, answers: list[Answer]) -> None:
    """Prints step times over ours by method, of steps that fit, and mean idle fractions."""
    fitting = sum(answer.compared is not None for answer in answers)
    print(f"\n{title}: {len(answers)} cells, {fitting} with a plan that fits")
    ratios, idle, left_out = collections.defaultdict(list), collections.defaultdict(list), collections.Counter()
    for answer in answers:
        methods = answer.compared["strategies"] if answer.compared else []
        ours = next((method["step_seconds"] for method in methods if method["name"] == OURS), None)
        for method in methods:
            if method["fits"]:
                ratios[method["name"]].append(method["step_seconds"] / ours)
                idle[method["name"]].append(method["bubble_fraction"])
            else:
                left_out[method["name"]] += 1
        if answer.compared:
            ratios["lower bound"].append(answer.compared["ideal_seconds"] / ours)
    compared = [answer.compared for answer in answers if answer.compared]
    # In the order of the command, which leaves out methods without a plan.
    names = max(([method["name"] for method in one["strategies"]] for one in compared), key=len, default=[])
    print(f"{'step / ours':<20} {'fit':>5} {'not':>5} {'geometric':>10} {'median':>8} {'least':>8} {'most':>8} {'idle':>8}")
    for name in filter(ratios.get, [*names, "lower bound"]):
        found = ratios[name]
        geometric = math.exp(statistics.fmean(math.log(ratio) for ratio in found))
        numbers = f"{geometric:>10.3f} {statistics.median(found):>8.3f} {min(found):>8.3f} {max(found):>8.3f}"
        waits = f"{statistics.fmean(idle[name]):>6.1%}" if idle[name] else ""
        print(f"{name:<20} {len(found):>5} {left_out[name]:>5} {numbers} {waits:>8}")


def print_violations(answers: list[Answer], arguments: argparse.Namespace) -> int:
    """Prints violations of the wanted checks by kind, and returns their number."""
    total = 0
    for check in CHECKS:
        found = [(answer.cell, reason) for answer in answers for kind, reason in answer.violations if kind == check]
        is_checked = check not in arguments.skip
        print(f"\n{check}: {len(found)} violations in {len({cell for cell, _ in found})} cells" + ("" if is_checked else " (not checked)"))
        for cell, reason in found if is_checked else ():
            print(f"  {reason}")
            for name in ("plan", "simulate"):
                print(f"    {shlex.join(cell.command(arguments, name))}")
        total += len(found) if is_checked else 0
    return total


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", type=pathlib.Path, default=pathlib.Path("target/release/dflop"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/plan-grid"), help="directory of the shapes and links")
    parser.add_argument("--runs", type=int, default=540, help="runs of commands with one encoder, two for each cell of the grid")
    parser.add_argument("--steps", type=int, default=16, help="batches that plans are judged on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="longest time of one run")
    parser.add_argument("--skip", choices=CHECKS, nargs="*", default=[], help="checks whose violations do not fail")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables().items():
        lines = "".join(f"{tiles},{tokens}\n" for tiles, tokens in rows)
        (arguments.out / f"{name}.csv").write_text("tiles,seq_len\n" + lines)
        lines = "".join(f"{tiles},{windows},{tokens}\n" for tiles, windows, tokens in with_audio(rows))
        (arguments.out / f"{name}.several.csv").write_text("vision_tiles,audio_tiles,seq_len\n" + lines)
    (arguments.out / "links.json").write_text(json.dumps(LINKS))
    chosen = cells(-(-arguments.runs // 2))
    started, answers = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for answer in pool.map(lambda cell: judge(cell, arguments), chosen):
            answers.append(answer)
            if len(answers) % 20 == 0:
                print(f"{len(answers)} of {len(chosen)} cells, {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"{2 * len(answers)} runs, {time.monotonic() - started:.0f} s")
    of_one = [answer for answer in answers if answer.cell.model != SEVERAL_ENCODERS]
    print_table("all with one encoder", of_one)
    for space, words in SPACES.items():
        title = f"{space} ({' '.join(words)})" if words else space
        print_table(title, [answer for answer in of_one if answer.cell.space == space])
    print_table("several encoders", [answer for answer in answers if answer.cell.model == SEVERAL_ENCODERS])
    return 1 if print_violations(answers, arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
