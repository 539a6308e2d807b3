"""Bounds the memory of a parallelism plan, from published sizes of models, apart from dflop's own formulas.

Sizes are those of the `config.json` of each checkpoint. Matrices count alone: norms, biases, stems and projectors are
below a percent of a model. Assumed is what `dflop plan` assumes: Adam in mixed precision, so a trained parameter takes 2
bytes, its gradient 2, and the optimizer 12, which the data-parallel ranks of a module share with ZeRO stage 1; activations
in 16 bits, fused attention and norms.

- Rajbhandari et al., 2020, arXiv:1910.02054, section 3.1: bytes per parameter
- Korthikanti et al., 2022, arXiv:2205.05198, section 4: activations of a layer
- Narayanan et al., 2021, arXiv:2104.04473, section 2.2: microbatches in flight in 1F1B and interleaved 1F1B
- Qi et al., 2024, arXiv:2401.10241, table 2: a stage holds as many microbatches as there are stages in ZB-H1
"""

import dataclasses
import math

GIB = 1 << 30
PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12
# Largest factor between a microbatch of small samples and the mean.
UNBALANCED = 1.25


@dataclasses.dataclass(frozen=True)
class Llm:
    """Sizes of a dense language model with gated MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    is_tied: bool = False

    def layer(self) -> int:
        """Returns the number of weights in a layer."""
        return self.hidden * (2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.ffn)

    def embedding(self) -> int:
        return self.vocab * self.hidden

    def parameters(self) -> int:
        return self.layers * self.layer() + (1 if self.is_tied else 2) * self.embedding()

    def saved(self, tp: int, split: int) -> float:
        """Returns activation bytes per token and layer, with norms split over `split` ranks."""
        return 8 * self.hidden / split + (4 * self.head_dim * (self.heads + self.kv_heads) + 6 * self.ffn) / tp


@dataclasses.dataclass(frozen=True)
class Tower:
    """Sizes of an encoder; `tokens` are those of a tile or a window, 1 where media are counted in tokens."""

    layers: int
    hidden: int
    ffn: int
    tokens: int = 1
    is_gated: bool = False

    def layer(self) -> int:
        return 4 * self.hidden**2 + (3 if self.is_gated else 2) * self.hidden * self.ffn

    def parameters(self) -> int:
        return self.layers * self.layer()

    def saved(self, tp: int, split: int) -> float:
        """Returns activation bytes per unit and layer."""
        inner = 8 * self.hidden + (6 if self.is_gated else 4) * self.ffn
        return self.tokens * (8 * self.hidden / split + inner / tp)


QWEN2_5_7B = Llm(28, 3584, 28, 4, 128, 18_944, 152_064)
QWEN2_5_72B = Llm(80, 8192, 64, 8, 128, 29_568, 152_064)
QWEN3_8B = Llm(36, 4096, 32, 8, 128, 12_288, 151_936)
QWEN3_32B = Llm(64, 5120, 64, 8, 128, 25_600, 151_936)
VICUNA_7B = Llm(32, 4096, 32, 32, 128, 11_008, 32_064)
VICUNA_13B = Llm(40, 5120, 40, 40, 128, 13_824, 32_064)
SIGLIP, CLIP = Tower(27, 1152, 4304, 729), Tower(24, 1024, 4096, 576)
INTERN_VIT, INTERN_VIT_6B = Tower(24, 1024, 4096, 1025), Tower(45, 3200, 12_800, 1025)
WHISPER = Tower(32, 1280, 5120, 1500)
QWEN2_VL, QWEN2_5_VL = Tower(32, 1280, 5120), Tower(32, 1280, 3420, is_gated=True)
QWEN3_VL, QWEN3_VL_SMALL = Tower(27, 1152, 4304), Tower(24, 1024, 4096)
PIXTRAL = Tower(24, 1024, 4096, is_gated=True)
# Encoders and language model by preset.
MODELS: dict[str, tuple[list[Tower], Llm]] = {
    "llava-ov-qwen2.5-7b": ([SIGLIP], QWEN2_5_7B),
    "llava-ov-qwen2.5-32b": ([SIGLIP], Llm(64, 5120, 40, 8, 128, 27_648, 152_064)),
    "llava-ov-qwen2.5-72b": ([SIGLIP], QWEN2_5_72B),
    "llava-ov-llama3-8b": ([SIGLIP], Llm(32, 4096, 32, 8, 128, 14_336, 128_256)),
    "llava-ov-llama3-70b": ([SIGLIP], Llm(80, 8192, 64, 8, 128, 28_672, 128_256)),
    "llava-1.5-7b": ([CLIP], VICUNA_7B),
    "llava-1.5-13b": ([CLIP], VICUNA_13B),
    "llava-next-mistral-7b": ([CLIP], Llm(32, 4096, 32, 8, 128, 14_336, 32_064)),
    "llava-next-vicuna-7b": ([CLIP], VICUNA_7B),
    "llava-next-vicuna-13b": ([CLIP], VICUNA_13B),
    "internvl3-8b": ([INTERN_VIT], QWEN2_5_7B),
    "internvl3.5-8b": ([INTERN_VIT], QWEN3_8B),
    "internvl3.5-38b": ([INTERN_VIT_6B], QWEN3_32B),
    "internvl2.5-qwen2.5-72b": ([INTERN_VIT_6B], QWEN2_5_72B),
    "gemma3-4b": ([Tower(27, 1152, 4304, 4096)], Llm(34, 2560, 8, 4, 256, 10_240, 262_208, True)),
    "gemma3-12b": ([Tower(27, 1152, 4304, 4096)], Llm(48, 3840, 16, 8, 256, 15_360, 262_208, True)),
    "gemma3-27b": ([Tower(27, 1152, 4304, 4096)], Llm(62, 5376, 32, 16, 128, 21_504, 262_208, True)),
    "idefics3-8b": ([Tower(27, 1152, 4304, 676)], Llm(32, 4096, 32, 8, 128, 14_336, 128_259)),
    "smolvlm2-2.2b": ([SIGLIP], Llm(24, 2048, 32, 32, 64, 8192, 49_280)),
    "qwen2-vl-7b": ([QWEN2_VL], QWEN2_5_7B),
    "qwen2.5-vl-3b": ([QWEN2_5_VL], Llm(36, 2048, 16, 2, 128, 11_008, 151_936, True)),
    "qwen2.5-vl-7b": ([QWEN2_5_VL], QWEN2_5_7B),
    "qwen3-vl-2b": ([QWEN3_VL_SMALL], Llm(28, 2048, 16, 8, 128, 6144, 151_936, True)),
    "qwen3-vl-4b": ([QWEN3_VL_SMALL], Llm(36, 2560, 32, 8, 128, 9728, 151_936, True)),
    "qwen3-vl-8b": ([QWEN3_VL], QWEN3_8B),
    "qwen3-vl-32b": ([QWEN3_VL], QWEN3_32B),
    "glm-4.1v-9b": ([Tower(24, 1536, 4096, is_gated=True)], Llm(40, 4096, 32, 2, 128, 13_696, 151_552)),
    "pixtral-12b": ([PIXTRAL], Llm(40, 5120, 32, 8, 128, 14_336, 131_072)),
    "mistral-small-3.1-24b": ([PIXTRAL], Llm(40, 5120, 32, 8, 128, 32_768, 131_072)),
    "qwen2-audio-7b": ([WHISPER], Llm(32, 4096, 32, 32, 128, 11_008, 156_032)),
    "omni-7b": ([SIGLIP, WHISPER], QWEN2_5_7B),
    "qwen2.5-omni-7b": ([QWEN2_5_VL, Tower(32, 1280, 5120)], QWEN2_5_7B),
}


@dataclasses.dataclass(frozen=True)
class Load:
    """What a module processes in a global batch of samples drawn from a table."""

    # Units of each sample in the table, ascending.
    units: list[int]
    batch: int
    # Bounds on the units of a batch, by four standard deviations.
    least: float
    most: float

    @classmethod
    def drawn(cls, units: list[int], batch: int) -> "Load":
        mean = math.fsum(units) / len(units)
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in units) / len(units) * batch)
        return cls(sorted(units), batch, max(0.0, batch * mean - 4 * deviation), batch * mean + 4 * deviation)

    def largest(self, rank_samples: float = 0.5, place: int = 0) -> float:
        """Returns the largest sample of the table, or one that is hardly exceeded at a place among as many samples."""
        quantile = max(0.0, 1 - place / (2 * rank_samples))
        return self.units[round(quantile * (len(self.units) - 1))]

    def held(self, ranks: int, microbatches: int, held: int, senders: int) -> float:
        """Returns the units in `held` microbatches at most: balanced, or with a sample above the mean in each.

        - `senders`: ranks of the language model whose media a rank has, each with a sample above its mean
        """
        mean, samples = self.most / ranks / microbatches, self.batch / ranks
        # Samples are whole: of 7 equal ones in 5 microbatches, some microbatch has 2.
        whole = math.ceil(samples / microbatches) * self.most / self.batch
        first, *above = (math.fsum(self.largest(samples, place * senders + at) for at in range(senders)) for place in range(held))
        return whole + first + math.fsum(max(UNBALANCED * mean, units) for units in above)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a plan was made for, apart from the plan."""

    model: str
    # By module, the language model last.
    loads: list[Load]
    # Parameters that dflop counts, by module.
    counted: list[int]
    has_zero1: bool
    is_sequence_parallel: bool
    # Names of frozen parts.
    frozen: list[str]
    modules: list[str]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Least and greatest bytes on the fullest GPU of a module."""

    least: float
    most: float


def is_known(model: str, counted: list[int]) -> bool:
    """Whether the sizes are in the table, and within 2 % of what dflop counts; projectors and stems may be larger."""
    if model not in MODELS:
        return False
    towers, llm = MODELS[model]
    is_close = abs(llm.parameters() / counted[-1] - 1) < 0.02
    return is_close and all(0.6 < tower.parameters() / own <= 1 for tower, own in zip(towers, counted))


@dataclasses.dataclass(frozen=True)
class Stages:
    """One module in a plan: bytes of each stage, at least and at most."""

    setup: Setup
    plan: dict
    place: int

    def own(self) -> dict:
        return self.plan["modules"][self.place]

    def sizes(self) -> Tower | Llm:
        towers, llm = MODELS[self.setup.model]
        return [*towers, llm][self.place]

    def is_frozen(self) -> bool:
        return self.setup.modules[self.place] in self.setup.frozen

    def state(self, parameters: float) -> float:
        """Returns the bytes of parameters, gradients and optimizer."""
        if self.is_frozen():
            return PARAMETER * parameters
        ranks = self.own()["dp"] if self.setup.has_zero1 else 1
        return (PARAMETER + GRADIENT + OPTIMIZER / ranks) * parameters

    def parameters(self, stage: int) -> tuple[float, float]:
        """Returns the parameters on a GPU in a stage, at least and at most."""
        own, sizes, layers = self.own(), self.sizes(), self.own()["layers"]
        inner = layers[stage] * sizes.layer() / own["tp"]
        counted = self.setup.counted[self.place]
        if isinstance(sizes, Tower):
            # Stem and projector are in one stage or another, perhaps without being split.
            return inner, inner + counted - sizes.parameters()
        is_first, is_last = stage == 0 and layers[0] > 0, stage == len(layers) - 1
        tables = is_first + is_last - (sizes.is_tied and is_first and is_last)
        inner += tables * sizes.embedding() / own["tp"]
        # Key heads may be fewer than ranks, and the first layers of the model in a later stage.
        copies = layers[stage] * 2 * sizes.hidden * sizes.head_dim * max(1.0, sizes.kv_heads / own["tp"])
        rest = abs(counted - sizes.parameters()) + (not is_first) * sizes.embedding() / own["tp"]
        return inner, inner + copies + rest

    def saved(self) -> float:
        """Returns the activation bytes per unit and layer that wait for the backward pass."""
        own, sizes = self.own(), self.sizes()
        split = own["tp"] if self.setup.is_sequence_parallel else 1
        if own["recompute"]:
            return 2 * sizes.hidden * (sizes.tokens if isinstance(sizes, Tower) else 1) / split
        return sizes.saved(own["tp"], split)

    def working(self, stage: int, word_bytes: int) -> float:
        """Returns the bytes per unit that exist while a microbatch is computed: a recomputed layer, or the scores of words."""
        own, sizes = self.own(), self.sizes()
        split = own["tp"] if self.setup.is_sequence_parallel else 1
        is_last = stage == len(own["layers"]) - 1 and isinstance(sizes, Llm)
        layer = sizes.saved(own["tp"], split) if own["recompute"] else 0
        return max(layer, word_bytes * sizes.vocab / own["tp"] if is_last else 0)

    def bytes(self, stage: int, in_flight: int | None, ahead: int = 0) -> Bounds:
        """Returns the bytes of a stage that holds this many microbatches; `None` for all media of a batch at once."""
        own, load, layers = self.own(), self.setup.loads[self.place], self.own()["layers"][stage]
        least, most = map(self.state, self.parameters(stage))
        if layers == 0:
            return Bounds(least, most)
        microbatches = self.plan["microbatches"] if in_flight is not None else 1
        held = in_flight or 1
        # Media may be divided between ranks, tokens of a sample are not. A plan has room for the largest sample.
        is_whole = self.plan["placement"] == "disaggregated" and self.plan["encoder_share"] == "sample"
        largest = load.largest() if isinstance(self.sizes(), Llm) or is_whole else 0
        # Windows of neighbors in flight cover all microbatches, so the fullest holds at least the mean window.
        units = max(largest, load.least / own["dp"] / math.ceil(microbatches / held))
        one = max(largest, load.least / own["dp"] / microbatches)
        if not self.is_frozen():
            least += layers * self.saved() * units + self.working(stage, 2) * one
        # A frozen encoder keeps the input of the projector alone, but the activations of a layer exist.
        is_passed = self.is_frozen() and isinstance(self.sizes(), Tower)
        senders = max(1, math.ceil(self.plan["modules"][-1]["dp"] / own["dp"]))
        one, all_held = (load.held(own["dp"], microbatches, many, senders) for many in (1, min(microbatches, held + ahead)))
        most += (1 if is_passed else layers) * self.saved() * all_held
        return Bounds(least, most + max(self.sizes().saved(1, 1) if is_passed else 0, self.working(stage, 6)) * one)


def in_flight(schedule: str, microbatches: int, stages_left: int, stages: int) -> int:
    """Returns the microbatches that a stage with this many stages from here to the end, out of all, holds."""
    if schedule == "gpipe":
        return microbatches
    return min(microbatches, stages if schedule == "zb-h1" else stages_left)


def chunked(llm: Stages, rank: int, chunks: int) -> Bounds:
    """Returns the memory of a rank that holds several stages under interleaved 1F1B."""
    ranks, microbatches = llm.own()["pp"], llm.plan["microbatches"]
    own = range(rank, ranks * chunks, ranks)
    state = {stage: llm.state(llm.parameters(stage)[0]) for stage in own}
    # Each stage holds at least the largest microbatch, and no stage more than the rank in all stages together.
    group = microbatches if microbatches < ranks else ranks + microbatches % ranks
    held = min(microbatches, 2 * (ranks - rank - 1) + (chunks - 1) * group + 1)
    least = sum(state.values()) + max(llm.bytes(stage, 1).least - state[stage] for stage in own)
    return Bounds(least, sum(llm.bytes(stage, held).most for stage in own))


def bounds(setup: Setup, plan: dict) -> list[Bounds] | None:
    """Returns the memory of each module's fullest GPU; `None` if layers are not those of the sizes.

    Modules on the same GPUs have the same bounds.
    """
    modules = [Stages(setup, plan, place) for place in range(len(setup.modules))]
    if any(sum(one.own()["layers"]) != one.sizes().layers for one in modules):
        return None
    *encoders, llm = modules
    schedule, _, rounds = plan["schedule"].partition(":")
    microbatches, ahead = plan["microbatches"], int(rounds) if schedule == "1f1b-ahead" else 0
    depth = len(llm.own()["layers"])
    beside = max(len(one.own()["layers"]) for one in encoders) if plan["placement"] == "disaggregated" else 0
    hold = lambda left: in_flight(schedule, microbatches, left, depth + beside)
    if schedule == "interleaved":
        of_llm = [chunked(llm, rank, int(rounds)) for rank in range(llm.own()["pp"])]
    else:
        of_llm = [llm.bytes(stage, hold(depth - stage)) for stage in range(depth)]
    if plan["placement"] == "joint":
        def both(stage: int) -> Bounds:
            parts = [one.bytes(stage, hold(depth - stage)) for one in modules]
            return Bounds(sum(part.least for part in parts), sum(part.most for part in parts))

        return [fullest([both(stage) for stage in range(depth)])] * len(modules)
    if plan["placement"] == "colocated":
        # Which stages of the two share a GPU is not stated.
        phases = [[one.bytes(stage, None) for stage in range(len(one.own()["layers"]))] for one in encoders]
        least = fullest(of_llm).least + sum(min(part.least for part in parts) for parts in phases)
        return [Bounds(least, fullest(of_llm).most + sum(fullest(parts).most for parts in phases))] * len(modules)

    def alone(one: Stages) -> Bounds:
        own = len(one.own()["layers"])
        return fullest([one.bytes(stage, hold(own - stage + depth), ahead) for stage in range(own)])

    return [*map(alone, encoders), fullest(of_llm)]


def fullest(parts: list[Bounds]) -> Bounds:
    return Bounds(max(part.least for part in parts), max(part.most for part in parts))
