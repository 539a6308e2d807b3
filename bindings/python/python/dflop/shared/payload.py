"""Objects in shared memory: a JSON document, and the memory of their arrays beside it.

An object is written once to an unnamed file in memory, which is sealed and handed over by its descriptor.
Receivers map it: arrays are views of the map, private to a process once it writes to them. The kernel frees
the memory with the last map, also of processes that were killed.

The file is the length of the document, the document and the parts, each at a place that the document states.
It holds data alone: reading it creates the types below and nothing else, and runs no code.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dflop import batches
from dflop._native import Array, StepPlan

# Alignment of arrays, a cache line; smaller ones are copied when they are read.
ALIGNMENT = 64
VIEW_BYTES_MIN = 4096
SMALL_ALIGNMENT = 16
# Largest number of buffers, and of bytes, of one system call.
BUFFERS_MAX = 512
DEPTH_MAX = 100
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LENGTH = struct.Struct("<Q")
# Kinds of NumPy arrays whose values are bytes without references.
_PLAIN_KINDS = "biufcmMSU"
_TENSOR_TYPES = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    }
)
_SCALARS = frozenset({type(None), bool, int, float, str})
_SEQUENCES = frozenset({list, tuple, set, frozenset})
_MISSING = object()
# Classes with attributes, some of which are dictionaries, too.
_CLASSES = {
    one.__name__: one
    for one in (
        batches.Sample,
        batches.Batch,
        batches.Microbatch,
        batches.Context,
        batches.ContextGroup,
        batches.ContextMedium,
        batches.Step,
        batches.Audio,
        batches.Video,
    )
}

_ATTRIBUTES: dict[type, list[str]] = {
    one: [name for name in getattr(one, "__slots__", one.__annotations__) if not name.startswith("__")]
    for one in _CLASSES.values()
}


def write(value: Any, names: str | Sequence[str] = "the object") -> int:
    """Writes an object to shared memory.

    - `names`: what messages call the object; of a tuple, each of its values

    Returns:
        the descriptor of the memory, which the caller closes.

    Raises:
        OSError: there is not enough memory.
        TypeError: the object has a value of a type that cannot be shared; the message names its place.
    """
    writer = _Writer()
    if isinstance(names, str):
        encoded = writer.write(value, names)
    else:
        encoded = ["tuple", *map(writer.write, value, names)]
    document = {"value": encoded, "parts": writer.places}
    head = json.dumps(document, separators=(",", ":")).encode()
    memory = os.memfd_create("dflop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_parts(memory, [_LENGTH.pack(len(head)), head], writer.parts, writer.places)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def read(memory: int) -> Any:
    """Reads an object from shared memory; its arrays are views of the memory, which may be written to.

    Raises:
        ValueError: the memory does not hold such an object, or could still be changed by others.
    """
    if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the memory of a message is not sealed")
    size = os.fstat(memory).st_size
    whole = memoryview(mmap.mmap(memory, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    (length,) = _LENGTH.unpack_from(whole)
    document = json.loads(bytes(whole[_LENGTH.size : _LENGTH.size + length]))
    begin = _aligned(_LENGTH.size + length)
    parts = [whole[begin + place : begin + place + size] for place, size in document["parts"]]
    return _Reader(parts).decode(document["value"])


class _Refused(Exception):
    """A value cannot be shared, for a reason; with its places, from the inside out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.places: list[str] = []


def _refused(value: Any) -> _Refused:
    found = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "dtype"):
        found += f" of type {value.dtype}"
    return _Refused(
        f"a {found}: a shared loader hands over numbers, texts, bytes, lists, tuples, sets, dictionaries, arrays of"
        " NumPy and JAX and dense CPU tensors of PyTorch; make one of them in the transform or the processor"
    )


