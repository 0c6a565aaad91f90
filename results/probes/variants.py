"""Variants of the kernel in one interleaved run, as results/notes.md compares them.

    python results/probes/variants.py build V...            compile (no GPU needed)
    python results/probes/variants.py run TOKENS ROUNDS V...   check and time, on an H200
    ncu --clock-control none --profile-from-start off --metrics M \
        python results/probes/variants.py once TOKENS V        one launch of a fused variant

A variant is `FLAGS:PHASE:BLOCK_M[:FIELD=VALUE...]`, as `:fused:128` or `:fused:64:prefetch=16`.
FLAGS, joined by +, are those of ablation.patch and need commit 1ab62c3 with that patch:

    turn      named barriers let the warpgroups issue their products in turn
    shfl      weight scales by lane and shuffle
    nopromo   no promotion: one accumulation (wrong results)
    samew, samea      every block loads the same weights, the same rows (wrong results)
    nofillb, nofilla  no loads of weights, of rows (wrong results)

rs and ss are flags of rows_split.patch on b64b067: warpgroups split rows, with A from registers or
from shared memory. pdl, late and wx are those of dependent_launch.patch on 5eff42e; early, pair, ss
and skew those of look_ahead.patch on 70ab78d. new and pre are those of uniform_ring.patch on
b1e471a; early, store and touch those of read_early.patch on 467d657; quad, wsf, late, zero, few,
pace1, pace2, tlb1 and tlb2 those of few_routes.patch on 438e93e; gN, oldc, few0, wx and bN those of
walk_groups.patch on 0af0d14, whose measured trees are not commits (results/notes.md).
Those of l2_place.patch on 20de27c: wf, w1 (weights evict_first, all or of experts with one block),
sl, sf (scattered rows evict_last, evict_first), al, af, pl (loads of rows, writes of the pools),
cd, pd (rows of combine, pools discarded), mp, mp2 (math warps pull a row, two). Those of
beside_loads.patch on 0ba03a8: lk, rp (what load warps do beside), first, prime (the first product
early), hf, hf2 (the last tiles in halves), rs (counters zeroed beside combine). Those of
clusters.patch on 3ae23ec: cl (clusters of two), cw, c2, np (pairs of full blocks, claims two ahead,
nothing shared), co (the launch alone), sc (a warp that looks tiles up), pk (combine selects words),
sg (SwiGLU without a select, for gates above -43), sk1 to sk3 (one warpgroup behind the other); og
of rows_direct.patch on 3ae23ec: few routes as they are without it.
parts.patch on 773ae7f adds the field combine_parts.
prefetch_ring.patch is for a195d07 and has none. PROBLEM names another preset.

Fused variants are compared with the reference and with the first one, to the bit.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tl_megamoe import kernel as kernels
from tl_megamoe.device import matmul
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.protocol import Measurement, Rules, run_rounds
from tl_megamoe.explorer.worker import Worker
from tl_megamoe.problem import PRESETS
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

PROBLEM = PRESETS[os.environ.get("PROBLEM", "deepseek-v4-flash")].one_rank()
CAPACITY = 8192
PHASES = ("dispatch", "linear1", "linear2")


def compiled(variant: str) -> tuple[kernels.CompiledKernel, Schedule]:
    """The kernel of a variant, and the schedule it runs with."""
    flags, phase, block_m, *fields = variant.split(":")
    if flags:
        matmul.X.clear()
        matmul.X.update(flags.split("+"))
    elif hasattr(matmul, "X"):
        matmul.X.clear()
    kernels._compile.cache_clear()
    values: dict[str, Any] = {"block_m": int(block_m)}
    for field in fields:
        name, value = field.split("=")
        values[name] = int(value) if value.lstrip("-").isdigit() else value
    values.setdefault("experts_per_wave", PROBLEM.num_local_experts)
    schedule = Schedule(**values)
    spec = kernels.KernelSpec(problem=PROBLEM, schedule=schedule, capacity=CAPACITY, phase=phase)
    return kernels.compile_kernel(spec), schedule


def beside(variant: str) -> list[str]:
    """The phases that leave behind what a stand-alone phase reads."""
    _, phase, *rest = variant.split(":")
    return [] if phase == "fused" else [":".join(("", p, *rest)) for p in PHASES]


def once(tokens: int, variant: str) -> None:
    """Launch a fused variant with each set of weights, and once more for a profiler."""
    worker = Worker(WorkerConfig(problem=PROBLEM, capacity=CAPACITY, recipe=Recipe()))
    worker.cell(tokens, "uniform")
    made, schedule = compiled(variant)

    def launch(index: int) -> None:
        buffer, y = worker.buffers[index][0], worker.outputs[index]
        made.launch(buffer, worker.weights[index][0], y, tokens, schedule)
        torch.cuda.synchronize()

    for index in (0, 1, 2, 0):
        launch(index)
    torch.cuda.profiler.start()
    launch(1)
    torch.cuda.profiler.stop()


def run(tokens: list[int], rounds: int, variants: list[str]) -> None:
    """Check and time the variants at each token count."""
    rules = Rules(rounds=rounds, warm_up_ms=60.0, min_samples=8, min_block_ms=25.0)
    worker = Worker(WorkerConfig(problem=PROBLEM, capacity=CAPACITY, recipe=Recipe(), rules=rules))

    def launch(variant: str, count: int) -> Any:
        made, schedule = compiled(variant)

        def one(index: int) -> None:
            y = worker.outputs[index]
            made.launch(worker.buffers[index][0], worker.weights[index][0], y, count, schedule)

        return one

    for count in tokens:
        worker.cell(count, "uniform")
        first = None
        for variant in variants:
            worker.bench.forget(variant)
            worker.bench.cell[variant] = launch(variant, count)
            for phase in beside(variant):
                for index in range(3):
                    launch(phase, count)(index)
            if variant.split(":")[1] == "fused":
                worker.outputs[0].fill_(torch.nan)
                worker.buffers[0][0].poison()
                worker.bench.cell[variant](0)
                torch.cuda.synchronize()
                y = worker.outputs[0].clone()
                first = y if first is None else first
                print(count, variant, worker.compare(y), torch.equal(y, first))
        found = run_rounds(worker.bench, variants, rules=rules, seed=count)
        for variant in variants:
            it = found[variant]
            if isinstance(it, Measurement):
                print(f"{count:6d} {variant:40s} {it.median_us:9.2f} us, {it.yardstick_tflops:.0f}")


def main() -> None:
    """Build, run or launch once."""
    if sys.argv[1] == "once":
        once(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "build":
        for variant in sys.argv[2:]:
            for each in (variant, *beside(variant)):
                compiled(each)
    else:
        run([int(t) for t in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    main()
