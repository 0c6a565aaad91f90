"""The tile order: which task comes at a position of the walk. One rule, three readers.

A task is one tile of linear1 or linear2: a pool block and a column block. Block `b` of the grid
begins with task b and claims every other (device/lookahead.py), in this order. Both orders put a
linear2 tile behind all linear1 tiles of its pool block, so that a wait for them cannot deadlock
while all blocks are resident.

wave: experts in waves of `experts_per_wave`; all linear1 tiles of a wave, then all its linear2 tiles.
lag:  linear1 of the first `lag` pool blocks; then in turn linear1 of the next blocks and linear2 of as
      many, `lag` before them; last linear2 of the last. In turn are 32 blocks, at most `lag`.

A launch with more pool blocks than the ring holds (layout.py) walks in lag order whatever it was
asked for: linear1 of a block waits until linear2 of the block that had its rows before is done, and
with a lag of at most half the ring that is behind it in the walk. A dispatch warp holds rows of up to
a block an expert and one, and waits for linear1 of those that had their rows before: with a lag, and
so a turn and a group, of at most the ring without a block an expert, that is behind all of them.

Where several pool blocks of an expert follow each other, up to GROUP_BLOCKS of them take a column
block one after the other, then the next: blocks of the grid that run together read the same weights,
which come from memory once, not once in each few pool blocks, while the group's rows stay in L2. A
group is done as a whole, so that waves of an expert or two wait at their ends.

In a cluster of two blocks (device/cluster.py) tasks 2i and 2i + 1 are claimed together, and in wave
order the tasks of a group come otherwise: two tiles of all its blocks, one tile after the other, but
then two tiles of a last block with at most 64 rows. So the tiles of a pair mostly have the same
weights, and take the same time.

The device reads WALK_CUDA, the tests compile the same text for the host, and `task_at` is its Python
twin for explorer and tests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

LINEAR1_BIT = 1 << 30
GROUP_BLOCKS = 16
"""Of 132 tiles of 128 x 256 that run together, 16 blocks and 8 tiles of each have the fewest rows and
weights to read."""
TURN_BLOCKS = 32
"""In lag order, twice a group: most experts' blocks are not parted by the end of a turn."""
WALK_CUDA = (
    f"#define TLMM_GROUP_BLOCKS {GROUP_BLOCKS}\n#define TLMM_TURN_BLOCKS {TURN_BLOCKS}\n"
    + r"""
// The expert that owns pool block m: the last one whose first block is not behind m. An expert without rows
// has its successor's first block and is skipped.
TLMM_DEV int tlmm_expert_of(const int* first_block, int num_experts, int m) {
  int lo = 0, hi = num_experts - 1;
  while (lo < hi) { int mid = (lo + hi + 1) >> 1; if (first_block[mid] <= m) lo = mid; else hi = mid - 1; }
  return lo; }
// Tile r of the pool blocks from `first` to `end`, where blocks of an expert come in groups of almost the same size.
TLMM_DEV int tlmm_grouped_task(const int* first_block, int num_experts, int first, int end, int r, int n) {
  int block = first + r / n, expert = tlmm_expert_of(first_block, num_experts, block);
  int begin = first_block[expert] > first ? first_block[expert] : first;
  if (first_block[expert + 1] < end) end = first_block[expert + 1];
  int groups = (end - begin + TLMM_GROUP_BLOCKS - 1) / TLMM_GROUP_BLOCKS, size = (end - begin + groups - 1) / groups;
  begin += (block - begin) / size * size;
  if (begin + size < end) end = begin + size;
  r -= (begin - first) * n;
  return ((begin + r % (end - begin)) << 8) | (r / (end - begin)); }
TLMM_DEV int tlmm_task(int index, const int* first_block, int num_experts, int lag_order, int step, int ring, int n1,
                       int n2) {
  int blocks = first_block[num_experts];
  if (index >= blocks * (n1 + n2)) return -1;
  if (blocks > ring) {  // walk_order
    if (!lag_order) step = ring / 4 > 1 ? ring / 4 : 1;
    if (step > ring - num_experts) step = ring - num_experts > 1 ? ring - num_experts : 1;
    if (step > ring / 2) step = ring / 2;
    lag_order = 1; }
  if (n1 == 0) return tlmm_grouped_task(first_block, num_experts, 0, blocks, index, n2);
  if (n2 == 0) return 1 << 30 | tlmm_grouped_task(first_block, num_experts, 0, blocks, index, n1);
  if (lag_order) {
    int lag = step < blocks ? step : blocks, turn = lag < TLMM_TURN_BLOCKS ? (lag > 1 ? lag : 1) : TLMM_TURN_BLOCKS;
    if (index < lag * n1) return 1 << 30 | tlmm_grouped_task(first_block, num_experts, 0, lag, index, n1);
    index -= lag * n1;
    int rest = blocks - lag, begin = index / (n1 + n2) / turn * turn;
    if (index >= rest * (n1 + n2))
      return tlmm_grouped_task(first_block, num_experts, rest, blocks, index - rest * (n1 + n2), n2);
    int end = begin + turn < rest ? begin + turn : rest, r = index - begin * (n1 + n2);
    if (r < (end - begin) * n1)
      return 1 << 30 | tlmm_grouped_task(first_block, num_experts, lag + begin, lag + end, r, n1);
    return tlmm_grouped_task(first_block, num_experts, begin, end, r - (end - begin) * n1, n2); }
  int lo = 0, hi = num_experts / step - 1;
  while (lo < hi) {
    int mid = (lo + hi + 1) >> 1;
    if (first_block[mid * step] * (n1 + n2) <= index) lo = mid; else hi = mid - 1; }
  int first = first_block[lo * step], r = index - first * (n1 + n2);
  int end = first_block[(lo + 1) * step], linear1 = (end - first) * n1;
  return r < linear1 ? 1 << 30 | tlmm_grouped_task(first_block, num_experts, first, end, r, n1)
                     : tlmm_grouped_task(first_block, num_experts, first, end, r - linear1, n2); }
"""
)