class _Writer:
    """Encodes values as JSON: scalars as they are, a dictionary with texts as keys as an object, everything
    else as a list that starts with its kind."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        # Offset and length of each part.
        self.places: list[tuple[int, int]] = []
        self._end = 0
        # Encoded arrays by identity, with the array, so that an identity belongs to one.
        self._known: dict[int, tuple[Any, Any]] = {}
        self._depth = 0

    def write(self, value: Any, name: str) -> Any:
        """Encodes a value.

        Raises:
            TypeError: it cannot be shared; the message names its place below ``name``.
        """
        try:
            return self._encode(value)
        except _Refused as refused:
            place = "".join(reversed(refused.places))
            raise TypeError(f"cannot share {name}{place}, {refused}") from None

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if self._depth == DEPTH_MAX:
            raise _Refused(f"which is nested more than {DEPTH_MAX} levels deep")
        self._depth += 1
        if kind is dict:
            encoded = self._mapping(value)
        elif kind in _SEQUENCES:
            encoded = self._sequence(value)
        elif _CLASSES.get(kind.__name__) is kind:
            encoded = self._object(value)
        else:
            encoded = self._leaf(value)
        self._depth -= 1
        return encoded

    def _sequence(self, values: Any) -> list[Any]:
        encoded: list[Any] = [type(values).__name__]
        try:
            for value in values:
                encoded.append(value if type(value) in _SCALARS else self._encode(value))
        except _Refused as refused:
            refused.places.append(f"[{len(encoded) - 1}]")
            raise
        return encoded

    def _mapping(self, values: dict[Any, Any]) -> Any:
        encoded, key = {}, None
        try:
            for key, value in values.items():
                if type(key) is not str:
                    return self._pairs(values)
                encoded[key] = value if type(value) in _SCALARS else self._encode(value)
        except _Refused as refused:
            if type(key) is str:
                refused.places.append(f"[{key!r}]")
            raise
        return encoded

    def _pairs(self, values: dict[Any, Any]) -> list[Any]:
        encoded: list[Any] = ["dict"]
        for key, value in values.items():
            try:
                encoded.append((self._encode(key), self._encode(value)))
            except _Refused as refused:
                refused.places.append(f"[{key!r}]")
                raise
        return encoded

    def _object(self, value: Any) -> Any:
        of, attributes, name = type(value), {}, ""
        try:
            items = self._mapping(value) if issubclass(of, dict) else None
            for name in _ATTRIBUTES[of]:
                one = getattr(value, name, _MISSING)
                if one is not _MISSING:
                    attributes[name] = one if type(one) in _SCALARS else self._encode(one)
        except _Refused as refused:
            if name:
                refused.places.append(f".{name}")
            if isinstance(value, batches.Sample):
                refused.places.append(f" (sample `{value.key}`)")
            raise
        return [of.__name__, attributes, items]

    def _leaf(self, value: Any) -> Any:
        known = self._known.get(id(value))
        if known is None:
            known = value, self._encoded(value)
            self._known[id(value)] = known
        return known[1]

    def _encoded(self, value: Any) -> Any:
        numpy, torch, jax = map(sys.modules.get, ("numpy", "torch", "jax"))
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _PLAIN_KINDS:
            return self._array(value, value.dtype.str, value.shape)
        if type(value) is Array:
            # Stored bytes are read-only, and arrive as bytes.
            if value.is_readonly:
                return ["bytes", self._part(memoryview(value.numpy()))]
            return self._array(value.numpy(), value.dtype, value.shape)
        if type(value) in (bytes, bytearray):
            return [type(value).__name__, self._part(memoryview(value))]
        if torch is not None and type(value) is torch.Tensor:
            return self._tensor(torch, value)
        if type(value) is StepPlan:
            return ["StepPlan", value.__reduce__()[1][0]]
        if jax is not None and isinstance(value, jax.Array) and str(value.dtype) in _TENSOR_TYPES:
            return ["jax", *self._array(jax.device_get(value), str(value.dtype), value.shape)[1:]]
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _PLAIN_KINDS:
            return ["number", self._part(memoryview(value.tobytes())), value.dtype.str]
        raise _refused(value)

    def _array(self, array: Any, dtype: str, shape: Sequence[int]) -> Any:
        import numpy

        flat: Any = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8) if array.size else b""
        return ["array", self._part(memoryview(flat)), dtype, list(shape)]

    def _tensor(self, torch: Any, value: Any) -> Any:
        is_dense = value.layout is torch.strided and not value.is_quantized and not value.is_conj()
        dtype = str(value.dtype).removeprefix("torch.")
        if not is_dense or value.device.type != "cpu" or value.is_neg() or dtype not in _TENSOR_TYPES:
            raise _refused(value)
        tensor = value.detach().contiguous()
        view = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        return ["tensor", self._part(memoryview(view)), dtype, list(tensor.shape)]

    def _part(self, view: memoryview) -> int:
        view = view.cast("B")
        alignment = ALIGNMENT if view.nbytes >= VIEW_BYTES_MIN else SMALL_ALIGNMENT
        place = _aligned(self._end, alignment)
        self.parts.append(view)
        self.places.append((place, view.nbytes))
        self._end = place + view.nbytes
        return len(self.parts) - 1


class _Reader:
    """Decodes what `_Writer` encodes."""

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts
        # An array that was one object stays one.
        self._known: dict[tuple[str, int], Any] = {}

    def decode(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: one if type(one) in _SCALARS else self.decode(one) for key, one in value.items()}
        if type(value) is not list:
            return value
        kind, *rest = value
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container(map(self.decode, rest))
        if kind == "dict":
            return {self.decode(key): self.decode(one) for key, one in rest}
        if kind in _CLASSES:
            return self._object(_CLASSES[kind], *rest)
        if kind == "StepPlan":
            return StepPlan(rest[0])
        known = kind, rest[0]
        if known not in self._known:
            self._known[known] = self._leaf(kind, self._parts[rest[0]], *rest[1:])
        return self._known[known]

    def _object(self, of: type, attributes: dict[str, Any], items: Any) -> Any:
        if not attributes.keys() <= set(_ATTRIBUTES[of]):
            raise ValueError(f"a message has a {of.__name__} with other attributes")
        decoded = self.decode(attributes)
        if not issubclass(of, dict):
            return of(**decoded)
        made = of(self.decode(items))
        for name, one in decoded.items():
            setattr(made, name, one)
        return made

    def _leaf(self, kind: str, part: memoryview, dtype: str = "", shape: Sequence[int] = ()) -> Any:
        if kind == "bytes":
            return bytes(part)
        # What is small would keep the whole map alive.
        memory = part if part.nbytes >= VIEW_BYTES_MIN else bytearray(part)
        if kind == "bytearray":
            return bytearray(part)
        if kind == "tensor" and dtype in _TENSOR_TYPES:
            return _tensor(memory, dtype, shape)
        if kind == "array":
            return _array(memory, dtype, shape)
        if kind == "jax" and dtype in _TENSOR_TYPES:
            return _jax(memory, dtype, shape)
        if kind == "number":
            return _array(memory, dtype, ())[()]
        raise ValueError(f"a message has a value of the kind `{kind}`, which is unknown")


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    of = getattr(torch, dtype)
    if not len(buffer):
        return torch.empty(tuple(shape), dtype=of)
    return torch.frombuffer(buffer, dtype=of).reshape(shape)


def _array(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Makes a NumPy array; of bfloat16, which NumPy lacks, the bits."""
    import numpy as np

    of = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    if of.kind not in _PLAIN_KINDS:
        raise ValueError(f"a message has an array of the type {dtype}")
    if not len(buffer):
        return np.empty(tuple(shape), of)
    return np.frombuffer(buffer, dtype=of).reshape(shape)


