"""Dispatch: every rank pulls the rows routed to its experts into an expert-sorted pool.

role       warps             work
all        all 384 threads   route: count routes per expert, reserve places, list them for their rank
dispatch   warp 0            exchange counts (barrier of the grid, of all ranks), prefix sums
dispatch   dispatch_warps    pull rows, scales, weights; write the pool; report chunks

barrier                    arrivals                     meaning
BLOCK                      384                          steps of the routing; counts known to all roles
dispatch_sync              one a block                  every route is listed and counted (gpu scope);
                                                        not with few routes
dispatch_signal[peer]      one a launch                 the peer's routes and counts are here (system scope)
row_bars[slot]             1 + chunk bytes              a row chunk is in shared memory
l2_arrival[earlier block]  see linear1.py               its pool rows may be overwritten
l1_arrival_count[block]    block_m x chunks_per_row     all rows of a pool block are written (gpu scope)

The order of rows inside an expert depends on which block reserved its places first; every row is
computed alone, so no result depends on it.

One rank with few routes (`Schedule.few_routes`: up to two a thread) needs neither lists nor the
barrier: every block reads and counts all routes, in the same order, and so knows the walk and the
source of every row.
With swapped operands it needs no pool either (gather.py).
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.plan import Params, Plan
from ..device.remote import peer_tensor, pull, put, wait_put
from ..device.ring import Shared
from ..device.walk import first_tile
from ..schedule import BLOCK_K, COUNTER_BITS
from ..shared_memory import FEW_COUNT_BYTES

ENTRY_ROUTES = 1024
"""Of an entry of `shared.routes`: expert * ENTRY_ROUTES + route."""
DISPATCH_CUDA = (
    f"#define TLMM_ENTRY_ROUTES {ENTRY_ROUTES}\n#define TLMM_FEW_COUNT_BYTES {FEW_COUNT_BYTES}\n"
    + r"""
// One warp: received counts (source rank x local expert) -> shared copy, unless they are COUNTED there already, rows by
// expert, first pool block and first row of every expert, with the totals at the end.
template <bool COUNTED>
TLMM_DEV void tlmm_scan_counts(const int* received, int* counts, int ranks, int experts, int block_m, int* total,
                               int* first_block, int* first_row) {
  int lane = (int)(threadIdx.x & 31), blocks = 0, rows = 0;
  for (int b = 0; b < experts; b += 32) {
    int x = b + lane, v = 0;
    if (x < experts)
      for (int r = 0; r < ranks; r++) {
        int q = COUNTED ? counts[r * experts + x] : tlmm_load(received + r * experts + x);
        counts[r * experts + x] = q; v += q; }
    int nb = (v + block_m - 1) / block_m, sb = nb, sr = v;
    #pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int t = __shfl_up_sync(0xffffffffu, sb, d), u = __shfl_up_sync(0xffffffffu, sr, d);
      if (lane >= d) { sb += t; sr += u; } }
    if (x < experts) { total[x] = v; first_block[x] = blocks + sb - nb; first_row[x] = rows + sr - v; }
    blocks += __shfl_sync(0xffffffffu, sb, 31); rows += __shfl_sync(0xffffffffu, sr, 31); }
  if (lane == 0) { first_block[experts] = blocks; first_row[experts] = rows; } }
