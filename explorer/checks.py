"""Each phase of a layer against the reference: what `tl-megamoe check` and the GPU tests run.

Every check starts from poisoned pools and from tensors of the reference, never from what a kernel
left behind, so each stands alone. On many ranks every process runs the same checks in the same
order; a check ends with one outcome that all of them agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.op import fp8_mega_moe
from tl_megamoe.problem import SCALE_BLOCK
from tl_megamoe.recipe import ALL_RECIPES
from tl_megamoe.schedule import Schedule
from tl_megamoe.swizzle import pack_rows, unpack_rows

from .findings import (
    ACCUMULATOR_ERROR,
    ROW_ERROR,
    Found,
    accumulators_found,
    bitwise_found,
    intermediate_found,
    layer_found,
    pool_found,
    same_bits,
    scattered_found,
    wrong,
)
from .layer import Layer, Received
from .places import counters_are_zero, first_places, fits_ring, ring_rows

ACCUMULATORS = "linear1 accumulators"
"""The check that runs the debug view of the stand-alone linear1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found, over all ranks; true when it passed.

    Attributes:
        check: its name.
        schedule: math mode and tile of the kernel, empty where none ran.
        tokens: of every rank, or of all alike.
        block_m: rows of a pool block, 0 where none matters.
        ranks: how many, and of which mode.
        error: the largest error of a rank, as text.
        bound: what it was held to.
        status: `ok`, `fail`, `timeout`, `error`, or `skipped`.
        reason: why it is not ok.
    """

    check: str
    schedule: str
    tokens: str
    block_m: int
    ranks: str
    error: str
    bound: str
    status: str
    reason: str = ""

    def __bool__(self) -> bool:
        return self.status == "ok"


def token_text(counts: Sequence[int]) -> str:
    """Tokens of the ranks: one number when all have as many."""
    return ",".join(map(str, counts[:1] if len(set(counts)) == 1 else counts))


def label(schedule: Schedule | None) -> str:
    """Math mode and tile of a schedule, for example `cooperative n256.256`."""
    if schedule is None:
        return ""
    return f"{schedule.math_mode} n{schedule.linear1_block_n}.{schedule.linear2_block_n}"


def outcome(
    layer: Layer,
    check: str,
    schedule: Schedule | None,
    bound: str,
    found: Mapping[int, Found],
) -> Outcome:
    """One outcome from what the ranks found; the same in every process.

    Where ranks have bounds of their own, that of the rank whose error is printed stands beside it.
    """
    every = layer.ranks.gather(found)
    worst = max(every, key=lambda f: f.size)
    if worst.bounds is not None:
        bound = _pair(worst.bounds)
    reasons = [f"rank {r}: {f.reason}" for r, f in enumerate(every) if f.reason]
    if layer.problem.num_ranks == 1:
        reasons = [f.reason for f in every if f.reason]
    status = "fail" if reasons else "ok"
    return _row(layer, check, schedule, bound, status, worst.error, "; ".join(reasons))


def skipped(layer: Layer, check: str, schedule: Schedule, reason: str) -> Outcome:
    """A check that does not apply."""
    return _row(layer, check, schedule, "", "skipped", "-", reason)


def _row(
    layer: Layer,
    check: str,
    schedule: Schedule | None,
    bound: str,
    status: str,
    error: str,
    reason: str,
) -> Outcome:
    return Outcome(
        check=check,
        schedule=label(schedule),
        tokens=token_text(layer.num_tokens),
        block_m=0 if schedule is None else schedule.block_m,
        ranks=f"{layer.problem.num_ranks} {layer.ranks.mode}",
        error=error,
        bound=bound,
        status=status,
        reason=reason,
    )


# ---- the checks


def check_interface(layer: Layer, schedule: None = None) -> Outcome:
    """Buffers as their formula says, counters at zero, wrong arguments refused. No launch."""
    found = {rank: _interface(layer, rank, layer.ranks.buffers[rank]) for rank in layer.ranks.here}
    return outcome(layer, "interface", None, "no launch", found)


def check_dispatch(layer: Layer, schedule: Schedule) -> Outcome:
    """Pools, metadata and counts after dispatch alone: bitwise."""
    poison(layer)
    layer.launch(schedule, "dispatch")
    found = {
        rank: pool_found(layer, rank, schedule.block_m, in_order=False) for rank in layer.ranks.here
    }
    return outcome(layer, "dispatch", schedule, "bitwise", found)


def check_accumulators(layer: Layer, schedule: Schedule) -> Outcome:
    """Gate and up of linear1 before SwiGLU, as the tensor cores left them in FP32."""
    if too_large := _too_large(layer, schedule):
        return skipped(layer, ACCUMULATORS, schedule, too_large)
    poison(layer)
    width = 2 * layer.problem.intermediate
    accumulators = {}
    for rank, buffer in layer.ranks.buffers.items():
        place_received(layer, rank, schedule.block_m)
        accumulators[rank] = torch.full(
            (buffer.layout.ring_rows, width), torch.nan, device=buffer.device
        )
    layer.ranks.barrier()
    layer.launch(schedule, "linear1", accumulators=accumulators)
    found = {
        rank: accumulators_found(layer, rank, schedule.block_m, accumulators[rank])
        for rank in layer.ranks.here
    }
    return outcome(layer, ACCUMULATORS, schedule, _pair(ACCUMULATOR_ERROR), found)


def check_linear1(layer: Layer, schedule: Schedule) -> Outcome:
    """Codes and scales of linear1: at most one e4m3 step off."""
    if too_large := _too_large(layer, schedule):
        return skipped(layer, "linear1", schedule, too_large)
    poison(layer)
    for rank in layer.ranks.here:
        place_received(layer, rank, schedule.block_m)
    layer.ranks.barrier()
    layer.launch(schedule, "linear1")
    found = {}
    for rank in layer.ranks.here:
        places = first_places(layer.counts(rank), schedule.block_m, layer.ranks.device)
        found[rank] = intermediate_found(layer, rank, schedule.block_m, places)
    return outcome(layer, "linear1", schedule, "1 step, 2%", found)


def check_linear2(layer: Layer, schedule: Schedule) -> Outcome:
    """Rows of linear2 where they belong on their tokens' ranks, and nothing else written."""
    if too_large := _too_large(layer, schedule):
        return skipped(layer, "linear2", schedule, too_large)
    poison(layer)
    for rank in layer.ranks.here:
        place_intermediate(layer, rank, schedule.block_m)
    layer.ranks.barrier()
    layer.launch(schedule, "linear2")
    found = {rank: scattered_found(layer, rank) for rank in layer.ranks.here}
    return outcome(layer, "linear2", schedule, _pair(ROW_ERROR), found)


