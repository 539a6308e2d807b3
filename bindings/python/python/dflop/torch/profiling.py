"""Measures a user's own modules into the profile that the cost model predicts from.

A module runs unchanged, forward and backward, over packs of short sequences and over single sequences, at
shapes where predictions would otherwise be wrong. Both together separate the time that depends on all tokens
from the time that depends on the length of each sequence, however the module packs. Only the inputs of the
module need to be known.

`Profile.write` writes the files that `CostModel(profile=…)` and `dflop plan --profile` read;
`Profile.check` compares predictions with mixed microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from dflop.torch._check import ModuleCheck, Prediction, check_module
from dflop.torch._clock import clock_of, device_name
from dflop.torch._inputs import MakeInputs, default_inputs
from dflop.torch._layers import cut_to, full_attention_layers, layer_count, watched, widths_of
from dflop.torch._measure import MakeOptimizer, Measurer, ModuleReport, Settings
from dflop.torch._rows import Row, to_csv
from dflop.torch._sequences import Sequences
from dflop.torch._subject import Subject, borrowed

T = TypeVar("T")
ItemTokens = int | Literal["free"]
MODULES = ("vision", "audio", "llm")


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
        subjects: the measured modules, for `check`.

    Examples:
        >>> import torch
        >>> widths = {"llm": {"hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32}}
        >>> profile = dflop.torch.profile(
        ...     torch.nn.Linear(16, 16), model="tiny-layer", layers=1, widths=widths,
        ...     make_inputs=lambda lengths: torch.ones(1, sum(lengths), 16),
        ...     tokens_max=64, seconds_max=0.1, repeats=3,
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
    subjects: tuple[Subject, ...] = field(repr=False, compare=False)

    def to_csv(self, module: str | None = None) -> str:
        """Returns the text of the profile, of one module or of all of them.

        Args:
            module: name of the module. Default: all.
        """
        rows = [row for row in self.rows if module in (None, row.module)]
        widths = {name: known for name, known in self.widths.items() if module in (None, name)}
        return to_csv(rows, self.metadata, widths, self.model)

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
        return Prediction(self.rows, module).microseconds(lengths)

    def check(
        self, *, microbatches: int = 24, repeats: int = 7, tokens_max: int | None = None, seed: int = 1
    ) -> dict[str, ModuleCheck]:
        """Runs microbatches of randomly drawn lengths and compares their times with predictions.

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
            prediction = Prediction(self.rows, subject.name)
            with borrowed(subject.module, subject.device), _cut(subject, prediction.layers):
                found[subject.name] = check_module(
                    subject,
                    prediction,
                    microbatches=microbatches,
                    repeats=repeats,
                    tokens_max=tokens_max or self.tokens_max,
                    seed=seed,
                )
        return found


