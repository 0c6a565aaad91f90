"""The layer as a function call: `fp8_mega_moe` in DeepGEMM's call shape, `mega_moe` functional.

Which schedule a launch runs: the `schedule` argument, else a forced math mode (the variants
`fp8_mega_moe_pingpong` and `fp8_mega_moe_cooperative`, or the environment variable
TL_MEGAMOE_KERNEL), else the frozen table of the device, else the built-in default, for which
TL_MEGAMOE_COOPERATIVE_THRESHOLD says from how many tokens it is cooperative. None of them changes
the result. A buffer reads table and variables once, when it first chooses. All ranks must choose
alike: the choice depends on `token_bound`, never on `num_tokens`.

Called eagerly a function launches by itself; while torch.compile traces it, it becomes an operator
of `library.py`, which does the same when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch

from . import library
from .arguments import RecipeLike, WeightPair
from .arguments import weight_shapes as weight_shapes
from .calls import Buffer, forward, is_traced, run
from .loading import Options
from .loading import prepare as prepare
from .schedule import Schedule
from .weights import MoEWeights


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: Buffer,
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
    cached on disk), all ranks of a process group together: call `SymmBuffer.warmup` or `prepare`
    before a CUDA graph is captured or torch.compile traces the call. Virtual ranks are launched in
    `VirtualGroup.run`.

    Args:
        y: (num_tokens, hidden) bfloat16, contiguous, on the buffer's device; 0 rows are fine.
        l1_weights: gate and up weights of this rank's experts from `transform_weights(...).l1`:
            pre-tiled e4m3 (local experts, 2*intermediate/128, hidden/128, 128, 128) and float32
            scales.
        l2_weights: down weights from `transform_weights(...).l2`, likewise.
        sym_buffer: inputs, pools and workspace; a ReferenceBuffer computes in float32 torch.
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
        math_mode: choose among schedules of this mode, `cooperative`, `pingpong` or `swapped`; not
            together with `schedule`.

    Raises:
        ValueError: an argument breaks a rule above; the message names it, the rule and the value.
            For whom it is raised, `prepare` says.
        ScheduleError: `schedule` is not valid for the problem.
    """
    options = (recipe, activation_clamp, fast_math, token_bound, schedule, math_mode)
    stats = cumulative_local_expert_recv_stats
    if is_traced(y):
        library.trace_launch(y, l1_weights, l2_weights, sym_buffer, stats, activation, options)
    else:
        run(y, l1_weights, l2_weights, sym_buffer, stats, activation, options)


def fp8_mega_moe_pingpong(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: Buffer,
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
    sym_buffer: Buffer,
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
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: MoEWeights,
    sym_buffer: Buffer,
    **options: Any,
) -> torch.Tensor:
    """The layer as a function: brings the inputs into the buffer, runs it, returns `y`.

    Calls of several threads on one buffer follow each other, and so do calls on several streams.
    In `VirtualGroup.run` call `fp8_mega_moe` instead: this one allocates and copies, which may wait
    for a rank that already runs.

    Args:
        x: (num_tokens, hidden) e4m3 activations; or bfloat16, quantised while they are brought in.
        x_sf: (num_tokens, hidden/128) float32 scales; None with a bfloat16 x.
        topk_idx: (num_tokens, topk) int64 global expert of each route, -1 for none.
        topk_weights: (num_tokens, topk) float32 routing weights.
        weights: from `transform_weights`.
        sym_buffer: holds at least num_tokens.
        **options: those of `fp8_mega_moe` from `cumulative_local_expert_recv_stats` on. While
            torch.compile traces, only `recipe`, `activation`, `activation_clamp`, `fast_math` and
            `token_bound`.

    Returns:
        (num_tokens, hidden) bfloat16.

    Raises:
        ValueError: as `SymmBuffer.fill`, `SymmBuffer.quantize` and `fp8_mega_moe`.
    """
    if is_traced(x):
        return library.trace_mega_moe(
            x, x_sf, topk_idx, topk_weights, weights, sym_buffer, **options
        )
    stats = options.pop("cumulative_local_expert_recv_stats", None)
    activation = options.pop("activation", "swiglu")
    return forward(
        x,
        x_sf,
        topk_idx,
        topk_weights,
        weights,
        sym_buffer,
        0,
        Options(**options),
        stats=stats,
        activation=activation,
        may_load=True,
    )
