"""Ranks and kernels on the CPU: the phases as torch writes them into the buffers of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_megamoe import reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.explorer.places import first_places, ring_rows
from tl_megamoe.explorer.ranks import Ranks
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.swizzle import pack_rows, unpack_rows
from tl_megamoe.virtual import VirtualGroup


class LoopRanks(Ranks):
    """All ranks in turn, on the CPU."""

    mode = "virtual"

    def run(self, launch: Callable[[int], object]) -> None:
        for rank in self.here:
            launch(rank)


def loop_ranks(problem: Problem, capacity: int, recipe: Recipe | None = None) -> LoopRanks:
    buffers = VirtualGroup(problem.num_ranks, "cpu").buffers(problem, capacity, recipe=recipe)
    return LoopRanks(problem, dict(enumerate(buffers)))


class FakeKernel:
    """One phase, or all of them, of one rank; `break_it(buffer, spec)` runs after each launch.

    Rows of an expert come in reverse order, as a kernel may have them. A launch of the last rank
    completes what needs all ranks, as the barriers of a kernel do.
    """

    def __init__(
        self, layer: Layer, spec: KernelSpec, break_it: Callable[[SymmBuffer, KernelSpec], None]
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.break_it = break_it
        self.outputs: dict[int, torch.Tensor] = {}

    def launch(
        self,
        buffer: SymmBuffer,
        weights: Any,
        y: torch.Tensor,
        num_tokens: int,
        schedule: Any,
        *,
        recv_stats: torch.Tensor | None = None,
        activation_clamp: float | None = None,
        l1_accumulators: torch.Tensor | None = None,
    ) -> None:
        self.outputs[buffer.rank] = y
        fused, phase = self.spec.phase == "fused", self.spec.phase
        if fused or phase == "dispatch":
            self.dispatch(buffer)
        if fused or phase == "linear1":
            self.linear1(buffer, activation_clamp, l1_accumulators)
        if fused or phase == "linear2":
            self.linear2(buffer)
        stats = buffer.recv_stats if recv_stats is None else recv_stats
        stats += buffer.expert_recv_count_sum
        if buffer.rank == self.layer.problem.num_ranks - 1:
            for rank, out in self.outputs.items():
                other = self.layer.ranks.buffers[rank]
                if fused or phase == "combine":
                    self.combine(other, out)
                self.break_it(other, self.spec)

    def dispatch(self, b: SymmBuffer) -> None:
        received = self.layer.received(b.rank)
        pool, block_m = received.pool, self.spec.schedule.block_m
        first = first_blocks(pool.counts, block_m)
        metadata, start = received.metadata(b.capacity).int(), 0
        gathered = self.spec.schedule.launch_gathers(
            self.layer.problem, self.layer.inputs[b.rank].num_tokens, b.recipe
        )
        for expert, count in enumerate(pool.counts):
            for n in range(count):  # in turn, so that the last block at a place stays
                source = start + (n if gathered else count - 1 - n)
                place = torch.tensor([first[expert] * block_m + n])
                row = ring_rows(b, place, block_m)
                b.l1_acts.view(torch.uint8)[row] = pool.x.view(torch.uint8)[source]
                b.l1_acts_sf[:, row] = pool.x_sf[source, :, None]
                b.l1_topk_weights[place] = pool.topk_weights[source]
                b.token_src_metadata[place] = metadata[source]
            start += count
        b.expert_recv_count_sum.copy_(torch.tensor(pool.counts))

    def rows(self, b: SymmBuffer) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
        """Counts, pool rows and rows of memory, in the pool's own order."""
        counts = tuple(b.expert_recv_count_sum.tolist())
        places = first_places(counts, self.spec.schedule.block_m, b.device)
        return counts, places, ring_rows(b, places, self.spec.schedule.block_m)

    def linear1(self, b: SymmBuffer, clamp: float | None, out: torch.Tensor | None) -> None:
        counts, places, rows = self.rows(b)
        pool = reference.ReferencePool(
            x=b.l1_acts.view(torch.uint8)[rows].view(b.l1_acts.dtype),
            x_sf=b.l1_acts_sf[:, rows].T,
            topk_weights=b.l1_topk_weights[places],
            expert=places,
            token=places,
            slot=places,
            counts=counts,
        )
        plain = self.layer.plain_of(b.rank)
        codes, sf = reference.linear1(pool, plain.l1, plain.l1_sf, b.recipe, clamp)
        intermediate = unpack_rows(b.l2_acts.view(torch.uint8))
        intermediate[rows] = codes.view(torch.uint8)
        b.l2_acts.view(torch.uint8).copy_(pack_rows(intermediate))
        b.l2_acts_sf[:, rows] = sf.T
        if out is not None:
            start = 0
            for expert, count in enumerate(counts):
                part = slice(start, start + count)
                out[rows[part]] = reference.scaled_product(
                    pool.x[part], pool.x_sf[part], plain.l1[expert], plain.l1_sf[expert]
                )
                start += count

    def linear2(self, b: SymmBuffer) -> None:
        counts, places, rows = self.rows(b)
        plain = self.layer.plain_of(b.rank)
        codes = unpack_rows(b.l2_acts)[rows].view(b.l2_acts.dtype)
        out = reference.linear2(codes, b.l2_acts_sf[:, rows].T, plain.l2, plain.l2_sf, counts)
        for n, source in enumerate(b.token_src_metadata[places].tolist()):
            peer = self.layer.ranks.buffers[source >> 24]
            within = source & 0xFFFFFF
            peer.combine_acts[within // b.capacity, within % b.capacity] = out[n]

    def combine(self, b: SymmBuffer, y: torch.Tensor) -> None:
        pool = self.layer.routes(b.rank)
        y.copy_(reference.combine(b.combine_acts[pool.slot, pool.token], pool, len(y)))


def fake_layer(
    ranks: Ranks,
    break_it: Callable[[SymmBuffer, KernelSpec], None] = lambda buffer, spec: None,
) -> Layer:
    """A layer whose kernels are `FakeKernel`s."""
    compile_spec: Any = lambda spec: FakeKernel(layer, spec, break_it)  # noqa: E731
    layer = Layer(ranks, seed=1, compile_spec=compile_spec)
    return layer
