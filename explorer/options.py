"""What a search is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe

from .messages import WorkerConfig
from .protocol import SCREEN_RULES, Rules
from .space import Space
from .strategy import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search.

    Attributes:
        problem: the layer as it runs: the one-rank view, or over all its ranks.
        rank_mode: `one`; `virtual`: all ranks of `problem` share the GPU; `real`: a GPU a rank.
        tokens: token counts that a rank contributes, one cell each.
        space: where candidates come from.
        results: folder of the tables.
        limit: candidates a cell, the best by the model; None for all.
        capacity: tokens of the buffers, at least max(tokens).
        routings: table name -> what the bench takes, a cell each.
        mix: table name -> weight of the routing in the ranking; all alike when empty.
        seed: of weights, order, and the first routing.
        strategy: `grid`, `halving` or `optuna`.
        confirm_top: best candidates of a cell that are confirmed; 0 confirms nothing.
        num_seeds, num_observations: routings of a confirmation, and rounds of each.
        budget_s: seconds on the GPU; None for no limit.
        again: measure finished rows once more.
        commit: recorded with every row.
        rules, screen_rules: numbers of the full protocol and of a screening block.
    """

    problem: Problem
    tokens: tuple[int, ...]
    space: Space
    results: Path
    capacity: int
    rank_mode: str = "one"
    recipe: Recipe = Recipe()
    phase: str = "fused"
    routings: dict[str, str] = field(default_factory=lambda: {"uniform": "uniform"})
    mix: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    limit: int | None = None
    strategy: str = "halving"
    confirm_top: int = 4
    num_seeds: int = 3
    num_observations: int = 5
    budget_s: float | None = None
    again: bool = False
    commit: str = ""
    rules: Rules = Rules()
    screen_rules: Rules = SCREEN_RULES

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} must be one of {', '.join(STRATEGIES)}")

    @property
    def gpu_ranks(self) -> int:
        """Ranks that run on one GPU."""
        return 1 if self.rank_mode == "real" else self.problem.num_ranks

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every routing in the ranking; their sum is 1."""
        found = {name: self.mix.get(name, 1.0) for name in self.routings}
        total = sum(found.values())
        return {name: weight / total for name, weight in found.items()}

    @property
    def seeds(self) -> range:
        """Seeds of the confirmation's routings."""
        return range(self.seed, self.seed + self.num_seeds)


def worker_config(options: SearchOptions) -> WorkerConfig:
    """What the GPU worker of a search is built for."""
    return WorkerConfig(
        problem=options.problem,
        capacity=options.capacity,
        rank_mode=options.rank_mode,
        recipe=options.recipe,
        phase=options.phase,
        seed=options.seed,
        rules=options.rules,
    )
