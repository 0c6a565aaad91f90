"""Expert weights: as the model has them, and as the kernel reads them.

A plain weight is (E, N, K) e4m3, row-major, with scales (E, N/128, K/128) float32. The kernel reads
128 x 128 blocks that are contiguous in memory and swizzled (swizzle.py), and for W1 rows that
alternate between 64 gate and 64 up rows, so that one tile holds the two halves of the same
intermediate columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3
from .swizzle import swizzle_rows

INTERLEAVE = 64
"""Rows of gate, then of up, in the interleaved W1: half of the N of one WGMMA."""


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Weights as a model has them, row-major.

    Attributes:
        l1: (E, 2*intermediate, hidden) e4m3; gate rows, then up rows.
        l1_sf: (E, 2*intermediate/128, hidden/128) float32.
        l2: (E, hidden, intermediate) e4m3.
        l2_sf: (E, hidden/128, intermediate/128) float32.
    """

    l1: Tensor
    l1_sf: Tensor
    l2: Tensor
    l2_sf: Tensor

    def of(self, experts: slice) -> PlainWeights:
        """Those of some neighbouring experts, in the same memory."""
        return PlainWeights(
            self.l1[experts], self.l1_sf[experts], self.l2[experts], self.l2_sf[experts]
        )


@dataclass(frozen=True, slots=True)
class MoEWeights:
    """Weights as the kernel reads them, from `transform_weights`.

    Attributes:
        l1: codes (E, 2*intermediate/128, hidden/128, 128, 128) e4m3, interleaved and pre-tiled;
            scales (E, 2*intermediate/128, hidden/128) float32, still gate blocks, then up blocks.
        l2: codes (E, hidden/128, intermediate/128, 128, 128) e4m3, pre-tiled; scales
            (E, hidden/128, intermediate/128) float32.
    """

    l1: tuple[Tensor, Tensor]
    l2: tuple[Tensor, Tensor]


