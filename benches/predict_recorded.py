"""Predicts recorded microbatches of a trainer from the profile of its model alone.

    python3 benches/predict_recorded.py --model qwen2.5-vl-7b --vision FILE.csv --llm FILE.csv \\
        --microbatches FILE.jsonl --samples samples.json [--json]

Needs the Python package. `--vision` and `--llm` are profiles that `dflop.torch.profile` wrote. A line of `--microbatches` has
the `keys` of its samples, its `tokens`, `patches` and `images`; `--samples` has tokens and patches by key. With `--json`
prints `{"predicted_ms": [...]}`, a number for each line. Otherwise, where lines have measured times (`fwd` and `bwd`, in
milliseconds), the `set` of their cut and their `rank`, prints errors, and the speed-up of every cut over the first one as
predicted and as measured.
"""

import argparse
import collections
import json
import pathlib
import shutil
import statistics
import tempfile

import dflop

NS_PER_MS = 1e6


def cost_model(name, vision, llm):
    """Returns the cost model of a profile in two files."""
    with tempfile.TemporaryDirectory() as directory:
        for file in (vision, llm):
            # by role, as both may have one name
            role = "vision" if file is vision else "llm"
            shutil.copy(file, pathlib.Path(directory) / f"{role}.csv")
        return dflop.CostModel(name, profile=directory)


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


def main():
    """Reads the arguments and prints the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vision", required=True, type=pathlib.Path)
    parser.add_argument("--llm", required=True, type=pathlib.Path)
    parser.add_argument("--microbatches", required=True, type=pathlib.Path)
    parser.add_argument("--samples", required=True, type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = cost_model(args.model, args.vision, args.llm)
    lines = [json.loads(line) for line in args.microbatches.read_text().splitlines()]
    samples = json.loads(args.samples.read_text())
    predicted = [predicted_ms(model, line, samples) for line in lines]
    if args.json:
        print(json.dumps({"predicted_ms": predicted}))
    else:
        report(model, lines, predicted)


if __name__ == "__main__":
    main()
