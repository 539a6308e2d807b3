"""Predicts recorded microbatches of a trainer from the profile of its model alone.

    python3 benches/predict_recorded.py --model qwen2.5-vl-7b --vision FILE.csv --llm FILE.csv \\
        --microbatches FILE.jsonl --samples samples.json [--json]

Needs the Python package. `--vision` and `--llm` are profiles that `dflop.torch.profile` wrote. A line of `--microbatches` has
the `keys` of its samples, its `tokens`, `patches` and `images`; `--samples` has tokens and patches by key. With `--json`
prints `{"predicted_ms": [...]}`, a number for each line. Otherwise, where lines have measured times (`fwd` and `bwd`, in
milliseconds), the `set` of their cut and their `rank`, prints errors, and the speed-up of every cut over the first one as
predicted and as measured.

`--cut` lets the balancer cut the samples of the first recorded step into as many microbatches, times that cut and every
recorded one at the stated rates `--patch-us` and `--token-us`, which know no profile, and exits with status 1 if a recorded
one is more than 1 % faster.
"""

import argparse
import collections
import json
import pathlib
import shutil
import statistics
import sys
import tempfile

import dflop

NS_PER_MS = 1e6
# how much slower than the best recorded cut the one of the balancer may be
SLOWER_MAX = 0.01


def cost_model(name, vision, llm):
    """Returns the cost model of a profile in two files."""
    with tempfile.TemporaryDirectory() as directory:
        for file in (vision, llm):
            # by role, as both may have one name
            role = "vision" if file is vision else "llm"
            shutil.copy(file, pathlib.Path(directory) / f"{role}.csv")
        return dflop.CostModel(name, device=directory)


def predicted_ms(model, line, samples):
    """Returns the milliseconds of a microbatch, forward and backward."""
    images = max(line["images"], 1)
    # the sizes of single images are not recorded
    patches = [round(line["patches"] / images)] * images if line["patches"] else []
    tokens = [samples[key][0] for key in line["keys"]]
    # what a sample gets besides, such as the ends of a turn
    tokens[0] = max(1, tokens[0] + line["tokens"] - sum(tokens))
    times = model.microbatch_time("vision", patches), model.microbatch_time("llm", tokens)
    return sum(times) / NS_PER_MS


def steps(lines, times):
    """Returns the time of the slowest rank of every cut."""
    ranks = collections.defaultdict(float)
    for line, time in zip(lines, times, strict=True):
        ranks[line["set"], line["rank"]] += time
    slowest = {}
    for (cut, _), time in ranks.items():
        slowest[cut] = max(slowest.get(cut, 0), time)
    return slowest


def report(model, lines, predicted):
    """Prints errors, the floor, and speed-ups."""
    for module, (tokens, seconds) in model.launch_limits.items():
        print(f"{module}: limited by launches below {tokens} tokens a microbatch ({1e3 * seconds:.0f} ms)")
    floor = sum(seconds for _, seconds in model.launch_limits.values())
    print(f"no microbatch is predicted below {1e3 * floor:.0f} ms")
    if any("fwd" not in line for line in lines):
        return
    measured = [line["fwd"] + line["bwd"] for line in lines]
    errors = sorted(abs(ours / theirs - 1) for ours, theirs in zip(predicted, measured, strict=True))
    p95 = errors[min(len(errors) - 1, round(0.95 * len(errors)))]
    print(f"{len(lines)} microbatches: error {statistics.median(errors):.1%} (median), {p95:.1%} (p95)")
    ours, theirs = steps(lines, predicted), steps(lines, measured)
    first = next(iter(theirs))
    print(f"{'cut':10} {'measured ms':>11} {'speed-up':>9} {'promised':>9} {'ratio':>6}")
    for cut in theirs:
        speedup, promised = theirs[first] / theirs[cut], ours[first] / ours[cut]
        print(f"{cut:10} {theirs[cut]:11.0f} {speedup:9.3f} {promised:9.3f} {promised / speedup:6.3f}")


def first_step(lines):
    """Returns the lines of the first step, by cut: those before a microbatch of a rank occurs again."""
    cuts = collections.defaultdict(dict)
    for line in lines:
        if line.get("step") == lines[0].get("step"):
            cuts[line["set"]].setdefault((line["rank"], line["mb"]), line)
    keys = {cut: sorted(key for line in step.values() for key in line["keys"]) for cut, step in cuts.items()}
    first = next(iter(keys))
    for cut, of_cut in keys.items():
        if of_cut != keys[first]:
            raise SystemExit(f"predict_recorded.py: cut `{cut}` has other samples than `{first}` in the first step")
    return cuts


def cuts_us(lines, samples, patch_us, token_us):
    """Returns the microseconds of every rank, by cut: of the recorded ones and of the balancer's."""

    def time(key):
        tokens, patches = samples[key]
        return patches * patch_us + tokens * token_us

    found = {}
    steps = first_step(lines)
    for cut, step in steps.items():
        ranks = collections.defaultdict(float)
        for (rank, _), line in step.items():
            ranks[rank] += sum(map(time, line["keys"]))
        found[cut] = list(ranks.values())
    first = next(iter(steps.values()))
    keys = [key for line in first.values() for key in line["keys"]]
    instance = {"n": len(keys), "m": len(first), "c": 1, "d": [[round(1e3 * time(key))] for key in keys]}
    ranks = dflop.balance(instance, dp=len({rank for rank, _ in first}), stages=[1])["ranks"]
    found["dflop"] = [sum(time(keys[item]) for microbatch in rank for item in microbatch) for rank in ranks]
    return found


def report_cuts(found):
    """Prints the slowest rank and the idle share of every cut; returns whether none beats the balancer's by much."""
    best = min(max(ranks) for cut, ranks in found.items() if cut != "dflop")
    print(f"{'cut':10} {'step ms':>9} {'over best recorded':>19} {'idle':>6}")
    for cut, ranks in found.items():
        idle = 1 - statistics.mean(ranks) / max(ranks)
        print(f"{cut:10} {max(ranks) / 1e3:9.1f} {max(ranks) / best - 1:19.2%} {idle:6.1%}")
    return max(found["dflop"]) <= (1 + SLOWER_MAX) * best


def main():
    """Reads the arguments and prints the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vision", required=True, type=pathlib.Path)
    parser.add_argument("--llm", required=True, type=pathlib.Path)
    parser.add_argument("--microbatches", required=True, type=pathlib.Path)
    parser.add_argument("--samples", required=True, type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cut", action="store_true", help="compare the balancer's cut with the recorded ones")
    parser.add_argument("--patch-us", type=float, default=28.1, help="microseconds of a patch, for --cut")
    parser.add_argument("--token-us", type=float, default=125.5, help="microseconds of a token, for --cut")
    args = parser.parse_args()
    if args.json and args.cut:
        parser.error("`--cut` prints a table: leave out `--json`")
    model = cost_model(args.model, args.vision, args.llm)
    lines = [json.loads(line) for line in args.microbatches.read_text().splitlines()]
    samples = json.loads(args.samples.read_text())
    predicted = [predicted_ms(model, line, samples) for line in lines]
    if args.json:
        print(json.dumps({"predicted_ms": predicted}))
    else:
        report(model, lines, predicted)
    if args.cut and not report_cuts(cuts_us(lines, samples, args.patch_us, args.token_us)):
        sys.exit(f"predict_recorded.py: a recorded cut is more than {SLOWER_MAX:.0%} faster than the balancer's")


if __name__ == "__main__":
    main()