def check_combine(layer: Layer, schedule: Schedule) -> Outcome:
    """Sums of combine: bitwise."""
    poison(layer)
    rows = {}
    for rank, buffer in layer.ranks.buffers.items():
        pool, rows[rank] = layer.routes(rank), layer.rows(rank)
        buffer.combine_acts[pool.slot, pool.token] = rows[rank]
        buffer.expert_recv_count_sum.zero_()
    layer.ranks.barrier()
    y = layer.launch(schedule, "combine")
    found = {}
    for rank in layer.ranks.here:
        pool, n = layer.routes(rank), layer.inputs[rank].num_tokens
        expected = reference.combine(rows[rank], pool, n)
        found[rank] = bitwise_found({"y": (y[rank], expected)})
    return outcome(layer, "combine", schedule, "bitwise", found)


def check_fused(layer: Layer, schedule: Schedule, launches: int = 2) -> Outcome:
    """The whole layer, launched several times: right, the same to the bit, counters as before."""
    poison(layer)
    y = [layer.launch(schedule) for _ in range(launches)]
    found = {}
    for rank in layer.ranks.here:
        found[rank] = layer_found(layer, rank, y[0][rank], layer.expected(rank))
        differing = [n for n in range(1, launches) if not same_bits(y[n][rank], y[0][rank])]
        if differing and not found[rank].reason:
            reason = f"launch {differing[0] + 1} gives other bits than the first"
            found[rank] = replace(found[rank], reason=reason)
    return outcome(layer, "fused", schedule, "", found)


PHASE_CHECKS: dict[str, dict[str, Callable[[Layer, Any], Outcome]]] = {
    "interface": {"interface": check_interface},
    "dispatch": {"dispatch": check_dispatch},
    "linear1": {ACCUMULATORS: check_accumulators, "linear1": check_linear1},
    "linear2": {"linear2": check_linear2},
    "combine": {"combine": check_combine},
    "fused": {"fused": check_fused},
}
"""The checks of a phase by name. The interface runs no kernel; its schedule is None."""


# ---- what the checks place


def poison(layer: Layer) -> None:
    """NaN into the pools of all ranks; returns when all have done it."""
    for buffer in layer.ranks.buffers.values():
        buffer.poison()
    layer.ranks.barrier()


