"""What a launch reports when one of its waits exceeds its bound (device/barriers.py writes it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .buffer import SymmBuffer

REPORT_SLOT = 16
"""Integers of one report; the slot of a wait starts at its tag times this."""
REPORT_LENGTH = 16 * REPORT_SLOT
REPORT_FIELDS = (
    "tag",
    "rank",
    "block",
    "thread",
    "peer",
    "pool_block",
    "expert",
    "tile",
    "have",
    "want",
)
"""First integers of a slot; -1 where a field does not apply. Tag 0: nothing timed out."""
TIMEOUT_TAGS = {
    1: "dispatch: exchange of the counts, grid barrier",
    2: "dispatch: rank {peer} has not arrived with its counts",
    3: "dispatch: pool block {pool_block} waits for linear1 to free its ring rows",
    4: "linear1: pool block {pool_block} waits for its tokens",
    5: "linear2: pool block {pool_block} waits for linear1",
    6: "combine: grid barrier before the sum",
    7: "combine: rank {peer} has not arrived with its rows",
    8: "linear1: pool block {pool_block} waits for linear2 to free its ring rows",
}
"""What a wait of device/barriers.py was for, by the tag it reports."""
_OWN_BLOCKS = {
    2: "dispatch: not all blocks of this rank have counted their tokens",
    7: "combine: not all blocks of this rank have written their rows",
}
"""The same for a cross-rank wait that is still short of the rank's own blocks."""
_GRID_TAGS = (1, 2)
_BLOCK_TAGS = (3, 4, 8, 5)
"""Waits of a pool block in the order in which it makes them. A wait for ring rows is for an earlier
block, so the first wait of the first stuck block is the cause of the others."""


class MegaMoeTimeout(RuntimeError):  # noqa: N818 - a timeout is the word its callers know
    """A wait in the kernel exceeded its bound; the message says which. The CUDA context is lost.

    Attributes (None where it does not apply to the wait):
        phase: `dispatch`, `linear1`, `linear2` or `combine`.
        rank: the rank that waited.
        peer: the rank it waited for; `rank` itself while its own blocks were missing.
        expert: local expert of the pool block.
        tile: column tile of the pool block.
        pool_block: the pool block that waited.
        have, want: what was counted and what was waited for: launches of the peer where there is
            one, else arrivals.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        expert: int | None = None,
        tile: int | None = None,
        pool_block: int | None = None,
        have: int | None = None,
        want: int | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.rank = rank
        self.peer = peer
        self.expert = expert
        self.tile = tile
        self.pool_block = pool_block
        self.have = have
        self.want = want


def check_reports(buffers: Sequence[SymmBuffer]) -> None:
    """Raise MegaMoeTimeout for the likeliest cause among the timed-out waits of several buffers.

    Raises:
        MegaMoeTimeout: a wait timed out.
    """
    stuck = []
    for buffer in buffers:
        for slot in buffer.report.view(-1, REPORT_SLOT).tolist():
            if slot[0]:
                stuck.append((_order(slot), buffer, slot))
    if not stuck:
        return
    stuck.sort(key=lambda entry: entry[0])
    _, buffer, slot = stuck[0]
    tag, rank, block, thread, peer, pool_block, expert, tile, have, want = slot[
        : len(REPORT_FIELDS)
    ]
    what = _what(slot)
    at = ", ".join(f"{n} {v}" for n, v in (("expert", expert), ("tile", tile)) if v >= 0)
    others: list[str] = []
    for _, _, other in stuck[1:]:
        text = f"rank {other[1]} " if len(buffers) > 1 else ""
        text += _what(other).split(":")[0]
        if text not in others:
            others.append(text)
    behind = f" (stuck behind it: {', '.join(others)})" if others else ""
    unit = " launches" if tag in _OWN_BLOCKS else ""
    queues = ""
    if buffer.rank_mode == "virtual":
        from .virtual import CONNECTIONS, MIN_CONNECTIONS

        queues = f", did CUDA start without {CONNECTIONS}={MIN_CONNECTIONS}"
    raise MegaMoeTimeout(
        f"{what}{f' ({at})' if at else ''}: rank {rank}, block {block}, thread {thread} counted "
        f"{have} of {want}{unit} in {buffer.timeout_s:g} s"
        f"{behind}. Every block of the grid must be resident at once: is another stream or process "
        f"holding SMs{queues}, or did a rank not launch? The CUDA context is lost.",
        phase=what.split(":")[0] if tag in TIMEOUT_TAGS else None,
        rank=rank,
        peer=_known(peer),
        expert=_known(expert),
        tile=_known(tile),
        pool_block=_known(pool_block),
        have=have,
        want=want,
    )


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _what(slot: list[int]) -> str:
    tag, rank, _, _, peer, pool_block = slot[:6]
    if tag in _OWN_BLOCKS and peer == rank:
        return _OWN_BLOCKS[tag]
    return TIMEOUT_TAGS.get(tag, f"unknown wait, tag {tag}").format(
        peer=peer, pool_block=pool_block
    )


def _order(slot: list[int]) -> tuple[int, int, int, bool]:
    """Sorts waits so that a cause stands before what it holds up."""
    tag, rank, _, _, peer, pool_block = slot[:6]
    for_another = peer != rank  # a rank that misses blocks of its own keeps its peers waiting
    if tag in _GRID_TAGS:
        return 0, 0, tag, for_another
    if tag in _BLOCK_TAGS:
        return 1, pool_block, _BLOCK_TAGS.index(tag), for_another
    return 2, 0, tag, for_another