def profile(
    module: torch.nn.Module | None = None,
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
    loss: Callable[[Any], torch.Tensor] | Mapping[str, Callable[[Any], torch.Tensor]] | None = None,
    layers: int | Mapping[str, int] | None = None,
    cut_layers: Sequence[int] | None = None,
    widths: Mapping[str, Mapping[str, int]] | None = None,
    optimizer: MakeOptimizer | None = None,
    tp_group: Any = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measures modules as they are trained, and returns a profile.

    Modules run in training mode, with their frozen parameters and their activation checkpointing, so do not
    set these again in a loader or planner that reads the profile. Modes, gradients, buffers, weights and
    random states are restored.

    With several modules, settings per module are mappings by name: ``"llm"``, ``"vision"``, ``"audio"``.

    Times are CUDA events on a GPU, with the rise of the allocator's peak in the forward pass; on the CPU they
    are the thread's CPU time if PyTorch has one thread, else wall time.

    Args:
        module: the LLM, as a positional argument.
        llm: the same by name.
        encoder: module of images.
        audio: module of audio.
        model: name of the model, for people. Default: the class of the first module.
        tokens_max: longest sequence, and maximum tokens of a microbatch inside a module.
        seconds_max: seconds to measure for, divided evenly between the modules; the shapes of the first grid
            always run.
        error_bound: relative error of interpolation below which no further shapes are measured.
        repeats: runs of each shape in the profile; fewer (at least 3) if the time is over.
        device: device to move modules to. Default: their current device.
        dtype: runs passes under ``torch.autocast`` of this type if the parameters have another type.
        make_inputs: function from the tokens of every sequence or item (``list[int]``) to the module's
            inputs: a mapping of keyword arguments, a tuple, or one tensor; required for modules other than
            Hugging Face LLMs, vision towers of tiles and of native resolution, and audio towers of windows.
        item_tokens: with ``make_inputs`` of an encoder: the tokens of an item if all items are equal, else
            ``"free"``.
        loss: function from the module's output to the start of the backward pass. Default: its ``loss``, else
            its first tensor.
        layers: number of transformer layers of a module that is not one list of layers; 1 for a single layer.
            The cost model scales times in proportion to the model's layers, or exactly with two counts in
            ``cut_layers``.
        cut_layers: measures modules with their first layers only, such as ``(2, 4)``, which separates the
            time per layer from the rest and needs less memory; modules get all their layers back.
        widths: ``hidden``, ``heads``, ``kv_heads``, ``ffn`` by module; models of other widths cannot use the
            profile. Default: the widths in the module's ``config``, if it has one.
        optimizer: function from parameters to an optimizer, such as ``torch.optim.AdamW``, whose step is
            measured too (at a learning rate of 0).
        tp_group: process group of a tensor-parallel module; all its ranks make the same call, and the slowest
            rank's time counts.
        seed: seed of all random choices.
        progress: function that is called with lines of progress.

    Raises:
        TypeError: a module is of an unknown kind, and there is no ``make_inputs`` for it.
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
        ...     encoder=Tower(), tokens_max=128, seconds_max=0.1, repeats=3, item_tokens=32,
        ...     make_inputs=lambda lengths: torch.ones(len(lengths), 32, 32),
        ... )
        >>> profile.model, list(profile.reports)
        ('Tower', ['vision'])

        Language models and encoders of ``transformers`` need no more than the modules:

        >>> profile = dflop.torch.profile(
        ...     llm=model.language_model, encoder=model.vision_tower, tokens_max=8192
        ... )  # doctest: +SKIP
    """
    modules = _modules(module, llm, encoder, audio)
    _check_settings(tokens_max=tokens_max, seconds_max=seconds_max, error_bound=error_bound, repeats=repeats)
    name = model or type(next(iter(modules.values()))).__name__
    agree, tp = _agreement(tp_group, device)
    report_line = progress or (lambda line: None)
    rows: list[Row] = []
    reports: dict[str, ModuleReport] = {}
    recomputes: dict[str, str] = {}
    subjects = []
    for kind, one in modules.items():
        if device is not None:
            one.to(device)
        make, sequences = _inputs(kind, one, _of(make_inputs, kind, modules), _of(item_tokens, kind, modules))
        place = _device(one, device)
        count = _of(layers, kind, modules) or layer_count(one)
        subject = Subject(
            name=kind,
            module=one,
            sequences=sequences,
            make_inputs=make,
            layers=count,
            attention_layers=full_attention_layers(kind, one, count),
            clock=clock_of(place),
            device=place,
            autocast=_autocast(one, dtype),
            loss=_of(loss, kind, modules),
            agree=agree,
        )
        settings = Settings(
            tokens_max=tokens_max,
            error_bound=error_bound,
            seconds=seconds_max / len(modules),
            repeats=repeats,
            tp=tp,
            cut_layers=tuple(cut_layers or ()),
            optimizer=optimizer,
        )
        with borrowed(one, place):
            torch.manual_seed(seed)
            recomputes.update({kind: _recompute(one, subject)})
            measured, report = Measurer(subject, settings).measure()
        rows += measured
        reports[kind] = report
        subjects.append(subject)
        report_line(_shown(report))
    return Profile(
        model=name,
        rows=tuple(rows),
        metadata=_metadata(subjects, dtype, recomputes),
        widths={kind: (widths or {}).get(kind, widths_of(kind, one)) for kind, one in modules.items()},
        reports=reports,
        tokens_max=tokens_max,
        subjects=tuple(subjects),
    )


def _modules(*given: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
    module, llm, encoder, audio = given
    if module is not None and llm is not None:
        raise TypeError("pass the LLM once: without a name, or as `llm`")
    found = {"vision": encoder, "audio": audio, "llm": module if module is not None else llm}
    modules = {kind: one for kind, one in found.items() if one is not None}
    if not modules:
        raise TypeError("pass a module to measure: `llm`, `encoder` or `audio`")
    return modules


def _of(setting: Mapping[str, T] | T | None, kind: str, modules: Mapping[str, Any]) -> T | None:
    """Returns the setting of one module."""
    if isinstance(setting, Mapping):
        unknown = [name for name in setting if name not in modules]
        if unknown:
            raise ValueError(f"expected settings for {', '.join(modules)}, found one for {unknown[0]}")
        return setting.get(kind)
    if setting is not None and len(modules) > 1:
        raise TypeError(f"several modules are measured: give each setting by name, as in {{{kind!r}: ...}}")
    return setting


def _inputs(
    kind: str, module: torch.nn.Module, make: MakeInputs | None, item_tokens: ItemTokens | None
) -> tuple[MakeInputs, Sequences]:
    if make is None:
        return default_inputs(kind, module)
    if kind == "llm" or item_tokens == "free":
        return make, Sequences.text()
    if item_tokens is None:
        raise TypeError(
            f"{kind}: make_inputs needs item_tokens: the tokens of an item, or 'free' where items differ"
        )
    return make, Sequences.items(item_tokens)


def _check_settings(**settings: float) -> None:
    for name, least in {"tokens_max": 2, "seconds_max": 0.0, "error_bound": 1e-6, "repeats": 1}.items():
        if not settings[name] >= least:
            raise ValueError(f"{name}: must be at least {least}, found {settings[name]}")


def _device(module: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device(device or "cpu")


def _autocast(module: torch.nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    own = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return None if dtype is None or own == {dtype} else dtype


def _cut(subject: Subject, layers: int) -> Any:
    from contextlib import nullcontext

    return nullcontext() if layers == subject.layers else cut_to(subject.module, layers)


def _agreement(
    group: Any, device: str | torch.device | None
) -> tuple[Callable[[list[float]], list[float]], int]:
    """Returns a function that gives all ranks of a group the slowest rank's times, and the group's size."""
    if group is None:
        return list, 1
    import torch.distributed as dist

    place = torch.device("cuda") if "nccl" in dist.get_backend(group) else torch.device("cpu")

    def agree(times: list[float]) -> list[float]:
        slowest = torch.tensor(times, dtype=torch.float64, device=place)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return [float(time) for time in slowest.tolist()]

    return agree, dist.get_world_size(group)


def _metadata(
    subjects: Sequence[Subject], dtype: torch.dtype | None, recomputes: Mapping[str, str]
) -> dict[str, str]:
    def of_each(value: Callable[[Subject], str]) -> str:
        values = {subject.name: value(subject) for subject in subjects}
        return next(iter(values.values())) if len(set(values.values())) == 1 else _pairs(values)

    first = subjects[0]
    return {
        "device": device_name(first.device),
        "torch": str(torch.__version__),
        "dtype": of_each(lambda subject: str(dtype or _dtype(subject.module)).removeprefix("torch.")),
        "trained": of_each(lambda subject: _trained(subject.module)),
        "recompute": of_each(lambda subject: recomputes[subject.name]),
        "clock": first.clock.name,
    }


def _recompute(module: torch.nn.Module, subject: Subject) -> str:
    """Runs the shortest sequence once to detect whether the backward pass recomputes layers."""
    with watched(module) as seen:
        subject.runs([(subject.sequences.short,)])
    return "layers" if True in seen else "none"


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _dtype(module: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _trained(module: torch.nn.Module) -> str:
    asks = {parameter.requires_grad for parameter in module.parameters()}
    return "partly" if len(asks) > 1 else ("all" if asks == {True} else "nothing")


def _shown(report: ModuleReport) -> str:
    error = "not known" if report.error_max is None else f"{report.error_max:.1%}"
    open_ = report.shapes.open + (report.lengths.open if report.lengths else 0)
    lengths = f" and {len(report.lengths.points)} lengths" if report.lengths else ""
    return (
        f"{report.module}: {report.rounds} rounds of {len(report.shapes.points)} shapes{lengths}; "
        f"largest error between them {error}, {open_} left open"
    )
