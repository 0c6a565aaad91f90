"""How WGMMA's operands lie in memory: 16-byte chunks swizzled by row, ready for bulk copies.

WGMMA reads its operands from shared memory in rows of 128 or 64 bytes whose chunks are exchanged by
row, lest all rows start in one bank (PTX ISA, "Shared memory matrix layout"). TMA tensor copies
exchange them on the way. Weights and the intermediate pool lie in memory like that, and plain bulk
copies bring them as they are: 16 KiB of weights or 8 KiB of rows each, without a descriptor.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16
ROW_TILE = 64
"""Rows, and columns, of a tile of the intermediate pool."""


def swizzle_rows(rows: Tensor) -> Tensor:
    """Exchange the 16-byte chunks of rows of 128 or 64 bytes; its own inverse.

    Chunk c of row r is at c ^ r % 8 in rows of 128 bytes, at c ^ r // 2 % 4 in rows of 64.

    Args:
        rows: (..., R, 128 or 64), any type of one byte; R a multiple of 8.

    Returns:
        A copy of the same shape and dtype.
    """
    width = rows.shape[-1]
    split = rows.view(torch.uint8).unflatten(-1, (-1, CHUNK)).unflatten(-3, (-1, 8))
    row = torch.arange(8, device=rows.device)[:, None]
    chunk = torch.arange(width // CHUNK, device=rows.device)
    moved = chunk ^ (row if width == 128 else row // 2)
    out: Tensor = split[..., row, moved, :].flatten(-2).flatten(-3, -2).view(rows.dtype)
    return out


def pack_rows(rows: Tensor) -> Tensor:
    """Rows as the intermediate pool holds them.

    Args:
        rows: (R, K), any type of one byte; R and K multiples of 64.

    Returns:
        (R/64, K/64, 64, 64), swizzled.
    """
    tiles = rows.view(torch.uint8).unflatten(0, (-1, ROW_TILE)).unflatten(2, (-1, ROW_TILE))
    return swizzle_rows(tiles.transpose(1, 2)).view(rows.dtype)


def unpack_rows(tiles: Tensor) -> Tensor:
    """Exact inverse of `pack_rows`: (R/64, K/64, 64, 64) -> (R, K)."""
    plain = swizzle_rows(tiles.view(torch.uint8)).transpose(1, 2)
    return plain.flatten(2).flatten(0, 1).view(tiles.dtype)
