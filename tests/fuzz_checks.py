"""What the fuzzer holds a case to without a GPU.

A check returns why a case fails, empty where it does not. It says its rule a second time, in
another form than the library: the rules of schedules as one condition, the layout as a formula.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from fuzz_cases import Case
from fuzz_numbers import check_reference, check_scaling
from fuzz_truth import make_inputs
from host_model import World, make_plan
from host_scheduler import STYLES, ModelError

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.compat import get_symm_buffer_size_for_sm90_mega_moe
from tl_megamoe.device.walk import expert_of, first_blocks, group_of, task_at, walk, walk_order
from tl_megamoe.explorer.places import counters_are_zero
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import ITEM_BYTES, Layout, make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.rules import RULES
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule
from tl_megamoe.selection import schedule_intervals

# ---- schedules


def is_legal(s: Schedule, problem: Problem, recipe: Recipe, phase: str) -> bool:
    """The rules of `rules.RULES` as one condition."""

    def kib(size: int) -> int:
        return -(-size // 1024)

    if not (
        s.math_mode in ("cooperative", "pingpong", "swapped")
        and s.order in ("wave", "lag")
        and s.block_m in (32, 64, 128)
        and {s.linear1_block_n, s.linear2_block_n} <= {128, 256}
        and s.load_warps in (1, 2)
        and s.evict_first in (0, 1)
        and s.cluster_size in (1, 2)
        and all(
            1 <= n < 2**24
            for n in (s.stages - 1, s.experts_per_wave, s.dispatch_warps, s.rows_in_flight)
        )
        and s.stages < 2**24
        and all(0 <= n < 2**24 for n in (s.lag, s.prefetch, s.num_sms - 1))
        and s.num_sms < 2**24
        and s.load_registers in range(24, 169, 8)
        and s.math_registers in range(168, 257, 8)
    ):
        return False
    wide = s.linear1_block_n == s.linear2_block_n == 256
    local, k_blocks = problem.num_local_experts, min(problem.hidden, problem.intermediate) // 128
    tile = (
        (s.block_m == 32 and phase == "dispatch" and (wide or s.math_mode == "cooperative"))
        or (s.block_m == 64 and wide)
        or (s.block_m == 128 and s.math_mode == "cooperative")
    )
    pairs = s.cluster_size == 2
    scales = s.stages * s.block_m * 4 * (128 // recipe.intermediate_group)
    kibs = (
        kib(s.stages * s.block_m * 128)
        + s.stages * max(s.linear1_block_n, s.linear2_block_n) // 8
        + kib(scales)
        + 16
        + (kib(64 * s.block_m) + 1 if s.math_mode == "swapped" else 1)
        + kib(8 * s.block_m * (128 // recipe.intermediate_group))
        + kib(4 * (4 * (s.stages + 6) + problem.num_experts + 3 * local + 2 + 4 * pairs))
        + kib(8 * (3 * s.stages + 6 + s.dispatch_warps * s.rows_in_flight + pairs * (s.stages + 9)))
        + kib(128 * s.dispatch_warps * s.rows_in_flight)
    )
    return (
        tile
        and (not pairs or (s.block_m == 128 and wide and s.math_mode == "cooperative"))
        and (not pairs or problem.hidden >= 512)
        and (not pairs or (s.dispatch_warps == 1 and s.load_warps == 2 and s.num_sms % 2 == 0))
        and kibs <= 227
        and s.dispatch_warps + s.load_warps <= 4
        and s.rows_in_flight <= 32
        and (s.lag > 0) == (s.order == "lag")
        and (s.experts_per_wave == local if s.lag else local % s.experts_per_wave == 0)
        and problem.hidden % s.linear2_block_n == 0
        and max(problem.intermediate // 128, problem.hidden // s.linear2_block_n) <= 256
        and s.stages <= max(k_blocks, 2)
        and s.prefetch <= problem.hidden // 128
        and s.load_registers + 2 * s.math_registers <= 3 * 168
    )


def check_schedule(case: Case) -> str:
    """`violations`, the condition above and `KernelSpec` agree; identity; what follows from it."""
    problem, s, recipe = case.problem, case.schedule, case.numeric
    for phase in ("fused", "dispatch", "linear2"):
        found = s.violations(problem, recipe, phase)
        if strange := [v.rule for v in found if v.rule not in RULES]:
            return f"unknown rules {strange}"
        if is_legal(s, problem, recipe, phase) == bool(found):
            return f"phase {phase}: violations are {list(found)}, the rules in short say otherwise"
        try:
            KernelSpec(
                problem=problem, schedule=s, capacity=case.capacity, phase=phase, recipe=recipe
            )
            told = ""
        except ScheduleError as error:
            told = str(error)
        if told != "; ".join(found):
            return f"phase {phase}: KernelSpec says {told!r}, violations {list(found)}"
    if Schedule.from_dict(s.to_dict()) != s:
        return "from_dict does not read to_dict back"
    if s.kernel_key().kernel_key() != s.kernel_key():
        return "a kernel key has another kernel key"
    rank_mode = "one" if problem.num_ranks == 1 else "real"
    intervals = schedule_intervals(
        problem, "NVIDIA H200", case.capacity, rank_mode=rank_mode, recipe=recipe
    )
    bounds = [last for last, _ in intervals]
    if bounds != sorted(set(bounds)) or bounds[-1] != case.capacity:
        return f"intervals of the schedules end at {bounds}, the capacity is {case.capacity}"
    chosen = [default_schedule(problem, n, recipe=recipe) for n in case.tokens]
    for schedule in (*chosen, *(schedule for _, schedule in intervals)):
        if broken := schedule.violations(problem, recipe):
            return f"the library chooses {schedule.name}, which breaks {list(broken)}"
    return "" if s.violations(problem, recipe) else _consequences(case)


def _consequences(case: Case) -> str:
    """What must follow for a valid schedule."""
    problem, s, recipe = case.problem, case.schedule, case.numeric
    walked = replace(s, order="lag", lag=5, experts_per_wave=problem.num_local_experts, prefetch=0)
    if replace(case, schedule=walked).spec.key() != case.spec.key():
        return "another walk is another kernel"
    chunk = s.row_chunk(problem, recipe)
    if problem.hidden % chunk or chunk % 128 or s.smem_bytes(problem, recipe) > 227 * 1024:
        return f"row chunks of {chunk} bytes and {s.smem_bytes(problem, recipe)} bytes in all"
    plan = make_plan(problem, s, case.capacity)
    rounds = -(-case.capacity * problem.num_topk // plan.route_batch)
    if plan.route_steps < 8 and rounds > 1:
        return f"routes of the capacity take {rounds} rounds of {plan.route_steps} steps"
    return ""


# ---- layout


def section_bytes(case: Case) -> dict[str, int]:
    """The size formula: bytes of every section but the workspace, in order."""
    c, k, h, i = case.capacity, case.num_topk, case.hidden, case.intermediate
    ranks, local = case.num_ranks, case.num_experts // case.num_ranks
    pool = -(-(ranks * c * k + 127 * local) // 128) * 128
    own = math.ceil(7 * c * k / (16 * 128))
    ring = pool if ranks == 1 else min(pool, 128 * (local + own))
    return {
        "x": c * h,
        "x_sf": c * h // 32,
        "topk_idx": 8 * c * k,
        "topk_weights": 4 * c * k,
        "src_routes": 4 * local * ranks * c * k,
        "l1_acts": ring * h,
        "l1_acts_sf": ring * h // 32,
        "l1_topk_weights": 4 * pool,
        "token_src_metadata": 4 * pool,
        "l2_acts": ring * i,
        "l2_acts_sf": 4 * ring * i // case.numeric.intermediate_group,
        "combine_acts": 2 * k * c * h,
        "recv_stats": 4 * local,
    }


def check_layout(case: Case) -> str:
    """Refused where a word is too short, else aligned, a KiB apart and as large as expected."""
    local = case.num_experts // case.num_ranks
    rows = case.num_ranks * case.capacity * case.num_topk + 127 * local
    too_large = case.capacity * case.num_topk > 2**24 or -(-rows // 128) * 2 >= 2**22
    try:
        layout = make_layout(case.problem, case.capacity, case.numeric)
    except ValueError as error:
        return "" if too_large else f"refused: {error}"
    if too_large:
        return "a capacity past the bits of a word is accepted"
    wanted = section_bytes(case)
    wanted["workspace"] = 4 * layout.workspace_offsets["end"]
    if list(layout.sections) != list(wanted):
        return f"sections are {list(layout.sections)}"
    end = 0
    for name, section in layout.sections.items():
        if section.offset % 1024 or not end + 1024 <= section.offset < end + 2048:
            return f"{name} begins at {section.offset}, the section before it ends at {end}"
        held = math.prod(section.shape) * ITEM_BYTES[section.dtype]
        if not held == section.num_bytes == wanted[name]:
            return f"{name} has {section.num_bytes} bytes, not {wanted[name]}"
        end = section.offset + held
    sizes = (case.num_ranks, case.num_experts, case.capacity, case.num_topk, case.hidden)
    told, _ = get_symm_buffer_size_for_sm90_mega_moe(*sizes, case.intermediate, recipe=case.numeric)
    if not told == layout.num_bytes == (end + 2047) // 1024 * 1024:
        return f"{layout.num_bytes} bytes, {told} by the function, sections end at {end}"
    return _counters(case, layout) or _pools(case, layout) or _views(case, layout)


def _counters(case: Case, layout: Layout) -> str:
    """The counters fill the workspace without gaps."""
    local = case.num_experts // case.num_ranks
    lengths = {
        **dict.fromkeys(("dispatch_sync", "combine_sync"), 32),
        **dict.fromkeys(("dispatch_signal", "combine_signal", "next_task"), 32),
        "expert_send_count": case.num_experts,
        "expert_recv_count": case.num_experts,
        "expert_recv_count_sum": local,
        **dict.fromkeys(("l1_arrival_count", "l2_arrival", "l2_done"), layout.pool_rows // 32),
    }
    at = dict(layout.workspace_offsets)
    if case.num_ranks == 1:
        if at.pop("expert_recv_count") != at["expert_send_count"]:
            return "one rank counts what it sends and what it receives in two places"
        del lengths["expert_recv_count"]
    end = 0
    for name, length in lengths.items():
        if at[name] != end:
            return f"{name} begins at {at[name]} of the workspace, not at {end}"
        end += length
    return "" if at["end"] == end else f"the workspace ends at {at['end']}, not at {end}"


def _pools(case: Case, layout: Layout) -> str:
    """Any routing has pool rows; the ring holds two blocks, and a block for every expert."""
    rng, local = random.Random(case.seed), case.num_experts // case.num_ranks
    routes = case.num_ranks * case.capacity * case.num_topk
    cuts = sorted(rng.randint(0, routes) for _ in range(local - 1))
    spread = [b - a for a, b in zip([0, *cuts], [*cuts, routes], strict=True)]
    ones = min(local - 1, routes)
    uneven = [1] * ones + [0] * (local - 1 - ones) + [routes - ones]
    for counts in (spread, uneven):
        for block_m in (32, 64, 128):
            if sum(-(-n // block_m) for n in counts) * block_m > layout.pool_rows:
                return f"{layout.pool_rows} pool rows do not hold blocks of {block_m}"
    ring, pool = layout.ring_rows, layout.pool_rows
    if ring % 128 or ring > pool or ring < min(pool, 128 * max(2, local)):
        return f"a ring of {ring} rows in a pool of {pool}"
    return ""


def _views(case: Case, layout: Layout) -> str:
    """Where it is small, a buffer's tensors lie where the layout has them."""
    if case.num_ranks > 1 or layout.num_bytes > 1 << 22:
        return ""
    buffer = SymmBuffer(case.problem, case.capacity, "cpu", recipe=case.numeric)
    for name, section in layout.sections.items():
        view = getattr(buffer, name)
        if view.data_ptr() - buffer.raw.data_ptr() != section.offset or (
            tuple(view.shape) != section.shape
        ):
            return f"the tensor {name} is not where its section is"
    buffer.poison()
    return "" if counters_are_zero(buffer) else "poison changes counters"


