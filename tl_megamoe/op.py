"""The layer as a function call: `fp8_mega_moe` in DeepGEMM's call shape, `mega_moe` functional.

Which schedule a launch runs: the `schedule` argument, else a forced math mode (the variants
`fp8_mega_moe_pingpong` and `fp8_mega_moe_cooperative`, or the environment variable
TL_MEGAMOE_KERNEL), else the frozen table of the device, else the built-in default, for which
TL_MEGAMOE_COOPERATIVE_THRESHOLD says from how many tokens it is cooperative. None of them changes
the result. All ranks must choose alike: the choice depends on `token_bound`, never on `num_tokens`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .arguments import (
    RecipeLike,
    WeightPair,
    check_bound,
    check_clamp,
    check_recipe,
    check_tensor,
    check_weights,
    check_y,
)
from .arguments import weight_shapes as weight_shapes
from .buffer import SymmBuffer
from .handshake import load_together, refuse_together
from .kernel import CompiledKernel, KernelSpec, compile_kernel
from .schedule import Schedule, ScheduleError
from .selection import KERNEL_VARIABLE, THRESHOLD_VARIABLE, choose_schedule
from .weights import MoEWeights

_Options = tuple[RecipeLike, float | None, bool, int | None, Schedule | None, str | None]
"""recipe, activation_clamp, fast_math, token_bound, schedule, math_mode."""


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: RecipeLike = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    token_bound: int | None = None,
    schedule: Schedule | None = None,
    math_mode: str | None = None,
) -> None:
    """Run the MoE layer on the tokens in `sym_buffer` and write `y`. One kernel launch.

    The caller fills `x`, `x_sf`, `topk_idx` and `topk_weights` of the buffer first
    (`SymmBuffer.fill` or the views themselves) for `y.shape[0]` tokens. Work runs on torch's
    current stream; nothing waits for it. With more than one rank every rank makes the call, with
    any number of tokens, also 0. The first call with a new schedule compiles it (about 10 s, then
    cached on disk), all ranks of a process group together: call `prepare` before capturing a CUDA
    graph. Virtual ranks are launched in `VirtualGroup.run`.

    Args:
        y: (num_tokens, hidden) bfloat16, contiguous, on the buffer's device; 0 rows are fine.
        l1_weights: gate and up weights of this rank's experts from `transform_weights(...).l1`:
            pre-tiled e4m3 (local experts, 2*intermediate/128, hidden/128, 128, 128) and float32
            scales.
        l2_weights: down weights from `transform_weights(...).l2`, likewise.
        sym_buffer: inputs, pools and workspace.
        cumulative_local_expert_recv_stats: (local experts,) int32; the rows each expert received
            are added to it.
        recipe: the buffer's Recipe; None or DeepGEMM's (1, 128, 128) mean the same.
        activation: `swiglu`.
        activation_clamp: if given, gate is cut at +clamp and up at +-clamp before SwiGLU.
        fast_math: approximate exponential and reciprocal in SwiGLU (a last-bit matter).
        token_bound: the most tokens that any rank has in this launch, the same on all ranks; the
            schedule is chosen for it. None: the capacity, with one rank num_tokens.
        schedule: run this schedule instead of the chosen one, the same on all ranks; never changes
            the result.
        math_mode: choose among schedules of this mode, `cooperative` or `pingpong`; not together
            with `schedule`.

    Raises:
        ValueError: an argument breaks a rule above; the message names it, the rule and the value.
            For whom it is raised, `prepare` says.
        ScheduleError: `schedule` is not valid for the problem.
    """
    stats = cumulative_local_expert_recv_stats

    def check_own() -> int:
        num_tokens = check_y(y, sym_buffer)
        check_weights("l1_weights", l1_weights, sym_buffer)
        check_weights("l2_weights", l2_weights, sym_buffer)
        if stats is not None:
            check_tensor(
                "cumulative_local_expert_recv_stats",
                stats,
                (sym_buffer.problem.num_local_experts,),
                torch.int32,
                sym_buffer,
            )
        if activation != "swiglu":
            raise ValueError(f"activation={activation!r} must be 'swiglu'")
        return num_tokens

    kernel, chosen, num_tokens = _prepare(
        sym_buffer,
        check_own,
        (recipe, activation_clamp, fast_math, token_bound, schedule, math_mode),
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


def fp8_mega_moe_pingpong(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: RecipeLike = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    token_bound: int | None = None,
) -> None:
    """`fp8_mega_moe` with a schedule whose math warpgroups each compute a tile of their own.

    Raises:
        ValueError: as `fp8_mega_moe`.
        ScheduleError: the problem has no such schedule; the message says why.
    """
    fp8_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        recipe,
        activation,
        activation_clamp,
        fast_math,
        token_bound=token_bound,
        math_mode="pingpong",
    )


def fp8_mega_moe_cooperative(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: RecipeLike = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    token_bound: int | None = None,
) -> None:
    """`fp8_mega_moe` with a schedule whose math warpgroups share every tile.

    Raises:
        ValueError: as `fp8_mega_moe`.
        ScheduleError: the problem has no such schedule; the message says why.
    """
    fp8_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        recipe,
        activation,
        activation_clamp,
        fast_math,
        token_bound=token_bound,
        math_mode="cooperative",
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

    In `VirtualGroup.run` call `fp8_mega_moe` instead: this one allocates and copies, which may wait
    for a rank that already runs.

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
    recipe: RecipeLike = None,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    token_bound: int | None = None,
    schedule: Schedule | None = None,
    math_mode: str | None = None,
) -> tuple[CompiledKernel, Schedule]:
    """Choose the schedule and load its kernel without launching it; kept with the buffer.

    With a process group the first call for a kernel is collective: every rank makes it, one rank a
    host compiles, the others load, and it returns when all have. Later calls exchange nothing.

    Args:
        sym_buffer: the buffer that will be launched.
        num_tokens: tokens of this rank.
        recipe, activation_clamp, fast_math, token_bound, schedule: as for `fp8_mega_moe`.
        math_mode: forced, `cooperative` or `pingpong`; not together with `schedule`.

    Returns:
        The kernel that a call with these arguments launches, and the schedule it runs.

    Raises:
        ValueError, ScheduleError: as `fp8_mega_moe`. Where the ranks load a kernel together the
            error of one is raised on all of them. Once they have it a rank that refuses its
            arguments tells nobody, and launches of the others wait for it for their `timeout_s`.
    """
    options = (recipe, activation_clamp, fast_math, token_bound, schedule, math_mode)
    kernel, chosen, _ = _prepare(sym_buffer, lambda: num_tokens, options)
    return kernel, chosen


def _prepare(
    sym_buffer: SymmBuffer, check_own: Callable[[], int], options: _Options
) -> tuple[CompiledKernel, Schedule, int]:
    """What `prepare` returns, and this rank's tokens.

    Args:
        sym_buffer: the buffer that will be launched.
        check_own: checks what other ranks need not have alike; returns the tokens.
        options: what they must have alike.
    """
    try:
        num_tokens = check_own()
        key = _kernel_key(sym_buffer, num_tokens, options)
    except Exception as error:
        _tell_peers(sym_buffer, error, options)
        raise
    kernel = sym_buffer.kernels.get(key)
    if kernel is None:
        if _has_peers(sym_buffer):
            kernel = _load_together(sym_buffer, *key)
        else:
            kernel = compile_kernel(_spec(sym_buffer, *key))
        sym_buffer.kernels[key] = kernel
    return kernel, key[0], num_tokens


def _kernel_key(
    sym_buffer: SymmBuffer, num_tokens: int, options: _Options
) -> tuple[Schedule, bool, bool]:
    """The key of a launch's kernel in the buffer's store: schedule, clamp or not, fast_math.

    Raises:
        ValueError, ScheduleError: one of the options is wrong, or has no schedule.
    """
    recipe, activation_clamp, fast_math, token_bound, schedule, math_mode = options
    check_recipe(recipe, sym_buffer)
    check_clamp(activation_clamp)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule must be a Schedule, found {type(schedule).__name__}")
        if math_mode is not None:
            raise ValueError(
                f"math_mode={math_mode!r} together with a schedule, which has a math mode: "
                f"{schedule.math_mode!r}. Pass one of the two."
            )
    bound = check_bound(sym_buffer, num_tokens, token_bound)
    chosen = _choose(sym_buffer, bound, math_mode) if schedule is None else schedule
    return chosen, activation_clamp is not None, fast_math


def _has_peers(sym_buffer: SymmBuffer) -> bool:
    """Whether other processes load kernels together with this one."""
    return sym_buffer.group is not None and sym_buffer.problem.num_ranks > 1


def _tell_peers(sym_buffer: SymmBuffer, error: Exception, options: _Options) -> None:
    """Raise `error` on all ranks where they wait for this one to load a kernel; else return.

    All ranks hold the same kernels. So whether the others load one follows from the options, and
    where these are what is wrong here, from whether this is the first call of all.
    """
    if not _has_peers(sym_buffer) or torch.cuda.is_current_stream_capturing():
        return
    try:
        loaded = _kernel_key(sym_buffer, 0, options) in sym_buffer.kernels
    except Exception:
        loaded = bool(sym_buffer.kernels)
    if not loaded:
        refuse_together(error, sym_buffer.group, sym_buffer.device)


def _choose(sym_buffer: SymmBuffer, bound: int, math_mode: str | None) -> Schedule:
    """The schedule of a launch that names none, cached with what it depends on."""
    forced, threshold = os.environ.get(KERNEL_VARIABLE), os.environ.get(THRESHOLD_VARIABLE)
    key = (bound, math_mode, forced, threshold)
    chosen = sym_buffer.schedules.get(key)
    if chosen is not None:
        return chosen
    chosen = choose_schedule(
        sym_buffer.problem,
        sym_buffer.device_name,
        sym_buffer.capacity,
        bound,
        rank_mode=sym_buffer.rank_mode,
        recipe=sym_buffer.recipe,
        math_mode=math_mode,
    ).schedule
    if sym_buffer.num_sms is not None and chosen.num_sms > sym_buffer.num_sms:
        # A smaller part, a MIG slice, or a virtual rank's share.
        chosen = replace(chosen, num_sms=sym_buffer.num_sms)
    sym_buffer.schedules[key] = chosen
    return chosen


def _spec(sym_buffer: SymmBuffer, chosen: Schedule, clamp: bool, fast_math: bool) -> KernelSpec:
    spec = KernelSpec(
        problem=sym_buffer.problem,
        schedule=chosen,
        capacity=sym_buffer.capacity,
        recipe=sym_buffer.recipe,
        clamp=clamp,
        fast_math=fast_math,
    )
    if sym_buffer.device.type != "cuda":
        raise ValueError(
            f"sym_buffer is on {sym_buffer.device}: the kernel needs an SM90 GPU. "
            "tl_megamoe.reference.moe computes the same layer anywhere."
        )
    if sym_buffer.num_sms is not None and chosen.num_sms > sym_buffer.num_sms:
        share = (
            f"the {sym_buffer.num_sms} SMs that a virtual rank of {sym_buffer.problem.num_ranks} "
            f"has of {sym_buffer.device_name}"
            if sym_buffer.rank_mode == "virtual"
            else f"the {sym_buffer.num_sms} SMs of {sym_buffer.device_name}"
        )
        raise ScheduleError(
            f"num_sms={chosen.num_sms} exceeds {share}: all blocks of the grid must be resident "
            "at once"
        )
    return spec


def _load_together(
    sym_buffer: SymmBuffer, chosen: Schedule, clamp: bool, fast_math: bool
) -> CompiledKernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernel of {chosen.name} is not loaded, and to load it is a collective call, "
            "which a CUDA graph cannot capture. Call tl_megamoe.op.prepare on every rank before."
        )
    choice = {**chosen.to_dict(), "activation_clamp": clamp, "fast_math": fast_math}
    return load_together(
        choice,
        lambda: compile_kernel(_spec(sym_buffer, chosen, clamp, fast_math)),
        lambda: _spec(sym_buffer, chosen, clamp, fast_math),
        sym_buffer.group,
        sym_buffer.device,
    )
