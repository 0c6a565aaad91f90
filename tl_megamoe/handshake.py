"""What ranks tell each other before the first launch, and what must hold between them.

Nothing here imports torch at module level: a launcher calls `disable_multicast` before torch starts
CUDA. A card is a dict of plain values, so that ranks with different versions can read each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

from .problem import Problem
from .recipe import Recipe
from .schedule import ScheduleError

MULTICAST_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    MULTICAST_VARIABLE: "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variables that keep NVLink multicast off, in NCCL, torch symmetric memory and NVSHMEM. The kernel
needs none, and setting it up fails on hosts whose fabric manager does not grant it."""
Card = dict[str, Any]
_PERSONAL = ("host", "device", "error", "hash")
"""Fields of a card that may differ between ranks, or are compared by other rules."""
T = TypeVar("T")


def disable_multicast() -> None:
    """Set the variables that keep NVLink multicast off, where they are unset.

    They are the process': NCCL groups that are made later do without NVLS too. To keep NCCL's own
    use, set NCCL_NVLS_ENABLE before.
    """
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)


def check_multicast_off() -> None:
    """`disable_multicast`, and an error when torch's symmetric memory would still use it.

    Raises:
        RuntimeError: TORCH_SYMM_MEM_DISABLE_MULTICAST is set to 0 or nothing.
    """
    disable_multicast()
    if os.environ[MULTICAST_VARIABLE].strip() in ("", "0"):
        raise RuntimeError(
            f"{MULTICAST_VARIABLE}={os.environ[MULTICAST_VARIABLE]!r} asks torch symmetric memory "
            "to set up NVLink multicast, which the kernel does not use and some hosts do not "
            f"grant. Unset it, or set {MULTICAST_VARIABLE}=1."
        )


def bare_card(error: Exception | None = None) -> Card:
    """Where this rank runs, and what kept it from saying more."""
    return {"host": own_host(), "device": None, "error": None if error is None else _say(error)}