def _jax(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import jax
    import numpy as np

    of = jax.numpy.dtype(dtype)
    return jax.numpy.asarray(np.frombuffer(bytes(buffer), dtype=of).reshape(shape))


def _aligned(place: int, alignment: int = ALIGNMENT) -> int:
    return -(-place // alignment) * alignment


def _write_parts(
    memory: int, head: Sequence[bytes], parts: Sequence[memoryview], places: Sequence[tuple[int, int]]
) -> None:
    """Writes the head, and the parts at their places behind it."""
    buffers = [memoryview(part) for part in head]
    end = sum(buffer.nbytes for buffer in buffers)
    begin = _aligned(end)
    for part, (place, length) in zip(parts, places, strict=True):
        gap = begin + place - end
        if gap:
            buffers.append(memoryview(bytes(gap)))
        buffers.append(part)
        end = begin + place + length
    os.ftruncate(memory, end)
    buffers = [buffer for buffer in buffers if buffer.nbytes]
    while buffers:
        written = os.writev(memory, buffers[:BUFFERS_MAX])
        done = 0
        while done < len(buffers) and written >= buffers[done].nbytes:
            written -= buffers[done].nbytes
            done += 1
        del buffers[:done]
        if buffers and written:
            buffers[0] = buffers[0][written:]
