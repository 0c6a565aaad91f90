"""The layer as a function call: `fp8_mega_moe` in DeepGEMM's call shape, `mega_moe` functional."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from .buffer import SymmBuffer
from .frozen import resolve
from .kernel import CompiledKernel, KernelSpec, compile_kernel
from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe, as_recipe
from .schedule import Schedule, ScheduleError
from .weights import MoEWeights

ALIGNMENT = 16
"""Bytes that the kernel's vector accesses to caller's tensors are aligned to."""
WeightPair = tuple[torch.Tensor, torch.Tensor]


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Recipe | tuple[int, int, int] = (1, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    schedule: Schedule | None = None,
) -> None:
    """Run the MoE layer on the tokens in `sym_buffer` and write `y`. One kernel launch.

    The caller fills `x`, `x_sf`, `topk_idx` and `topk_weights` of the buffer first
    (`SymmBuffer.fill` or the views themselves) for `y.shape[0]` tokens. Work runs on torch's
    current stream; nothing waits for it. The first call with a new schedule compiles it (about
    10 s, then cached on disk): call `prepare` before capturing a CUDA graph.

    Args:
        y: (num_tokens, hidden) bfloat16, contiguous, on the buffer's device; 0 rows are fine.
        l1_weights: gate and up weights from `transform_weights(...).l1`: pre-tiled e4m3
            (local experts, 2*intermediate/128, hidden/128, 128, 128) and float32 scales.
        l2_weights: down weights from `transform_weights(...).l2`, likewise.
        sym_buffer: inputs, pools and workspace.
        cumulative_local_expert_recv_stats: (local experts,) int32; the rows each expert received
            are added to it.
        recipe: a Recipe, or DeepGEMM's (1, 128, 128).
        activation: `swiglu`.
        activation_clamp: if given, gate is cut at +clamp and up at +-clamp before SwiGLU.
        fast_math: approximate exponential and reciprocal in SwiGLU (a last-bit matter).
        schedule: run this schedule instead of the frozen one; never changes the result.

    Raises:
        ValueError: an argument breaks a rule above; the message names it, the rule and the value.
        ScheduleError: `schedule` is not valid for the problem.
    """
    num_tokens = _check_y(y, sym_buffer)
    _check_weights("l1_weights", l1_weights, sym_buffer)
    _check_weights("l2_weights", l2_weights, sym_buffer)
    stats = cumulative_local_expert_recv_stats
    if stats is not None:
        _check_tensor(
            "cumulative_local_expert_recv_stats",
            stats,
            (sym_buffer.problem.num_local_experts,),
            torch.int32,
            sym_buffer,
        )
    if activation != "swiglu":
        raise ValueError(f"activation={activation!r} must be 'swiglu'")
    _check_clamp(activation_clamp)
    kernel, chosen = prepare(
        sym_buffer,
        num_tokens,
        recipe=recipe,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
        schedule=schedule,
    )
    kernel.launch(
        sym_buffer,
        MoEWeights(l1=l1_weights, l2=l2_weights),
        y,
        num_tokens,
        chosen,
        recv_stats=stats,
        activation_clamp=activation_clamp,
    )


def mega_moe(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: MoEWeights,
    sym_buffer: SymmBuffer,
    **options: Any,
) -> torch.Tensor:
    """The layer as a function: copies the inputs into the buffer, runs it, returns `y`.

    Args:
        x: (num_tokens, hidden) e4m3 activations.
        x_sf: (num_tokens, hidden/128) float32 scales.
        topk_idx: (num_tokens, topk) int64 global expert of each route, -1 for none.
        topk_weights: (num_tokens, topk) float32 routing weights.
        weights: from `transform_weights`.
        sym_buffer: holds at least num_tokens.
        **options: those of `fp8_mega_moe` from `cumulative_local_expert_recv_stats` on.

    Returns:
        (num_tokens, hidden) bfloat16.

    Raises:
        ValueError: as `SymmBuffer.fill` and `fp8_mega_moe`.
    """
    sym_buffer.fill(x, x_sf, topk_idx, topk_weights)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    fp8_mega_moe(y, weights.l1, weights.l2, sym_buffer, **options)
    return y


def prepare(
    sym_buffer: SymmBuffer,
    num_tokens: int,
    *,
    recipe: Recipe | tuple[int, int, int] = (1, 128, 128),
    activation_clamp: float | None = None,
    fast_math: bool = True,
    schedule: Schedule | None = None,
) -> tuple[CompiledKernel, Schedule]:
    """Choose the schedule and load its kernel without launching it; kept with the buffer.

    Returns:
        The kernel that a call with these arguments launches, and the schedule it runs.

    Raises:
        ValueError, ScheduleError: as `fp8_mega_moe`.
    """
    recipe = as_recipe(recipe)
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, found {type(schedule).__name__}")
    chosen = schedule
    if chosen is None:
        chosen = sym_buffer.schedules.get(num_tokens)
    if chosen is None:
        chosen = resolve(
            sym_buffer.problem, sym_buffer.device_name, sym_buffer.capacity, num_tokens
        ).schedule
        if sym_buffer.num_sms is not None and chosen.num_sms > sym_buffer.num_sms:
            chosen = replace(chosen, num_sms=sym_buffer.num_sms)  # a smaller part, or a MIG slice
        sym_buffer.schedules[num_tokens] = chosen
    key = (chosen, recipe, activation_clamp is not None, fast_math)
    kernel = sym_buffer.kernels.get(key)
    if kernel is None:
        spec = KernelSpec(
            problem=sym_buffer.problem,
            schedule=chosen,
            capacity=sym_buffer.capacity,
            recipe=recipe,
            clamp=activation_clamp is not None,
            fast_math=fast_math,
        )
        if sym_buffer.device.type != "cuda":
            raise ValueError(
                f"sym_buffer is on {sym_buffer.device}: the kernel needs an SM90 GPU. "
                "tl_megamoe.reference.moe computes the same layer anywhere."
            )
        if sym_buffer.num_sms is not None and chosen.num_sms > sym_buffer.num_sms:
            raise ScheduleError(
                f"num_sms={chosen.num_sms} exceeds the {sym_buffer.num_sms} SMs of "
                f"{sym_buffer.device_name}: all blocks of the grid must be resident at once"
            )
        kernel = compile_kernel(spec)
        sym_buffer.kernels[key] = kernel
    return kernel, chosen


def weight_shapes(problem: Problem) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the pre-tiled weights and their scales, by argument name."""
    local = problem.num_local_experts
    hidden, intermediate = problem.hidden // SCALE_BLOCK, problem.intermediate // SCALE_BLOCK
    tile = (SCALE_BLOCK, SCALE_BLOCK)
    return {
        "l1_weights": ((local, 2 * intermediate, hidden, *tile), (local, 2 * intermediate, hidden)),
        "l2_weights": ((local, hidden, intermediate, *tile), (local, hidden, intermediate)),
    }


