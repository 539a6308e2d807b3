"""Plans tiny clusters, and compares with the best of all plans and all microbatches.

    python3 tests/python/plan_brute.py --dflop target/release/dflop --cases 60 --seed 1

Every case has a model of a few layers, 2 to 5 GPUs and a global batch of 3 to 6 samples, drawn from `--seed` and the
number of the case. The script writes a profile whose times it knows: layers take time in proportion to tiles and
tokens, attention to squared tokens, the LM head to tokens, and a backward pass twice the forward pass. It then
enumerates all plans and, for each, all assignments of samples to microbatches in order, simulates them by 1F1B as
docs/planning.md describes it, and compares the shortest step with `dflop plan`, for every placement and for all:

- `clean`: the command succeeds
- `slow`: the step time is at most `--slower` above the shortest one
- `fast`: the step time is not below the shortest one, so both have the same costs
- `bound`: the lower bound is not above the shortest step time

With `space.encoder_share=medium`, encoder ranks take whole samples, or with joint placement whole images, the longest
first; with `tile` they divide the tiles. All checks hold for both.
Links are free and memory is never short. Layers of disaggregated and colocated plans are even; with joint placement
the chain is cut anywhere. Prints tables by placement, then each violation with its command line and both plans, and
exits with 1 if there is one. Needs no packages.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import random
import shlex
import sys
import time

from plan_grid import Run, run

PLACEMENTS = ["disaggregated", "joint", "colocated"]
CHECKS = ["clean", "slow", "fast", "bound"]
# Largest relative difference of times that are the same: passes are whole nanoseconds.
EQUAL = 1e-4
# Largest relative difference to the shortest step of a step that the table counts as optimal.
OPTIMAL = 0.001
TILE_PATCHES = 256
TP_DEGREES = [1, 2]
SHARES = ["medium", "tile"]
# Tokens at which the planner tabulates times, so that nothing is interpolated between them.
TOKENS = [part << power for power in range(7) for part in range(16, 32)]
# Time of a backward pass over that of the forward pass.
BACKWARD = 2


def even(whole: int, parts: int) -> tuple[int, ...]:
    """Divides as evenly as possible, the larger parts first."""
    return tuple(whole // parts + (part < whole % parts) for part in range(parts))


@dataclasses.dataclass(frozen=True)
class Sample:
    tiles: int
    # Images that the tiles belong to, as evenly as possible.
    media: int
    tokens: int

    def sizes(self) -> list[int]:
        """Returns the tiles of each image."""
        return list(even(self.tiles, self.media)) if self.media else []


@dataclasses.dataclass(frozen=True)
class Costs:
    """Microseconds of a forward pass on one GPU: of a layer by tile, token and squared token, and of the head."""

    tile: float
    token: float
    square: float
    head: float
    # Speed of a TP group of 2 over that of one GPU.
    pair_speed: float

    def speed(self, tp: int) -> float:
        return self.pair_speed if tp == 2 else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Degrees; encoder and LLM layers by stage, which joint placement cuts alike."""

    placement: str
    encoder_tp: int
    encoder_dp: int
    encoder: tuple[int, ...]
    llm_tp: int
    llm_dp: int
    llm: tuple[int, ...]
    microbatches: int

    def is_coupled(self) -> bool:
        """Whether encoder ranks serve all LLM ranks, which then wait for each other in every slot."""
        return self.placement == "disaggregated" and self.llm_dp > 1 and self.encoder_dp != self.llm_dp

    def text(self) -> str:
        encoder = f"encoder tp {self.encoder_tp}, dp {self.encoder_dp}, layers {list(self.encoder)}"
        llm = f"llm tp {self.llm_tp}, dp {self.llm_dp}, layers {list(self.llm)}"
        return f"{self.placement}, {encoder}; {llm}; {self.microbatches} microbatches"


