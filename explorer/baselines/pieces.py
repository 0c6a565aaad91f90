"""What lies between the grouped products of a baseline: permute, SwiGLU and quantise, combine.

The routing of a cell is fixed, so all indices and row counts are made beforehand, which flatters a
baseline: in a model they follow from each batch. All of it may be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import E4M3, E4M3_INV_MAX, E4M3_MAX, MIN_AMAX

logger = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor], Tensor]
"""Codes (rows, K) and their packed scales -> (rows, N)."""
MAX_SHAPES = 1024
"""Shapes for which one piece may be compiled: cells times baselines."""


class Rows:
    """Rows by expert for a routing: each expert's part begins at a multiple of `align` rows.

    Args:
        topk_idx: (tokens, topk) local experts, negative for a route to none.
        topk_weights: (tokens, topk) float32.
        num_experts: local experts.
        align: rows of a part are a multiple of it; the padding holds copies of token 0.
        equal: all parts have the rows of the largest.

    Attributes:
        counts: rows of each expert without padding.
        parts: rows of each expert, padding included.
        num_rows: rows of all parts.
        expert: (num_rows,) int32, -1 in the padding.
        token: (num_rows,) int64.
        weight: (num_rows,) float32, 0 in the padding.
        place: (tokens x topk,) int64, the row of each route, 0 for a route to none.
        kept: (tokens, topk, 1) bool; None when no route goes to none.
    """

    def __init__(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        align: int,
        *,
        equal: bool = False,
    ):
        self.num_tokens, self.num_topk = topk_idx.shape
        device, experts = topk_idx.device, topk_idx.flatten().long()
        routes = (experts >= 0).nonzero().flatten()
        routes = routes[experts[routes].argsort(stable=True)]
        chosen = experts[routes]
        self.counts: list[int] = chosen.bincount(minlength=num_experts).tolist()
        sizes = [-(-count // align) * align for count in self.counts]
        if equal:
            sizes = [max(*sizes, align)] * num_experts
        elif not any(sizes):
            sizes[0] = align
        starts = [sum(sizes[:expert]) for expert in range(num_experts)]
        self.parts = [slice(a, a + size) for a, size in zip(starts, sizes, strict=True)]
        self.num_rows = sum(sizes)
        first = torch.tensor([sum(self.counts[:e]) for e in range(num_experts)], device=device)
        start = torch.tensor(starts, device=device)
        row = start[chosen] + torch.arange(len(routes), device=device) - first[chosen]
        self.token = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        self.token[row] = routes // self.num_topk
        self.weight = torch.zeros(self.num_rows, device=device)
        self.weight[row] = topk_weights.flatten()[routes]
        self.expert = torch.full((self.num_rows,), -1, dtype=torch.int32, device=device)
        self.expert[row] = chosen.int()
        self.place = torch.zeros(experts.numel(), dtype=torch.int64, device=device)
        self.place[routes] = row
        all_kept = len(routes) == experts.numel()
        self.kept = None if all_kept else (experts >= 0).view(*topk_idx.shape, 1)

    def scale_index(
        self, groups: int, blocks: Sequence[slice], source: Tensor | None = None
    ) -> Tensor:
        """Where packed scales come from, as indices into row-major scales.

        Packed: one block of rows after the other, within a block one column of scales after the
        other, as products on SM90 read them.

        Args:
            groups: scales of a row.
            blocks: rows that make a block.
            source: (num_rows,) the row that each row's scales come from; its own when None.
        """
        rows = torch.arange(self.num_rows, device=self.token.device) if source is None else source
        column = torch.arange(groups, device=rows.device)[:, None]
        return torch.cat([(rows[part] * groups + column).flatten() for part in blocks])


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor by index, eight bytes at a time: float8 has no index_select, and torch
    copies elements, so that bytes would take many times as long."""
    return x.view(torch.int64).index_select(0, index).view(x.dtype)


