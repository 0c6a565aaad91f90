"""Which kernel a launch runs, and how it comes into the process: together with the other ranks.

A buffer keeps the schedules that it may choose, as intervals of the token bound, and the kernels
that it has loaded. Both are looked up once: after that a launch reads neither files nor the
environment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .arguments import RecipeLike, check_bound, check_clamp, check_recipe
from .buffer import SymmBuffer
from .handshake import differing, gather, in_step, load_together, refuse_together
from .kernel import CompiledKernel, KernelSpec, compile_kernel
from .residency import check_resident
from .schedule import Schedule, ScheduleError
from .selection import schedule_intervals


class Options(NamedTuple):
    """What a call chooses, the same on all ranks; the arguments of `fp8_mega_moe` of these names.

    A plain tuple in this order equals it, and is quicker to make.
    """

    recipe: RecipeLike = None
    activation_clamp: float | None = None
    fast_math: bool = True
    token_bound: int | None = None
    schedule: Schedule | None = None
    math_mode: str | None = None


KernelKey = tuple[Schedule, bool, bool]
"""A loaded kernel of a buffer: schedule, clamp or not, fast_math."""


class NotLoadedError(RuntimeError):
    """A call that must not compile needs a kernel that is not loaded."""


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
        math_mode: forced, one of `frozen.MATH_MODES`; not together with `schedule`.

    Returns:
        The kernel that a call with these arguments launches, and the schedule it runs.

    Raises:
        ValueError, ScheduleError: as `fp8_mega_moe`, and for a ReferenceBuffer, which runs no
            kernel. Where the ranks load a kernel together the
            error of one is raised on all of them. Once they have it a rank that refuses its
            arguments tells nobody, and launches of the others wait for it for their `timeout_s`.
    """
    options = Options(recipe, activation_clamp, fast_math, token_bound, schedule, math_mode)
    kernel, chosen, _ = prepare_launch(sym_buffer, lambda: num_tokens, options)
    return kernel, chosen


def prepare_launch(
    sym_buffer: SymmBuffer,
    check_own: Callable[[], int],
    options: Options,
    *,
    may_load: bool = True,
) -> tuple[CompiledKernel, Schedule, int]:
    """What `prepare` returns, and this rank's tokens.

    Args:
        sym_buffer: the buffer that will be launched.
        check_own: checks what other ranks need not have alike; returns the tokens.
        options: what they must have alike.
        may_load: whether a kernel that is not loaded is loaded, or NotLoadedError raised.
    """
    check_kernel_buffer(sym_buffer)
    try:
        num_tokens = check_own()
        key = _kernel_key(sym_buffer, num_tokens, options)
    except Exception as error:
        if may_load:  # else nobody waits
            tell_peers(sym_buffer, error, options)
        raise
    kernel = sym_buffer.kernels.get(key)
    if kernel is None:
        if not may_load:
            raise NotLoadedError(
                f"the kernel of schedule {key[0].name} (activation_clamp "
                f"{'on' if key[1] else 'off'}, fast_math={key[2]}) is not loaded, and a call from "
                "model code never compiles. Call sym_buffer.warmup(...) with these options on every"
                " rank before the first forward."
            )
        kernel = _load(sym_buffer, key)
    return kernel, key[0], num_tokens


def check_kernel_buffer(sym_buffer: Any) -> None:
    """Raise ValueError unless this is a buffer that kernels run on."""
    if not isinstance(sym_buffer, SymmBuffer):
        raise ValueError(
            f"sym_buffer must be a SymmBuffer, found {type(sym_buffer).__name__}: no kernel runs "
            "on anything else"
        )
    if sym_buffer.destroyed:
        raise ValueError(f"{sym_buffer!r} was destroyed: make a new one")


def warm_up(
    sym_buffer: SymmBuffer, *, activation_clamp: bool, fast_math: bool
) -> list[tuple[int, Schedule]]:
    """Load the kernel of every schedule that a token bound can choose; see `SymmBuffer.warmup`."""
    if has_peers(sym_buffer):
        intervals = _agree_on_intervals(sym_buffer)
    else:
        intervals = _intervals(sym_buffer, None)
    for _, schedule in intervals:
        key = (schedule, activation_clamp, fast_math)
        if key not in sym_buffer.kernels:
            _load(sym_buffer, key)
    return intervals


