"""What `tl-megamoe why` says: the schedule of a launch, where it came from, how it would walk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tl_megamoe.device.walk import first_blocks, walk_order
from tl_megamoe.frozen import frozen_paths
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule
from tl_megamoe.selection import choose_schedule

from .cost import uniform_counts
from .evidence import SPREADS
from .farm import kernel_digest


def explain(
    problem: Problem,
    mode: str,
    device: str,
    num_tokens: int,
    capacity: int,
    recipe: Recipe,
    root: Path | None,
) -> str:
    """The lines that `why` prints.

    Args:
        problem: the layer as the rank runs it.
        mode: its rank mode.
        device: for example `nvidia-h200`.
        num_tokens: the most tokens of any rank.
        capacity: tokens of the buffers.
        recipe: of the buffers.
        root: folder of the frozen files; the package's when None.
    """
    found = choose_schedule(
        problem,
        device,
        capacity,
        num_tokens,
        root=root,
        quiet=True,
        rank_mode=mode,
        recipe=recipe,
    )
    lines = []
    lines.append(f"schedule  {found.schedule.name}")
    lines.append(f"origin    {found.origin}: {found.message}")
    known = sorted({path.parent.name for path in frozen_paths(root)})
    if device not in known:
        there = ", ".join(known) or "no device"
        lines.append(f"device    nothing is frozen for {device!r}; there is for {there}")
    if mode == "virtual":
        lines.append(
            f"grid      num_sms is cut to a rank's part, the GPU's SMs // {problem.num_ranks}"
        )
    if problem.num_ranks > 1:
        lines.append(f"walk      {_walk_of(problem, found.schedule, capacity, num_tokens)}")
    if found.entry is not None:
        measured = found.entry.evidence.get("recipe")
        if measured != str(recipe):
            lines.append(f"recipe    measured with {measured}, and serves {recipe} too")
        if found.entry.evidence.get("kernel") != kernel_digest():
            lines.append(f"measured  with another kernel than this one ({kernel_digest()})")
        lines += _evidence(found.entry.evidence)
    for name, value in found.schedule.to_dict().items():
        lines.append(f"  {name:<18} {value}")
    return "\n".join(lines)


def _evidence(evidence: dict[str, Any]) -> list[str]:
    """What the entry rests on, and a line for each token count that was confirmed for it."""
    lines = [
        f"  {name:<18} {value}" for name, value in evidence.items() if name != "cells" and value
    ]
    for cell in evidence.get("cells", []):
        parts = [f"{cell['num_tokens']} tokens"]
        if cell.get("median_us") is not None:
            parts.append(f"{cell['median_us']:.1f} us")
        if cell.get("ratio_to_floor") is not None:
            parts.append(f"{cell['ratio_to_floor']:.3f} of the floor")
        if cell.get("num_observations") is not None:
            parts.append(
                f"{cell['num_observations']} observations of {cell['num_seeds']} seeds, "
                + (f"spread {cell['spread']:.2%}" if cell.get("spread") else "the default itself")
            )
        if cell.get("margin") is not None:
            margin, spread = cell["margin"], cell["margin_spread"]
            word = f"{abs(margin):.2%} {'faster' if margin > 0 else 'slower'} than"
            if abs(margin) <= SPREADS * spread:
                word = f"level ({margin:+.2%}) with"
            parts.append(f"{word} {cell['runner_up']} (spread of that {spread:.2%})")
        lines.append(f"measured  {', '.join(parts)}")
    return lines


def _walk_of(problem: Problem, schedule: Schedule, capacity: int, num_tokens: int) -> str:
    """The order in which launches of many ranks walk, whose pools are rings."""

    def order(blocks: int) -> str:
        asked = schedule.lag if lag_order else schedule.experts_per_wave
        lag, step = walk_order(blocks, problem.num_local_experts, ring, lag_order, asked)
        return f"lag {step}" if lag else f"waves of {step} experts"

    lag_order = schedule.order == "lag"
    ring = make_layout(problem, capacity).ring_blocks(schedule.block_m)
    blocks = first_blocks(uniform_counts(problem, num_tokens), schedule.block_m)[-1]
    return (
        f"{order(ring)} up to the {ring} pool blocks of the ring (capacity {capacity}); a launch "
        f"with more wraps it and walks in {order(ring + 1)}, whatever the schedule says. Uniform "
        f"routing of {num_tokens} tokens makes about {blocks}: {order(blocks)}"
    )
