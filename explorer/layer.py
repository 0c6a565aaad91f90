"""A layer to check: weights and inputs of every rank, its launches, and what they must give.

Every process computes the inputs of all ranks and the weights of all experts from seeds, so ranks
on GPUs of their own need no exchange of tensors. The reference of a phase never takes what a kernel
left behind: each phase can be checked alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.kernel import CompiledKernel, KernelSpec, compile_kernel
from tl_megamoe.recipe import Recipe
from tl_megamoe.reference import ReferencePool
from tl_megamoe.schedule import COUNTER_BITS, Schedule
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights, transform_weights

from .ranks import Ranks

NO_EXPERT = 2**40
"""An expert that no layer has, in rows that must not be read: a cut to 32 bits would make it 0."""


@dataclass(frozen=True, slots=True)
class Received:
    """What dispatch must deliver to a rank, by local expert, then source rank, token, slot.

    Attributes:
        pool: the rows; their `token` counts within the source.
        source: (rows,) int64, the rank each came from.
        route: (rows,) int64, its index among the routes of all ranks (`Layer.routes`, one rank
            after the other).
    """

    pool: ReferencePool
    source: Tensor
    route: Tensor

    def metadata(self, capacity: int) -> Tensor:
        """(rows,) int64: `token_src_metadata` of each row."""
        within = self.pool.slot * capacity + self.pool.token
        return (self.source << COUNTER_BITS) + within


class Layer:
    """A layer on its ranks.

    Attributes:
        ranks: the ranks and their buffers.
        problem: the layer over all of them; `whole` is the same on one rank.
        plain: weights of all experts.
        weights: those of each rank here, as kernels read them.
        inputs: of every rank, here or not; empty before the first `set`.

    Args:
        ranks: from `open_ranks`.
        seed: of the weights.
        compile_spec: makes a kernel; tests pass a fake.
    """

    def __init__(
        self,
        ranks: Ranks,
        seed: int = 0,
        *,
        compile_spec: Callable[[KernelSpec], CompiledKernel] = compile_kernel,
    ) -> None:
        self.ranks = ranks
        self.problem = ranks.problem
        self.whole = replace(ranks.problem, num_ranks=1, from_num_ranks=None)
        self.plain = random_weights(self.whole, ranks.device, seed)
        self.weights: dict[int, MoEWeights] = {}
        for rank in ranks.here:
            own = self.plain_of(rank)
            self.weights[rank] = transform_weights(
                (own.l1, own.l1_sf), (own.l2, own.l2_sf), self.problem
            )
        self.inputs: tuple[Inputs, ...] = ()
        self._compile = compile_spec
        self._kernels: dict[KernelSpec, CompiledKernel] = {}
        self._routes: dict[int, ReferencePool] = {}
        self._intermediate: dict[tuple[int, Recipe], tuple[Tensor, Tensor]] = {}

    @property
    def recipe(self) -> Recipe:
        """That of the buffers."""
        return self.ranks.first.recipe

    def plain_of(self, rank: int) -> PlainWeights:
        """The plain weights of a rank's experts."""
        local = self.problem.num_local_experts
        part = slice(rank * local, (rank + 1) * local)
        p = self.plain
        return PlainWeights(p.l1[part], p.l1_sf[part], p.l2[part], p.l2_sf[part])

    # ---- inputs

    def fill(
        self,
        num_tokens: int | Sequence[int],
        seed: int,
        routing: str = "uniform",
        mask: float = 0.0,
    ) -> None:
        """Random tokens into the buffers, poison everywhere else.

        Args:
            num_tokens: of each rank, or of all alike.
            seed: any integer.
            routing, mask: as for `random_inputs`. One draw serves all ranks: they share the popular
                experts.
        """
        counts = (
            [num_tokens] * self.problem.num_ranks if isinstance(num_tokens, int) else num_tokens
        )
        every = random_inputs(self.whole, sum(counts), routing, mask, seed, self.ranks.device)
        tensors = (every.x, every.x_sf, every.topk_idx, every.topk_weights)
        parts = zip(*(t.split(list(counts)) for t in tensors), strict=True)
        self.set([Inputs(*part) for part in parts])

    def set(self, inputs: Sequence[Inputs]) -> None:
        """The tokens of every rank into the buffers here; returns when all ranks have theirs."""
        if len(inputs) != self.problem.num_ranks:
            raise ValueError(
                f"{len(inputs)} inputs for {self.problem.num_ranks} ranks: one of each rank"
            )
        self.inputs = tuple(inputs)
        self._routes.clear()
        self._intermediate.clear()
        for rank, buffer in self.ranks.buffers.items():
            i = inputs[rank]
            buffer.poison()
            buffer.topk_idx.fill_(NO_EXPERT)  # rows past num_tokens must not be read
            buffer.topk_weights.fill_(torch.nan)
            buffer.fill(i.x, i.x_sf, i.topk_idx, i.topk_weights)
        self.ranks.barrier()  # the launch of a peer writes into this buffer

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        return tuple(i.num_tokens for i in self.inputs)

    # ---- launches

    def kernel(
        self,
        schedule: Schedule,
        phase: str = "fused",
        *,
        clamp: bool = False,
        fast_math: bool = True,
        debug: bool = False,
    ) -> CompiledKernel:
        """The kernel of a launch; every process of the ranks asks for it at the same time."""
        spec = KernelSpec(
            problem=self.problem,
            schedule=schedule,
            capacity=self.ranks.first.capacity,
            phase=phase,
            recipe=self.recipe,
            clamp=clamp,
            fast_math=fast_math,
            debug=debug,
        )
        kernel = self._kernels.get(spec.key())
        if kernel is None:
            kernel = self.ranks.in_turn(lambda: self._compile(spec))
            self._kernels[spec.key()] = kernel
        return kernel

    def outputs(self) -> dict[int, Tensor]:
        """A `y` of NaN for each rank here."""
        return {
            rank: torch.full(
                (self.inputs[rank].num_tokens, self.problem.hidden),
                torch.nan,
                dtype=torch.bfloat16,
                device=self.ranks.device,
            )
            for rank in self.ranks.here
        }

    def start(
        self,
        schedule: Schedule,
        y: Mapping[int, Tensor],
        phase: str = "fused",
        *,
        clamp: float | None = None,
        fast_math: bool = True,
        recv_stats: Mapping[int, Tensor] | None = None,
        accumulators: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Launch a kernel on every rank here; nothing waits. `kernel` was called before."""
        kernel = self.kernel(
            schedule,
            phase,
            clamp=clamp is not None,
            fast_math=fast_math,
            debug=accumulators is not None,
        )

        def launch(rank: int) -> None:
            options = {} if accumulators is None else {"l1_accumulators": accumulators[rank]}
            kernel.launch(
                self.ranks.buffers[rank],
                self.weights[rank],
                y[rank],
                self.inputs[rank].num_tokens,
                schedule,
                recv_stats=None if recv_stats is None else recv_stats[rank],
                activation_clamp=clamp,
                **options,
            )

        self.ranks.run(launch)

    def launch(
        self,
        schedule: Schedule,
        phase: str = "fused",
        *,
        clamp: float | None = None,
        fast_math: bool = True,
        recv_stats: Mapping[int, Tensor] | None = None,
        accumulators: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Run a kernel on all ranks and wait for them; `y` of each rank here, NaN before.

        Raises:
            MegaMoeTimeout: a wait in the kernel timed out.
        """
        y = self.outputs()
        self.start(
            schedule,
            y,
            phase,
            clamp=clamp,
            fast_math=fast_math,
            recv_stats=recv_stats,
            accumulators=accumulators,
        )
        self.ranks.barrier()
        return y

    # ---- reference

    def routes(self, source: int) -> ReferencePool:
        """All routes of a rank's tokens, by global expert, token, slot."""
        if source not in self._routes:
            i = self.inputs[source]
            self._routes[source] = reference.dispatch(
                i.x, i.x_sf, i.topk_idx, i.topk_weights, self.whole
            )
        return self._routes[source]

    def counts(self, rank: int) -> tuple[int, ...]:
        """Rows that each local expert of a rank receives."""
        local = self.problem.num_local_experts
        sources = [self.routes(source).counts for source in range(self.problem.num_ranks)]
        return tuple(sum(c[rank * local + e] for c in sources) for e in range(local))

    def intermediate(self, source: int, recipe: Recipe | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales that linear1 makes of `routes(source)`, unclamped.

        Args:
            source: a rank.
            recipe: that of the buffers when None.
        """
        recipe = recipe or self.recipe
        if (source, recipe) not in self._intermediate:
            self._intermediate[source, recipe] = reference.linear1(
                self.routes(source), self.plain.l1, self.plain.l1_sf, recipe
            )
        return self._intermediate[source, recipe]

    def intermediate_of(
        self, received: Received, recipe: Recipe | None = None
    ) -> tuple[Tensor, Tensor]:
        """`intermediate` of the rows that a rank receives."""
        parts = [self.intermediate(source, recipe) for source in range(self.problem.num_ranks)]
        return take_rows([codes for codes, _ in parts], received.route), torch.cat(
            [sf for _, sf in parts]
        )[received.route]

    def rows(self, source: int) -> Tensor:
        """BF16 rows that linear2 makes of `intermediate(source)`."""
        codes, sf = self.intermediate(source)
        return reference.linear2(
            codes, sf, self.plain.l2, self.plain.l2_sf, self.routes(source).counts
        )

    def expected(
        self, rank: int, clamp: float | None = None, recipe: Recipe | None = None
    ) -> Tensor:
        """`y` of a rank by the whole-layer reference, in the recipe of the buffers when None."""
        i = self.inputs[rank]
        return reference.moe(
            self.whole,
            i.x,
            i.x_sf,
            i.topk_idx,
            i.topk_weights,
            self.plain,
            recipe or self.recipe,
            clamp,
        )

    def received(self, rank: int) -> Received:
        """The rows that a rank receives, from all ranks."""
        local = self.problem.num_local_experts
        pools = [self.routes(source) for source in range(self.problem.num_ranks)]
        expert = torch.cat([p.expert for p in pools]) - rank * local
        source = torch.cat([torch.full_like(p.expert, number) for number, p in enumerate(pools)])
        chosen = ((expert >= 0) & (expert < local)).nonzero().flatten()
        route = chosen[expert[chosen].argsort(stable=True)]
        counts = torch.bincount(expert[route], minlength=local)
        pool = ReferencePool(
            x=take_rows([p.x for p in pools], route),
            x_sf=torch.cat([p.x_sf for p in pools])[route],
            topk_weights=torch.cat([p.topk_weights for p in pools])[route],
            expert=expert[route],
            token=torch.cat([p.token for p in pools])[route],
            slot=torch.cat([p.slot for p in pools])[route],
            counts=tuple(counts.tolist()),
        )
        return Received(pool, source[route], route)


def take_rows(codes: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows of several e4m3 tensors, one after the other, by index: as bytes, float8 has no cat."""
    return torch.cat([c.view(torch.uint8) for c in codes])[index].view(codes[0].dtype)
