"""Plans random problems, and checks what `plan` and `simulate --shapes` promise.

    python3 tests/python/plan_random.py --dflop target/release/dflop --cases 100 --seed 1

Every case has a model, a table of shapes, a cluster and settings, all drawn from `--seed` and the number of the case; a case
is the same for every program with the same models and columns. Checks:

- `clean`: both commands succeed, or both find that no plan fits and need more memory than is usable; none panics
- `equal`: plan and step time of "dflop" are those of `plan`
- `any`: of some cases, the placement `any` is as fast as each placement alone
- `slower`: "dflop" is no slower than any method that fits and whose placement is searched
- `memory`: the memory of a plan is within bounds from published sizes, see `plan_memory.py`, and below the limit
- `equal samples`: where samples are alike, "dflop" is no slower than "data-blind", the same plan without balance

`--explicit` states placement and ZeRO stage 1 in all cases, and shares tiles, or samples in native resolution, so that programs
with other defaults solve the same problems. Programs without `space.encoder_share=medium` share these by default.

Prints violations with command lines, and CPU time; writes `summary.json` into `--out`; exits with 1 if there is a violation.
Needs no packages.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
import time

import plan_memory
from plan_grid import OURS, SLOWER, Run, degrees, run, whole

CHECKS = ["clean", "equal", "any", "slower", "memory", "equal samples"]
# Largest relative difference of step times that are the same, of two commands and of two searches.
EQUAL = 1e-6
AS_FAST = 1e-9
# Largest factor between the memory of a plan and the greatest bound on it.
MEMORY_MOST = 1.1
PLACEMENTS = ["disaggregated", "colocated", "joint"]
# Shares of the kinds of models.
KINDS = {"tiles": 0.3, "native": 0.3, "audio": 0.1, "two encoders": 0.13, "experts": 0.17}
GPUS = [8, 8, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128, 256]
MANY_GPUS = [512, 1024, 2048, 4096]
FAMILIES = ["heavy tail", "equal", "bimodal", "text mixed", "many media", "long audio"]
# Units of a medium of size 1, and tokens of a unit in the language model.
UNITS = {"tiles": (1, 256), "patches": (1024, 0.25), "tokens": (250, 1), "windows": (1, 750)}
NO_PLAN = re.compile(r"needs at least ([\d.]+) GiB per GPU.* but of ([\d.]+) GiB only ([\d.]+) are usable")
# Reasons without memory.
NO_DEGREES = re.compile(r"no tensor-parallel degree of|are too few for separate modules")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that can be planned."""

    name: str
    kind: str
    # Encoders by name, and the columns that count their media.
    encoders: dict[str, str]
    # Parameters by module, the language model last.
    counted: list[int]

    def unit(self, encoder: str) -> str:
        """Returns a key of `UNITS`."""
        unit = self.encoders[encoder].rpartition("_")[2]
        return "windows" if (unit, encoder) == ("tiles", "audio") else unit

    def prefix(self, encoder: str) -> str:
        return f"{encoder}_" if len(self.encoders) > 1 else ""


