"""Where the routes of a fuzzed launch go: worked out on the host, brought to the GPU at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from fuzz_cases import Case
from torch import Tensor

from tl_megamoe.device.walk import first_blocks
from tl_megamoe.schedule import COUNTER_BITS

GROUP_BYTES = 2**28
"""Of the float32 weights, and of the rows, that are multiplied at once."""
Groups = tuple[tuple[Tensor, Tensor], ...]
"""Experts, and (experts, rows) places of their routes; places past all routes fill up."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of all tokens that an expert gets, by expert, then token, then slot.

    As ranks own neighbouring experts, those that a rank gets stand together (`part`).

    Attributes:
        counts: routes of every expert.
        blocks: pool blocks of every rank.
        num_routed: tokens that have routes.
        token: (routes,) int64, counted over all ranks.
        slot, expert: (routes,) int64.
        metadata: (routes,) int64, `token_src_metadata` of each.
        place: (routes,) int64, pool rows of its rank, those of an expert one behind the other.
        where: (tokens, topk) int64, which route it is; their number where it is none.
        count: (experts,) int64.
        groups: experts that are multiplied together.
    """

    counts: list[int]
    blocks: list[int]
    num_routed: int
    token: Tensor
    slot: Tensor
    expert: Tensor
    metadata: Tensor
    place: Tensor
    where: Tensor
    count: Tensor
    groups: Groups

    @classmethod
    def of(cls, topk_idx: Tensor, case: Case) -> Routes:
        """Those of (tokens, topk) routes of all ranks; waits for the GPU twice."""
        idx, topk = topk_idx.cpu().flatten(), case.num_topk
        valid = ((idx >= 0) & (idx < case.num_experts)).nonzero().flatten()
        order = valid[idx[valid].argsort(stable=True)]
        token, slot, expert = order // topk, order % topk, idx[order]
        count = torch.bincount(expert, minlength=case.num_experts)
        counts = count.tolist()
        ends = torch.tensor(case.tokens).cumsum(0)
        source = torch.bucketize(token, ends, right=True)
        within = token - (ends - torch.tensor(case.tokens))[source]
        metadata = (source << COUNTER_BITS) + slot * case.capacity + within
        first, blocks = pool_blocks(counts, case)
        row = torch.arange(len(order)) - (count.cumsum(0) - count)[expert]
        where = torch.full((len(idx),), len(order))
        where[order] = torch.arange(len(order))
        groups = list(grouped(counts, 2 * case.intermediate, case.hidden))
        lists = [token, slot, expert, metadata, first[expert] + row, where, count]
        here = send(topk_idx.device, [*lists, *(t for group in groups for t in group)])
        return cls(
            counts,
            blocks,
            len(token.unique()),
            *here[:5],
            here[5].view(-1, topk),
            here[6],
            tuple(zip(here[7::2], here[8::2], strict=True)),
        )

    def part(self, experts: range) -> slice:
        """Where the routes of some neighbouring experts stand."""
        start = sum(self.counts[: experts.start])
        return slice(start, start + sum(self.counts[experts.start : experts.stop]))


def pool_blocks(counts: Sequence[int], case: Case) -> tuple[Tensor, list[int]]:
    """First pool row of every expert, and pool blocks of every rank."""
    local, block_m = case.num_experts // case.num_ranks, case.schedule.block_m
    first: list[int] = []
    blocks = []
    for rank in range(case.num_ranks):
        *own, end = first_blocks(counts[rank * local : (rank + 1) * local], block_m)
        first += [block_m * block for block in own]
        blocks.append(end)
    return torch.tensor(first), blocks


def send(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of int64 to a device, in one copy: each copy waits for the GPU."""
    every = torch.cat([t.flatten() for t in tensors]).to(device)
    parts = every.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def grouped(counts: Sequence[int], columns: int, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Experts that have rows, in groups: what `Groups` holds, on the CPU.

    The experts of a group have at least half as many rows as its first.
    """
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    left = sorted((e for e, n in enumerate(counts) if n), key=lambda e: -counts[e])
    while left:
        most = counts[left[0]]
        size = 4 * max(columns * k, most * max(columns, k))
        fitting = [e for e in left[: max(1, GROUP_BYTES // size)] if 2 * counts[e] >= most]
        left = left[len(fitting) :]
        first = torch.tensor([[starts[e], counts[e]] for e in fitting])
        step = torch.arange(most)
        index = torch.where(step < first[:, 1:], first[:, :1] + step, total)
        yield torch.tensor(fitting), index
