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

    @property
    def scales_per_k_block(self) -> int:
        """Intermediate scales of one row in a K block of 128 columns."""
        return 128 // self.intermediate_group

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe of a name such as `exact-128` or `pow2-64`, as `str` writes it.

        Raises:
            ValueError: any other text.
        """
        for recipe in ALL_RECIPES:
            if str(recipe) == text:
                return recipe
        raise ValueError(f"recipe {text!r} must be one of {', '.join(map(str, ALL_RECIPES))}")

    def __str__(self) -> str:
        return f"{self.scale}-{self.intermediate_group}"


ALL_RECIPES = tuple(
    Recipe(scale=scale, intermediate_group=group)
    for scale in ("exact", "pow2")
    for group in (128, 64)
)
"""Every recipe; the first is the default."""


DEEPGEMM_RECIPES = ((1, 128, 128), (128, 128, 128))
"""What callers of DeepGEMM's SM90 kernels pass, which differ in how they write the same scales."""
RecipeLike = Recipe | tuple[int, int, int] | None


def as_recipe(recipe: Any) -> Recipe:
    """A `Recipe`, from a `Recipe`, from one of DeepGEMM's tuples, or the default from None.

    Raises:
        ValueError: any other tuple or type.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe is None or (isinstance(recipe, (tuple, list)) and tuple(recipe) in DEEPGEMM_RECIPES):
        return Recipe()
    raise ValueError(
        f"recipe={recipe!r} must be a tl_megamoe.Recipe, "
        f"{' or '.join(map(str, DEEPGEMM_RECIPES))}: activation scales per token and 128 columns, "
        "weight scales per 128 x 128"
    )
