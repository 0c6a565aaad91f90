"""The programs: one persistent kernel that runs all phases, and one kernel a phase.

Both come from one builder over the same macros: a stand-alone phase is the fused program without
the other phases' work and the waits for them, so that it is tested, profiled and searched alone.

threads            role                 registers
0 .. 32 D          dispatch             load_registers (one warpgroup with load)
.. 32 (D + L)      load                 load_registers
.. 128             idle warps, if any; in a cluster the scheduler
128 .. 256         math warpgroup 0     math_registers
256 .. 384         math warpgroup 1     math_registers

The math warpgroups share every tile of the block (cooperative), or take turns (pingpong): the even
tiles are warpgroup 0's, the odd ones warpgroup 1's, and while one writes its tile the other
multiplies. The load role does not tell these modes apart. With swapped operands they share every
tile too, and the linears are modules of their own (phases/linear1_swapped.py, linear2_swapped.py).
The warp that loads weights finds out which tile comes next and tells the others
(device/lookahead.py, device/tasks.py); in a cluster a warp of its own (device/cluster.py).
"""

from typing import Any

import tilelang.language as T

from .device import barriers, cluster, trace
from .device.barriers import BARRIERS_CUDA
from .device.cluster import CLUSTER_CUDA, Scheduler
from .device.l2 import L2_CUDA
from .device.lookahead import LOOKAHEAD_CUDA, Lookahead
from .device.matmul import MATMUL_CUDA, MAX_UNITS, Accumulators
from .device.pingpong import Turns
from .device.plan import FP8, Params, Plan
from .device.remote import REMOTE_CUDA
from .device.report import REPORT_CUDA, Report, clear_stored
from .device.ring import RING_CUDA, Cursor, Shared
from .device.swapped import SWAPPED_CUDA, SWAPPED_SWIGLU_CUDA
from .device.tasks import TASKS_CUDA
from .device.trace import TRACE_CUDA
from .device.walk import LINEAR1_BIT, PAIRS_CUDA, WALK_CUDA, block_of
from .phases import combine, dispatch, linear1, linear1_swapped, linear2, linear2_swapped
from .phases.combine import COMBINE_CUDA
from .phases.dispatch import DISPATCH_CUDA
from .phases.gather import GATHER_CUDA
from .phases.linear1 import LINEAR1_CUDA
from .scaling import SCALING_CUDA

DEVICE_CUDA = (
    BARRIERS_CUDA
    + REMOTE_CUDA
    + L2_CUDA
    + RING_CUDA
    + TASKS_CUDA
    + LOOKAHEAD_CUDA
    + WALK_CUDA
    + MATMUL_CUDA
    + REPORT_CUDA
    + SCALING_CUDA
    + DISPATCH_CUDA
    + COMBINE_CUDA
)


def device_cuda(fast_math: bool, swapped: bool = False, in_cluster: bool = False) -> str:
    """The text of the helpers. A promotion flushes subnormal numbers where nvcc's own code does."""
    text = DEVICE_CUDA + SWAPPED_CUDA + GATHER_CUDA if swapped else DEVICE_CUDA
    if in_cluster:
        text += PAIRS_CUDA + CLUSTER_CUDA
    if fast_math:
        return text + (SWAPPED_SWIGLU_CUDA if swapped else LINEAR1_CUDA)
    return text.replace("rn.ftz.f32", "rn.f32")


def linear_phases(plan: Plan) -> Any:
    """The modules of linear1 and linear2."""
    if plan.schedule.swapped:
        return linear1_swapped, linear2_swapped
    return linear1, linear2


PASS_CONFIGS = {
    # Else address_of() arguments are wrapped in bound checks and code generation fails.
    "tl.disable_safe_memory_legalize": True,
    # Else buffers of different roles share memory: their lifetimes look disjoint.
    "tl.disable_shared_memory_reuse": True,
    # All barriers are placed by hand: an inserted one inside a role's branch would hang.
    "tl.disable_thread_storage_sync": True,
}


@T.macro
def load_role(plan: Plan, p: Params, shared: Shared, grid_block, what):
    """Walk the tiles and fill the ring; `what` = (rows too, weights too). Role: load, one warp."""
    first, second = linear_phases(plan)
    cursor = Cursor(plan.schedule.stages, 1)
    ahead = Lookahead(plan, p, shared, grid_block, what)
    block = T.alloc_var("int32")
    tile = T.alloc_var("int32")
    ahead.start()
    # Nested whiles, not an if: a lowered `if` repeats its condition for each statement inside.
    while ahead.code[0] >= 0:
        if plan.runs("linear1"):
            while ahead.code[0] >= LINEAR1_BIT:
                block = block_of(ahead.code[0])
                tile = ahead.code[0] & 255
                first.load(plan, p, shared, cursor, ahead, block, tile)
                trace.mark_tile(plan, p, trace.LOAD, 1, block, tile)
                ahead.advance()
        if plan.runs("linear2"):
            while (ahead.code[0] >> 30) == 0:
                block = block_of(ahead.code[0])
                tile = ahead.code[0] & 255
                second.load(plan, p, shared, cursor, ahead, block, tile)
                trace.mark_tile(plan, p, trace.LOAD, 2, block, tile)
                ahead.advance()
    ahead.report_before()