def quantise(h: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """`scaling.quantize_rows` without NaN rules and without constants copied from the host, which
    no capture allows: codes (rows, K) e4m3, scales (rows, K/group) float32."""
    groups = h.unflatten(1, (-1, recipe.intermediate_group))
    sf = groups.abs().amax(2).clamp_min(MIN_AMAX) * E4M3_INV_MAX
    if recipe.scale == "pow2":
        bits = sf.view(torch.int32)
        sf = (((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)
    scaled = (groups * (1.0 / sf)[:, :, None]).flatten(1)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), sf


def swiglu_quantise(gate_up: Tensor, weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Gate and up columns (rows, 2*intermediate) -> codes and scales of the intermediate rows.

    The routing weight is part of the scales or of the values, as the recipe says.
    """
    gate, up = gate_up.float().chunk(2, 1)
    h = reference.swiglu(gate, up)
    if not recipe.folds_topk_weight:
        h = h * weight[:, None]
    codes, sf = quantise(h, recipe)
    return codes, sf * weight[:, None] if recipe.folds_topk_weight else sf


def combine(rows: Tensor, place: Tensor, kept: Tensor | None, out: Tensor) -> None:
    """Sum each token's rows in float32, in slot order."""
    found = rows.index_select(0, place).view(len(out), -1, rows.shape[1])
    if kept is not None:
        found = found.masked_fill(~kept, 0.0)
    out.copy_(found.sum(1, dtype=torch.float32))


def fuse(piece: Callable[..., Any], *example: Any) -> tuple[Callable[..., Any], str]:
    """A piece in as few kernels as torch.compile makes, and how it came: `compiled` or `eager`.

    Args:
        piece: a function of tensors.
        example: arguments of the shapes that it will get; the piece runs once with them.
    """
    if not any(isinstance(value, Tensor) and value.is_cuda for value in example):
        piece(*example)
        return piece, "eager"
    compiled: Callable[..., Any] = torch.compile(piece, dynamic=False, fullgraph=True)
    try:
        import torch._inductor.config as inductor

        # In this process: a daemon may not have a pool of its own.
        with torch._dynamo.config.patch(recompile_limit=MAX_SHAPES):
            with inductor.patch(compile_threads=1):
                compiled(*example)
        return compiled, "compiled"
    except Exception as error:  # no Triton or no C compiler; the piece itself may be fine
        logger.warning("torch.compile does not work here, the pieces run eagerly: %s", error)
        piece(*example)
        return piece, "eager"


class ExpertLayer:
    """A layer of one rank from two grouped products and the pieces between them.

    Args:
        rows: of the routing.
        products: of the gate and up rows, and of the down rows.
        recipe: of the intermediate.
        sizes: hidden and intermediate.
        blocks: rows whose scales the products read as one block.
    """

    def __init__(
        self,
        rows: Rows,
        products: tuple[Product, Product],
        recipe: Recipe,
        sizes: tuple[int, int],
        blocks: Sequence[slice],
    ):
        hidden, inter = sizes
        self.rows, self.products = rows, products
        device = rows.token.device
        self._x_index = rows.scale_index(hidden // 128, blocks, rows.token)
        self._h_index = rows.scale_index(inter // recipe.intermediate_group, blocks)

        def middle(gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return swiglu_quantise(gate_up, weight, recipe)

        gate_up = torch.zeros((rows.num_rows, 2 * inter), dtype=torch.bfloat16, device=device)
        self._middle, how = fuse(middle, gate_up, rows.weight)
        back = torch.zeros((rows.num_rows, hidden), dtype=torch.bfloat16, device=device)
        out = torch.empty((rows.num_tokens, hidden), dtype=torch.bfloat16, device=device)
        self._combine, _ = fuse(combine, back, rows.place, rows.kept, out)
        self.notes = f"pieces={how}"

    def run(self, x: Tensor, x_sf: Tensor, out: Tensor) -> None:
        """The layer for tokens `x` with scales (tokens, hidden/128), into `out`."""
        rows, (first, second) = self.rows, self.products
        codes = take_rows(x, rows.token)
        gate_up = first(codes, x_sf.flatten().index_select(0, self._x_index))
        h, h_sf = self._middle(gate_up, rows.weight)
        back = second(h, h_sf.flatten().index_select(0, self._h_index))
        self._combine(back, rows.place, rows.kept, out)