def place_received(layer: Layer, rank: int, block_m: int) -> tuple[Received, Tensor]:
    """What dispatch leaves behind, from the reference: pool of linear1, metadata, counts.

    Returns:
        The rows, and the rows of the pools' memory that hold them.
    """
    buffer, received = layer.ranks.buffers[rank], layer.received(rank)
    pool = received.pool
    places = first_places(pool.counts, block_m, buffer.device)
    rows = ring_rows(buffer, places, block_m)
    buffer.l1_acts.view(torch.uint8)[rows] = pool.x.view(torch.uint8)
    buffer.l1_acts_sf[:, rows] = pool.x_sf.T
    buffer.l1_topk_weights[places] = pool.topk_weights
    buffer.token_src_metadata[places] = received.metadata(buffer.capacity).int()
    buffer.expert_recv_count_sum.copy_(torch.tensor(pool.counts, dtype=torch.int32))
    return received, rows


def place_intermediate(layer: Layer, rank: int, block_m: int) -> None:
    """What linear1 leaves behind, from the reference; and what dispatch does."""
    buffer = layer.ranks.buffers[rank]
    received, rows = place_received(layer, rank, block_m)
    codes, sf = layer.intermediate_of(received)
    pool = unpack_rows(buffer.l2_acts.view(torch.uint8))
    pool[rows] = codes.view(torch.uint8)
    buffer.l2_acts.view(torch.uint8).copy_(pack_rows(pool))
    buffer.l2_acts_sf[:, rows] = sf.T


def _pair(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.1e}, token {bounds[1]:.1e}"


def _too_large(layer: Layer, schedule: Schedule) -> str:
    """Why a stand-alone linear cannot run: it waits for nobody, so its pool must fit in memory."""
    for rank in range(layer.problem.num_ranks):
        if not fits_ring(layer.ranks.first, layer.counts(rank), schedule.block_m):
            return (
                f"rank {rank} receives {sum(layer.counts(rank))} rows, more blocks than the "
                f"{layer.ranks.first.layout.ring_rows} ring rows hold; take fewer tokens"
            )
    return ""


def _interface(layer: Layer, rank: int, buffer: SymmBuffer) -> Found:
    layout = buffer.layout
    last = list(layout.sections.values())[-1]
    sizes = {
        "layout.num_bytes": layout.num_bytes,
        "the allocation": buffer.raw.numel(),
        "buffer.num_bytes": buffer.num_bytes,
    }
    if len(set(sizes.values())) > 1 or not last.offset + last.num_bytes <= layout.num_bytes:
        return wrong(f"sizes differ: {sizes}")
    if f"{layout.num_bytes:,} bytes" not in buffer.describe():
        return wrong(f"describe() does not print the {layout.num_bytes:,} bytes of the buffer")
    for name, section in layout.sections.items():
        view = getattr(buffer, name)
        if view.data_ptr() - buffer.raw.data_ptr() != section.offset:
            return wrong(f"{name} is not at its offset {section.offset}")
        if view.numel() * view.element_size() != section.num_bytes:
            return wrong(f"{name} does not have the {section.num_bytes} bytes of its section")
    if int(buffer.peers[rank]) != buffer.raw.data_ptr() or len(set(buffer.peers.tolist())) != len(
        buffer.peers
    ):
        return wrong(f"the peer table {buffer.peers.tolist()} does not name every buffer once")
    if not counters_are_zero(buffer):
        return wrong("counters are not zero before the first launch")
    accepted = [name for name, call in _bad_calls(layer, rank, buffer).items() if _accepts(call)]
    if accepted:
        return wrong(f"fp8_mega_moe accepts {', '.join(accepted)}")
    return Found(0.0, "as specified")


def _bad_calls(layer: Layer, rank: int, buffer: SymmBuffer) -> dict[str, Callable[[], None]]:
    """Calls that must be refused before anything is launched or exchanged."""
    hidden, weights = layer.problem.hidden, layer.weights[rank]
    y = torch.empty((1, hidden), dtype=torch.bfloat16, device=buffer.device)
    long = torch.empty((buffer.capacity + 1, hidden), dtype=y.dtype, device=buffer.device)
    other = next(r for r in ALL_RECIPES if r != buffer.recipe)
    call = partial(fp8_mega_moe, sym_buffer=buffer, l1_weights=weights.l1, l2_weights=weights.l2)
    stats = torch.zeros(layer.problem.num_local_experts + 1, dtype=torch.int32, device=y.device)
    return {
        "y in float32": partial(call, y.float()),
        "y of another hidden size": partial(call, y[:, : hidden - SCALE_BLOCK // 2].contiguous()),
        "more tokens than the capacity": partial(call, long),
        f"recipe {other}": partial(call, y, recipe=other),
        "activation 'gelu'": partial(call, y, activation="gelu"),
        "a clamp of -1": partial(call, y, activation_clamp=-1.0),
        "statistics of another length": partial(call, y, cumulative_local_expert_recv_stats=stats),
        "weights in another order": partial(fp8_mega_moe, y, weights.l1[::-1], weights.l2, buffer),
    }


def _accepts(call: Callable[[], None]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True
