"""What the fuzzer holds a launch to: two launches of the fused kernel on poisoned pools.

Comparisons gather on the GPU, and the host waits for them at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from fuzz_cases import Case
from fuzz_routes import Routes
from fuzz_stages import intermediate_of, wrong_intermediate, wrong_sums
from fuzz_truth import is_close, joined, judge, make_inputs, make_truth
from torch import Tensor

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.layout import LINE, make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import COUNTER_BITS
from tl_megamoe.synthetic import Inputs

GUARD = 0xA5
WRAPS = "rings wrap"
FAR = "y is far from the reference"


@dataclass
class Flags:
    """Comparisons and what they are of, in the order in which they count."""

    wrong: list[tuple[str, Tensor]] = field(default_factory=list)

    def differ(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """Note whether two tensors of equal shapes are not equal to the bit."""
        self.wrong.append((what, (bits(actual) != bits(expected)).any()))

    def first(self) -> str:
        """The first that is wrong; waits for the GPU."""
        if not self.wrong:
            return ""
        found = torch.stack([flag for _, flag in self.wrong]).tolist()
        return next((what for (what, _), flag in zip(self.wrong, found, strict=True) if flag), "")


@dataclass(frozen=True, slots=True)
class Pool:
    """The rows that a rank received, by expert, then source rank, token, slot.

    Attributes:
        wraps: whether rows took the memory of others.
        kept: (rows,) bool, those that are left.
        intermediate: codes and scales that linear1 left at their places.
    """

    wraps: bool
    kept: Tensor
    intermediate: tuple[Tensor, Tensor]


def bits(t: Tensor) -> Tensor:
    """The bits of a tensor, so that NaNs and the signs of zeros compare."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])


def check_layer(case: Case, layer: Layer, sf: tuple[Tensor, Tensor]) -> tuple[str, list[str]]:
    """Two launches: right, equal to the bit, counters at zero, rows where they belong, no others.

    The first drops what it leaves in L2 (`Schedule.evict_first`), whatever the case says.

    Args:
        case: one whose kernel and layer are there.
        layer: of its sizes.
        sf: scales of the layer's weights before any case multiplied them.

    Returns:
        Why the case fails, empty where it does not, and what is to be counted of it.
    """
    scale_weights(layer, sf, case.w_scale)
    layer.set(make_inputs(case, layer.ranks.device))  # poisons everything but the tokens
    for buffer in layer.ranks.buffers.values():
        buffer.raw[guard_bytes(buffer)] = GUARD
    stats = {rank: b.recv_stats.clone() for rank, b in layer.ranks.buffers.items()}
    results = [layer.outputs() for _ in range(2)]
    # The second leaves its pools behind.
    for y, evict_first in zip(results, (1, 0), strict=True):
        schedule = replace(case.schedule, evict_first=evict_first)
        layer.start(schedule, y, clamp=case.clamp, fast_math=case.fast_math)
    layer.ranks.barrier()
    every = joined(list(layer.inputs))
    routes, flags = Routes.of(every.topk_idx, case), Flags()
    pools: list[Pool] = []
    for rank, buffer in layer.ranks.buffers.items():
        first, again = (y[rank] for y in results)
        flags.differ(f"rank {rank}: the second launch gives other bits", again, first)
        guards = buffer.raw[guard_bytes(buffer)]
        flags.wrong.append((f"rank {rank}: a guard was written to", guards.ne(GUARD).any()))
        compare_counters(flags, rank, buffer)
        compare_counts(flags, case, rank, buffer, routes, stats[rank])
        pools.append(compare_pool(flags, case, rank, buffer, routes, every))
    y = torch.cat([results[0][rank] for rank in sorted(results[0])])
    truth = make_truth(every, routes, layer.plain, case.numeric, case.clamp)
    kept = torch.cat([pool.kept for pool in pools])
    codes, sf = (torch.cat(parts) for parts in zip(*(p.intermediate for p in pools), strict=True))
    for what, rows in zip(
        ("scale", "value"), wrong_intermediate(case, truth, codes, sf), strict=True
    ):
        flags.wrong.append((f"a {what} of linear1 is wrong", (rows & kept).any()))
    wraps = any(pool.wraps for pool in pools)
    if wraps:
        far = ~is_close(y, truth, case.intermediate)
        flags.wrong.append((FAR, far))
    else:
        off = wrong_sums(truth, layer.plain, codes, sf, y)
        flags.wrong.append(("y is not what linear1 left, multiplied and summed", off.any()))
    reason = flags.first()
    return judge(case, y, truth) if reason == FAR else reason, [WRAPS] if wraps else []