def models(dflop: pathlib.Path, out: pathlib.Path) -> dict[str, list[Model]]:
    """Lists the presets that can be planned, by kind; the error for a table without columns names the columns."""
    found = collections.defaultdict(list)
    empty = out / "empty.csv"
    empty.write_text("none\n1\n")
    families = run([str(dflop), "models", "--json"], 60).answer["families"]
    names = [name for family in families if "plan" in family["levels"] for name in family["presets"]]
    for name in sorted(set(names) - {"tiny"}):
        about = run([str(dflop), "models", "--model", name, "--json"], 60).answer
        refused = run([str(dflop), "plan", "--model", name, "--gpus", "8", "--global-batch-size", "8", "--shapes", str(empty)], 60)
        columns = re.search(r"columns `([a-z_,]+),seq_len", refused.message)[1].split(",")
        modules = [module["module"] for module in about["modules"]]
        encoders = dict(zip(modules[:-1], columns, strict=True))
        if about["active_parameters"] < about["parameters"]:
            kind = "experts"
        elif len(encoders) > 1:
            kind = "two encoders"
        elif "audio" in encoders:
            kind = "audio"
        else:
            kind = "native" if columns == ["patches"] else "tiles"
        found[kind].append(Model(name, kind, encoders, [module["parameters"] for module in about["modules"]]))
    return dict(found)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Units and media by encoder, and tokens."""

    media: dict[str, tuple[int, int]]
    tokens: int


def media_sizes(rng: random.Random, family: str, encoder: str) -> list[float]:
    """Draws the sizes of the media of a sample, in tiles or windows."""
    if family == "equal":
        return [4]
    if family == "long audio" and encoder == "audio":
        return [min(120, rng.lognormvariate(2.2, 0.8))]
    if encoder == "audio" and rng.random() < 0.4:
        return []
    match family:
        case "bimodal":
            return [1 if rng.random() < 0.88 else 32]
        case "text mixed":
            return [rng.uniform(1, 6)] if rng.random() < 0.4 else []
        case "many media":
            return [rng.uniform(0.5, 2) for _ in range(min(48, int(rng.paretovariate(0.8))))]
        case "long audio":
            return [1] if rng.random() < 0.5 else []
    return [min(60, rng.paretovariate(1.1))]


def sample(rng: random.Random, family: str, model: Model) -> Sample:
    text = 200
    if family != "equal":
        text = 16 + whole(rng.lognormvariate(6.5, 1.1) if family == "text mixed" else rng.lognormvariate(5, 0.9), 16_000)
    media, tokens = {}, float(text)
    for encoder in model.encoders:
        scale, tokens_per_unit = UNITS[model.unit(encoder)]
        step = 4 if scale > 1 else 1
        units = [max(step, round(size * scale / step) * step) for size in media_sizes(rng, family, encoder)]
        media[encoder] = (sum(units), len(units))
        tokens += sum(units) * tokens_per_unit
    return Sample(media, round(tokens))


def table(model: Model, samples: list[Sample], has_media: bool) -> str:
    """Returns the CSV file."""
    header, rows = [], [[] for _ in samples]

    def add(name: str, values: list[int]) -> None:
        header.append(name)
        for row, value in zip(rows, values):
            row.append(str(value))

    for encoder, column in model.encoders.items():
        found = [sample.media[encoder] for sample in samples]
        add(column, [units for units, _ in found])
        if has_media:
            add(f"{model.prefix(encoder)}media", [media for _, media in found])
        if has_media and model.unit(encoder) == "patches":
            add(f"{model.prefix(encoder)}patch_squares", [max(units, units**2 // max(1, media)) for units, media in found])
    add("seq_len", [sample.tokens for sample in samples])
    return "\n".join([",".join(header), *map(",".join, rows)]) + "\n"


@dataclasses.dataclass
class Case:
    """One problem."""

    number: int
    model: Model
    family: str
    samples: list[Sample]
    has_media: bool
    gpus: int
    batch: int
    batches: int
    flags: dict[str, str]
    links: dict | None
    settings: dict[str, str]
    # Whether each placement is planned alone as well.
    is_divided: bool

    def command(self, arguments: argparse.Namespace, name: str, **settings: str) -> list[str]:
        """Returns the command line of `plan` or `simulate`, with some settings replaced."""
        words = [str(arguments.dflop), name, "--model", self.model.name, "--shapes", str(self.file(arguments, "csv"))]
        words += ["--gpus", str(self.gpus), "--global-batch-size", str(self.batch), "--json"]
        words += ["--batches" if name == "plan" else "--steps", str(self.batches)]
        words += [word for flag in self.flags.items() for word in flag]
        words += ["--links", str(self.file(arguments, "json"))] if self.links else []
        settings = self.settings | {f"space.{key}": value for key, value in settings.items()}
        return words + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def file(self, arguments: argparse.Namespace, ending: str) -> pathlib.Path:
        return arguments.out / f"{arguments.seed}-{self.number}.{ending}"

    def write(self, arguments: argparse.Namespace) -> None:
        self.file(arguments, "csv").write_text(table(self.model, self.samples, self.has_media))
        if self.links:
            self.file(arguments, "json").write_text(json.dumps(self.links))

    def units(self, encoder: str) -> list[int]:
        return [sample.media[encoder][0] for sample in self.samples]


def draw_settings(rng: random.Random, model: Model, arguments: argparse.Namespace) -> dict[str, str]:
    """Draws settings; a default is left out, unless settings are explicit."""
    is_native = any(model.unit(encoder) in ("patches", "tokens") for encoder in model.encoders)
    parts = rng.sample(["vision", "audio", "projector", "llm"], 2)
    drawn = {
        "space.kinds": rng.choice([None, None, "basic", "full"]),
        "space.placement": rng.choice([None, None, None, "any", *PLACEMENTS]),
        "space.zero1": rng.choice([None, None, "true", "false"]),
        "space.sequence_parallel": rng.choice([None, None, "true", "false"]),
        "space.encoder_share": rng.choice([None, None, "medium", "sample", "sample" if is_native else "tile"]),
        "plan.schedule": rng.choice([None] * 7 + ["gpipe", "1f1b", "1f1b-ahead:2", "zb-h1"]),
        "cost.freeze": rng.choice([None] * 4 + [",".join(part for part in parts if part in (*model.encoders, "projector", "llm"))]),
    }
    if arguments.explicit:
        drawn["space.placement"] = drawn["space.placement"] or "any"
        drawn["space.zero1"] = drawn["space.zero1"] or "true"
        drawn["space.encoder_share"] = "sample" if is_native else "tile"
    if not arguments.has_medium:
        # `simulate --shapes` of these programs does not accept it.
        drawn["space.encoder_share"] = None
    return {key: value for key, value in drawn.items() if value}


def draw(number: int, known: dict[str, list[Model]], arguments: argparse.Namespace) -> Case:
    rng = random.Random(f"{arguments.seed}-{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    model = rng.choice(known[kind])
    family = rng.choice([family for family in FAMILIES if family != "long audio" or "audio" in model.encoders])
    gpus = rng.choice(GPUS) if rng.random() < 0.88 else rng.choice(MANY_GPUS)
    batch = min(16_384, round(gpus * rng.choice([1, 2, 4, 8, 12]) * rng.choice([1, 1, 1, 0.9])))
    links = {
        "nvlink": {"gigabytes_per_second": rng.choice([150, 240, 360]), "latency_microseconds": 3},
        "infiniband": {"gigabytes_per_second": rng.choice([3, 12.5, 25, 50]), "latency_microseconds": rng.choice([5, 20])},
    }
    return Case(
        number=number, model=model, family=family, gpus=gpus, batch=batch,
        samples=[sample(rng, family, model) for _ in range(rng.choice([300, 1000, 3000]))],
        has_media=family == "many media" or rng.random() < 0.2,
        batches=6 if gpus < 512 else 3,
        flags={
            "--device": rng.choice(["a100", "h100", "h200"]),
            "--memory-gib": str(rng.choice([40, 64, 80, 80, 96, 141, 192])),
            "--gpus-per-node": str(rng.choice([4, 8, 8, 8, 16])),
            "--seed": str(rng.randrange(100)),
        },
        links=links if rng.random() < 0.35 else None,
        settings=draw_settings(rng, model, arguments),
        is_divided=rng.random() < arguments.divided,
    )


@dataclasses.dataclass(frozen=True)
class Violation:
    """A promise that does not hold, and the command lines that show it."""

    check: str
    reason: str
    commands: list[str]


@dataclasses.dataclass
class Answer:
    """What came of a case."""

    case: Case
    commands: dict[str, list[str]]
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    # Checks that were made, those that could not be, and violations.
    made: set[str] = dataclasses.field(default_factory=set)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    violations: list[Violation] = dataclasses.field(default_factory=list)
    # Reported memory over the least bound and over the greatest, by module.
    memory: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    # Methods whose placement is not searched, and that are faster.
    faster_elsewhere: dict[str, float] = dataclasses.field(default_factory=dict)

    def run(self, name: str, seconds: float) -> Run:
        self.runs[name] = run(self.commands[name], seconds)
        return self.runs[name]

    def add(self, check: str, reason: str, *names: str) -> None:
        """Adds a violation that these commands show, by default the first two."""
        commands = [shlex.join(self.commands[name]) for name in names or ("plan", "simulate")]
        self.violations.append(Violation(check, reason, commands))

    def document(self) -> dict:
        """Returns the case for `summary.json`."""
        case, plan = self.case, self.runs["plan"].answer
        return {
            "case": case.number, "model": case.model.name, "kind": case.model.kind, "family": case.family, "gpus": case.gpus,
            "global_batch": case.batch, "flags": case.flags, "links": case.links, "settings": case.settings,
            "step_seconds": plan and plan["step_seconds"], "plan": plan and [plan[key] for key in ("modules", "microbatches", "placement")],
            "methods": {name: [method["step_seconds"], method["fits"]] for name, method in self.methods().items()},
            "cpu_seconds": {name: round(one.cpu_seconds, 3) for name, one in self.runs.items()},
            "made": sorted(self.made), "left_out": self.left_out, "memory_over_least": self.memory,
            "faster_elsewhere": self.faster_elsewhere, "violations": [dataclasses.asdict(one) for one in self.violations],
        }

    def methods(self) -> dict[str, dict]:
        compared = self.runs["simulate"].answer
        return {method["name"]: method for method in compared["strategies"]} if compared else {}


def check_clean(answer: Answer) -> bool:
    """Checks success and messages, and returns whether there are plans to check."""
    answer.made.add("clean")
    for name, one in answer.runs.items():
        if one.failed:
            answer.add("clean", f"{name}: {one.failed}")
        elif one.answer is None and (need := NO_PLAN.search(one.message)):
            needed, _, usable = map(float, need.groups())
            if needed <= usable:
                answer.add("clean", f"{name}: needs {needed} GiB, of which {usable} are usable: {one.message[:300]}")
        elif one.answer is None and not NO_DEGREES.search(one.message):
            answer.add("clean", f"{name}: no known reason: {one.message[:300]}")
    plan, compared = answer.runs["plan"], answer.runs["simulate"]
    if plan.failed or compared.failed:
        return False
    if (plan.answer is None) != (compared.answer is None):
        answer.add("clean", "only one of the commands finds that no plan fits")
    return plan.answer is not None and compared.answer is not None


def check_equal(answer: Answer) -> None:
    answer.made.add("equal")
    plan, ours = answer.runs["plan"].answer, answer.methods()[OURS]
    if not ours["fits"]:
        answer.add("equal", "\"dflop\" does not fit into memory")
    longer = ours["step_seconds"] / plan["step_seconds"] - 1
    if degrees(ours["plan"]) != degrees(plan):
        answer.add("equal", f"the plans differ, and the step of simulate by {longer:+.4%}")
    elif abs(longer) > EQUAL:
        answer.add("equal", f"simulate {ours['step_seconds']:.6f} s, plan {plan['step_seconds']:.6f} s ({longer:+.4%})")


def check_slower(answer: Answer) -> None:
    answer.made.add("slower")
    ours = answer.methods()[OURS]
    default = "any" if "LLM's stages" in answer.runs["plan"].answer["searched"] else PLACEMENTS[0]
    searched = answer.case.settings.get("space.placement", default)
    for name, method in answer.methods().items():
        longer = ours["step_seconds"] / method["step_seconds"]
        if not method["fits"] or longer <= SLOWER:
            continue
        placement = method["plan"]["placement"]
        if searched in ("any", placement):
            answer.add("slower", f"\"dflop\" takes {longer - 1:.2%} longer than \"{name}\" ({placement})")
        else:
            answer.faster_elsewhere[name] = longer


def check_equal_samples(answer: Answer) -> None:
    blind, ours = answer.methods().get("data-blind"), answer.methods()[OURS]
    if not blind or not blind["fits"] or degrees(blind["plan"]) != degrees(ours["plan"]):
        answer.left_out["equal samples"] = "\"data-blind\" does not fit, or has another plan"
        return
    answer.made.add("equal samples")
    longer = ours["step_seconds"] / blind["step_seconds"] - 1
    if longer > EQUAL:
        answer.add("equal samples", f"\"dflop\" takes {longer:.4%} longer than the same plan dealt")


def check_any(answer: Answer, arguments: argparse.Namespace) -> None:
    """Plans each placement alone, and compares with all placements."""
    answer.made.add("any")
    case = answer.case
    for placement in ["any", *PLACEMENTS]:
        answer.commands[placement] = case.command(arguments, "plan", placement=placement)
        one = answer.run(placement, arguments.seconds)
        if one.failed:
            answer.add("clean", f"{placement}: {one.failed}", placement)
    alike = answer.runs["any"].answer
    for placement in PLACEMENTS:
        alone = answer.runs[placement].answer
        if alone and not alike:
            answer.add("any", f"\"{placement}\" has a plan that fits, \"any\" has none", "any", placement)
        elif alone and (longer := alike["step_seconds"] / alone["step_seconds"] - 1) > AS_FAST:
            reason = f"\"any\" ({alike['placement']}) takes {longer:.4%} longer than \"{placement}\""
            answer.add("any", reason, "any", placement)


def check_memory(answer: Answer) -> None:
    """Compares the reported memory with bounds."""
    case, plan = answer.case, answer.runs["plan"].answer
    reported = plan["memory"]
    found = [module["gib"] for module in reported["modules"]]
    usable = reported["limit_gib"] / reported["margin"]
    if max(found) > usable * (1 + EQUAL):
        answer.add("memory", f"{max(found):.2f} GiB are more than the {usable:.2f} GiB that are usable")
    if not plan_memory.is_known(case.model.name, case.model.counted):
        answer.left_out["memory"] = "experts" if case.model.kind == "experts" else "sizes are not in the table"
        return
    units = [case.units(encoder) for encoder in case.model.encoders] + [[sample.tokens for sample in case.samples]]
    zero1 = case.settings.get("space.zero1")
    setup = plan_memory.Setup(
        model=case.model.name,
        loads=[plan_memory.Load.drawn(own, case.batch) for own in units],
        counted=case.model.counted,
        has_zero1=zero1 == "true" if zero1 else "sharded optimizer state" in plan["searched"],
        is_sequence_parallel=case.settings.get("space.sequence_parallel") == "true",
        frozen=case.settings.get("cost.freeze", "").split(","),
        modules=[*case.model.encoders, "llm"],
    )
    bounds = plan_memory.bounds(setup, plan)
    if bounds is None:
        answer.left_out["memory"] = "layers are not those of the table"
        return
    answer.made.add("memory")
    for name, gib, bound in zip(setup.modules, found, bounds, strict=True):
        least, most = bound.least / plan_memory.GIB, MEMORY_MOST * bound.most / plan_memory.GIB
        answer.memory.append((round(gib / least, 4), round(MEMORY_MOST * gib / most, 4)))
        if not least <= gib <= most:
            answer.add("memory", f"{name}: {gib:.3f} GiB are not within {least:.3f} and {most:.3f}")


def judge(case: Case, arguments: argparse.Namespace) -> Answer:
    case.write(arguments)
    answer = Answer(case, {name: case.command(arguments, name) for name in ("plan", "simulate")})
    for name in ("plan", "simulate"):
        answer.run(name, arguments.seconds)
    if check_clean(answer):
        check_equal(answer)
        check_slower(answer)
        check_memory(answer)
        if case.family == "equal":
            check_equal_samples(answer)
    if case.is_divided and not answer.runs["plan"].failed:
        check_any(answer, arguments)
    if not answer.violations:
        case.file(arguments, "csv").unlink()
    return answer


def print_times(answers: list[Answer]) -> None:
    """Prints the CPU time of `plan` by number of GPUs, and by model."""
    keys = {
        "GPUs": lambda case: case.gpus, "kind": lambda case: case.model.kind, "model": lambda case: case.model.name,
        "shapes": lambda case: case.family,
    }
    for title, key in keys.items():
        times = collections.defaultdict(list)
        for answer in answers:
            times[key(answer.case)].append(answer.runs["plan"].cpu_seconds)
        print(f"\n{'CPU s of plan by ' + title:<30} {'cases':>6} {'median':>8} {'most':>8}")
        for name, found in sorted(times.items()):
            print(f"{name:<30} {len(found):>6} {statistics.median(found):>8.2f} {max(found):>8.2f}")


def count(check: str, answers: list[Answer]) -> dict:
    """Counts cases and violations of a check."""
    return {
        "cases": sum(check in answer.made for answer in answers),
        "violated": sum(any(one.check == check for one in answer.violations) for answer in answers),
        "violations": sum(one.check == check for answer in answers for one in answer.violations),
        "left_out": dict(collections.Counter(answer.left_out[check] for answer in answers if check in answer.left_out)),
    }


def print_checks(answers: list[Answer]) -> None:
    """Prints every violation with the command lines."""
    for check in CHECKS:
        counted = count(check, answers)
        reasons = "".join(f", {number} left out ({reason})" for reason, number in counted["left_out"].items())
        print(f"\n{check}: {counted['violations']} violations in {counted['violated']} of {counted['cases']} cases{reasons}")
        for answer, one in ((answer, one) for answer in answers for one in answer.violations if one.check == check):
            print(f"  case {answer.case.number}, {answer.case.model.name}, {answer.case.family}: {one.reason}")
            for command in one.commands:
                print(f"    {command}")
    print()
    for at, bound in enumerate(("least", "greatest")):
        if ratios := [ratio[at] for answer in answers for ratio in answer.memory]:
            print(f"memory over the {bound} bound: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    elsewhere = [ratio for answer in answers for ratio in answer.faster_elsewhere.values()]
    most = f", up to {max(elsewhere):.3f} times as fast" if elsewhere else ""
    print(f"methods with a placement that is not searched and a shorter step: {len(elsewhere)}{most}")


def write_summary(answers: list[Answer], arguments: argparse.Namespace) -> None:
    checks = {check: count(check, answers) for check in CHECKS}
    cases = [answer.document() for answer in answers]
    summary = {"dflop": str(arguments.dflop), "seed": arguments.seed, "explicit": arguments.explicit, "checks": checks, "cases": cases}
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", type=pathlib.Path, default=pathlib.Path("target/release/dflop"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/plan-random"), help="directory of the summary, and of shapes and links")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run; the same cases as without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="longest time of one run")
    parser.add_argument("--divided", type=float, default=0.25, help="share of cases that plan each placement alone")
    parser.add_argument("--gpus-most", type=int, default=4096, help="leaves out cases with more GPUs")
    parser.add_argument("--explicit", action="store_true", help="states what has different defaults in older programs")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = models(arguments.dflop, arguments.out)
    help_text = subprocess.run([arguments.dflop, "plan", "--help"], capture_output=True, text=True, check=True).stdout
    arguments.has_medium = "`medium`" in help_text
    cases = [draw(number, known, arguments) for number in arguments.only or range(arguments.cases)]
    cases = [case for case in cases if case.gpus <= arguments.gpus_most]
    started, answers = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for answer in pool.map(lambda case: judge(case, arguments), cases):
            answers.append(answer)
            if len(answers) % 20 == 0:
                print(f"{len(answers)} of {len(cases)} cases, {time.monotonic() - started:.0f} s", file=sys.stderr)
                write_summary(answers, arguments)
    fitting = sum(answer.runs["plan"].answer is not None for answer in answers)
    print(f"{len(answers)} cases, {fitting} with a plan that fits, {time.monotonic() - started:.0f} s")
    print_times(answers)
    print_checks(answers)
    write_summary(answers, arguments)
    return 1 if any(answer.violations for answer in answers) else 0


if __name__ == "__main__":
    sys.exit(main())
