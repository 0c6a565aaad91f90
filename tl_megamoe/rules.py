"""The names of the rules that a schedule may break, and what says that it does.

`Schedule.violations` applies them; nothing else does.
"""

from __future__ import annotations

RULES = {
    "values": "every field holds one of its values, and integers lie in their range",
    "register_split": "load registers in 24..168 and math registers in 168..256, multiples of 8",
    "role_warps": "dispatch and load warps fit the four warps of their warpgroup",
    "row_lanes": "a dispatch warp has at most a row chunk in flight a lane",
    "order_lag": "a lag belongs to order lag, and order lag to a lag",
    "wgmma_rows": "a tile has the 64 rows of a WGMMA at least (32: dispatch alone)",
    "pingpong_rows": "a pingpong tile has 64 rows",
    "cluster_tiles": "a cluster shares the weights of cooperative tiles of 128 rows",
    "cluster_columns": "each block of a cluster loads 128 of 256 weight rows",
    "cluster_warps": "in a cluster the fourth warp schedules",
    "cluster_grid": "the grid is whole clusters",
    "cluster_hidden": "a cluster needs two linear2 tiles of a pool block",
    "pingpong_columns": "a pingpong tile has 256 columns",
    "swapped_rows": "a tile of swapped operands has 64 rows at most",
    "swapped_columns": "a tile of swapped operands has 256 columns",
    "row_split": "128 columns mean that the warpgroups split rows: 128 of them",
    "wave_divides_experts": "experts_per_wave divides the local experts",
    "lag_one_wave": "order lag has one wave of all local experts",
    "columns_divide_hidden": "linear2's block_n divides the hidden size",
    "walk_tiles": "the walk can name every tile of a pool block",
    "stages_k_blocks": "the ring is no deeper than the shorter phase has K blocks",
    "prefetch_k_blocks": "the prefetch is no longer than linear1 has K blocks",
    "register_pool": "the roles' registers fit those that the block is launched with",
    "shared_memory": "the ring, the tables and the row chunks fit shared memory",
}
"""Name -> what it asks: every rule that `Schedule.violations` knows."""


class Violation(str):
    """A sentence that says which rule is broken, by which value and what would do.

    Attributes:
        rule: one of `RULES`.
    """

    __slots__ = ("rule",)
    rule: str

    def __new__(cls, rule: str, text: str) -> Violation:
        self = super().__new__(cls, text)
        self.rule = rule
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.rule, str(self)


class Violations(list[Violation]):
    """What a schedule breaks; empty for a valid one."""

    def add(self, rule: str, text: str) -> None:
        """One more."""
        self.append(Violation(rule, text))