def guard_bytes(buffer: SymmBuffer) -> Tensor:
    """(bytes,) int64: where the guards of a buffer are."""
    return _guard_bytes(buffer.problem, buffer.capacity, buffer.recipe, buffer.device)


@lru_cache(maxsize=64)
def _guard_bytes(problem: Problem, capacity: int, recipe: Recipe, device: torch.device) -> Tensor:
    guards = make_layout(problem, capacity, recipe).guards.values()
    return torch.cat([torch.arange(start, start + n) for start, n in guards]).to(device)


def compare_counters(flags: Flags, rank: int, buffer: SymmBuffer) -> None:
    """What a launch clears is cleared."""
    at, problem = buffer.layout.workspace_offsets, buffer.problem
    lengths = {"next_task": LINE, "expert_send_count": problem.num_experts}
    blocks = buffer.layout.max_pool_blocks
    for name in ("next_task", "expert_send_count", "l1_arrival_count", "l2_arrival", "l2_done"):
        part = buffer.workspace[at[name] : at[name] + lengths.get(name, blocks)]
        flags.wrong.append((f"rank {rank}: {name} is not cleared", part.ne(0).any()))


def compare_counts(
    flags: Flags, case: Case, rank: int, buffer: SymmBuffer, routes: Routes, before: Tensor
) -> None:
    """Rows that each expert received in a launch, and those of both launches added up."""
    local = case.problem.num_local_experts
    want = routes.count[rank * local : (rank + 1) * local].int()
    flags.differ(f"rank {rank}: expert_recv_count_sum is wrong", buffer.expert_recv_count_sum, want)
    flags.differ(f"rank {rank}: recv_stats is wrong", buffer.recv_stats - before, 2 * want)


def compare_pool(
    flags: Flags, case: Case, rank: int, buffer: SymmBuffer, routes: Routes, every: Inputs
) -> Pool:
    """The rows that a rank received, as far as later ones have not taken their memory.

    The kernel orders the rows of an expert as it likes: they are sorted by what stands in their
    metadata, right or wrong. A launch that gathers them leaves none: its intermediate rows are in
    the order of routes.
    """
    local, block_m = case.problem.num_local_experts, case.schedule.block_m
    part = routes.part(range(rank * local, (rank + 1) * local))
    token, slot, expert = routes.token[part], routes.slot[part], routes.expert[part]
    place, want = routes.place[part], routes.metadata[part]
    blocks, ring = routes.blocks[rank], buffer.layout.ring_rows // block_m
    gathered = case.schedule.launch_gathers(case.problem, case.tokens[rank], case.numeric)
    metadata = want if gathered else buffer.token_src_metadata[place].long()
    within = metadata & ((1 << COUNTER_BITS) - 1)
    by_token = (metadata >> COUNTER_BITS) * buffer.capacity + within % buffer.capacity
    order = by_token * case.num_topk + within // buffer.capacity
    order = order.argsort()
    order = order[expert[order].argsort(stable=True)]
    place, metadata = place[order], metadata[order]
    flags.differ(f"rank {rank}: token_src_metadata is wrong", metadata, want)
    if not gathered:
        flags.differ(
            f"rank {rank}: l1_topk_weights is wrong",
            buffer.l1_topk_weights[place],
            every.topk_weights[token, slot],
        )
    kept = place // block_m + ring >= blocks  # the last block at a place stays
    row = place // block_m % ring * block_m + place % block_m
    pools = (
        ("l1_acts", bits(buffer.l1_acts)[row], bits(every.x)[token]),
        ("l1_acts_sf", bits(buffer.l1_acts_sf[:, row].T), bits(every.x_sf)[token]),
    )
    for name, got, wanted in () if gathered else pools:
        flags.wrong.append(
            (f"rank {rank}: {name} is wrong", ((got != wanted) & kept[:, None]).any())
        )
    left = intermediate_of(buffer, row, min(blocks, ring) * block_m)
    return Pool(blocks > ring, kept, left)


def scale_weights(layer: Layer, sf: tuple[Tensor, Tensor], factor: float) -> None:
    """Multiply the scales of a layer's weights, those of its kernels as those of its reference."""
    local = layer.problem.num_local_experts
    layer.plain.l1_sf.copy_(sf[0] * factor)
    layer.plain.l2_sf.copy_(sf[1] * factor)
    for rank, weights in layer.weights.items():
        part = slice(rank * local, (rank + 1) * local)
        weights.l1[1].copy_(sf[0][part] * factor)
        weights.l2[1].copy_(sf[1][part] * factor)