def interleave_gate_up(w: Tensor) -> Tensor:
    """Reorder the rows of W1: 64 gate rows, the 64 matching up rows, the next 64 gate rows, ...

    Args:
        w: (E, 2*intermediate, hidden), gate rows, then up rows; e4m3 or any dtype.

    Returns:
        A copy of the same shape.
    """
    experts, rows, columns = w.shape
    split = _bytes(w).view(experts, 2, rows // 2 // INTERLEAVE, INTERLEAVE, -1)
    return split.transpose(1, 2).reshape(experts, rows, -1).view(w.dtype)


def separate_gate_up(w: Tensor) -> Tensor:
    """Exact inverse of `interleave_gate_up`."""
    experts, rows, columns = w.shape
    split = _bytes(w).view(experts, rows // 2 // INTERLEAVE, 2, INTERLEAVE, -1)
    return split.transpose(1, 2).reshape(experts, rows, -1).view(w.dtype)


def pretile(w: Tensor) -> Tensor:
    """Make every 128 x 128 block contiguous, as WGMMA reads it (`swizzle_rows`).

    (E, N, K) e4m3 -> (E, N/128, K/128, 128, 128).
    """
    experts, rows, columns = w.shape
    shape = (experts, rows // SCALE_BLOCK, SCALE_BLOCK, columns // SCALE_BLOCK, SCALE_BLOCK)
    return swizzle_rows(_bytes(w).view(shape).transpose(2, 3)).view(w.dtype)


def untile(tiled: Tensor) -> Tensor:
    """Exact inverse of `pretile`: (E, N/128, K/128, 128, 128) -> (E, N, K)."""
    experts, row_blocks, column_blocks = tiled.shape[:3]
    shape = (experts, row_blocks * SCALE_BLOCK, column_blocks * SCALE_BLOCK)
    codes = swizzle_rows(_bytes(tiled)).transpose(2, 3)
    return codes.reshape(shape).view(tiled.dtype)


def transform_weights(
    l1: tuple[Tensor, Tensor], l2: tuple[Tensor, Tensor], problem: Problem | None = None
) -> MoEWeights:
    """Prepare the stacked weights of one rank for the kernel. Allocates a copy of the codes.

    Args:
        l1: codes (E, 2*intermediate, hidden) e4m3 (gate rows, then up rows) and scales
            (E, 2*intermediate/128, hidden/128) float32, contiguous.
        l2: codes (E, hidden, intermediate) e4m3 and scales (E, hidden/128, intermediate/128)
            float32, contiguous.
        problem: when given, E, hidden and intermediate must be those of one of its ranks.

    Raises:
        ValueError: a shape, stride, dtype or device that breaks one of these rules.
    """
    plain = PlainWeights(*l1, *l2)
    check_plain_weights(plain, problem)
    return MoEWeights(
        (pretile(interleave_gate_up(plain.l1)), plain.l1_sf), (pretile(plain.l2), plain.l2_sf)
    )


def transform_separate(
    gate: Tensor,
    gate_sf: Tensor,
    up: Tensor,
    up_sf: Tensor,
    down: Tensor,
    down_sf: Tensor,
    problem: Problem | None = None,
) -> MoEWeights:
    """Prepare weights that come as three matrices; see `transform_weights`.

    Args:
        gate: (E, intermediate, hidden) e4m3.
        gate_sf: (E, intermediate/128, hidden/128) float32, contiguous.
        up: like `gate`.
        up_sf: like `gate_sf`.
        down: (E, hidden, intermediate) e4m3.
        down_sf: (E, hidden/128, intermediate/128) float32, contiguous.
        problem: as for `transform_weights`.

    Raises:
        ValueError: as for `transform_weights`.
    """
    for name, codes, sf in (("gate", gate, gate_sf), ("up", up, up_sf)):
        _check_codes(name, codes)
        _check_scales(f"{name}_sf", sf, codes)
    if gate.shape != up.shape:
        raise ValueError(
            f"up of shape {tuple(up.shape)} must have the shape of gate, {tuple(gate.shape)}"
        )
    if gate.device != up.device:
        raise ValueError(f"up is on {up.device}, gate on {gate.device}: move them to one device")
    stacked = torch.cat((gate.view(torch.uint8), up.view(torch.uint8)), 1).view(E4M3)
    return transform_weights((stacked, torch.cat((gate_sf, up_sf), 1)), (down, down_sf), problem)


def restore_weights(weights: MoEWeights) -> PlainWeights:
    """The plain weights that `transform_weights` was given, for the reference."""
    (l1, l1_sf), (l2, l2_sf) = weights.l1, weights.l2
    return PlainWeights(separate_gate_up(untile(l1)), l1_sf, untile(l2), l2_sf)


def check_plain_weights(plain: PlainWeights, problem: Problem | None = None) -> None:
    """Raise ValueError unless shapes, strides, dtypes and devices are as `PlainWeights` says."""
    _check_codes("l1", plain.l1)
    _check_codes("l2", plain.l2)
    experts, rows, hidden = plain.l1.shape
    if rows % (2 * SCALE_BLOCK):
        raise ValueError(
            f"l1 of shape {tuple(plain.l1.shape)} has {rows} rows; gate and up rows need a "
            f"multiple of {2 * SCALE_BLOCK} together: (experts, 2*intermediate, hidden)"
        )
    if tuple(plain.l2.shape) != (experts, hidden, rows // 2):
        raise ValueError(
            f"l2 of shape {tuple(plain.l2.shape)} does not belong to l1 of shape "
            f"{tuple(plain.l1.shape)}: it must be (experts, hidden, intermediate) = "
            f"{(experts, hidden, rows // 2)}"
        )
    _check_scales("l1 scale", plain.l1_sf, plain.l1)
    _check_scales("l2 scale", plain.l2_sf, plain.l2)
    if plain.l2.device != plain.l1.device:
        raise ValueError(f"l2 is on {plain.l2.device}, l1 on {plain.l1.device}")
    if problem is not None:
        want = (problem.num_local_experts, 2 * problem.intermediate, problem.hidden)
        if tuple(plain.l1.shape) != want:
            raise ValueError(
                f"l1 of shape {tuple(plain.l1.shape)} is not that of one rank of problem "
                f"{problem.name!r}: (num_local_experts, 2*intermediate, hidden) = {want}"
            )


def _bytes(w: Tensor) -> Tensor:
    """Contiguous raw bytes: float8 tensors support few operations."""
    return w.contiguous().view(torch.uint8)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, found {type(value).__name__}")


def _check_codes(name: str, w: Tensor) -> None:
    _check_tensor(name, w)
    if w.dtype != E4M3 or w.dim() != 3:
        raise ValueError(
            f"{name} must be a 3-dimensional {E4M3} tensor (experts, rows, columns), found "
            f"{w.dtype} of shape {tuple(w.shape)}"
        )
    if w.shape[0] < 1 or w.shape[1] < 1 or w.shape[1] % SCALE_BLOCK or w.shape[2] % SCALE_BLOCK:
        raise ValueError(
            f"{name} of shape {tuple(w.shape)} must have at least one expert, and rows and columns "
            f"in multiples of {SCALE_BLOCK}, the block of one weight scale"
        )


def _check_scales(name: str, sf: Tensor, codes: Tensor) -> None:
    _check_tensor(name, sf)
    experts, rows, columns = codes.shape
    want = (experts, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
    if sf.dtype != torch.float32 or tuple(sf.shape) != want or not sf.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 of shape (experts, rows/128, columns/128) = {want},"
            f" found {sf.dtype} of shape {tuple(sf.shape)} with strides {sf.stride()}. Scales that "
            "other kernels keep column-major or packed must be converted; .contiguous() is right "
            "only if the shape already has this order."
        )
    if sf.device != codes.device:
        raise ValueError(f"{name} is on {sf.device}, its codes on {codes.device}")
