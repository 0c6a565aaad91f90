"""Makes a failing case of the fuzzer simpler, a step at a time, as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from fuzz_cases import Case

from tl_megamoe.problem import SCALE_BLOCK


def mended(case: Case) -> Case:
    """The case with a schedule that fits its sizes, where sizes alone are in its way."""
    if case.check == "schedule":
        return case
    s, local = case.schedule, case.num_experts // case.num_ranks
    if case.hidden % s.linear2_block_n:
        s = replace(
            s, math_mode="cooperative", block_m=128, linear1_block_n=128, linear2_block_n=128
        )
    k_blocks = min(case.hidden, case.intermediate) // SCALE_BLOCK
    s = replace(
        s,
        stages=min(s.stages, max(k_blocks, 2)),
        experts_per_wave=local if s.order == "lag" else gcd(s.experts_per_wave, local),
        prefetch=min(s.prefetch, case.hidden // SCALE_BLOCK),
    )
    return replace(case, schedule=s)


def smaller(value: int, least: int = 1, step: int = 1) -> list[int]:
    """Numbers to try in place of one: the least, then ever closer ones, down to a step below."""
    units = (value - least) // step
    cuts = {units >> shift for shift in range(units.bit_length())}
    return sorted(value - cut * step for cut in cuts)


SIMPLE: dict[str, Any] = {
    "mask": 0.0,
    "routing": "uniform",
    "weights": "softmax",
    "x_scale": 1.0,
    "w_scale": 1.0,
    "seed": 0,
    "clamp": None,
    "fast_math": True,
    "recipe": "exact-128",
}
SIMPLE_SCHEDULE: dict[str, Any] = {
    "prefetch": 0,
    "math_mode": "cooperative",
    "block_m": 128,
    "linear1_block_n": 256,
    "linear2_block_n": 256,
    "stages": 2,
    "dispatch_warps": 1,
    "load_warps": 2,
    "load_registers": 40,
    "math_registers": 232,
    "rows_in_flight": 1,
    "evict_first": 0,
    "cluster_size": 1,
    "num_sms": 1,
}


def simpler(case: Case) -> Iterator[Case]:
    """Valid cases that are simpler by a step; launches first, which need no other kernel."""
    for candidate in _simpler(case):
        if candidate != case and candidate.is_valid:
            yield candidate


def _simpler(case: Case) -> Iterator[Case]:
    if len([n for n in case.tokens if n]) > 1:
        for rank, count in enumerate(case.tokens):
            only = [0] * case.num_ranks
            only[rank] = count
            yield replace(case, tokens=tuple(only))
    yield replace(case, tokens=tuple(sorted(case.tokens, reverse=True)))
    for rank, count in enumerate(case.tokens):
        for fewer in smaller(count, 0):
            yield replace(
                case, tokens=tuple(fewer if r == rank else n for r, n in enumerate(case.tokens))
            )
    for name, value in SIMPLE.items():
        yield replace(case, **{name: value})
    local = case.num_experts // case.num_ranks
    plain = replace(case.schedule, order="wave", lag=0, experts_per_wave=local)
    yield replace(case, schedule=plain)
    yield replace(case, schedule=replace(case.schedule, prefetch=0))
    for ranks in smaller(case.num_ranks):
        fewer_ranks = replace(case, num_ranks=ranks, tokens=case.tokens[:ranks])
        yield mended(replace(fewer_ranks, num_experts=local * ranks))
    for experts in smaller(local):
        yield mended(replace(case, num_experts=experts * case.num_ranks))
    for topk in smaller(case.num_topk):
        yield replace(case, num_topk=topk)
    for name in ("hidden", "intermediate"):
        for size in smaller(getattr(case, name), SCALE_BLOCK, SCALE_BLOCK):
            yield mended(replace(case, **{name: size}))
    for capacity in smaller(case.capacity, max(1, *case.tokens)):
        yield replace(case, capacity=capacity)
    for name, value in SIMPLE_SCHEDULE.items():
        yield replace(case, schedule=replace(case.schedule, **{name: value}))


def shrink(
    case: Case,
    reason: str,
    fails: Callable[[Case], str],
    *,
    seconds: float = 60.0,
    tries: int = 1000,
) -> tuple[Case, str]:
    """The simplest case that still fails, as far as single steps and the limits lead.

    Args:
        case: one that fails.
        reason: why.
        fails: why a case fails, empty where it does not.
        seconds, tries: after which the search ends.

    Returns:
        The case and why it fails.
    """
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in simpler(case):
            if tries <= 0 or time.monotonic() > end:
                return case, reason
            tries -= 1
            if found := fails(candidate):
                case, reason, again = candidate, found, True
                break
    return case, reason
