"""Runs twelve plans on the CPU executor and compares measured steps with simulated ones.

    cargo build --profile dist -p dflop-cli
    python3 benches/wall_time.py [--runs 5] [--steps 12] [--plans 1,2,3] [--quiet 600] [--json FILE]

The simulator predicts from profiles that `dflop profile` measures in processes of its own, before every turn of
all plans; nothing that a run measures changes a prediction. A profile is measured while every other core runs the
same work, as the ranks of a step do. The first four steps of every run are left out. Differences are over simulated
time:

- *replayed*: the actions that the ranks recorded, in their order and with their messages, each pass with the CPU
  time that its thread took. This needs no core per rank. The program replays the traces itself and ends if `dflop`
  finds another time.
- *wall, passes*: from start to end of the action list of the slowest rank; of plans with two ranks of one thread.
- *wall, step*: from the end of a step to the end of the next one: also reading, sums of gradients and the update of
  the weights, for which the simulator has no time.

`--quiet` waits up to so many seconds before every run until other processes take less than 5 % of the machine.
Exits with 1 if a median differs by more than 8 %.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

BOUND = 0.08
#: First steps of a run that are left out: they allocate buffers for microbatches of all sizes.
WARM_UP = 4
#: Share of the machine that other processes may take in a quiet run.
QUIET = 0.05

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {
    "model_type": "internvl_vision",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": [32, 32],
    "patch_size": [4, 4],
    "num_channels": 3,
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "layer_scale_init_value": 0.1,
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
    "use_mean_pooling": True,
    "use_qk_norm": False,
}
IMAGES = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "image_seq_length": 16,
    "image_token_id": 72,
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "vision_config": VISION,
    "text_config": {**TEXT, "num_hidden_layers": 4},
}
PREPROCESSOR = {"max_patches": 23, "min_patches": 1, "crop_to_patches": True, "size": {"height": 32, "width": 32}}
MODELS = {"text": TEXT, "images": IMAGES}


def joint(vision, llm, dp=1):
    """Returns the tables of a joint plan from the layers of its stages."""
    parallel = {"placement": "joint", "schedule": "1f1b", "vision": {"layers": vision}, "llm": {"layers": llm, "dp": dp}}
    return {"parallel": parallel}


#: Name, model, tables of the configuration.
PLANS = [
    ("1f1b, encoder + LLM", "images", {"parallel": {"schedule": "1f1b", "vision": {}, "llm": {}}}),
    ("1f1b, PP 2", "text", {"parallel": {"schedule": "1f1b", "llm": {"stages": 2}}}),
    ("DP 2", "text", {"parallel": {"schedule": "1f1b", "llm": {"dp": 2}}}),
    ("gpipe, PP 3, DP 2", "text", {"parallel": {"schedule": "gpipe", "llm": {"layers": [3, 2, 1], "dp": 2}}}),
    ("interleaved:2, PP 2, DP 2", "text", {"parallel": {"schedule": "interleaved:2", "llm": {"stages": 4, "dp": 2}}}),
    ("zb-h1, PP 2", "text", {"parallel": {"schedule": "zb-h1", "llm": {"stages": 2}}}),
    ("1f1b-ahead:1, encoder + LLM", "images", {"parallel": {"schedule": "1f1b-ahead:1", "vision": {}, "llm": {}}}),
    (
        "1f1b, encoder DP 3 + LLM PP 2, DP 2, recomputed",
        "images",
        {
            "model": {"recompute_layers": True},
            "parallel": {"schedule": "1f1b", "vision": {"dp": 3}, "llm": {"stages": 2, "dp": 2}},
        },
    ),
    ("1f1b, joint PP 2", "images", joint([3, 0], [1, 3])),
    ("1f1b, joint DP 2", "images", joint([3], [4], dp=2)),
    ("1f1b, joint PP 3, DP 2", "images", joint([3, 0, 0], [0, 2, 2], dp=2)),
    (
        "1f1b, colocated, encoder DP 2 + LLM PP 2",
        "images",
        {"parallel": {"placement": "colocated", "schedule": "1f1b", "vision": {"dp": 2}, "llm": {"stages": 2}}},
    ),
]


def toml(value):
    """Formats a value as inline TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)