@T.macro
def wait_for_stage(plan: Plan, p: Params, shared: Shared, cursor, linear: int, block, tile):
    """Wait for the tile's first K block, between stamps. The profiling build; role: math."""
    if plan.schedule.pingpong:
        trace.mark_tile(plan, p, trace.TURN, linear, block, tile)
    shared.ring.wait(cursor)
    trace.mark_tile(plan, p, trace.STAGE, linear, block, tile)


@T.macro
def math_role(plan: Plan, p: Params, shared: Shared, grid_block, wg):
    """Walk the tiles and compute them, then combine. Role: math warpgroup `wg`."""
    barriers.sync(barriers.BLOCK, plan.schedule.threads)
    trace.mark(plan, p, trace.START)
    if plan.runs("linear1") or plan.runs("linear2"):
        first, second = linear_phases(plan)
        acc = Accumulators(MAX_UNITS)
        cursor = Cursor(plan.schedule.stages, 0)
        report = Report(plan, p, shared, wg)
        turns = Turns(plan, shared, cursor, wg)
        block = T.alloc_var("int32")
        tile = T.alloc_var("int32")
        expert = T.alloc_var("int32")
        rows = T.alloc_var("int32")
        turn = T.alloc_var("int32", init=0)
        turns.start()
        while turns.code[0] >= 0:
            if plan.runs("linear1"):
                while turns.code[0] >= LINEAR1_BIT:
                    block = block_of(turns.code[0])
                    tile = turns.code[0] & 255
                    expert = turns.expert[0]
                    rows = turns.rows[0]
                    turns.begin_multiply()
                    if plan.profile:
                        report.pay_if_empty(shared.ring, cursor)
                        wait_for_stage(plan, p, shared, cursor, 1, block, tile)
                    weights = first.multiply(
                        plan, p, shared, cursor, acc, wg, (block, tile, expert, rows), report
                    )
                    turns.end_multiply()
                    trace.mark_tile(plan, p, trace.MULTIPLY, 1, block, tile)
                    turns.next_early()
                    turns.begin_finish()
                    if plan.schedule.pingpong:
                        trace.mark_tile(plan, p, trace.FINISH_TURN, 1, block, tile)
                    if plan.debug:
                        first.write_accumulators(plan, p, acc, wg, (block, tile, expert, rows))
                    first.finish(
                        plan, p, shared, acc, wg, (block, tile, expert, rows), turn, weights
                    )
                    turns.end_finish()
                    trace.mark_tile(plan, p, trace.FINISH, 1, block, tile)
                    turns.next()
            if plan.runs("linear2"):
                while (turns.code[0] >> 30) == 0:
                    block = block_of(turns.code[0])
                    tile = turns.code[0] & 255
                    expert = turns.expert[0]
                    rows = turns.rows[0]
                    turns.begin_multiply()
                    if plan.profile:
                        report.pay_if_empty(shared.ring, cursor)
                        wait_for_stage(plan, p, shared, cursor, 2, block, tile)
                    targets = second.multiply(
                        plan, p, shared, cursor, acc, wg, (block, tile, expert, rows), report
                    )
                    turns.end_multiply()
                    trace.mark_tile(plan, p, trace.MULTIPLY, 2, block, tile)
                    turns.next_early()
                    turns.begin_finish()
                    if plan.schedule.pingpong:
                        trace.mark_tile(plan, p, trace.FINISH_TURN, 2, block, tile)
                    second.scatter(plan, p, shared, acc, wg, (block, tile, expert, rows), targets)
                    turns.end_finish()
                    trace.mark_tile(plan, p, trace.FINISH, 2, block, tile)
                    turns.next()
        report.pay_deferred()
        turns.end()
    sums = combine.Combine(plan, p, grid_block, wg)
    if plan.runs("combine"):
        sums.prepare()
    combine.wait_for_rows(plan, p)
    trace.mark(plan, p, trace.COMBINE_WAIT)
    if plan.runs("combine"):
        sums.run()
        trace.mark(plan, p, trace.COMBINE)