// All threads of a block: what tlmm_scan_counts makes, and the entry expert * TLMM_ENTRY_ROUTES + route of every received
// row, an expert's in the order of routes, which is that of every other block. A warp counts routes that lie together,
// 32 at a step; all are on their way before the first is looked at.
template <int THREADS, int STEPS>
TLMM_DEV void tlmm_count_few(const int64_t* topk_idx, int routes, void* scratch, int* counts, int experts, int block_m,
                             int* total, int* first_block, int* first_row, int* entries, int block_barrier) {
  static_assert(THREADS * STEPS <= TLMM_ENTRY_ROUTES, "a route does not fit its entry");
  static_assert(sizeof(unsigned short) == TLMM_FEW_COUNT_BYTES, "shared memory has room for other numbers");
  int thread = tlmm_thread(), lane = thread & 31, steps = (routes + THREADS - 1) / THREADS;
  int first = thread / 32 * steps * 32 + lane;
  unsigned short* mine = (unsigned short*)scratch + thread / 32 * experts;  // of an expert's routes, those of the warp
  long long index[STEPS]; int expert[STEPS], place[STEPS];
  #pragma unroll
  for (int s = 0; s < STEPS; s++)
    index[s] = s < steps && first + s * 32 < routes ? topk_idx[first + s * 32] : -1;
  for (int x = lane; x < experts; x += 32) mine[x] = 0;
  __syncwarp();
  #pragma unroll
  for (int s = 0; s < STEPS; s++) {
    expert[s] = index[s] >= 0 && index[s] < experts ? (int)index[s] : -1;  // compared before it is narrowed
    if (s < steps) {
      unsigned same = __match_any_sync(0xffffffffu, expert[s]);
      int before = __popc(same & ((1u << lane) - 1)), counted = expert[s] >= 0 ? mine[expert[s]] : 0;
      place[s] = counted + before;
      __syncwarp();
      if (expert[s] >= 0 && before == 0) mine[expert[s]] = (unsigned short)(counted + __popc(same));
      __syncwarp(); } }
  tlmm_bar(block_barrier, THREADS);
  for (int x = thread; x < experts; x += THREADS) {
    unsigned short* warps = (unsigned short*)scratch + x;
    int of_warp[THREADS / 32], n = 0;
    #pragma unroll
    for (int w = 0; w < THREADS / 32; w++) of_warp[w] = warps[w * experts];
    #pragma unroll
    for (int w = 0; w < THREADS / 32; w++) { warps[w * experts] = (unsigned short)n; n += of_warp[w]; }
    counts[x] = n; }
  tlmm_bar(block_barrier, THREADS);
  if (thread < 32) tlmm_scan_counts<true>(0, counts, 1, experts, block_m, total, first_block, first_row);
  tlmm_bar(block_barrier, THREADS);
  #pragma unroll
  for (int s = 0; s < STEPS; s++)
    if (expert[s] >= 0)
      entries[first_row[expert[s]] + mine[expert[s]] + place[s]] = expert[s] * TLMM_ENTRY_ROUTES + first + s * 32; }
// Helpers with 32-bit indices: TileLang's own are 64-bit, and take registers that pulling lacks.
// Entry `within` of list `list` of src_routes, which lies `offset` bytes from the workspace.
TLMM_DEV int tlmm_route(const void* workspace, long long offset, int list, int length, int within) {
  return tlmm_load((const char*)workspace + offset + ((long long)list * length + within) * 4); }
TLMM_DEV float tlmm_load_at(long long base, int index) { return ((const float*)base)[index]; }
// The rank that sends a row of an expert, and which of its rows that is. Starts at the own rank and goes round:
// ranks do not all pull from the same peer.
TLMM_DEV int tlmm_source_rank(const int* counts, int own, int ranks, int experts, int expert, int* within) {
  int rank = own, n;
  while (*within >= (n = counts[rank * experts + expert])) { *within -= n; rank = rank + 1 == ranks ? 0 : rank + 1; }
  return rank; }
"""
)


@T.macro
def warm_l2(plan: Plan, p: Params, grid_block):
    """Ask for the weights this block most likely starts with, while tokens are routed. One warp.

    The guess is exact when every expert receives the same number of rows, in one group of blocks
    (in a cluster only if its last has more than 64);
    a wrong one costs bandwidth only.
    """
    problem, s = plan.problem, plan.schedule
    tiles = s.linear1_tiles(problem)
    blocks_each = T.max(
        1,
        (p.num_tokens * problem.num_topk + problem.num_local_experts * s.block_m - 1)
        // (problem.num_local_experts * s.block_m),
    )
    expert = T.min(grid_block // tiles // blocks_each, problem.num_local_experts - 1)
    tile = first_tile(grid_block, blocks_each, tiles)
    block_bytes = BLOCK_K * BLOCK_K
    for b in (0, 1):
        T.call_extern(
            "handle",
            "tlmm_prefetch",
            T.address_of(p.w1[0, 0, 0, 0, 0]),
            T.Cast("int64", (expert * tiles + tile) * 2 + b) * (plan.groups1 * block_bytes),
            32,
            p.prefetch * (block_bytes // 32),
        )
    for row in (tile, plan.groups2 + tile):
        T.call_extern(
            "handle",
            "tlmm_touch",
            T.address_of(p.w1_sf[0, 0, 0]),
            T.Cast("int64", expert * 2 * plan.groups2 + row) * (plan.groups1 * 4),
            plan.groups1 * 4,
        )
    T.call_extern(
        "handle", "tlmm_touch", T.address_of(p.peers[0]), T.int64(0), 8 * problem.num_ranks
    )


@T.macro
def route(plan: Plan, p: Params, shared: Shared, grid_block):
    """All routes of this rank to where their experts' ranks find them. All threads."""
    if plan.counts_few:
        if plan.is_few(p):
            count_few(plan, p, shared)
        else:
            list_routes(plan, p, shared, grid_block)
    else:
        list_routes(plan, p, shared, grid_block)


