"""Types of the compiled part. Classes and functions document themselves at run time."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, final, overload

from dflop.batches import Batch, Medium, Microbatch, Sample, Step
from dflop.custom import Custom, ModelDescription
from dflop.settings import CustomProcessor, Order, Plan, Processor, Read

__all__ = [
    "Array",
    "Augment",
    "BalancedLoader",
    "BatchIterator",
    "CostModel",
    "Dataset",
    "Image",
    "Loader",
    "MicrobatchIterator",
    "Mixture",
    "SampleTransform",
    "ShardWriter",
    "StepIterator",
    "StepMicrobatches",
    "StepPlan",
    "Table",
    "TimeCurve",
    "Transform",
    "__version__",
    "balance",
    "check_predictions",
    "choose_sizes",
    "cli",
    "command",
    "index_part",
    "merge_index",
    "mix",
    "pack_all",
    "pack_finish",
    "pack_list",
    "pack_one",
    "pack_tables",
]
__version__: str

_Path: TypeAlias = str | os.PathLike[str]
_Names: TypeAlias = _Path | Sequence[_Path]
_Model: TypeAlias = _Path | ModelDescription | Sequence[_Path | ModelDescription]
_ArrayType: TypeAlias = Literal["numpy", "torch", "jax", "dlpack", "auto"]
_Transforms: TypeAlias = (
    Mapping[str, Callable[[list[Any]], Sequence[Any]]] | Sequence[Transform | SampleTransform]
)

@final
class Array:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def is_readonly(self) -> bool: ...
    def numpy(self) -> Any: ...
    def __len__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class Augment:
    def __new__(
        cls,
        *,
        crop_scale: tuple[float, float] | None = None,
        crop_ratio: tuple[float, float] = ...,
        flip: float = 0.0,
        color_jitter: tuple[float, float, float, float] = ...,
    ) -> Self: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Image:
    def __new__(
        cls,
        size: int = 224,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: Literal["float32", "bfloat16", "uint8"] = "float32",
        layout: Literal["nchw", "nhwc"] = "nchw",
        augment: Augment | None = None,
        scaled_decode: bool = False,
    ) -> Self: ...
    @property
    def size(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Transform:
    def __new__(
        cls,
        fields: _Names,
        function: Callable[..., Sequence[Any]],
        *,
        decodes: bool = False,
        has_context: bool = False,
    ) -> Self: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class SampleTransform:
    def __new__(
        cls,
        function: Callable[..., Sequence[Mapping[str, Any] | BaseException | None]],
        *,
        has_context: bool = False,
    ) -> Self: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Dataset:
    def __new__(
        cls,
        shards: _Names,
        *,
        index: _Path | None = None,
        split: str | None = None,
        splits: _Path | None = None,
        repeat: int | None = None,
        cache: _Path | None = None,
        cache_bytes: int = ...,
        requests_max: int = 256,
        read: Literal["auto", "mmap", "pread"] = "auto",
        allow_pipe: bool = False,
        allow_outside: bool = False,
        tokenizer: Any | None = None,
        model: _Names | None = None,
        chat_template: str | None = None,
        caption_prompt: str | None = None,
        rebuild: bool = False,
        verify: bool = False,
        foreign: Literal["ignore", "check", "follow"] = "check",
    ) -> Self: ...
    @property
    def shards(self) -> list[str]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def index_path(self) -> Path | None: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def skipped(self) -> list[dict[str, Any]]: ...
    @property
    def warnings(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, tuple[list[str]]]: ...
    def __arrow_c_stream__(self, requested_schema: Any | None = None) -> Any: ...

@final
class Mixture:
    def __len__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Table:
    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __arrow_c_stream__(self, requested_schema: Any | None = None) -> Any: ...

@final
class CostModel:
    def __new__(
        cls,
        model: _Model,
        *,
        device: str = "h100",
        profile: _Path | None = None,
        profile_tp: Sequence[int] | None = None,
        packed_tokens: int | None = None,
        freeze: str | None = None,
        recompute: Literal["none", "scores", "layers"] = "none",
    ) -> Self: ...
    @property
    def modules(self) -> list[str]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def cost(
        self,
        *,
        text_tokens: int = 0,
        target_tokens: int = 0,
        images: Sequence[tuple[int, int]] = ...,
        audio: Sequence[tuple[int, int]] = ...,
        videos: Sequence[tuple[int, int, int]] = ...,
    ) -> dict[str, Any]: ...
    def sequence_times(self, module: str, lengths: Sequence[int]) -> list[int]: ...
    def annotate(self, dataset: Dataset) -> Table: ...

@final
class Loader:
    def __new__(
        cls,
        dataset: Dataset | _Names,
        *,
        batch_size: int = 32,
        image: Image | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        epochs: int = 1,
        samples: int | None = None,
        drop_last: bool = False,
        shuffle_buffer: int | None = None,
        shuffle_bytes: int = 268435456,
        shuffle_shards: bool = False,
        read: Read | None = None,
        transforms: _Transforms | None = None,
        filter: Callable[[list[dict[str, Any]]], Sequence[bool]] | None = None,
        array_type: _ArrayType = "auto",
    ) -> Self: ...
    def __iter__(self) -> BatchIterator: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __setstate__(self, state: Mapping[str, Any]) -> None: ...
    @property
    def skipped(self) -> list[dict[str, Any]]: ...
    @property
    def skipped_samples(self) -> int: ...
    @property
    def filtered_samples(self) -> int: ...
    @property
    def kernel_cpu_seconds(self) -> float: ...
    def metrics(self) -> dict[str, Any]: ...

@final
class BatchIterator(Iterator[Batch]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class BalancedLoader:
    def __new__(
        cls,
        dataset: Dataset | Mixture | _Names,
        *,
        model: _Model | CostModel | Custom,
        global_batch_size: int,
        microbatches: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        steps: int | None = None,
        tokenizer: Any | None = None,
        processor: Processor | CustomProcessor | None = None,
        plan: Plan | None = None,
        order: Order | None = None,
        read: Read | None = None,
        transforms: _Transforms | None = None,
        filter: Callable[[list[dict[str, Any]]], Iterable[bool]] | None = None,
        array_type: _ArrayType = "auto",
    ) -> Self: ...
    def __iter__(self) -> StepIterator: ...
    def __len__(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def modules(self) -> list[str]: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def filtered_samples(self) -> int: ...
    def report_stage_seconds(
        self, step: Step, seconds: Mapping[str, Sequence[Sequence[float]]]
    ) -> dict[str, Any] | None: ...
    def media_shares(self, step: Step, microbatch: int, ranks: int) -> list[list[Medium]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __setstate__(self, state: Mapping[str, Any]) -> None: ...
    @property
    def skipped(self) -> list[dict[str, Any]]: ...
    @property
    def skipped_samples(self) -> int: ...
    def metrics(self) -> dict[str, Any]: ...
    def prepare_report(self) -> dict[str, Any]: ...

@final
class StepIterator(Iterator[Step]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> Step: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class StepMicrobatches(Sequence[Microbatch]):
    def __len__(self) -> int: ...
    def __iter__(self) -> MicrobatchIterator: ...
    @overload
    def __getitem__(self, index: int, /) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Microbatch]: ...

@final
class MicrobatchIterator(Iterator[Microbatch]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> Microbatch: ...
    def skip(self, sample: Sample, reason: str) -> None: ...

@final
class StepPlan:
    def __new__(cls, json: str) -> Self: ...
    @property
    def ranks(self) -> list[list[list[int]]]: ...
    @property
    def refused(self) -> list[tuple[int, str]]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def mix(
    datasets: Sequence[tuple[Dataset | _Names, float]],
    *,
    weights_from: Sequence[tuple[int, Sequence[float]]] = ...,
    choose: Sequence[int] | None = None,
    stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
) -> Mixture: ...
def balance(
    instance: Mapping[str, Any],
    *,
    strategy: str = "search",
    search_effort: int | None = None,
    dp: int | None = None,
    stages: Sequence[int] | None = None,
    tokens_max: int | None = None,
    bytes_max: int | None = None,
) -> dict[str, Any]: ...

@final
class ShardWriter:
    def __new__(
        cls,
        directory: _Path,
        *,
        shard_bytes: int | None = None,
        shard_samples: int | None = None,
        zstd: bool = False,
        index: bool = True,
        append: bool = False,
    ) -> Self: ...
    def write(self, key: str, fields: Sequence[tuple[str, bytes | bytearray]]) -> None: ...
    def finish(self) -> dict[str, Any]: ...
    def abort(self) -> None: ...

@final
class TimeCurve:
    def __new__(cls, points: Iterable[tuple[int, float]], *, is_squared: bool = False) -> Self: ...
    def at(self, tokens: int) -> float: ...

def choose_sizes(
    size_min: int,
    size_max: int,
    *,
    error_bound: float,
    snap: Callable[[int], int],
    measure: Callable[[list[int]], Sequence[float]],
    is_spent: Callable[[], bool],
    predict: Callable[[list[tuple[int, float]], list[int]], Sequence[float]] | None = None,
) -> tuple[list[int], float | None, int]: ...
def check_predictions(predicted: Sequence[float], runs: Sequence[Sequence[float]]) -> dict[str, Any]: ...
def cli(args: Sequence[str], *, program: Sequence[str]) -> int: ...
def command(args: Sequence[str]) -> str: ...
def index_part(dataset: Dataset, shards: Sequence[str]) -> bytes: ...
def merge_index(dataset: Dataset, parts: Sequence[bytes]) -> None: ...
def pack_all(sources: Sequence[_Path], out: _Path, settings: Mapping[str, Any]) -> dict[str, Any]: ...
def pack_tables(tables: Iterable[bytes], name: str, out: _Path, settings: Mapping[str, Any]) -> dict[str, Any]: ...
def pack_list(source: _Path, parts: int, settings: Mapping[str, Any]) -> list[bytes]: ...
def pack_one(source: _Path, out: _Path, part: bytes, settings: Mapping[str, Any]) -> bytes: ...
def pack_finish(out: _Path, parts: Sequence[bytes], settings: Mapping[str, Any]) -> dict[str, Any]: ...