def configuration(model, profile, tables):
    """Returns the configuration of a plan."""
    image_fraction, batch = (0.0, 128) if model == "text" else (0.15, 64)
    all_tables = {
        "model": {"config": MODELS[model], "preprocessor": PREPROCESSOR},
        "data": {"global_batch_size": batch, "generate": {"samples": 2048, "seed": 1, "image_fraction": image_fraction}},
        "parallel": {"microbatches": 8, "threads": 1, "profile": str(profile)},
        "optimizer": {"learning_rate": 1e-3},
        "correction": {"enabled": False},
    }
    for name, table in tables.items():
        all_tables[name] = {**all_tables[name], **table}
    if all_tables["parallel"]["llm"].get("dp", 1) > 1:
        all_tables["parallel"]["microbatches"] = 4
    lines = ["steps = 1000"]
    for name, table in all_tables.items():
        lines += [f"[{name}]", *(f"{field} = {toml(value)}" for field, value in table.items())]
    return "\n".join(lines) + "\n"


def replay(events):
    """Returns the longest path through the recorded actions of each step in seconds, by CPU times of passes."""
    steps = {}
    for event in events:
        if event["ph"] == "X" and event["tid"] == 0:
            steps.setdefault(event["args"]["step"], {}).setdefault(event["pid"], []).append(event)
    makespans = {}
    for step, lists in steps.items():
        names, left = messages(lists), {}
        ended, at, passes = dict.fromkeys(lists, 0), dict.fromkeys(lists, 0), {}
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, actions in lists.items():
                while at[rank] < len(actions):
                    action = actions[at[rank]]
                    message = names.get((rank, at[rank]))
                    if action["name"].startswith("recv") and message not in left:
                        break
                    part = (action["args"]["microbatch"], action["args"]["stage"])
                    if action["name"].startswith("send"):
                        # Rows leave at the end of their pass, wherever the list has the send.
                        left[message] = passes[part, "backward" if "gradient" in action["name"] else "forward"]
                    elif message:
                        ended[rank] = max(ended[rank], left[message])
                    elif action["cat"] in ("forward", "backward"):
                        # Sums of gradients overlap with passes; the simulation has no time for them either.
                        ended[rank] += action["args"]["cpu_ns"]
                        # Rows leave with the gradient of the input, before that of the weights.
                        if "weight" not in action["name"]:
                            passes[part, action["cat"]] = ended[rank]
                    at[rank] += 1
                    is_moving = True
        if any(at[rank] < len(actions) for rank, actions in lists.items()):
            sys.exit(f"step {step}: the recorded actions do not complete")
        makespans[step] = max(ended.values()) / 1e9
    return makespans


def messages(lists):
    """Names both ends of every message alike, by rank and position in its list.

    An end knows its own stage and microbatch and the rank of its peer. Sorted by them, the messages that one rank
    sends to another are in the order of those that the other receives.
    """
    ends = {}
    for rank, actions in lists.items():
        for place, action in enumerate(actions):
            found = re.fullmatch(r"(send|recv)( gradient)? (\d+) in stage (\d+) (?:to|from) (\d+)", action["name"])
            if found:
                is_send, gradient, peer = found[1] == "send", bool(found[2]), int(found[5])
                pair = (rank, peer) if is_send else (peer, rank)
                ends.setdefault((pair, gradient, is_send), []).append((int(found[3]), int(found[4]), rank, place))
    names = {}
    for (pair, gradient, _), own in ends.items():
        for number, (_, _, rank, place) in enumerate(sorted(own)):
            names[rank, place] = (pair, gradient, number)
    return names


def machine_seconds():
    """Returns the CPU seconds of the whole machine since its start, by all processes."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def others_share(work):
    """Runs work; returns its result, and the share of the machine that other processes took meanwhile."""
    start, all_start, own_start = time.monotonic(), machine_seconds(), os.times()
    result = work()
    own = os.times()
    own_seconds = sum(own[:4]) - sum(own_start[:4])
    elapsed = (time.monotonic() - start) * (os.cpu_count() or 1)
    return result, max(0.0, (machine_seconds() - all_start - own_seconds) / elapsed)


def wait_until_quiet(seconds):
    """Waits until other processes leave the machine alone; gives up after some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and others_share(lambda: time.sleep(2))[1] > QUIET:
        pass