PAIRS_CUDA = r"""
// In a cluster: the task that comes where `tlmm_task` of the same launch has `code`. `total`: rows of each expert. `near`:
// bit 0 if the next task has the same weights, bit 1 if the one before has.
TLMM_DEV int tlmm_pair_task(int code, const int* first_block, const int* total, int num_experts, int n1, int n2, int* near) {
  *near = 0;
  if (code < 0) return code;
  int phase = code & 1 << 30, block = code >> 8 & 4194303, n = phase ? n1 : n2;
  int expert = tlmm_expert_of(first_block, num_experts, block), begin = first_block[expert], end = first_block[expert + 1];
  int last_rows = total[expert] - (end - 1 - begin) * 128;
  int groups = (end - begin + TLMM_GROUP_BLOCKS - 1) / TLMM_GROUP_BLOCKS, size = (end - begin + groups - 1) / groups;
  begin += (block - begin) / size * size;
  bool low = last_rows <= 64 && begin + size >= end;
  if (begin + size < end) end = begin + size;
  size = end - begin;
  int full = size - low, r = (code & 255) * size + block - begin, q = r % (2 * size), tile = r / (2 * size) * 2;
  int tiles = tile + 1 < n ? 2 : 1;
  if (q >= full * tiles) return phase | (end - 1) << 8 | (tile + q - full * tiles);
  block = q % full;
  *near = (block > 0 ? 2 : 0) | (block + 1 < full ? 1 : 0);
  return phase | (begin + block) << 8 | (tile + q / full); }
"""


class Task(NamedTuple):
    """One tile: `phase` is 1 or 2, `block` the pool block, `tile` the column block."""

    phase: int
    block: int
    tile: int