@dataclasses.dataclass(frozen=True)
class Case:
    number: int
    gpus: int
    encoder_layers: int
    llm_layers: int
    samples: tuple[Sample, ...]
    costs: Costs
    # Value of `space.encoder_share`.
    share: str

    def directory(self, arguments: argparse.Namespace) -> pathlib.Path:
        return arguments.out / str(self.number)

    def command(self, arguments: argparse.Namespace, placement: str) -> list[str]:
        """Returns the command line of `plan`."""
        path = self.directory(arguments)
        words = [arguments.dflop, "plan", "--model", path / "model.json", "--profile", path / "profile.csv"]
        words += ["--shapes", path / "shapes.csv", "--gpus", self.gpus, "--global-batch-size", len(self.samples)]
        words += ["--batches", 1, "--set", f"space.encoder_share={self.share}"]
        return [str(word) for word in [*words, "--set", f"space.placement={placement}", "--json"]]

    def write(self, arguments: argparse.Namespace) -> None:
        """Writes model, profile and shapes."""
        path = self.directory(arguments)
        path.mkdir(parents=True, exist_ok=True)
        tokens = {"rule": "square", "tile_size": 224, "patch_size": 14, "merge_size": 2}
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        vision = sizes | {"num_hidden_layers": self.encoder_layers, "tokens": tokens}
        llm = sizes | {"model_type": "llama", "num_hidden_layers": self.llm_layers, "num_key_value_heads": 2}
        model = {"model_type": "described", "vision": vision, "llm": llm | {"vocab_size": 512}}
        (path / "model.json").write_text(json.dumps(model, indent=1))
        (path / "profile.csv").write_text(profile(self.costs))
        rows = [f"{sample.tiles},{sample.media},{sample.tokens}" for sample in self.samples]
        (path / "shapes.csv").write_text("\n".join(["tiles,media,seq_len", *rows]) + "\n")


def profile(costs: Costs) -> str:
    """Returns a profile with exact times at one and two layers."""
    lines = ["# dflop-profile: 1", "# device: abacus", "module,part,phase,tp,layers,batch,tokens,microseconds"]
    longest = [16 << power for power in range(10)]
    for tp, (phase, factor) in itertools.product(TP_DEGREES, [("forward", 1), ("backward", BACKWARD)]):
        speed = costs.speed(tp) / factor
        for layers in (1, 2):
            runs = [("vision,whole", tiles, TILE_PATCHES, costs.tile * tiles) for tiles in (1, 2, 4, 8, 16, 32, 64)]
            runs += [("llm,linear", 1, tokens, costs.token * tokens) for tokens in longest]
            runs += [("llm,attention", 1, tokens, costs.square * tokens**2) for tokens in TOKENS]
            for part, batch, tokens, layer in runs:
                lines.append(f"{part},{phase},{tp},{layers},{batch},{tokens},{layers * layer / speed:.6f}")
        for tokens in longest:
            lines.append(f"llm,ends,{phase},{tp},0,1,{tokens},{costs.head * tokens / speed:.6f}")
    return "\n".join(lines) + "\n"