def call(command):
    """Runs a command and returns its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def measure(arguments, config, trace):
    """Returns the seconds of one run after its first steps: simulated, replayed, pipeline and wall."""
    command = [arguments.dflop, "train", config, "--steps", arguments.steps, "--trace", trace, "--json"]
    output, others = others_share(lambda: call(list(map(str, command))))
    steps = [json.loads(line) for line in output.splitlines()]
    makespans = replay(json.loads(trace.read_text()))
    for step in steps:
        own = makespans[step["step"]]
        if abs(own - step["replayed_seconds"]) > 1e-6 * own:
            sys.exit(f"{config.name}: dflop replayed {step['replayed_seconds']} s, the trace gives {own} s")
    fields = ("predicted_seconds", "replayed_seconds", "pipeline_seconds", "seconds")
    return {**{field: sum(step[field] for step in steps[WARM_UP:]) for field in fields}, "others": others}


def spread(values):
    """Formats minimum, median and maximum of differences."""
    return "  ".join(f"{100 * value:+6.1f}" for value in (min(values), statistics.median(values), max(values)))


def report(name, ranks, runs):
    """Prints the differences of one plan; returns whether their medians are within the bound."""
    rows = [("replayed", "replayed_seconds")]
    if ranks == 2:
        rows += [("wall, passes", "pipeline_seconds"), ("wall, step", "seconds")]
    is_good = True
    for label, field in rows:
        differences = [run[field] / run["predicted_seconds"] - 1 for run in runs]
        is_within = abs(statistics.median(differences)) <= BOUND
        is_good &= is_within
        print(f"{name:<48} {ranks:>5}  {label:<13} {spread(differences)}  {'met' if is_within else 'MISSED'}", flush=True)
    return is_good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dflop", default="target/dist/dflop", type=pathlib.Path)
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--plans", help="numbers of plans, such as 1,2,3 [default: all]")
    parser.add_argument("--directory", type=pathlib.Path, help="keeps profiles and configurations here")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.dflop = arguments.dflop.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.directory or pathlib.Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        sys.exit(0 if compare(arguments, directory) else 1)


def measure_profile(arguments, model):
    """Measures the profile of a model while every other core runs the same, as the ranks of a step do.

    Cores share caches, memory and a power limit, so one that computes alone is faster than all of them together.
    """
    def command(out):
        limits = ["--set", "plan.tokens_max=4096", "--seconds-max", str(arguments.profile_seconds)]
        return list(map(str, [arguments.dflop, "profile", "--model", model, "--out", out, *limits]))

    is_over = threading.Event()
    with tempfile.TemporaryDirectory() as scratch:
        cores = range(1, os.cpu_count() or 1)
        neighbors = [threading.Thread(target=repeat, args=(command(f"{scratch}/{core}"), is_over)) for core in cores]
        for neighbor in neighbors:
            neighbor.start()
        try:
            return call(command(model / "profile"))
        finally:
            is_over.set()
            for neighbor in neighbors:
                neighbor.join()


def repeat(command, is_over):
    """Runs a command again and again until an event."""
    while not is_over.is_set():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if is_over.wait(0.2):
                process.terminate()
                process.wait()


def profile_all(arguments, directory):
    """Measures the profiles of all models."""
    for name, config in MODELS.items():
        model = directory / name
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        (model / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        wait_until_quiet(arguments.quiet)
        output, others = others_share(lambda model=model: measure_profile(arguments, model))
        print(f"profile of {name}: {output.splitlines()[1]}, others {100 * others:.0f} %", flush=True)


def compare(arguments, directory):
    """Measures all plans in turn, and profiles before every turn; returns whether all are within the bound."""
    chosen = [int(number) - 1 for number in arguments.plans.split(",")] if arguments.plans else range(len(PLANS))
    runs = {number: [] for number in chosen}
    for turn in range(arguments.runs):
        profile_all(arguments, directory)
        for number in chosen if turn % 2 == 0 else list(chosen)[::-1]:
            _, model, tables = PLANS[number]
            config = directory / f"plan-{number + 1}.toml"
            config.write_text(configuration(model, directory / model / "profile", tables))
            wait_until_quiet(arguments.quiet)
            runs[number].append(measure(arguments, config, directory / "trace.json"))
            one = runs[number][-1]
            figures = " ".join(f"{field} {one[field]:.4f}" for field in list(one)[:4])
            load = os.getloadavg()[0]
            print(f"plan {number + 1} run {turn}: {figures} others {100 * one['others']:.0f} % load {load:.1f}", flush=True)
    print(f"\n{'plan':<48} {'ranks':>5}  {'over simulated':<13} {'min %':>6}  {'median':>6}  {'max':>6}")
    are_good = [report(PLANS[number][0], ranks_of(PLANS[number][2]["parallel"]), runs[number]) for number in chosen]
    if arguments.json:
        arguments.json.write_text(json.dumps({PLANS[number][0]: runs[number] for number in chosen}, indent=1) + "\n")
    return all(are_good)


def ranks_of(parallel):
    """Returns the number of ranks of a plan."""
    chunks = int(parallel["schedule"].partition(":")[2] or 1)
    # Encoders that are not on ranks of their own are on those of the LLM.
    names = ("llm",) if "placement" in parallel else ("vision", "llm")
    modules = [parallel[name] for name in names if name in parallel]
    stages = [len(table.get("layers", ())) or table.get("stages", 1) for table in modules]
    return sum(count * table.get("dp", 1) for count, table in zip(stages, modules, strict=True)) // chunks


if __name__ == "__main__":
    main()