@T.macro
def count_few(plan: Plan, p: Params, shared: Shared):
    """Count the few routes of the only rank, in every block: none waits for another. All threads."""
    problem, threads = plan.problem, plan.schedule.threads
    T.call_extern(
        "handle",
        f"tlmm_count_few<{threads}, {plan.few_routes // threads}>",
        T.address_of(p.topk_idx[0, 0]),
        p.num_tokens * problem.num_topk,
        T.address_of(shared.staging[0, 0]),
        T.address_of(shared.counts[0]),
        problem.num_experts,
        plan.schedule.block_m,
        T.address_of(shared.total[0]),
        T.address_of(shared.first_block[0]),
        T.address_of(shared.first_row[0]),
        T.address_of(shared.routes[0]),
        barriers.BLOCK,
    )


@T.macro
def list_routes(plan: Plan, p: Params, shared: Shared, grid_block):
    """List every route of this rank at its expert's rank, and count it. All threads.

    In rounds of `route_batch` routes, one round for most capacities: count by expert in shared
    memory, reserve that many places in the expert's list, write the routes there.
    """
    problem, s = plan.problem, plan.schedule
    steps = plan.route_steps
    tx = T.get_thread_binding()
    expert = T.alloc_local((steps,), "int32")
    place = T.alloc_local((steps,), "int32")
    first = T.alloc_var("int32", init=0)
    i = T.alloc_var("int32")
    count = T.alloc_var("int32")
    while first < p.num_tokens * problem.num_topk:
        i = tx
        while i < problem.num_experts:
            shared.tables[shared.counts.at(i)] = 0
            i += s.threads
        barriers.sync(barriers.BLOCK, s.threads)
        for step in T.unroll(steps):
            expert[step] = -1
            place[step] = 0
            i = first + (step * s.num_sms + grid_block) * s.threads + tx
            if i < p.num_tokens * problem.num_topk:
                expert[step] = _expert_or_none(
                    p.topk_idx[i // problem.num_topk, i % problem.num_topk], problem.num_experts
                )
        for step in T.unroll(steps):
            if expert[step] >= 0:
                place[step] = T.atomic_add(shared.counts[expert[step]], 1, return_prev=True)
        barriers.sync(barriers.BLOCK, s.threads)
        i = tx
        while i < problem.num_experts:
            count = shared.counts[i]
            if count > 0:
                shared.tables[shared.counts.at(i)] = barriers.fetch_add(
                    p.workspace, plan.counter("expert_send_count") + i, count
                )
            i += s.threads
        barriers.sync(barriers.BLOCK, s.threads)
        for step in T.unroll(steps):
            if expert[step] >= 0:
                routes = peer_tensor(
                    plan,
                    p.peers,
                    expert[step] // problem.num_local_experts,
                    "src_routes",
                    plan.layout.sections["src_routes"].shape,
                )
                routes[
                    expert[step] % problem.num_local_experts,
                    p.rank,
                    shared.counts[expert[step]] + place[step],
                ] = first + (step * s.num_sms + grid_block) * s.threads + tx
        barriers.sync(barriers.BLOCK, s.threads)
        first += plan.route_batch


def _expert_or_none(index, num_experts: int):
    """A route's expert as int32, -1 when out of range; compared before it is narrowed."""
    return T.if_then_else((index >= 0) & (index < num_experts), T.Cast("int32", index), T.int32(-1))


@T.macro
def learn_counts(plan: Plan, p: Params, shared: Shared, grid_block):
    """Received counts and their prefix sums, in shared memory, unless few routes have brought them
    there. Role: dispatch, warp 0."""
    tx = T.get_thread_binding()
    i = T.alloc_var("int32")
    if plan.counts_few:
        if not plan.is_few(p):
            exchange_counts(plan, p, shared)
    else:
        exchange_counts(plan, p, shared)
    if plan.runs("dispatch"):
        i = tx
        while i < T.if_then_else(grid_block == 0, plan.problem.num_local_experts, 0):
            p.workspace[plan.counter("expert_recv_count_sum") + i] = shared.total[i]
            p.recv_stats[i] = p.recv_stats[i] + shared.total[i]
            i += 32


@T.macro
def exchange_counts(plan: Plan, p: Params, shared: Shared):
    """Wait until all routes are listed, and learn how many each expert received. One warp."""
    problem = plan.problem
    tx = T.get_thread_binding()
    if plan.runs("dispatch"):
        if problem.num_ranks > 1:
            barriers.rank_sync(plan, p, "dispatch", barriers.TAG_DISPATCH_PEER, send_counts=True)
        else:
            if tx == 0:
                barriers.grid_sync(plan, p, "dispatch_sync", barriers.TAG_DISPATCH_SYNC)
            T.sync_warp()
    source = "expert_recv_count" if plan.runs("dispatch") else "expert_recv_count_sum"
    T.call_extern(
        "handle",
        "tlmm_scan_counts<false>",
        T.address_of(p.workspace[plan.counter(source)]),
        T.address_of(shared.counts[0]),
        problem.num_ranks if plan.runs("dispatch") else 1,
        problem.num_local_experts,
        plan.schedule.block_m,
        T.address_of(shared.total[0]),
        T.address_of(shared.first_block[0]),
        T.address_of(shared.first_row[0]),
    )
    T.sync_warp()


def _base(plan: Plan, p: Params, rank):
    """Where a rank's buffer begins."""
    return p.peers[0 if plan.problem.num_ranks == 1 else rank]


@T.macro
def pull_rows(plan: Plan, p: Params, shared: Shared, grid_block):
    """Bring this block's share of the received rows into the pool. Role: dispatch, every warp.

    Lanes 0..rows_in_flight-1 own one chunk slot each; chunks go round the grid in pool order, so that
    the groups of blocks the walk starts with are complete first. The last row of an expert also reports for
    the padding rows of its block. Where the ring wraps, a chunk waits until linear1 has read the
    block whose rows it takes.

    With few tokens this is a chain of memory latencies that the whole launch waits for: a row, its
    scales and its routing weight are all on their way before one of them is waited for.
    """
    problem, s, layout = plan.problem, plan.schedule, plan.layout
    chunk_bytes, chunks = plan.row_chunk, plan.chunks_per_row
    local, ranks, topk = problem.num_local_experts, problem.num_ranks, problem.num_topk
    tx = T.get_thread_binding()
    lane = tx % 32
    warp = tx // 32
    slot = warp * s.rows_in_flight + lane
    parity = T.alloc_var("int32", init=0)
    expert = T.alloc_var("int32", init=0)
    first = T.alloc_var("int32")
    end = T.alloc_var("int32")
    item = T.alloc_var("int32")
    within = T.alloc_var("int32")
    chunk = T.alloc_var("int32")
    pool_row = T.alloc_var("int32")
    block = T.alloc_var("int32")
    row_in_ring = T.alloc_var("int32")
    arrivals = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    source = T.alloc_var("int32")
    weight = T.alloc_var("float32", init=0.0)
    entry = T.alloc_var("int32", init=-1)
    steps = (plan.groups1 + 31) // 32
    row_sf = T.alloc_local((s.rows_in_flight * steps,), "float32")
    # Pairs with the barrier that brought the routes: peers' plain stores of x, our bulk copies.
    barriers.fence_async()
    end = shared.first_row[local] * chunks
    first = grid_block * s.row_slots + warp * s.rows_in_flight
    while first < end:
        pool_row = -1
        row_in_ring = -1
        block = 0
        source = 0
        rank = 0
        arrivals = 0
        chunk = 0
        if (lane < s.rows_in_flight) & (first + lane < end):
            item = (first + lane) // chunks
            chunk = (first + lane) % chunks
            if plan.counts_few:
                if plan.is_few(p):
                    entry = shared.routes[item]
                    expert = entry // ENTRY_ROUTES
            while shared.first_row[expert + 1] <= item:
                expert += 1
            within = item - shared.first_row[expert]
            block = shared.first_block[expert] + within // s.block_m
            if plan.fused and plan.ring_wraps:
                if block >= plan.ring_blocks:
                    barriers.wait_equal(
                        p,
                        plan.counter("l2_arrival") + block - plan.ring_blocks,
                        plan.l2_arrival_target,
                        barriers.TAG_POOL_RING,
                        block,
                        expert,
                        -1,
                    )
            pool_row = shared.first_block[expert] * s.block_m + within
            row_in_ring = plan.ring_row(block) + within % s.block_m
            arrivals = T.if_then_else(
                within + 1 == shared.total[expert], s.block_m - within % s.block_m, 1
            )
            if entry >= 0:
                source = entry % ENTRY_ROUTES
            else:
                rank = T.call_extern(
                    "int32",
                    "tlmm_source_rank",
                    T.address_of(shared.counts[0]),
                    p.rank,
                    ranks,
                    local,
                    expert,
                    T.address_of(within),
                )
                source = T.call_extern(
                    "int32",
                    "tlmm_route",
                    T.address_of(p.workspace[0]),
                    T.int64(plan.offset("src_routes") - plan.offset("workspace")),
                    expert * ranks + rank,
                    layout.capacity * topk,
                    within,
                )
            pull(
                shared.rows[slot * chunk_bytes],
                _base(plan, p, rank)
                + plan.offset("x")
                + T.Cast("int64", source // topk) * problem.hidden
                + chunk * chunk_bytes,
                shared.row_bars[slot],
                chunk_bytes,
            )
            if chunk == 0:
                weight = T.call_extern(
                    "float32",
                    "tlmm_load_at",
                    _base(plan, p, rank) + plan.offset("topk_weights"),
                    source,
                )
                p.metadata[pool_row] = (
                    rank * (1 << COUNTER_BITS) + source % topk * layout.capacity + source // topk
                )
        T.sync_warp()
        # Row scales, a whole warp a row: groups1 floats, transposed into the pool. Those of all rows
        # are on their way before the first is stored, and stored while the rows are.
        for owner in tuple(range(s.rows_in_flight)):
            row = T.shfl_sync(T.if_then_else(chunk == 0, row_in_ring, -1), owner)
            route = T.shfl_sync(source, owner)
            peer = T.shfl_sync(rank, owner)
            if row >= 0:
                for step in tuple(range(steps)):
                    if step * 32 + lane < plan.groups1:
                        row_sf[owner * steps + step] = T.call_extern(
                            "float32",
                            "tlmm_load_at",
                            _base(plan, p, peer) + plan.offset("x_sf"),
                            route // topk * plan.groups1 + step * 32 + lane,
                        )
        if pool_row >= 0:
            T.mbarrier_wait_parity(shared.row_bars[slot], parity)
            parity = parity ^ 1
            put(
                p.l1_acts,
                T.Cast("int64", row_in_ring) * problem.hidden + chunk * chunk_bytes,
                shared.rows[slot * chunk_bytes],
                chunk_bytes,
            )
            if chunk == 0:
                p.l1_topk_weights[pool_row] = weight
        T.sync_warp()
        for owner in tuple(range(s.rows_in_flight)):
            row = T.shfl_sync(T.if_then_else(chunk == 0, row_in_ring, -1), owner)
            if row >= 0:
                for step in tuple(range(steps)):
                    if step * 32 + lane < plan.groups1:
                        p.l1_acts_sf[step * 32 + lane, row] = row_sf[owner * steps + step]
        # Pairs with linear1's load: our plain stores of the scales, its bulk loads. sync_warp
        # gathers the lanes' stores behind the release of the lane that reports the row.
        barriers.fence_async()
        T.sync_warp()
        if pool_row >= 0:
            wait_put()
            barriers.add_release(p.workspace, plan.counter("l1_arrival_count") + block, arrivals)
        T.sync_warp()
        trace.mark_tile(plan, p, trace.PULL, 0, block, 0)
        first += s.num_sms * s.row_slots
