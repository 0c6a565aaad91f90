"""A model's state dict, read the way torch loads one: what is there is copied, the rest is named.

Unlike a checkpoint (checkpoint.py) a state dict may hold a part of the layer, as one shard of many
files does; a caller that needs all of it looks at `StateReport.missing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .checkpoint import (
    NAMINGS,
    SHARED_WORDS,
    STACKED,
    MissingTensorError,
    Naming,
    Piece,
    Target,
    check_stacked,
    each_pieces,
    naming_of,
    num_experts_of,
    own_experts,
    place,
    refuse_biases,
    refuse_gate,
    shared_pieces,
    stacked_pieces,
)
from .problem import Problem
from .sources import Tensors

NUMBER = r"\d+\."


@dataclass(slots=True)
class StateReport:
    """What loading found.

    Attributes:
        missing: tensors of this rank that the state dict lacks.
        known: keys that belong to the layer, also those of other ranks' experts.
        errors: why a tensor could not be read.
    """

    missing: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def load_state(
    state: Mapping[str, Tensor],
    prefix: str,
    problem: Problem,
    rank: int,
    num_shared: int,
    target: Target,
) -> StateReport | None:
    """Copy what a state dict holds of a rank's experts.

    Args:
        state: of a model; the names are those of checkpoint.py under `<prefix>experts.` or
            `<prefix>`, shared experts under `<prefix>shared_experts.` or `<prefix>shared_expert.`.
        prefix: with a dot at the end, or empty.
        problem: the layer without shared experts.
        rank: whose experts.
        num_shared: shared experts of the layer.
        target: gets the weights.

    Returns:
        None if no key is that of an expert.
    """
    names = [name for name in state if name.startswith(prefix)]
    base = f"{prefix}experts."
    if not any(name.startswith(base) for name in names):
        base = prefix
    shared = f"{prefix}{SHARED_WORDS[0]}"
    if any(name.startswith(f"{prefix}{SHARED_WORDS[1]}.") for name in names):
        shared = f"{prefix}{SHARED_WORDS[1]}"
    stacked = any(f"{base}{word}" in names for word in STACKED)
    naming = naming_of(names, re.escape(base) + NUMBER)
    naming_shared = naming_of(names, re.escape(f"{shared}.")) if num_shared else None
    if not stacked and naming is None and naming_shared is None:
        return None
    source, report = Tensors(state), StateReport()
    pieces: list[Piece] = []
    try:
        refuse_biases(names, base)
        if num_shared:
            refuse_biases(names, f"{shared}.")
            refuse_gate(names, shared)
            pieces += shared_pieces(f"{shared}.", problem, num_shared, naming_shared or NAMINGS[0])
        if stacked:
            check_stacked(source, base, problem)
            pieces += stacked_pieces(base, problem, own_experts(problem, rank))
        else:
            pieces += each_pieces(base, problem, own_experts(problem, rank), naming or NAMINGS[0])
    except ValueError as error:
        report.errors.append(str(error))
        pieces = []
    experts = STACKED if stacked else naming
    report.known.update(_known(names, base, problem, experts))
    report.known.update(_known(names, f"{shared}.", None, naming_shared))
    _place_all(source, pieces, target, report)
    return report


def _place_all(source: Tensors, pieces: list[Piece], target: Target, report: StateReport) -> None:
    failed: set[str] = set()  # one word is enough for the experts of a stacked tensor
    for piece in pieces:
        if piece.name in failed:
            continue
        try:
            place(source, piece, target)
        except MissingTensorError as error:
            failed.add(piece.name)
            report.missing.append(error.name)
        except ValueError as error:
            failed.add(piece.name)
            report.errors.append(str(error))


def _known(
    names: list[str], base: str, problem: Problem | None, words: Naming | tuple[str, ...] | None
) -> Iterator[str]:
    """The keys of weights and scales under `base`; of numbered experts those that the layer has."""
    if words is None:
        return
    stacked = words is STACKED
    number = rf"({NUMBER})" if problem is not None and not stacked else "()"
    ending = r"(_scale_inv)?" if stacked else r"\.(weight|weight_scale_inv|scale)"
    pattern = re.compile(rf"{re.escape(base)}{number}({'|'.join(words)}){ending}")
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if not match[1] or problem is None or int(match[1][:-1]) < num_experts_of(problem):
            yield name