def _agree_on_intervals(sym_buffer: SymmBuffer) -> list[tuple[int, Schedule]]:
    """`_intervals`, the same on all ranks: else some would wait for a kernel that others lack."""
    group, device = sym_buffer.group, sym_buffer.device
    intervals = in_step(lambda: _intervals(sym_buffer, None), group, device)
    names = [f"{schedule.name} to {end} tokens" for end, schedule in intervals]
    found = differing(gather({"schedules": names}, group, device))
    if found:
        raise ScheduleError(
            f"the ranks would load different kernels: {found}. Set the TL_MEGAMOE_ variables alike "
            "on every rank, and install one version of the frozen schedules."
        )
    return intervals


def _load(sym_buffer: SymmBuffer, key: KernelKey) -> CompiledKernel:
    with sym_buffer.lock:  # threads that need one kernel load it once
        kernel = sym_buffer.kernels.get(key)
        if kernel is None:
            if has_peers(sym_buffer):
                kernel = _load_together(sym_buffer, *key)
            else:
                kernel = _get_kernel(sym_buffer, _spec(sym_buffer, *key))
            sym_buffer.kernels[key] = kernel
    return kernel


def _get_kernel(sym_buffer: SymmBuffer, spec: KernelSpec) -> CompiledKernel:
    """From the buffer's exported kernels, else compiled or from tilelang's disk cache.

    Raises:
        ScheduleError: its blocks cannot all be resident.
    """
    exported = sym_buffer.exported
    kernel = compile_kernel(spec) if exported is None else exported.fused(spec)
    check_resident(kernel, sym_buffer)
    return kernel


def _kernel_key(sym_buffer: SymmBuffer, num_tokens: int, options: Options) -> KernelKey:
    """The key of a launch's kernel in the buffer's store.

    Raises:
        ValueError, ScheduleError: one of the options is wrong, or has no schedule.
    """
    schedule, math_mode = options.schedule, options.math_mode
    check_recipe(options.recipe, sym_buffer)
    check_clamp(options.activation_clamp)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule must be a Schedule, found {type(schedule).__name__}")
        if math_mode is not None:
            raise ValueError(
                f"math_mode={math_mode!r} together with a schedule, which has a math mode: "
                f"{schedule.math_mode!r}. Pass one of the two."
            )
    bound = check_bound(sym_buffer, num_tokens, options.token_bound)
    if schedule is None:
        intervals = _intervals(sym_buffer, math_mode)
        schedule = intervals[bisect_left(intervals, bound, key=lambda interval: interval[0])][1]
    return schedule, options.activation_clamp is not None, options.fast_math


def _intervals(sym_buffer: SymmBuffer, math_mode: str | None) -> list[tuple[int, Schedule]]:
    """(last token bound, schedule): what a launch that names no schedule may run, found once."""
    found = sym_buffer.schedules.get(math_mode)
    if found is None:
        found = schedule_intervals(
            sym_buffer.problem,
            sym_buffer.device_name,
            sym_buffer.capacity,
            rank_mode=sym_buffer.rank_mode,
            recipe=sym_buffer.recipe,
            math_mode=math_mode,
            num_sms=sym_buffer.num_sms,
        )
        sym_buffer.schedules[math_mode] = found
    return found


def has_peers(sym_buffer: SymmBuffer) -> bool:
    """Whether other processes load kernels together with this one."""
    return sym_buffer.group is not None and sym_buffer.problem.num_ranks > 1


def tell_peers(
    sym_buffer: Any, error: Exception, options: Options, *, quantizes: bool = False
) -> None:
    """Raise `error` on all ranks where they wait for this one to load a kernel; else return.

    All ranks hold the same kernels. So whether the others load one follows from the options, and
    where these are what is wrong here, from whether this is the first call of all.

    Args:
        sym_buffer: of the call.
        error: what is wrong with it.
        options: what the ranks have alike.
        quantizes: whether the call also needs the kernel that quantises, without shared experts.
    """
    if (
        not isinstance(sym_buffer, SymmBuffer)
        or not has_peers(sym_buffer)
        or torch.cuda.is_current_stream_capturing()
    ):
        return
    try:
        loaded = _kernel_key(sym_buffer, 0, options) in sym_buffer.kernels
    except Exception:
        loaded = bool(sym_buffer.kernels)
    if not loaded or (quantizes and 0 not in sym_buffer.quantizers):
        refuse_together(error, sym_buffer.group, sym_buffer.device)


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
            "which a CUDA graph cannot capture. Call tl_megamoe.prepare on every rank before."
        )
    choice: dict[str, Any] = {
        **chosen.to_dict(),
        "activation_clamp": clamp,
        "fast_math": fast_math,
    }
    return load_together(
        choice,
        lambda: _get_kernel(sym_buffer, _spec(sym_buffer, chosen, clamp, fast_math)),
        lambda: _spec(sym_buffer, chosen, clamp, fast_math),
        sym_buffer.group,
        sym_buffer.device,
    )
