"""Page-locks host memory, so that `tensor.to("cuda", non_blocking=True)` overlaps with compute."""

from __future__ import annotations

from typing import Any, Self

import torch

from dflop.torch._tensors import tensors_of


def pin(batch: Any) -> Any:
    """Returns a batch with its tensors in page-locked memory; without CUDA the batch itself.

    Tensors are copied into buffers of PyTorch's pool, which reuses them when the copies to the GPU are
    complete; the loader's memory is free immediately. To register the loader's buffers in place, without a
    copy, see `HostRegistry`.

    Args:
        batch: a mapping (also a `dflop.Batch` or a microbatch), list or tuple of CPU tensors and NumPy
            arrays; other values are not changed.

    Returns:
        the batch; a mapping becomes a ``dict``.

    Examples:
        >>> import torch
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> for batch in dflop.Loader("shards/", batch_size=128, image=dflop.Image(64)):
        ...     images = dflop.torch.pin(batch)["image"].to(device, non_blocking=True)
        >>> images.shape[1:]
        torch.Size([3, 64, 64])
    """
    if not torch.cuda.is_available():
        return batch
    return _pinned(batch)


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" else value
    if hasattr(value, "__array_interface__"):
        return torch.as_tensor(value).pin_memory()
    if hasattr(value, "keys"):
        return {key: _pinned(value[key]) for key in list(value.keys())}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_pinned, value))
    return type(value)(map(_pinned, value)) if isinstance(value, (list, tuple)) else value


class HostRegistry:
    """Registers memory with CUDA in place, once per buffer.

    For buffers that are reused many times and outlive the registry. Registered memory must not be freed:
    other memory at the same address would be taken for it. Registering a buffer of megabytes takes
    milliseconds, so it pays for reused buffers only. Without CUDA nothing is registered.

    Examples:
        >>> import torch
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> buffer = torch.empty(4, 3, 64, 64)
        >>> with dflop.torch.HostRegistry() as registry:
        ...     for batch in dflop.Loader("shards/", batch_size=2, image=dflop.Image(64), samples=6):
        ...         images = batch["image"]
        ...         registry.register([buffer])
        ...         on_device = buffer[: len(images)].copy_(images).to(device, non_blocking=True)
        ...     registered = len(registry)  # 1 on CUDA
    """

    def __init__(self) -> None:
        self._cudart: Any = None
        if torch.cuda.is_available():
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns the number of registered buffers."""
        return len(self._bytes)

    def register(self, batch: Any) -> None:
        """Registers the memory of all CPU tensors of a batch: a mapping, list or tuple of tensors.

        A known buffer is not registered again, unless a buffer of another size starts at its address.

        Args:
            batch: a mapping, list or tuple of tensors.

        Raises:
            RuntimeError: CUDA refuses a buffer, such as one that overlaps another.
        """
        if self._cudart is None:
            return
        values = {key: batch[key] for key in list(batch.keys())} if hasattr(batch, "keys") else batch
        for tensor in tensors_of(values):
            if tensor.device.type != "cpu" or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            self._register(storage.data_ptr(), storage.nbytes())

    def close(self) -> None:
        """Unregisters all buffers; call it before their memory is freed."""
        for address in list(self._bytes):
            self._unregister(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _register(self, address: int, size: int) -> None:
        if self._bytes.get(address) == size:
            return
        if address in self._bytes:
            self._unregister(address)
        self._succeed(
            self._cudart.cudaHostRegister(address, size, 0), f"register {size} bytes at {address:#x}"
        )
        self._bytes[address] = size

    def _unregister(self, address: int) -> None:
        del self._bytes[address]
        self._succeed(self._cudart.cudaHostUnregister(address), f"unregister the memory at {address:#x}")

    @staticmethod
    def _succeed(status: Any, what: str) -> None:
        if int(status) != 0:
            raise RuntimeError(f"CUDA could not {what}: status {int(status)}")