def own_card(problem: Problem, capacity: int, recipe: Recipe | None = None) -> Card:
    """What this rank was called with, and where it runs.

    The name of the problem is not part of it: sizes decide what runs.
    """
    from . import __version__

    card: Card = {
        **problem.key(),
        "recipe": str(recipe or Recipe()),
        "capacity": capacity,
        "version": __version__,
    }
    text = json.dumps(card, sort_keys=True, default=repr)
    card["hash"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {**card, **bare_card()}


def check_handshake(own_rank: int, all_cards: Sequence[Card]) -> None:
    """Raise on every rank unless all ranks run the same layer on devices of their own.

    Args:
        own_rank: the rank that speaks.
        all_cards: by rank.

    Raises:
        ValueError: names the fields that differ, each rank's value, and what to do; or the error of
            a rank that could not make its buffer.
    """
    failed = _errors(all_cards)
    if len({card["hash"] for card in all_cards if "hash" in card}) > 1:
        # A version of the package may know fields that another does not.
        names = sorted({name for card in all_cards for name in card} - set(_PERSONAL))
        found = differing([{name: card.get(name) for name in names} for card in all_cards])
        raise ValueError(
            f"the ranks of one layer must agree, found on rank {own_rank}: {found}. Pass the same "
            "problem, recipe and capacity on every rank, with one version of tl_megamoe."
            f"{f' Also {failed}' if failed else ''}"
        )
    if failed:
        raise ValueError(f"no rank may launch. {failed}")
    seen: dict[tuple[Any, Any], int] = {}
    for rank, card in enumerate(all_cards):
        if card.get("device") is None:
            continue
        first = seen.setdefault((card.get("host"), card["device"]), rank)
        if first != rank:
            raise ValueError(
                f"ranks {first} and {rank} use one GPU ({card['device']} of {card.get('host')}), "
                f"found on rank {own_rank}: their kernels wait for each other and each takes the "
                "whole GPU. Call torch.cuda.set_device(local_rank) first; ranks that share a GPU "
                "are made with VirtualGroup."
            )


def leader_of(cards: Sequence[Card], rank: int) -> int:
    """The lowest rank on the host of `rank`: it compiles, the others of the host load."""
    host = cards[rank]["host"]
    return next(r for r, card in enumerate(cards) if card["host"] == host)


def own_host() -> str:
    """The name by which ranks know that they share a machine, and its cache of kernels."""
    return socket.gethostname()


def gather(card: Card, group: Any, device: Any = None) -> list[Card]:
    """Every rank's card; a collective call of all ranks of `group`.

    Args:
        card: plain values.
        group: the process group.
        device: this rank's GPU, through which NCCL sends the cards; the current one when None.
    """
    import torch
    import torch.distributed as dist

    cards: list[Any] = [None] * dist.get_world_size(group)
    on_gpu = device is not None and torch.device(device).type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        dist.all_gather_object(cards, card, group=group)
    return cards


def exchange_cards(card: Card, group: Any, device: Any = None) -> list[Card]:
    """Every rank's card, checked; see `gather`.

    Raises:
        ValueError: as `check_handshake`, on every rank.
    """
    import torch.distributed as dist

    cards = gather(card, group, device)
    check_handshake(dist.get_rank(group), cards)
    return cards


def differing(choices: Sequence[Card]) -> str:
    """What differs between the ranks' choices, by field; empty when nothing does."""
    parts = []
    for name in choices[0]:
        values = [choice.get(name) for choice in choices]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            parts.append(f"{name} differs ({listed})")
    return "; ".join(parts)


def load_together(
    choice: Card,
    load: Callable[[], T],
    check: Callable[[], object],
    group: Any,
    device: Any = None,
) -> T:
    """Compile a kernel on one rank a host, load it on the others, return when all ranks have it.

    A rank that launched alone would count its peers' compile time against its timeout, and the
    compilers of one host would do the same work. Each step ends in an exchange of errors, which is
    the barrier too. A collective call of all ranks of `group`.

    Args:
        choice: what must be the same on all ranks: plain values by field.
        load: makes the kernel, from the host's disk cache where it is there.
        check: raises where the choice is not valid on this rank.
        group: the process group.
        device: as for `gather`.

    Returns:
        What `load` returned.

    Raises:
        ScheduleError: the ranks chose differently, or `check` raised on one of them.
        RuntimeError: `load` raised on one of them.
    """
    import torch.distributed as dist

    try:
        check()
    except Exception as error:  # the others wait: they must hear of it
        refuse_together(error, group, device)
    cards = gather({**bare_card(), "choice": choice}, group, device)
    _raise_errors(cards, ScheduleError)
    found = differing([c["choice"] for c in cards])
    if found:
        grid = (
            " num_sms is cut to the multiprocessors of a rank's GPU: where GPUs differ, pass a "
            "schedule that fits the smallest."
        )
        raise ScheduleError(
            f"the ranks of one launch must choose alike: {found}. Pass the same token_bound, "
            "schedule, activation_clamp and fast_math on every rank, and set the TL_MEGAMOE_ "
            f"variables alike.{grid if 'num_sms differs' in found else ''}"
        )
    rank = dist.get_rank(group)
    leads = leader_of(cards, rank) == rank
    out: list[T] = []

    def take_turn(mine: bool) -> None:
        if mine:
            out.append(load())

    for mine in (leads, not leads):
        in_step(partial(take_turn, mine), group, device)
    return out[0]


def refuse_together(error: Exception, group: Any, device: Any = None) -> NoReturn:
    """Tell the ranks that wait in `load_together` that this one does not come.

    Raises:
        ScheduleError: always, there and here.
    """
    _raise_errors(gather(bare_card(error), group, device), ScheduleError)
    raise AssertionError("a rank that refuses has said so")


def in_step(work: Callable[[], T], group: Any, device: Any = None) -> T:
    """`work()` on every rank of `group`; returns when all of them are done.

    Raises:
        RuntimeError: `work` raised on one of them; on all of them.
    """
    card, out = bare_card(), []
    try:
        out.append(work())
    except Exception as error:  # whatever it is, the others wait
        card["error"] = f"{type(error).__name__}: {error}"
    _raise_errors(gather(card, group, device), RuntimeError)
    return out[0]


def _say(error: Exception) -> str:
    """The text of an error: of one that is no rule of ours, with its kind."""
    ours = isinstance(error, (ValueError, RuntimeError))
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _errors(cards: Sequence[Card]) -> str:
    failed = [(rank, card["error"]) for rank, card in enumerate(cards) if card.get("error")]
    return "; ".join(f"rank {rank}: {error}" for rank, error in failed)


def _raise_errors(cards: Sequence[Card], kind: type[Exception]) -> None:
    failed = _errors(cards)
    if failed:
        raise kind(f"no rank may launch. {failed}")