def first_blocks(counts: Sequence[int], block_m: int) -> list[int]:
    """First pool block of every expert, and the number of blocks at the end.

    Args:
        counts: rows received by each local expert.
        block_m: rows of a pool block.
    """
    out = [0]
    for count in counts:
        out.append(out[-1] + -(-count // block_m))
    return out


def expert_of(first_block: Sequence[int], block: int) -> int:
    """The expert that owns a pool block."""
    return bisect_right(first_block, block, 0, len(first_block) - 1) - 1


def group_size(blocks: int) -> int:
    """Pool blocks of a group, but the last, of an expert with so many in a row."""
    groups = (blocks + GROUP_BLOCKS - 1) // GROUP_BLOCKS
    return (blocks + groups - 1) // groups


def first_tile(index: Any, blocks_each: Any, tiles: Any) -> Any:
    """The linear1 tile at an early position of the walk, where every expert has `blocks_each` pool
    blocks, one group."""
    return index % (tiles * blocks_each) // blocks_each


def groups_between(first_block: Sequence[int], first: int, end: int) -> list[range]:
    """The pool blocks from `first` to `end` in groups, each of one expert."""
    groups = []
    while first < end:
        groups.append(group_of(first_block, first, first, end))
        first = groups[-1].stop
    return groups


def group_of(first_block: Sequence[int], block: int, first: int = 0, end: int = 2**31) -> range:
    """The blocks with which a pool block is walked, of those from `first` to `end`."""
    expert = expert_of(first_block, block)
    begin, end = max(first_block[expert], first), min(first_block[expert + 1], end)
    size = group_size(end - begin)
    begin += (block - begin) // size * size
    return range(begin, min(begin + size, end))


def _grouped(first_block: Sequence[int], first: int, end: int, r: int, n: int) -> tuple[int, int]:
    """Pool block and tile of the r-th of `n` tiles a block of those from `first` to `end`: the twin
    of `tlmm_grouped_task`."""
    group = group_of(first_block, first + r // n, first, end)
    tile, within = divmod(r - (group.start - first) * n, len(group))
    return group.start + within, tile


def walk_order(
    blocks: int, experts: int, ring_blocks: int, lag_order: bool, step: int
) -> tuple[bool, int]:
    """The order that a launch of `blocks` pool blocks of `experts` local experts walks in, asked for
    (`lag_order`, `step`).

    With no more blocks than the ring holds, what was asked for. Else the lag order, its lag at most
    half the ring, and the ring without a block an expert; for a schedule in wave order a quarter.
    """
    if blocks <= ring_blocks:
        return lag_order, step
    lag = step if lag_order else max(1, ring_blocks // 4)
    return True, min(lag, max(1, ring_blocks - experts), ring_blocks // 2)


def turn_blocks(lag: int) -> int:
    """In lag order, the blocks whose linear1, and before them linear2, come in turn."""
    return max(1, min(lag, TURN_BLOCKS))


def task_at(
    index: int, first_block: Sequence[int], lag_order: bool, step: int, n1: int, n2: int
) -> Task | None:
    """The task at a position of the walk, or None past its end: the twin of `tlmm_task`.

    `lag_order` and `step` are what `walk_order` returned.

    Args:
        index: position, from 0.
        first_block: from `first_blocks`.
        lag_order: lag order, else wave order.
        step: the lag in pool blocks, or experts per wave.
        n1: linear1 tiles of a pool block; 0 walks linear2 alone.
        n2: linear2 tiles of a pool block; 0 walks linear1 alone.
    """
    blocks = first_block[-1]
    both = n1 + n2
    if index >= blocks * both:
        return None
    if n1 == 0 or n2 == 0:
        return Task(2 if n1 == 0 else 1, *_grouped(first_block, 0, blocks, index, both))
    if lag_order:
        lag = min(step, blocks)
        if index < lag * n1:
            return Task(1, *_grouped(first_block, 0, lag, index, n1))
        index -= lag * n1
        rest, turn = blocks - lag, turn_blocks(lag)
        if index >= rest * both:
            return Task(2, *_grouped(first_block, rest, blocks, index - rest * both, n2))
        begin = index // both // turn * turn
        end, r = min(begin + turn, rest), index - begin * both
        if r < (end - begin) * n1:
            return Task(1, *_grouped(first_block, lag + begin, lag + end, r, n1))
        return Task(2, *_grouped(first_block, begin, end, r - (end - begin) * n1, n2))
    starts = [first_block[e] * both for e in range(0, len(first_block) - 1, step)]
    wave = bisect_right(starts, index) - 1
    first, end = first_block[wave * step], first_block[(wave + 1) * step]
    r = index - first * both
    linear1 = (end - first) * n1
    if r < linear1:
        return Task(1, *_grouped(first_block, first, end, r, n1))
    return Task(2, *_grouped(first_block, first, end, r - linear1, n2))


def pair_task(
    task: Task, first_block: Sequence[int], totals: Sequence[int], n1: int, n2: int
) -> tuple[Task, bool, bool]:
    """In a cluster, in wave order: the task that comes where `task_at` has `task`, and whether the
    one before and the next have the same weights: the twin of `tlmm_pair_task`.

    Args:
        task: from `task_at`.
        first_block: from `first_blocks`, of 128 rows a block.
        totals: rows of each expert.
        n1, n2: as `task_at`.
    """
    expert = expert_of(first_block, task.block)
    group, n = group_of(first_block, task.block), n1 if task.phase == 1 else n2
    end = first_block[expert + 1]
    low = group.stop == end and totals[expert] - (end - 1 - first_block[expert]) * 128 <= 64
    full = len(group) - low
    pair, q = divmod(task.tile * len(group) + task.block - group.start, 2 * len(group))
    tiles = min(2, n - 2 * pair)
    if q >= full * tiles:
        return Task(task.phase, group.stop - 1, 2 * pair + q - full * tiles), False, False
    tile, block = divmod(q, full)
    found = Task(task.phase, group.start + block, 2 * pair + tile)
    return found, block > 0, block + 1 < full


def walk(
    first_block: Sequence[int], lag_order: bool, step: int, n1: int, n2: int
) -> Iterator[Task]:
    """All tasks in order."""
    index = 0
    while (task := task_at(index, first_block, lag_order, step, n1, n2)) is not None:
        yield task
        index += 1


def block_of(code: Any) -> Any:
    """The pool block of a task's traced code."""
    return (code >> 8) & 4194303


def task_expression(plan: Any, p: Any, shared: Any, index: Any) -> Any:
    """The task at a traced position, as a 32-bit code: negative past the end, else
    `LINEAR1_BIT | block << 8 | tile` (`tlmm_task`)."""
    import tilelang.language as T

    return T.call_extern(
        "int32",
        "tlmm_task",
        index,
        T.address_of(shared.first_block[0]),
        plan.problem.num_local_experts,
        p.lag_order,
        p.order_step,
        plan.ring_blocks,
        plan.walk_tiles1,
        plan.walk_tiles2,
    )


def walks_pairs(plan: Any, p: Any, shared: Any) -> Any:
    """Whether a launch of clusters walks in wave order, traced: else no tile is shared."""
    wave = p.lag_order == 0
    if plan.ring_wraps:
        wave = wave & (shared.first_block[plan.problem.num_local_experts] <= plan.ring_blocks)
    return wave


def pair_expression(plan: Any, shared: Any, code: Any, near: Any) -> Any:
    """The task in a cluster where `task_expression` has `code`; `near` gets which neighbours have
    the same weights (`tlmm_pair_task`)."""
    import tilelang.language as T

    return T.call_extern(
        "int32",
        "tlmm_pair_task",
        code,
        T.address_of(shared.first_block[0]),
        T.address_of(shared.total[0]),
        plan.problem.num_local_experts,
        plan.walk_tiles1,
        plan.walk_tiles2,
        T.address_of(near),
    )


def expert_expression(plan: Any, shared: Any, block: Any) -> Any:
    """The expert of a traced pool block (`tlmm_expert_of`)."""
    import tilelang.language as T

    return T.call_extern(
        "int32",
        "tlmm_expert_of",
        T.address_of(shared.first_block[0]),
        plan.problem.num_local_experts,
        block,
    )
