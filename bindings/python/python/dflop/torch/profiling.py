"""Measures a user's own modules into the profile that the cost model predicts from.

A module runs unchanged, forward and backward, over packs of short sequences and over single sequences, at
shapes where predictions would otherwise be wrong. Both together separate the time that depends on all tokens
from the time that depends on the length of each sequence, however the module packs. Only the inputs of the
module need to be known.

`Profile.write` writes the files that `CostModel(device=…)` and `dflop plan --profile` read;
`Profile.check` compares predictions with mixed microbatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dflop._native import MicrobatchCurve
from dflop.torch._budget import now
from dflop.torch._check import ModuleCheck, check_module
from dflop.torch._clock import clock_of
from dflop.torch._held_out import HeldOut, measure_held_out
from dflop.torch._inputs import MakeInputs
from dflop.torch._layers import widths_of
from dflop.torch._measure import MakeOptimizer, Measurer, ModuleReport, Settings
from dflop.torch._metadata import launches_of, measured_of, metadata_of, packs_of, recompute_of
from dflop.torch._rows import Row, to_csv
from dflop.torch._stage_chain import StageBuild, StageChain, chains_of, layer_counts, stage_times
from dflop.torch._subject import Subject, borrowed
from dflop.torch._subjects import (
    ItemTokens,
    Loss,
    agreement,
    make_subject,
    modules_of,
    refuse_beside_split,
    setting_of,
)
from dflop.torch.model_parts import unwrapped
from dflop.torch.splitting import Split

HELD_OUT_MIN = 20
"""Number of held-out microbatches below which a warning is given."""
HELD_OUT_SHARES = (0.2, 0.4)
"""Minimum and maximum share of the time that is reserved for held-out microbatches."""
SHARE_MIN = 0.15
"""Minimum share of the remaining time for a module."""
OVER_LIMIT = 1.1
"""Share of the time limit above which a warning is given."""


@dataclass(frozen=True)
class Profile:
    """Measured times of modules, which `profile` returns.

    Attributes:
        model: name of the model, the start of file names.
        rows: raw times of whole passes (``whole``), and their parts (``linear``, ``attention``); repeats are
            separate rows.
        metadata: device, versions and measurement settings.
        widths: widths by module.
        reports: by module, the measured shapes and the interpolation error between them.
        tokens_max: maximum tokens of a microbatch inside a module.
        held_out: microbatches of mixed lengths that were run besides, from which the cost model computes the
            errors of its predictions.
        subjects: the measured modules, for `check`.

    Examples:
        >>> import torch
        >>> widths = {"llm": {"hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32}}
        >>> profile = dflop.torch.profile(
        ...     torch.nn.Linear(16, 16), model="tiny-layer", layers=1, widths=widths,
        ...     make_inputs=lambda lengths: torch.ones(1, sum(lengths), 16),
        ...     tokens_max=64, seconds_max=10, repeats=3,
        ... )
        >>> [path.name for path in profile.write("profiles/")]
        ['tiny-layer-llm.csv']
        >>> profile.to_csv().splitlines()[0]
        '# dflop-profile: 1'
        >>> profile.predict_microseconds("llm", [16, 32]) > 0
        True
        >>> errors = profile.check(microbatches=4, repeats=3)
        >>> list(errors)
        ['llm']
    """

    model: str
    rows: tuple[Row, ...]
    metadata: Mapping[str, str]
    widths: Mapping[str, Mapping[str, int]]
    reports: Mapping[str, ModuleReport]
    tokens_max: int
    held_out: tuple[HeldOut, ...]
    subjects: tuple[Subject, ...] = field(repr=False, compare=False)

    def to_csv(self, module: str | None = None) -> str:
        """Returns the text of the profile, of one module or of all of them.

        Args:
            module: name of the module. Default: all.
        """
        rows = [row for row in self.rows if module in (None, row.module)]
        widths = {name: known for name, known in self.widths.items() if module in (None, name)}
        held_out = [one for one in self.held_out if module in (None, one.module)]
        return to_csv(rows, self.metadata, widths, self.model, held_out)

    def write(self, directory: str | Path) -> list[Path]:
        """Writes one file per module into a directory, which is created if needed, and returns their paths.

        Files are named by model, module and tensor-parallel degree; existing files are replaced. All profiles
        in a directory are read as one, so use a directory per device.

        Args:
            directory: directory of the files.

        Raises:
            OSError: a file cannot be written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in self.model)
        paths = []
        for name in self.reports:
            tp = next(row.tp for row in self.rows if row.module == name)
            path = directory / f"{stem}-{name}{f'-tp{tp}' if tp > 1 else ''}.csv"
            path.write_text(self.to_csv(name), encoding="utf-8")
            paths.append(path)
        return paths

    def predict_microseconds(self, module: str, lengths: Sequence[int]) -> float:
        """Returns the predicted forward and backward time of a module with the most layers that were
        measured, over sequences or items of these token counts that run together."""
        return self._curve(module).microseconds(lengths)

    def _curve(self, module: str) -> MicrobatchCurve:
        """Returns the fit that the cost model predicts microbatches with, here at every parallel degree."""
        rows = [replace(row, tp=1) for row in self.rows if row.module == module and row.part == "whole"]
        held_out = [one for one in self.held_out if one.module == module]
        return MicrobatchCurve(to_csv(rows, {}, {}, self.model, held_out), module)

    def check(
        self, *, microbatches: int = 24, repeats: int = 7, tokens_max: int | None = None, seed: int = 1
    ) -> dict[str, ModuleCheck]:
        """Runs further microbatches of randomly drawn lengths and compares their times with predictions of
        the cost model, as the held-out ones of the profile are compared when it is read.

        Args:
            microbatches: number of microbatches.
            repeats: number of runs of each that are counted.
            tokens_max: maximum tokens of a microbatch inside a module. Default: the measured maximum.
            seed: seed of the lengths.

        Returns:
            dict[str, ModuleCheck]: the errors by module; ``is_within`` is true if the median error is at most
            5 %, and the 95th percentile at most 12 % or one and a half times the spread of runs, whichever is
            more.
        """
        found = {}
        for subject in self.subjects:
            curve = self._curve(subject.name)
            with borrowed(subject.module, subject.device), _cut(subject, curve.layers):
                found[subject.name] = check_module(
                    subject,
                    curve,
                    microbatches=microbatches,
                    repeats=repeats,
                    tokens_max=tokens_max or self.tokens_max,
                    seed=seed,
                )
        return found


def profile(
    model_or_llm: torch.nn.Module | Split | None = None,
    /,
    *,
    llm: torch.nn.Module | None = None,
    encoder: torch.nn.Module | None = None,
    audio: torch.nn.Module | None = None,
    model: str | None = None,
    tokens_max: int = 4096,
    seconds_max: float = 60.0,
    error_bound: float = 0.05,
    repeats: int = 7,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    make_inputs: MakeInputs | Mapping[str, MakeInputs] | None = None,
    item_tokens: ItemTokens | Mapping[str, ItemTokens] | None = None,
    loss: Loss | Mapping[str, Loss] | None = None,
    layers: int | Mapping[str, int] | None = None,
    cut_layers: Sequence[int] | None = None,
    build: StageBuild | None = None,
    widths: Mapping[str, Mapping[str, int]] | None = None,
    optimizer: MakeOptimizer | None = None,
    tp_group: Any = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measures a whole model, or modules, as they are trained, and returns a profile.

    Of a whole model of ``transformers`` with images or audio, the encoders are measured with their
    projectors, and the LLM with its embedding, LM head and loss, over packed rows as loaders deliver them:
    ``position_ids`` restart with every sequence. `find_parts` in `dflop.torch.model_parts` finds the parts.
    The metadata names what was measured, the attention implementations, and under ``packs`` whether attention
    stays inside each sequence: ``separate``, ``masked`` (it does, but pairs of the whole row are computed),
    or ``joined``.

    Of a `Split`, the stages of a `Pipeline` are measured, on packed rows, as three stages of each module: the
    first one, with the embedding, one of layers only, and the last one, with projector or LM head and loss.
    The chain runs with and without the inner one, so that ``dflop plan --trainer torch --profile`` knows the
    time per layer and the time outside of layers; ``reports[module].stages`` has the time of each stage.

    Modules run in training mode, with their frozen parameters and their activation checkpointing, so do not
    set these again in a loader or planner that reads the profile. Modes, gradients, buffers, weights and
    random states are restored.

    With several modules, settings per module are mappings by name: ``"llm"``, ``"vision"``, ``"audio"``.

    Times are CUDA events on a GPU, with the rise of the allocator's peak in the forward pass; on the CPU they
    are the thread's CPU time if PyTorch has one thread, else wall time.

    Args:
        model_or_llm: a whole model, whose encoders and LLM are found; a `Split`, whose stages are built on
            the device; or an LLM.
        llm: an LLM by name.
        encoder: module of images.
        audio: module of audio.
        model: name of the model, for people. Default: the class of the first module.
        tokens_max: longest sequence, and maximum tokens of a microbatch inside a module.
        seconds_max: seconds to measure for, divided between the modules by their need: about three quarters
            for the rows of the profile, the rest for held-out microbatches. If the time is short, there are
            fewer repeats and shapes; at least the smallest and the largest pack and the longest sequence run
            three times, which may take longer: then there is a warning.
        error_bound: relative error of interpolation below which no further shapes are measured.
        repeats: runs of each shape in the profile; fewer (at least 3) if the time is over.
        device: device to move modules to. Default: their current device; for a split, the current CUDA
            device if there is one.
        dtype: runs passes under ``torch.autocast`` of this type if the parameters have another type.
        make_inputs: function from the tokens of every sequence or item (``list[int]``) to the module's
            inputs: a mapping of keyword arguments, a tuple, or one tensor; required for modules other than
            Hugging Face LLMs, vision towers of tiles and of native resolution, and audio towers of windows.
            For a split, it returns the tensors of a microbatch by name, such as ``pixel_values``.
        item_tokens: with ``make_inputs`` of an encoder: the tokens of an item if all items are equal, else
            ``"free"``.
        loss: function from the module's output to the start of the backward pass. Default: its ``loss``, else
            its first tensor.
        layers: number of transformer layers of a module that is not one list of layers; 1 for a single layer.
            The cost model scales times in proportion to the model's layers, or exactly with two counts in
            ``cut_layers``.
        cut_layers: measures modules with their first layers only, such as ``(2, 4)``, which separates the
            time per layer from the rest and needs less memory; modules get all their layers back. Of a split,
            with one or two counts of at least 2, only so many layers are created. Default: all; of a split,
            all and half of them.
        build: with a split, the function around it that the `Pipeline` gets, called as
            ``build(module, layers, is_first, is_last, None)``, which freezes or compiles stages.
        widths: ``hidden``, ``heads``, ``kv_heads``, ``ffn`` by module; models of other widths cannot use the
            profile. Default: the widths in the module's ``config``, if it has one.
        optimizer: function from parameters to an optimizer, such as ``torch.optim.AdamW``, whose step is
            measured too (at a learning rate of 0).
        tp_group: process group of a tensor-parallel module; all its ranks make the same call, and the slowest
            rank's time counts.
        seed: seed of all random choices.
        progress: function that is called with lines of progress.

    Raises:
        TypeError: a module is of an unknown kind, and there is no ``make_inputs`` for it; or an argument is
            not for a split, or only for one.
        ValueError: a setting is invalid.
        RuntimeError: a shape does not fit into memory; the message names module and shape.

    Examples:
        >>> import torch
        >>> class Tower(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(2)])
        ...     def forward(self, rows):
        ...         for layer in self.layers:
        ...             rows = layer(rows).relu()
        ...         return rows
        >>> profile = dflop.torch.profile(
        ...     encoder=Tower(), tokens_max=128, seconds_max=10, repeats=3, item_tokens=32,
        ...     make_inputs=lambda lengths: torch.ones(len(lengths), 32, 32),
        ... )
        >>> profile.model, list(profile.reports)
        ('Tower', ['vision'])

        Whole models of ``transformers`` need no more:

        >>> profile = dflop.torch.profile(model, tokens_max=8192)  # doctest: +SKIP

        A plan for a `Pipeline` of a large checkpoint, from six layers of each module:

        >>> split = dflop.torch.split("checkpoint/")  # doctest: +SKIP
        >>> profile = dflop.torch.profile(split, cut_layers=(2, 6))  # doctest: +SKIP
        >>> paths = profile.write("profile/")  # doctest: +SKIP
    """
    started = now()
    _check_settings(tokens_max=tokens_max, seconds_max=seconds_max, error_bound=error_bound, repeats=repeats)
    modules: Mapping[str, torch.nn.Module]
    if isinstance(model_or_llm, Split):
        beside = {"llm": llm, "encoder": encoder, "audio": audio, "loss": loss, "layers": layers}
        refuse_beside_split(beside | {"tp_group": tp_group})
        chains = chains_of(model_or_llm, build, device, cut_layers)
        modules, name = chains, chains["llm"].model_name
    else:
        if build is not None:
            raise TypeError("`build` is for the stages of a split: pass the split as well")
        modules = modules_of(model_or_llm, llm, encoder, audio)
        if device is not None and model_or_llm is not None:
            model_or_llm.to(device)
        named = unwrapped(model_or_llm) if model_or_llm is not None else next(iter(modules.values()))
        name = type(named).__name__
    agree, tp = agreement(tp_group, device)

    def subject_of(kind: str, one: torch.nn.Module) -> Subject:
        return make_subject(
            kind,
            one,
            clock_of,
            agree,
            device=device,
            dtype=dtype,
            make_inputs=setting_of(make_inputs, kind, modules),
            item_tokens=setting_of(item_tokens, kind, modules),
            loss=setting_of(loss, kind, modules),
            layers=setting_of(layers, kind, modules),
        )

    subjects = [subject_of(kind, one) for kind, one in modules.items()]
    settings = Settings(
        tokens_max=tokens_max,
        error_bound=error_bound,
        repeats=repeats,
        seed=seed,
        tp=tp,
        cut_layers=tuple(cut_layers or ()),
        optimizer=optimizer,
    )
    measured = _measure_all(subjects, settings, started + seconds_max, progress or (lambda line: None))
    _warn(len(measured.held_out) // len(subjects), subjects, now() - started, seconds_max)
    return Profile(
        model=model or name,
        rows=tuple(measured.rows),
        metadata=metadata_of(subjects, dtype, measured.recomputes, measured.parts)
        | launches_of(measured.reports.values()),
        widths={kind: (widths or {}).get(kind, widths_of(kind, one)) for kind, one in modules.items()},
        reports=measured.reports,
        tokens_max=tokens_max,
        held_out=tuple(measured.held_out),
        subjects=tuple(subjects),
    )


@dataclass
class _Measured:
    """What has been measured of all modules; `recomputes` and `parts` are for the metadata, by module."""

    rows: list[Row] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)
    reports: dict[str, ModuleReport] = field(default_factory=dict)
    recomputes: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)


def _measure_all(
    subjects: Sequence[Subject], settings: Settings, deadline: float, report_line: Callable[[str], None]
) -> _Measured:
    """Measures modules one after another, each in its share of the time by need, then all together.

    Held-out microbatches have the time that is left, and at least what some of them need.
    """
    found = _Measured()
    measurers = [Measurer(subject, _own_settings(subject, settings)) for subject in subjects]
    needs = []
    for subject, measurer in zip(subjects, measurers, strict=True):
        with borrowed(subject.module, subject.device):
            torch.manual_seed(settings.seed)
            found.recomputes[subject.name] = recompute_of(subject)
            found.parts[subject.name] = measured_of(subject)
            subject.packs = packs_of(subject)
            needs.append(measurer.probe())
    agree = subjects[0].agree

    def rest() -> float:
        return max(-agree([now() - deadline])[0], 0.0)

    limit = rest()
    for at, (subject, measurer) in enumerate(zip(subjects, measurers, strict=True)):
        wanted = sum(one.held_out_seconds() for one in measurers)
        least, most = HELD_OUT_SHARES
        reserved = min(max(wanted, least * limit), most * limit)
        # A module whose passes are short still needs time for its many repeats.
        share = max(needs[at] / sum(needs[at:]), SHARE_MIN) if at + 1 < len(needs) else 1.0
        measurer.budget.allow(share * max(rest() - reserved, 0.0))
        with borrowed(subject.module, subject.device):
            torch.manual_seed(settings.seed)
            rows, report = measurer.measure()
            if isinstance(subject.module, StageChain):
                stages = stage_times(subject, measurer.pack(report.shapes.points[-1]))
                report = replace(report, stages=stages)
        found.rows += rows
        found.reports[subject.name] = report
        report_line(_shown(report))
    with ExitStack() as stack:
        for measurer in measurers:
            stack.enter_context(measurer.borrowed())
        torch.manual_seed(settings.seed)
        modules = [measurer.budgeted for measurer in measurers]
        found.held_out = measure_held_out(modules, rest(), settings.tokens_max, settings.seed)
    report_line(f"{len(found.held_out) // len(subjects)} held-out microbatches")
    return found


def _own_settings(subject: Subject, settings: Settings) -> Settings:
    """Returns the settings of a module: stages of a split have their own numbers of layers."""
    if not isinstance(subject.module, StageChain):
        return settings
    return replace(settings, cut_layers=layer_counts(subject.module))


def _check_settings(**settings: float) -> None:
    for name, least in {"tokens_max": 2, "seconds_max": 0.0, "error_bound": 1e-6, "repeats": 1}.items():
        if not settings[name] >= least:
            raise ValueError(f"{name}: must be at least {least}, found {settings[name]}")


def _cut(subject: Subject, layers: int) -> Any:
    from contextlib import nullcontext

    return nullcontext() if layers == subject.layers else subject.cut(layers)


def _warn(held_out: int, subjects: Sequence[Subject], seconds: float, seconds_max: float) -> None:
    """Warns of a limit that was too short, and of packs whose sequences attend to each other."""
    if seconds > OVER_LIMIT * seconds_max:
        _warned(f"the smallest set of shapes took {seconds:.1f} s, seconds_max is {seconds_max:g}")
    if held_out < HELD_OUT_MIN:
        _warned(
            f"too little time for {HELD_OUT_MIN} held-out microbatches ({held_out}): predictions are hardly "
            f"checked; raise seconds_max or lower tokens_max"
        )
    for subject in subjects:
        if subject.packs == "joined":
            _warned(
                f"{subject.name}: sequences of a packed row attend to those before them, in training as "
                f"well; the model does not read the boundaries in position_ids"
            )


def _warned(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _shown(report: ModuleReport) -> str:
    error = "not known" if report.error_max is None else f"{report.error_max:.1%}"
    open_ = report.shapes.open + (report.lengths.open if report.lengths else 0)
    lengths = f" and {len(report.lengths.points)} lengths" if report.lengths else ""
    launches = ""
    if report.launch_tokens:
        launches = f"; limited by launches up to {report.launch_tokens} tokens"
    return (
        f"{report.module}: {report.rounds} rounds of {len(report.shapes.points)} shapes{lengths} "
        f"in {report.seconds:.1f} s of {report.seconds_max:.1f} s; "
        f"largest error between shapes {error}, {open_} left open{launches}"
    )