def build_program(plan: Plan):
    """The TileLang program of a plan: a `T.prim_func` with the parameters of `Params`."""
    problem, s, layout = plan.problem, plan.schedule, plan.layout
    shape = {name: section.shape for name, section in layout.sections.items()}
    local, groups1, groups2 = problem.num_local_experts, plan.groups1, plan.groups2
    w1_shape = (local, 2 * groups2, groups1, 128, 128)
    w2_shape = (local, groups1, groups2, 128, 128)

    @T.prim_func
    def mega_moe(
        topk_idx: T.Tensor(shape["topk_idx"], "int64"),
        peers: T.Tensor((problem.num_ranks,), "int64"),
        workspace: T.Tensor(shape["workspace"], "int32"),
        l1_acts: T.Tensor(shape["l1_acts"], FP8),
        l1_acts_sf: T.Tensor(shape["l1_acts_sf"], "float32"),
        l1_topk_weights: T.Tensor(shape["l1_topk_weights"], "float32"),
        token_src_metadata: T.Tensor(shape["token_src_metadata"], "int32"),
        l2_acts: T.Tensor(shape["l2_acts"], FP8),
        l2_acts_sf: T.Tensor(shape["l2_acts_sf"], "float32"),
        w1: T.Tensor(w1_shape, FP8),
        w1_sf: T.Tensor((local, 2 * groups2, groups1), "float32"),
        w2: T.Tensor(w2_shape, FP8),
        w2_sf: T.Tensor((local, groups1, groups2), "float32"),
        recv_stats: T.Tensor((local,), "int32"),
        y_address: T.int64,
        report_address: T.int64,
        timeout_ms: T.int32,
        rank: T.int32,
        num_tokens: T.int32,
        lag_order: T.int32,
        order_step: T.int32,
        prefetch: T.int32,
        evict_first: T.int32,
        clamp: T.float32,
        trace_address: T.int64 if plan.profile else 0,  # a constant is no parameter
    ):
        clusters = {"cluster_dims": s.cluster_size} if s.cluster_size > 1 else {}
        with T.Kernel(s.num_sms, threads=s.threads, **clusters) as grid_block:
            helpers = device_cuda(plan.fast_math, s.swapped, s.cluster_size > 1)
            T.import_source(helpers + TRACE_CUDA if plan.profile else helpers)
            p = Params(
                topk_idx,
                peers,
                workspace,
                l1_acts,
                l1_acts_sf,
                l1_topk_weights,
                token_src_metadata,
                l2_acts,
                l2_acts_sf,
                w1,
                w1_sf,
                w2,
                w2_sf,
                recv_stats,
                y_address,
                report_address,
                timeout_ms,
                rank,
                num_tokens,
                lag_order,
                order_step,
                prefetch,
                evict_first,
                clamp,
                trace_address,
            )
            shared = Shared(plan)
            tx = T.get_thread_binding()
            trace.begin(plan, p)
            cluster.sync(plan)
            if plan.runs("dispatch"):
                if plan.fused:
                    if tx >= 96:
                        if tx < 128:
                            dispatch.warm_l2(plan, p, grid_block)
                dispatch.route(plan, p, shared, grid_block)
                trace.mark(plan, p, trace.ROUTE)
            if tx < 128:
                T.set_max_nreg(s.load_registers, 0)
                if tx < s.first_load_thread:
                    if tx < 32:
                        dispatch.learn_counts(plan, p, shared, grid_block)
                        trace.mark(plan, p, trace.COUNTS)
                    barriers.sync(barriers.BLOCK, s.threads)
                    trace.mark(plan, p, trace.START)
                    if plan.gathers:
                        if not plan.is_few(p):
                            dispatch.pull_rows(plan, p, shared, grid_block)
                    else:
                        if plan.runs("dispatch"):
                            dispatch.pull_rows(plan, p, shared, grid_block)
                else:
                    if tx == s.first_load_thread:
                        clear_stored(shared)
                    barriers.sync(barriers.BLOCK, s.threads)
                    trace.mark(plan, p, trace.START)
                    if plan.runs("linear1") or plan.runs("linear2"):
                        if tx < s.first_load_thread + 32:
                            load_role(plan, p, shared, grid_block, (True, s.load_warps == 1))
                        else:
                            if s.load_warps == 2:
                                if tx < s.first_load_thread + 64:
                                    load_role(plan, p, shared, grid_block, (False, True))
                                else:
                                    if s.cluster_size > 1:
                                        scheduler = Scheduler(plan, p, shared, grid_block)
                                        scheduler.run()
                combine.wait_beside(plan, p)
                combine.reset_counters(plan, p, shared, grid_block)
            else:
                T.set_max_nreg(s.math_registers, 1)
                # One text for both warpgroups: half the code to compile and to fetch.
                wg = T.alloc_var("int32")
                wg = T.call_extern("int32", "tlmm_uniform", tx // 128 - 1)
                math_role(plan, p, shared, grid_block, wg)
            cluster.sync(plan)

    return mega_moe
