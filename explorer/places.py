"""Where the rows of a launch lie in a rank's pools, and in the memory behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.layout import num_ring_rows
from tl_megamoe.schedule import COUNTER_BITS

CAPACITY_STEP = 128
"""Tokens; a capacity that is proposed is a multiple."""


def num_blocks(counts: Sequence[int], block_m: int) -> int:
    """Pool blocks of a launch that receives these rows."""
    return first_blocks(counts, block_m)[-1]


def first_places(counts: Sequence[int], block_m: int, device: torch.device) -> Tensor:
    """(rows,) int64: pool rows that hold a rank's rows when each expert's stand in order."""
    first = first_blocks(counts, block_m)
    parts = [
        torch.arange(count, device=device) + first[expert] * block_m
        for expert, count in enumerate(counts)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)


def kernel_places(buffer: SymmBuffer, counts: Sequence[int], block_m: int) -> Tensor:
    """(rows,) int64: pool rows in the order of `Received`, read from the kernel's metadata.

    The kernel orders the rows of an expert as it likes. What stands in the metadata decides here,
    right or wrong: compare it with `Received.metadata`.
    """
    places = first_places(counts, block_m, buffer.device)
    metadata = buffer.token_src_metadata[places].long()
    within = metadata & ((1 << COUNTER_BITS) - 1)
    slot, token = within // buffer.capacity, within % buffer.capacity
    order = (metadata >> COUNTER_BITS) * buffer.capacity + token
    key = order * buffer.problem.num_topk + slot
    out, start = places.clone(), 0
    for count in counts:
        part = slice(start, start + count)
        out[part] = places[part][key[part].argsort()]
        start += count
    return out


def ring_rows(buffer: SymmBuffer, pool_rows: Tensor, block_m: int) -> Tensor:
    """Rows of the pools' memory that hold these pool rows."""
    blocks = buffer.layout.ring_rows // block_m
    return pool_rows // block_m % blocks * block_m + pool_rows % block_m


def rows_left(
    buffer: SymmBuffer, pool_rows: Tensor, counts: Sequence[int], block_m: int, *, in_order: bool
) -> Tensor:
    """(rows,) bool: which pool rows are still in memory after a launch.

    Args:
        buffer: of the rank.
        pool_rows: pool rows.
        counts: rows of each local expert.
        block_m: rows of a pool block.
        in_order: the launch took blocks in turn, so that the last one at a place stays (the fused
            kernel). Else whoever came last stays (stand-alone phases wait for nobody): only places
            that one block took are told.
    """
    blocks, ring = num_blocks(counts, block_m), buffer.layout.ring_rows // block_m
    block = pool_rows // block_m
    last = block + ring >= blocks
    return last if in_order else last & (block < ring)


def fits_ring(buffer: SymmBuffer, counts: Sequence[int], block_m: int) -> bool:
    """Whether the pools have memory for all rows at once."""
    return num_blocks(counts, block_m) <= buffer.layout.ring_rows // block_m


def no_room_at_once(buffer: SymmBuffer, received: Sequence[Sequence[int]], block_m: int) -> str:
    """Why phases one after the other cannot run: the pools must hold all rows of a launch at once.

    The fused kernel reuses rows while it runs. Empty when they can.

    Args:
        buffer: of one of the ranks.
        received: rows of each local expert, by rank.
        block_m: rows of a pool block.
    """
    ring = buffer.layout.ring_blocks(block_m)
    blocks = max(num_blocks(counts, block_m) for counts in received)
    if blocks <= ring:
        return ""
    capacity = CAPACITY_STEP
    while num_ring_rows(buffer.problem, capacity) // block_m < blocks:
        capacity += CAPACITY_STEP
    return (
        f"block_m={block_m} makes {blocks} pool blocks of a rank, and phases one after the other "
        f"have memory for {ring} at --capacity {buffer.capacity}: pass --capacity {capacity} or "
        "more"
    )


def counters_are_zero(buffer: SymmBuffer) -> bool:
    """Whether a launch left its counters as it found them."""
    offset = buffer.layout.workspace_offsets["expert_send_count"]
    sends = buffer.workspace[offset : offset + buffer.problem.num_experts]
    counters = (sends, buffer.l1_arrival_count, buffer.l2_arrival, buffer.l2_done)
    return not bool(torch.stack([c.ne(0).any() for c in counters]).any())
