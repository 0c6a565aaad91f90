"""Shared experts as the kernel sees them: one more expert of every rank, one more route a token.

A routed layer has L experts a rank; with S shared experts a rank has L + S, its own copies of the
shared ones last, so that their rows never leave it.
"""

from __future__ import annotations

from dataclasses import replace

from .problem import Problem


def with_shared(routed: Problem, num_shared: int) -> Problem:
    """The layer that a kernel runs for a routed layer and its shared experts.

    Args:
        routed: as the router knows it.
        num_shared: experts that every token visits; 0 changes nothing.

    Raises:
        ValueError: not an integer of at least 0, or more experts or routes than a layer may have.
    """
    if type(num_shared) is not int or num_shared < 0:
        raise ValueError(f"num_shared_experts={num_shared!r} must be an integer from 0")
    if not num_shared:
        return routed
    return replace(
        routed,
        name=f"{routed.name}{_suffix(num_shared)}",
        num_experts=routed.num_experts + num_shared * routed.num_ranks,
        num_topk=routed.num_topk + num_shared,
    )


def without_shared(whole: Problem, num_shared: int) -> Problem:
    """Exact inverse of `with_shared`.

    Raises:
        ValueError: the layer has no experts or routes left without them.
    """
    if not 0 <= num_shared < min(whole.num_local_experts, whole.num_topk):
        raise ValueError(
            f"num_shared={num_shared} must be from 0 to below num_topk={whole.num_topk} and "
            f"num_local_experts={whole.num_local_experts} of problem {whole.name!r}, which count "
            "the shared experts"
        )
    if not num_shared:
        return whole
    return replace(
        whole,
        name=whole.name.removesuffix(_suffix(num_shared)),
        num_experts=whole.num_experts - num_shared * whole.num_ranks,
        num_topk=whole.num_topk - num_shared,
    )


def _suffix(num_shared: int) -> str:
    return f"-shared{num_shared}"
