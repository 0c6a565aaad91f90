"""Stamps of the profiling build: when each role of each block did what. One format, two readers.

A lane is a warp of the first warpgroup or a math warpgroup; the first thread of it writes. An event
lasts from the lane's stamp before to its own, so that all time of a lane belongs to some event. The
last stamp and the number of events lie in shared memory, not in registers: the K loops have none
left. It is static memory, which fills a KiB anyway (the barriers lie there).

trace[block, lane, i]   int32 x 4
i = 0                   events stamped, SM, 0, 0
i = 1 ..                begin and end in ns (low halves of %globaltimer), SM clocks, code
code                    kind << 28 | (linear is 1) << 27 | pool block << 8 | tile

Events past the lane's capacity are counted and not written. Without `Plan.profile` nothing here is
part of a kernel.
"""

from __future__ import annotations

from typing import Any

NUM_LANES = 6
"""Four warps (dispatch, then load, then idle ones), two math warpgroups."""
LANE_EVENTS = 4095
"""A tile of a math warpgroup takes three, in pingpong mode five."""
EVENT_WORDS = 4
MAX_POOL_BLOCKS = 1 << 19

BEGIN = 0
ROUTE = 1
COUNTS = 2
START = 3
PULL = 4
ARRIVAL = 5
LOAD = 6
TURN = 7
STAGE = 8
MULTIPLY = 9
FINISH_TURN = 10
FINISH = 11
COMBINE_WAIT = 12
COMBINE = 13
RESET = 14

NOTE_CUDA = (
    f"#define TLMM_LANES {NUM_LANES}\n#define TLMM_LANE_EVENTS {LANE_EVENTS}\n"
    + r"""
// Ends a lane's event and begins the next one; kind 0 begins the first. `last`: events, ns and clock of the last
// stamp. `out`: the lane's memory.
TLMM_DEV void tlmm_note(uint4* last, uint4* out, unsigned now, unsigned clock, unsigned sm, int kind, int linear,
                        int block, int tile) {
  unsigned n = last->x, code = (unsigned)kind << 28 | (unsigned)(linear == 1) << 27 | (unsigned)(block << 8 | tile);
  if (kind == 0) { n = 0; out[0] = make_uint4(0, sm, 0, 0); }
  else {
    if (n < TLMM_LANE_EVENTS) out[1 + n] = make_uint4(last->y, now, clock - last->z, code);
    out[0].x = ++n; }
  *last = make_uint4(n, now, clock, 0); }
"""
)
"""What the tests compile for the host too."""
TRACE_CUDA = (
    NOTE_CUDA
    + r"""
// Whole warps call it. The thread is read by volatile assembly, as tlmm_lane() does.
TLMM_DEV void tlmm_stamp(long long trace, int kind, int linear, int block, int tile) {
  __shared__ uint4 last[TLMM_LANES];
  unsigned tx; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tx));
  if ((tx & (tx < 128 ? 31 : 127)) == 0) {
    unsigned now, clock, sm = 0, lane = tx < 128 ? tx >> 5 : 3 + (tx >> 7);
    if (kind == 0) asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now) :: "memory");
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock) :: "memory");
    tlmm_note(last + lane, (uint4*)trace + (blockIdx.x * TLMM_LANES + lane) * (TLMM_LANE_EVENTS + 1), now, clock, sm,
              kind, linear, block, tile); }
  __syncwarp(); }
"""
)


def trace_shape(num_blocks: int) -> tuple[int, int, int, int]:
    """Shape of the int32 tensor that a launch of `num_blocks` blocks fills."""
    return num_blocks, NUM_LANES, LANE_EVENTS + 1, EVENT_WORDS


def _stamp(p: Any, kind: int, linear: int = 0, block: Any = 0, tile: Any = 0) -> Any:
    import tilelang.language as T

    return T.call_extern("handle", "tlmm_stamp", p.trace_address, kind, linear, block, tile)


def begin(plan: Any, p: Any) -> Any:
    """Begin the first event of every lane. All threads of the block."""
    return _stamp(p, BEGIN) if plan.profile else None


def mark(plan: Any, p: Any, kind: int) -> Any:
    """What ends here was `kind`. Whole warps; the whole warpgroup of a math role."""
    return _stamp(p, kind) if plan.profile else None


def mark_tile(plan: Any, p: Any, kind: int, linear: int, block: Any, tile: Any) -> Any:
    """What ends here was `kind` of a tile of linear1 or linear2 (1 or 2); else as `mark`."""
    return _stamp(p, kind, linear, block, tile) if plan.profile else None