# ---- the walk


def launch_order(schedule: Schedule) -> tuple[bool, int]:
    """The launch arguments of the order."""
    lag = schedule.order == "lag"
    return lag, schedule.lag if lag else schedule.experts_per_wave


def check_walk(case: Case) -> str:
    """Every tile once, of experts that have rows, in the order asked for, safe where rings wrap."""
    s, rng = case.schedule, random.Random(case.seed)
    narrow = replace(case, hidden=128, x_scale=1.0)  # routes do not depend on it
    idx = torch.cat([i.topk_idx.flatten() for i in make_inputs(narrow)])
    local = case.num_experts // case.num_ranks
    rank = rng.randrange(case.num_ranks)
    own = idx[(idx >= rank * local) & (idx < (rank + 1) * local)] - rank * local
    counts = torch.bincount(own, minlength=local).tolist()
    first, n1, n2 = (
        first_blocks(counts, s.block_m),
        s.linear1_tiles(case.problem),
        s.linear2_tiles(case.problem),
    )
    blocks = first[-1]
    ring = make_layout(case.problem, case.capacity, case.numeric).ring_blocks(s.block_m)
    ring = rng.choice((ring, rng.randint(2, max(2, blocks))))
    lag_order, step = walk_order(blocks, local, ring, *launch_order(s))
    if blocks > ring and not (lag_order and 1 <= step < ring):
        return f"{blocks} blocks in a ring of {ring} are walked with lag {step}"
    done, last, ahead = {1: [0] * blocks, 2: [0] * blocks}, (-1,), -1
    for index, task in enumerate(walk(first, lag_order, step, n1, n2)):
        phase, block, tile = task
        if not (0 <= block < blocks and tile == done[phase][block] < (n1 if phase == 1 else n2)):
            return f"task {index}, {task}, is past its block, or comes out of turn"
        expert = expert_of(first, block)
        if not 0 < counts[expert] - (block - first[expert]) * s.block_m:
            return f"block {block} of expert {expert} has no rows"
        if phase == 2 and done[1][block] != n1:
            return f"{task} comes before linear1 of its block"
        if phase == 1 and block >= ring and done[2][block - ring] != n2:
            return f"{task} takes the rows of block {block - ring}, which is not done"
        if lag_order:
            ahead = max(ahead, block) if phase == 1 else ahead
            if phase == 2 and ahead < min(block + step, blocks - 1):
                return f"{task} comes {ahead - block} blocks behind linear1, the lag is {step}"
        elif (place := (expert // step, phase, group_of(first, block).start, tile, block)) < last:
            return f"{task} comes behind a later wave, phase, group, tile or block"
        else:
            last = place
        done[phase][block] += 1
    if done != {1: [n1] * blocks, 2: [n2] * blocks}:
        return "not every tile is walked"
    end = task_at(blocks * (n1 + n2), first, lag_order, step, n1, n2)
    return "" if end is None else f"{end} lies behind the end"


def check_launches(case: Case) -> str:
    """Two launches of all roles of all ranks in the host model, in a ring that often wraps."""
    problem, s, rng = case.problem, case.schedule, random.Random(case.seed)
    ring = None
    if rng.random() < 0.9:  # a dispatch warp's rows in flight have their blocks in the ring
        in_flight = min(s.rows_in_flight - 1, problem.num_local_experts)
        ring = max(rng.choice((2, 2, 3)), in_flight + 1)
    plan = make_plan(problem, s, case.capacity, ring)
    launches = [
        [i.topk_idx.tolist() for i in make_inputs(replace(case, seed=case.seed + n))]
        for n in range(2)
    ]
    try:
        World(plan, launches, launch_order(s), rng, rng.choice(STYLES)).run()
    except ModelError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- text


def wrong_strides(case: Case, text: str) -> str:
    """What stands a stage apart in the K loops, by the text, and does not in the ring."""
    s, scales = case.schedule, case.numeric.scales_per_k_block
    sf = scales * s.block_m * 4
    barrier, operands = 8, {s.block_m * 8, s.max_block_n * 8}  # descriptors count 16 bytes
    loads = re.findall(r"tlmm_load_(?:shared\(|scales<\d+>\(\w+, )(.*)\);", text)
    stage = r"\(\(uint\)\w+\) \* \(uint\)(\d+)\)"
    for load in loads:
        if re.findall(stage, load) != [str(sf)]:
            return f"scales of a stage are {sf} bytes, and one is read at {load}"
        behind = re.search(r"\) \+ \(uint\)(\d+)\)$", load)
        row = int(behind[1]) if behind else 0
        if row // (s.block_m * 4) >= scales or row % (s.block_m * 4) not in (0, 32):
            return f"a row has {scales} scales {s.block_m * 4} bytes apart, one is read at {load}"
    rest = {int(n) for n in re.findall(stage, text)} - {sf, barrier} - operands
    if rest or not loads:
        return f"{len(loads)} scales are read, other strides are {sorted(rest)}"
    return ""


def check_lowers(case: Case) -> str:
    """The program becomes CUDA text with products, and without what serialises them."""
    from tilelang import tvm
    from tilelang.engine.lower import lower

    from tl_megamoe.kernel import TARGET, _program
    from tl_megamoe.program import PASS_CONFIGS

    target = tvm.target.Target(TARGET)
    configs = {**PASS_CONFIGS, "tl.enable_fast_math": case.fast_math}
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        text = str(lower(_program(case.spec), target=target).kernel_source)
    if not re.search(r"tlmm_product(?:_columns)?<", text):
        return "no WGMMA in the text"
    for word in ("printf", "__trap", "__sync_thread_partial"):
        if word in text:
            return f"{word} in the text"
    if strides := wrong_strides(case, text):
        return strides
    barrier, other = "tlmm_grid_sync((", "tlmm_rank_sync(("
    if case.num_ranks > 1:
        barrier, other = other, barrier
    found = text.count(barrier), text.count(other)
    return "" if found == (2, 0) else f"{found} barriers of all blocks, and of the other kind"


CHECKS: dict[str, Callable[[Case], str]] = {
    "schedule": check_schedule,
    "layout": check_layout,
    "walk": check_walk,
    "launches": check_launches,
    "scaling": check_scaling,
    "reference": check_reference,
    "lowers": check_lowers,
}
"""Those that need no GPU."""