def draw(number: int, seed: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    layers = [rng.randint(2, 4), rng.randint(2, 4)]
    family = rng.choice(["alike", "mixed", "one large", "text"])
    samples = []
    for index in range(rng.randint(3, 6)):
        tiles = {"alike": 3, "mixed": rng.randint(1, 12), "one large": 1 + 11 * (index == 0)}.get(family)
        tiles = rng.choice([0, 1, 2, 6]) if tiles is None else tiles
        tiles = max(tiles, int(index == 0))
        samples.append(Sample(tiles, rng.randint(min(tiles, 1), tiles), 256 if family == "alike" else rng.choice(TOKENS)))
    # The encoder takes a tenth to three times as long as the LLM.
    token = rng.uniform(1, 4)
    llm = layers[1] * token * sum(sample.tokens for sample in samples)
    tile = rng.choice([0.1, 0.3, 1, 3]) * rng.uniform(0.8, 1.25) * llm / (layers[0] * sum(sample.tiles for sample in samples))
    costs = Costs(tile, token, rng.choice([1e-6, 2e-4, 2e-3]) * token, rng.choice([0.1, 1]) * token, rng.choice([1.3, 1.7, 1.95]))
    return Case(number, rng.randint(2, 5), *layers, tuple(samples), costs, rng.choice(SHARES))


def plans(case: Case) -> list[Plan]:
    """Lists all plans, in all placements."""
    found = []
    degrees = range(1, case.gpus + 1)
    for tp, stages, dp in itertools.product(TP_DEGREES, degrees, degrees):
        left = case.gpus - tp * stages * dp
        if left < 0:
            continue
        for microbatches in range(1, len(case.samples) // dp + 1):
            llm = (tp, dp, even(case.llm_layers, stages), microbatches)
            is_whole = stages <= case.llm_layers
            for encoder_tp, encoder_stages, encoder_dp in itertools.product(TP_DEGREES, degrees, degrees):
                fits = encoder_stages <= case.encoder_layers and encoder_tp * encoder_stages * encoder_dp <= left
                if is_whole and fits:
                    encoder = even(case.encoder_layers, encoder_stages)
                    found.append(Plan("disaggregated", encoder_tp, encoder_dp, encoder, *llm))
            for encoder_tp in TP_DEGREES:
                if is_whole and (tp * stages * dp) % encoder_tp == 0:
                    ranks = tp * stages * dp // encoder_tp
                    found.append(Plan("colocated", encoder_tp, ranks, (case.encoder_layers,), *llm))
            layers = case.encoder_layers + case.llm_layers
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                ends = [*cuts, layers]
                encoder = [min(end, case.encoder_layers) for end in ends]
                encoder = tuple(end - start for start, end in zip([0, *encoder], encoder))
                chain = tuple(end - start for start, end in zip([0, *ends], ends))
                inside = tuple(of_chain - own for of_chain, own in zip(chain, encoder))
                found.append(Plan("joint", 1, dp * tp, encoder, tp, dp, inside, microbatches))
    return found


@functools.cache
def passes(stages: int, slots: int) -> list[tuple[int, int, bool]]:
    """Lists stage, slot and direction of all passes by 1F1B, each after those that it waits for."""
    queues = []
    for stage in range(stages):
        ahead = min(slots, stages - stage)
        queue = [(slot, True) for slot in range(ahead)]
        for slot in range(slots):
            queue.append((slot, False))
            if slot + ahead < slots:
                queue.append((slot + ahead, True))
        queues.append(collections.deque(queue))
    done, ordered = set(), []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                slot, is_forward = queue[0]
                before = (stage - 1 if is_forward else stage + 1, slot, is_forward)
                if 0 <= before[0] < stages and before not in done:
                    break
                queue.popleft()
                done.add((stage, slot, is_forward))
                ordered.append((stage, slot, is_forward))
    return ordered


def chain_us(stages: list[list[float]]) -> float:
    """Returns the time of one pipeline with these forward times by stage and slot."""
    slots = len(stages[0])
    free = [0.0] * len(stages)
    sent = {}
    for stage, slot, is_forward in passes(len(stages), slots):
        arrival = sent.get((stage - 1 if is_forward else stage + 1, slot, is_forward), 0.0)
        time_us = stages[stage][slot] * (1 if is_forward else BACKWARD)
        free[stage] = max(free[stage], arrival) + time_us
        sent[stage, slot, is_forward] = free[stage]
    return max(free)


def coupled_us(encoder: list[list[float]], ranks: list[list[list[float]]]) -> float:
    """Returns the time of a step whose encoder serves all LLM ranks.

    - `encoder`: forward times by stage and slot
    - `ranks`: forward times by LLM rank, stage and slot
    """
    first, slots = len(encoder), len(encoder[0])
    stages = first + len(ranks[0])
    lanes = range(len(ranks))
    free = [[0.0] * (1 if stage < first else len(ranks)) for stage in range(stages)]
    sent = {}
    for stage, slot, is_forward in passes(stages, slots):
        arrivals = sent.get((stage - 1 if is_forward else stage + 1, slot, is_forward), [0.0])
        factor = 1 if is_forward else BACKWARD
        if stage < first:
            # Outputs and gradients of a slot are those of all ranks.
            times, arrivals = [encoder[stage][slot]], [max(arrivals)]
        else:
            times = [ranks[lane][stage - first][slot] for lane in lanes]
            arrivals = arrivals * len(ranks) if len(arrivals) == 1 else arrivals
        free[stage] = [max(one, other) + factor * own for one, other, own in zip(free[stage], arrivals, times)]
        sent[stage, slot, is_forward] = free[stage]
    return max(map(max, free))


def cells_of(samples: int, ranks: int, slots: int):
    """Yields all assignments of samples to the microbatches of equal ranks, as sets of bits by rank and slot.

    No microbatch is empty. Ranks that change places are the same assignment.
    """
    for cells in itertools.product(range(ranks * slots), repeat=samples):
        if len(set(cells)) == ranks * slots:
            masks = [0] * (ranks * slots)
            for sample, cell in enumerate(cells):
                masks[cell] |= 1 << sample
            of_ranks = [tuple(masks[rank * slots:(rank + 1) * slots]) for rank in range(ranks)]
            if all(one < other for one, other in zip(of_ranks, of_ranks[1:])):
                yield tuple(of_ranks)


class Loads:
    """Times of sets of samples, which are bits."""

    def __init__(self, case: Case):
        self.case = case
        self.subsets = range(1 << len(case.samples))
        self.layer, self.head = [], []
        for mask in self.subsets:
            tokens = [sample.tokens for sample in self.samples(mask)]
            squares = sum(token**2 for token in tokens)
            self.layer.append(case.costs.token * sum(tokens) + case.costs.square * squares)
            self.head.append(case.costs.head * sum(tokens))
        self.largest = functools.cache(self.largest_share)

    def samples(self, mask: int) -> list[Sample]:
        return [sample for at, sample in enumerate(self.case.samples) if mask >> at & 1]

    def largest_share(self, mask: int, ranks: int, is_by_medium: bool) -> int:
        """Returns the most tiles of a rank: tiles divided, or whole images or samples, the longest first."""
        samples = self.samples(mask)
        tiles = sum(sample.tiles for sample in samples)
        if self.case.share == "tile":
            return -(-tiles // ranks)
        wholes = [[sample.tiles] for sample in samples]
        if is_by_medium:
            wholes = [sample.sizes() for sample in samples]
        shares = [0] * ranks
        for whole in sorted(itertools.chain(*wholes), reverse=True):
            shares[shares.index(min(shares))] += whole
        return max(shares)

    def encoder(self, plan: Plan, layers: int, mask: int, ranks: int) -> float:
        """Returns the forward time of encoder layers whose samples these ranks share."""
        tiles = self.largest(mask, ranks, plan.placement == "joint")
        return layers * tiles * self.case.costs.tile / self.case.costs.speed(plan.encoder_tp)

    def llm(self, plan: Plan, stage: int, mask: int) -> float:
        """Returns the forward time of an LLM stage; the last one has the head."""
        is_last = plan.llm[stage] and not any(plan.llm[stage + 1:])
        time_us = plan.llm[stage] * self.layer[mask] + (self.head[mask] if is_last else 0)
        return time_us / self.case.costs.speed(plan.llm_tp)

    def rank(self, plan: Plan, masks: tuple[int, ...]) -> list[list[float]]:
        """Returns the forward times by stage and slot of an LLM rank, with an encoder that belongs to it."""
        llm = [[self.llm(plan, stage, mask) for mask in masks] for stage in range(len(plan.llm))]
        # Encoder ranks belong to LLM ranks one by one, or all of them serve the only LLM rank.
        sharers = {"joint": plan.llm_tp, "disaggregated": plan.encoder_dp // plan.llm_dp}.get(plan.placement)
        if plan.is_coupled() or plan.placement == "colocated":
            return llm
        encoder = [[self.encoder(plan, layers, mask, sharers) for mask in masks] for layers in plan.encoder]
        if plan.placement == "joint":
            return [[one + other for one, other in zip(*stage)] for stage in zip(encoder, llm)]
        return encoder + llm


def shortest_of(case: Case, loads: Loads, plan: Plan, assignments: list, limit_us: float):
    """Returns the shortest step of a plan below a limit and its microbatches; the limit and `None` if there is none."""
    best = (limit_us, None)
    everything = loads.subsets[-1]
    outside = 0.0
    if plan.placement == "colocated":
        # Forward before the pipeline, backward after it.
        outside = (1 + BACKWARD) * loads.encoder(plan, plan.encoder[0], everything, plan.encoder_dp)
    times = functools.cache(lambda masks: loads.rank(plan, masks))
    alone = functools.cache(lambda masks: chain_us(times(masks)))
    # The slowest stage computes for this time at least.
    busy = functools.cache(lambda masks: (1 + BACKWARD) * max(map(sum, times(masks))))
    for assignment in assignments:
        if outside + max(map(busy, assignment)) >= best[0]:
            continue
        if plan.is_coupled():
            slots = [functools.reduce(int.__or__, slot) for slot in zip(*assignment)]
            encoder = [[loads.encoder(plan, layers, mask, plan.encoder_dp) for mask in slots] for layers in plan.encoder]
            if (1 + BACKWARD) * max(map(sum, encoder)) >= best[0]:
                continue
            found = coupled_us(encoder, [times(masks) for masks in assignment])
        else:
            found = 0.0
            for masks in assignment:
                found = max(found, outside + alone(masks))
                if found >= best[0]:
                    break
        if found < best[0]:
            best = (found, assignment)
    return best


@dataclasses.dataclass(frozen=True)
class Shortest:
    seconds: float
    plan: Plan
    # Samples by rank and slot, as bits.
    assignment: tuple

    def text(self) -> str:
        numbers = lambda mask: [at for at in range(mask.bit_length()) if mask >> at & 1]
        groups = [[numbers(mask) for mask in masks] for masks in self.assignment]
        return f"{self.seconds * 1e3:.6f} ms: {self.plan.text()}; samples {groups}"


def shortest(case: Case) -> tuple[dict[str, Shortest], int]:
    """Returns the shortest step of every placement, and the number of plans."""
    loads, everything = Loads(case), plans(case)
    assignments = functools.cache(lambda ranks, slots: list(cells_of(len(case.samples), ranks, slots)))
    best: dict[str, Shortest] = {}
    for plan in everything:
        known = best[plan.placement].seconds * 1e6 if plan.placement in best else float("inf")
        found, assignment = shortest_of(case, loads, plan, assignments(plan.llm_dp, plan.microbatches), known * (1 - 1e-9))
        if assignment:
            best[plan.placement] = Shortest(found / 1e6, plan, assignment)
    best["any"] = min(best.values(), key=lambda found: found.seconds)
    return best, len(everything)


@dataclasses.dataclass
class Answer:
    case: Case
    shortest: dict[str, Shortest]
    plans: int
    runs: dict[str, Run]
    # Placement, check and reason.
    violations: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    def ratio(self, placement: str, name: str) -> float:
        return self.runs[placement].answer[name] / self.shortest[placement].seconds


def judge(case: Case, arguments: argparse.Namespace) -> Answer:
    case.write(arguments)
    runs = {placement: run(case.command(arguments, placement), 60) for placement in [*PLACEMENTS, "any"]}
    answer = Answer(case, *shortest(case), runs)
    for placement, one in runs.items():
        add = lambda check, reason: answer.violations.append((placement, check, reason))
        if one.answer is None:
            add("clean", one.failed or one.message)
            continue
        longer = answer.ratio(placement, "step_seconds") - 1
        if longer > arguments.slower:
            add("slow", f"{longer:.3%} longer than the shortest step")
        if longer < -EQUAL:
            add("fast", f"{-longer:.3%} shorter than any step")
        if (above := answer.ratio(placement, "lower_bound_seconds") - 1) > EQUAL:
            add("bound", f"the bound is {above:.3%} above the shortest step")
    return answer


def print_table(title: str, answers: list[Answer]) -> None:
    """Prints step times and bounds over the shortest steps, by placement."""
    print(f"\n{title}: {len(answers)} clusters")
    heads = f"{'planned':>8} {'optimal':>8} {'worst':>8} {'slow':>6} {'fast':>6} {'bound above':>12} {'mean bound':>11}"
    print(f"{'placement':<14} {heads}")
    for placement in [*PLACEMENTS, "any"]:
        planned = [answer for answer in answers if answer.runs[placement].answer]
        steps = [answer.ratio(placement, "step_seconds") - 1 for answer in planned]
        bounds = [answer.ratio(placement, "lower_bound_seconds") for answer in planned]
        found = collections.Counter(check for answer in answers for of, check, _ in answer.violations if of == placement)
        optimal = sum(abs(step) <= OPTIMAL for step in steps)
        numbers = f"{len(planned):>8} {optimal:>8} {max(steps, default=0):>8.3%} {found['slow']:>6} {found['fast']:>6}"
        print(f"{placement:<14} {numbers} {found['bound']:>12} {sum(bounds) / max(len(bounds), 1):>11.3f}")


def print_violations(answers: list[Answer], arguments: argparse.Namespace) -> int:
    """Prints violations of the wanted checks by kind, and returns their number."""
    total = 0
    for check in CHECKS:
        found = [(answer, *violation) for answer in answers for violation in answer.violations if violation[1] == check]
        print(f"\n{check}: {len(found)} violations" + (" (not checked)" if check in arguments.skip else ""))
        if check in arguments.skip:
            continue
        total += len(found)
        for answer, placement, _, reason in found:
            cluster = f"{answer.case.gpus} GPUs, {len(answer.case.samples)} samples"
            print(f"  case {answer.case.number}, {placement}, {cluster}: {reason}")
            print(f"    {shlex.join(answer.case.command(arguments, placement))}")
            print(f"    shortest {answer.shortest[placement].text()}")
            if planned := answer.runs[placement].answer:
                degrees = lambda one: f"{one['name']} tp {one['tp']}, dp {one['dp']}, layers {one['layers']}"
                modules = "; ".join(map(degrees, planned["modules"]))
                step = f"{planned['step_seconds'] * 1e3:.6f} ms: {planned['placement']}"
                print(f"    plan     {step}, {modules}; {planned['microbatches']} microbatches")
    return total


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", type=pathlib.Path, default=pathlib.Path("target/release/dflop"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/plan-brute"), help="directory of the problems")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run; the same cases as without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slower", type=float, default=0.005, help="most that a step may take longer, as a fraction")
    parser.add_argument("--skip", choices=CHECKS, nargs="*", default=[], help="checks whose violations do not fail")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    cases = [draw(number, arguments.seed) for number in arguments.only or range(arguments.cases)]
    started, answers = time.monotonic(), []
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for answer in pool.map(functools.partial(judge, arguments=arguments), cases):
            answers.append(answer)
            if len(answers) % 20 == 0:
                print(f"{len(answers)} of {len(cases)} clusters, {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"{len(answers)} clusters, {sum(answer.plans for answer in answers)} plans, {time.monotonic() - started:.0f} s")
    print_table("all", answers)
    for share in SHARES:
        print_table(f"space.encoder_share={share}", [answer for answer in answers if answer.case.share == share])
    return 1 if print_violations(answers, arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
