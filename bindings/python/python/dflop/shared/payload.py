"""Objects in shared memory: pickled, with the memory of their arrays beside the pickle.

An object is written once to an unnamed file in memory, which is sealed and handed over by its descriptor.
Receivers map it: arrays are views of the map, private to a process once it writes to them. The kernel frees
the memory with the last map, also of processes that were killed.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any

from dflop._native import Array

# Alignment of arrays, a cache line.
ALIGNMENT = 64
# Arrays below this size are pickled: a view would not pay off.
VIEW_BYTES_MIN = 4096
# Largest number of buffers, and of bytes, of one system call.
BUFFERS_MAX = 512
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LENGTHS = struct.Struct("<Q")


def write(value: Any) -> int:
    """Writes an object to shared memory.

    Returns:
        the descriptor of the memory, which the caller closes.

    Raises:
        OSError: there is not enough memory.
        Exception: the object cannot be pickled.
    """
    views: list[memoryview] = []

    def keeps_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < VIEW_BYTES_MIN:
            return True
        views.append(view)
        return False

    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=keeps_inside).dump(value)
    parts: list[Any] = [pickled.getbuffer(), *views]
    head = b"".join(_LENGTHS.pack(number) for number in (len(parts), *(part.nbytes for part in parts)))
    memory = os.memfd_create("dflop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_aligned(memory, [head, *parts])
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def read(memory: int) -> Any:
    """Reads an object from shared memory; its arrays are views of the memory, which may be written to."""
    size = os.fstat(memory).st_size
    whole = memoryview(mmap.mmap(memory, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    (parts,) = _LENGTHS.unpack_from(whole)
    lengths = [_LENGTHS.unpack_from(whole, _LENGTHS.size * (1 + part))[0] for part in range(parts)]
    start, views = _LENGTHS.size * (1 + parts), []
    for length in lengths:
        start = _aligned(start)
        views.append(whole[start : start + length])
        start += length
    return pickle.loads(views[0], buffers=views[1:])


class _Pickler(pickle.Pickler):
    """Pickles arrays of all libraries with their memory beside the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Array) and not value.is_readonly:
            return _array, (pickle.PickleBuffer(value.numpy()), value.dtype, value.shape)
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _is_plain(torch, value):
            tensor = value.detach().contiguous()
            if tensor.numel() == 0:
                return _empty_tensor, (str(tensor.dtype), tuple(tensor.shape))
            buffer = pickle.PickleBuffer(tensor.reshape(-1).view(torch.uint8).numpy())
            return _tensor, (buffer, str(tensor.dtype), tuple(tensor.shape))
        return NotImplemented


def _is_plain(torch: Any, tensor: Any) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_conj()
    return is_dense and tensor.device.type == "cpu" and not tensor.is_neg()


def _tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)


def _empty_tensor(dtype: str, shape: Sequence[int]) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))


def _array(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Makes a NumPy array; of bfloat16, which NumPy lacks, the bits."""
    import numpy as np

    return np.frombuffer(buffer, dtype="uint16" if dtype == "bfloat16" else dtype).reshape(shape)


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _write_aligned(memory: int, parts: Sequence[Any]) -> None:
    """Writes parts one after the other, each aligned, and the head directly before the first."""
    end, buffers = 0, []
    for part in parts:
        gap = _aligned(end) - end
        if gap:
            buffers.append(memoryview(bytes(gap)))
        view = memoryview(part).cast("B")
        buffers.append(view)
        end += gap + view.nbytes
    os.ftruncate(memory, end)
    while buffers:
        written = os.writev(memory, buffers[:BUFFERS_MAX])
        while buffers and written >= buffers[0].nbytes:
            written -= buffers.pop(0).nbytes
        if buffers and written:
            buffers[0] = buffers[0][written:]
