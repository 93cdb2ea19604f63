"""Give the bytes of a tensor's memory to what is no tensor operation: digests and files."""

import ctypes
from typing import Any

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, without a copy; it keeps the tensor.

    Unlike after `numpy()`, PyTorch can still resize the tensor's storage, and so give its memory back.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"not the memory of a contiguous tensor on the CPU: strides {tensor.stride()}, {tensor.device}"
        )
    size = tensor.numel() * tensor.element_size()
    array: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")
