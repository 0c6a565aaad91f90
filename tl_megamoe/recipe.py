"""The numeric recipe: how the intermediate activations are scaled to FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear1's output becomes FP8.

    One scale covers `intermediate_group` columns of one row. With `scale="exact"` it is
    `sf = max(amax, 1e-10) / 448` and the routing weight is folded into the stored scale
    (`sf * topk_weight`), so that the FP8 codes do not depend on it. With `scale="pow2"` it is
    `2 ** ceil(log2(sf))` and the routing weight multiplies the activation before it is quantised,
    because a folded weight would not leave a power of two.

    Attributes:
        scale: `exact` or `pow2`.
        intermediate_group: columns that share one scale, 128 or 64.

    Raises:
        ValueError: a value outside these choices.
    """

    scale: Literal["exact", "pow2"] = "exact"
    intermediate_group: Literal[128, 64] = 128

    def __post_init__(self) -> None:
        if self.scale not in ("exact", "pow2"):
            raise ValueError(f"scale={self.scale!r} of the recipe must be 'exact' or 'pow2'")
        if self.intermediate_group not in (128, 64):
            raise ValueError(
                f"intermediate_group={self.intermediate_group!r} of the recipe must be 128 or 64"
            )

    @property
    def folds_topk_weight(self) -> bool:
        """Whether the routing weight is part of the stored scale (else of the activation)."""
        return self.scale == "exact"

    def kernel_violations(self) -> list[str]:
        """Why no kernel runs this recipe; empty when one does."""
        if self == Recipe():
            return []
        return [
            f"recipe {self} has no kernel: linear1 writes exact scales per 128 columns. "
            f"Use {Recipe()}, or reference.moe for the reference result."
        ]

    def __str__(self) -> str:
        return f"{self.scale}-{self.intermediate_group}"


def as_recipe(recipe: Any) -> Recipe:
    """A `Recipe`, from a `Recipe` or from DeepGEMM's tuple `(1, 128, 128)`.

    Raises:
        ValueError: any other tuple or type.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (tuple, list)) and tuple(recipe) == (1, 128, 128):
        return Recipe()
    raise ValueError(
        f"recipe={recipe!r} must be a tl_megamoe.Recipe or (1, 128, 128): activation scales per "
        "token and 128 columns, weight scales per 128 x 128"
    )