def _check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    buffer: SymmBuffer,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, found {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} for problem {buffer.problem.name!r}, "
            f"found {tuple(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} must start at a multiple of {ALIGNMENT} bytes (16-byte stores, TMA), found "
            f"{tensor.data_ptr():#x}. Clone it."
        )
    if tensor.device != buffer.device:
        raise ValueError(
            f"{name} must be on {buffer.device} like the buffer, is on {tensor.device}"
        )


def _check_y(y: Any, buffer: SymmBuffer) -> int:
    if not isinstance(y, torch.Tensor) or y.dim() != 2:
        found = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        raise ValueError(f"y must be a (num_tokens, hidden) tensor, found {found}")
    num_tokens = int(y.shape[0])
    if num_tokens > buffer.capacity:
        raise ValueError(
            f"y has num_tokens={num_tokens} rows, over the buffer's capacity={buffer.capacity}. "
            "Make the buffer with a larger capacity, or split the batch."
        )
    _check_tensor("y", y, (num_tokens, buffer.problem.hidden), torch.bfloat16, buffer)
    return num_tokens


def _check_weights(name: str, pair: Any, buffer: SymmBuffer) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"{name} must be a (weight, scale) pair from transform_weights, found "
            f"{type(pair).__name__}"
        )
    weight, scale = weight_shapes(buffer.problem)[name]
    try:
        _check_tensor(f"{name}[0]", pair[0], weight, torch.float8_e4m3fn, buffer)
    except ValueError as error:
        raise ValueError(f"{error}. Prepare weights with transform_weights.") from None
    _check_tensor(f"{name}[1]", pair[1], scale, torch.float32, buffer)


def _check_clamp(clamp: Any) -> None:
    if clamp is None:
        return
    if not isinstance(clamp, (int, float)) or not (math.isfinite(clamp) and clamp > 0):
        raise ValueError(f"activation_clamp={clamp!r} must be a positive number or None")
