"""Where a buffer lies: which device, and memory that the GPUs of other ranks reach."""

from __future__ import annotations

import torch
from torch import Tensor


def pick_device(device: torch.device | str | None) -> torch.device:
    """`device`, or the current CUDA device when None; a CUDA device always with its index.

    Raises:
        ValueError: None, and torch sees no CUDA device.
    """
    if device is None and not torch.cuda.is_available():
        raise ValueError(
            "device=None means the current CUDA device, and torch sees none. The kernel needs an "
            "SM90 GPU; device='cpu' makes a buffer to look at."
        )
    chosen = torch.device("cuda" if device is None else device)
    if str(chosen) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def allocate(num_bytes: int, device: torch.device, num_ranks: int) -> Tensor:
    """Zeroed bytes that the GPUs of the other ranks can reach."""
    if num_ranks == 1:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    import torch.distributed._symmetric_memory as symmetric

    raw: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    return raw.zero_()
