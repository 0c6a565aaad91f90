"""What ranks cost: two virtual ranks beside one of twice the size, of one GPU.

    python results/probes/virtual_ranks.py build   compile (no GPU needed)
    python results/probes/virtual_ranks.py run     check and time, on an H200

Two ranks of 66 SMs and 16 experts each with t tokens, and one rank of 132 SMs and 32 experts with
2t tokens: the same experts, routes and SMs. Sizes of deepseek-v4-flash.
"""

from __future__ import annotations

import sys

from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.protocol import Measurement, Rules, run_rounds
from tl_megamoe.explorer.worker import Worker
from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

SIZES = {"hidden": 4096, "intermediate": 2048, "num_experts": 32, "num_topk": 6}
TWO, ONE = (Problem(name=str(ranks), num_ranks=ranks, **SIZES) for ranks in (2, 1))
CAPACITY = {TWO: 4096, ONE: 8192}
TOKENS = (256, 4096)
RULES = Rules(rounds=3, warm_up_ms=60.0, min_samples=10, min_block_ms=30.0)


def schedule_of(problem: Problem) -> Schedule:
    """Tiles of 128 rows on a rank's part of the SMs."""
    return Schedule(experts_per_wave=problem.num_local_experts, num_sms=132 // problem.num_ranks)


def run() -> None:
    """Check and time both, twice; the better of each counts."""
    workers = {
        problem: Worker(
            WorkerConfig(
                problem=problem,
                capacity=CAPACITY[problem],
                recipe=Recipe(),
                rules=RULES,
                rank_mode="virtual" if problem is TWO else "one",
            )
        )
        for problem in (TWO, ONE)
    }
    for tokens in TOKENS:
        times: dict[Problem, list[float]] = {TWO: [], ONE: []}
        for problem, worker in workers.items():
            worker.cell(tokens if problem is TWO else 2 * tokens, "uniform")
            found = worker.check("x", schedule_of(problem))
            if found.status != "ok":
                raise RuntimeError(f"{problem.num_ranks} ranks: {found.status}: {found.reason}")
        for _ in range(2):
            for problem, worker in workers.items():
                it = run_rounds(worker.bench, ["x"], rules=RULES, seed=tokens)["x"]
                if isinstance(it, Measurement):
                    times[problem].append(it.median_us)
        two, one = min(times[TWO]), min(times[ONE])
        print(f"{tokens} tokens: {two:.1f} and {one:.1f} us, {two / one:.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "build":
        for each in (TWO, ONE):
            compile_kernel(
                KernelSpec(problem=each, schedule=schedule_of(each), capacity=CAPACITY[each])
            )
    else:
        run()
