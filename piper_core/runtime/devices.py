"""What devices this machine has."""

from __future__ import annotations


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
