"""Copy what the host has computed to a device without waiting for the copy."""

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device; to a GPU it goes by pinned memory, which torch keeps until it is copied."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
