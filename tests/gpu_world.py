"""One layer on the GPU for many tests: launches of many schedules, all equal to the bit."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from gpu_cases import rank_mode

from tl_megamoe import BufferOverwrittenError, reference
from tl_megamoe.explorer.findings import layer_found, pool_found, same_bits
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.explorer.places import counters_are_zero
from tl_megamoe.explorer.ranks import open_ranks
from tl_megamoe.problem import Problem, divisors_of
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule
from tl_megamoe.synthetic import Inputs

TIMEOUT_S = 5.0


class World(Layer):
    """A layer whose results are compared over all the tests that fill in the same inputs.

    Its buffers have guards, which are looked at after each `launch`; before one of the fused kernel
    what no peer writes is poisoned.

    The first `y` of a routing is compared with the reference; every other one, of whatever schedule
    and math mode, must equal it to the bit.
    """

    def __init__(self, problem: Problem, capacity: int, recipe: Recipe | None = None) -> None:
        mode = rank_mode(problem)
        ranks = open_ranks(
            problem, capacity, mode=mode, recipe=recipe, timeout_s=TIMEOUT_S, debug=True
        )
        super().__init__(ranks, seed=1)
        self._key: Any = None
        self._first: dict[tuple[float | None, bool], dict[int, torch.Tensor]] = {}

    def fill(
        self,
        num_tokens: int | Sequence[int],
        seed: int,
        routing: str = "uniform",
        mask: float = 0.0,
    ) -> None:
        counts = num_tokens if isinstance(num_tokens, int) else tuple(num_tokens)
        key, first = (counts, seed, routing, mask), self._first
        same = key == self._key
        super().fill(num_tokens, seed, routing, mask)
        if same:
            self._first = first
        self._key = key

    def set(self, inputs: Sequence[Inputs]) -> None:
        self._key, self._first = None, {}
        super().set(inputs)

    def change(self, rank: int = 0, **tensors: torch.Tensor) -> None:
        """Other tensors for a rank's tokens."""
        inputs = list(self.inputs)
        inputs[rank] = replace(inputs[rank], **tensors)
        self.set(inputs)

    def launch(
        self, schedule: Schedule, phase: str = "fused", **options: Any
    ) -> dict[int, torch.Tensor]:
        if phase == "fused":
            for buffer in self.ranks.buffers.values():
                buffer.poison(local=self.problem.num_ranks > 1)
        y = super().launch(schedule, phase, **options)
        reasons = dict.fromkeys(self.ranks.here, "")
        for rank, buffer in self.ranks.buffers.items():
            try:
                buffer.check_guards()
            except BufferOverwrittenError as error:
                reasons[rank] = str(error)
        self.agree(reasons)
        return y

    @property
    def y(self) -> torch.Tensor:
        """The `y` of one rank that every launch of these inputs gives."""
        return next(iter(self._first.values()))[0]

    def run(self, schedule: Schedule, **options: Any) -> torch.Tensor:
        """`launch` of one rank, of which no more than `y` matters."""
        return self.launch(schedule, **options)[0]

    def check(
        self,
        schedules: Mapping[str, Schedule],
        *,
        launches: int = 2,
        clamp: float | None = None,
        fast_math: bool = True,
        pools: bool = False,
    ) -> None:
        """Every schedule is right, repeats bitwise, agrees with the others, resets its counters.

        Args:
            schedules: by name.
            launches: of each.
            clamp, fast_math: of the kernel.
            pools: look at the receive pools after each schedule too.
        """
        reasons = dict.fromkeys(self.ranks.here, "")
        for name, schedule in schedules.items():
            for _ in range(launches):
                y = self.launch(schedule, clamp=clamp, fast_math=fast_math)
                for rank in self.ranks.here:
                    found = self._judge(rank, y[rank], clamp, fast_math)
                    if found and not reasons[rank]:
                        reasons[rank] = f"{name}: {found}"
            for rank, buffer in self.ranks.buffers.items():
                found = "" if counters_are_zero(buffer) else "counters are not zero"
                if pools and not found and not self.leaves_none(schedule):
                    found = pool_found(self, rank, schedule.block_m, in_order=True).reason
                reasons[rank] = reasons[rank] or (found and f"{name}: {found}")
        self.agree(reasons)

    def leaves_none(self, schedule: Schedule) -> bool:
        """Whether a launch leaves no rows in the pool."""
        if schedule.evict_first:
            return True
        most = max(inputs.num_tokens for inputs in self.inputs)
        return schedule.launch_gathers(self.problem, most, self.recipe)

    def _judge(self, rank: int, y: torch.Tensor, clamp: float | None, fast_math: bool) -> str:
        first = self._first.setdefault((clamp, fast_math), {})
        if rank in first:
            return "" if same_bits(y, first[rank]) else "other bits than the first launch"
        found = layer_found(self, rank, y, self.expected(rank, clamp)).reason
        if not found:  # else schedules that are wrong in the same way would pass behind this one
            first[rank] = y
        return found

    def agree(self, reasons: Mapping[int, str]) -> None:
        """Fail on every rank if there is a reason on one: ranks stay in step."""
        found = [
            f"rank {r}: {reason}" for r, reason in enumerate(self.ranks.gather(reasons)) if reason
        ]
        assert not found, "; ".join(found)

    def wrong_for(self, recipe: Recipe, y: Mapping[int, torch.Tensor]) -> bool:
        """Whether the whole-layer reference of another recipe refuses `y` of each of some ranks."""
        return all(
            not reference.compare(
                own, self.expected(rank, recipe=recipe), intermediate=self.problem.intermediate
            )
            for rank, own in y.items()
        )


@lru_cache(maxsize=1)
def world(problem: Problem, capacity: int, recipe: Recipe | None = None) -> World:
    """The world of a problem; the one before it is freed, so group tests by problem."""
    gc.collect()
    torch.cuda.empty_cache()
    return World(problem, capacity, recipe)


def walks(schedule: Schedule, problem: Problem) -> dict[str, Schedule]:
    """Runtime variants of a schedule: orders, wave sizes, lags, prefetch, place in L2."""
    out = {
        f"wave{n}": replace(schedule, order="wave", lag=0, experts_per_wave=n)
        for n in divisors_of(problem.num_local_experts)
    }
    out |= {
        f"lag{lag}": replace(
            schedule, order="lag", lag=lag, experts_per_wave=problem.num_local_experts
        )
        for lag in (1, 3, 10**6)
    }
    out["no_prefetch"] = replace(schedule, prefetch=0)
    out["evict_first"] = replace(schedule, evict_first=1)
    return out
