"""`tl-megamoe host`: what a call of the layer costs the CPU, from the function to the module."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any

from tl_megamoe.problem import Problem

from .args import add_problem, current_commit, one_count, problem_of
from .bench import render

CALLS = 100
"""Calls between two synchronisations: CUDA queues about 1000 launches before it blocks."""
ROUNDS = 30
YARDSTICK = "y.zero_(), torch's own launch"
"""Hosts differ by a factor of two from one virtual machine to the next: compare ratios."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time of one form of the call.

    Attributes:
        form: how the layer is called.
        median_us, least_us: of a call, over the rounds.
    """

    form: str
    median_us: float
    least_us: float


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the command."""
    parser = add("host", run, "Time what a call costs the host, by form of the call.")
    add_problem(parser)
    parser.add_argument("--tokens", type=one_count, default=16, help="tokens of a call (16)")
    parser.add_argument(
        "--capacity", type=one_count, default=8192, help="buffer tokens, as the kernels have (8192)"
    )
    parser.add_argument("--commit", help="printed with the times (from git)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import torch

    problem = problem_of(args)
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        raise ValueError("host needs an SM90 GPU: launches are what it times")
    times = host_times(problem, args.tokens, args.capacity)
    print(
        f"{problem.name}, {args.tokens} tokens, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}, commit {args.commit or current_commit()}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d}; microseconds of host time a call, median and "
        f"least of {ROUNDS} rounds of {CALLS} calls"
    )
    lines = [("form", "median", "least")]
    lines += [(t.form, f"{t.median_us:.2f}", f"{t.least_us:.2f}") for t in times]
    print(render(lines))
    return 0


def time_calls(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Sequence[float]:
    """Microseconds a call, by round; nothing waits for the GPU inside a round."""
    times = []
    for _ in range(ROUNDS):
        synchronize()
        start = clock()
        for _ in range(CALLS):
            call()
        times.append((clock() - start) / CALLS / 1000)
    synchronize()
    return times


def host_times(problem: Problem, num_tokens: int, capacity: int) -> list[HostTime]:
    """Host time of every form of the call on the current GPU.

    Args:
        problem: of one rank.
        num_tokens: tokens of a call.
        capacity: tokens of the buffer.
    """
    import torch

    from tl_megamoe import MegaMoE, SymmBuffer, fp8_mega_moe, mega_moe, prepare
    from tl_megamoe.quantize import quantize_activations
    from tl_megamoe.synthetic import random_inputs

    buffer = SymmBuffer(problem, capacity)
    layer = MegaMoE(
        problem.hidden, problem.intermediate, problem.num_experts, problem.num_topk, buffer=buffer
    )
    made = random_inputs(problem, num_tokens, device=buffer.device)
    x = torch.randn(num_tokens, problem.hidden, device=buffer.device).bfloat16()
    x_fp8, x_sf = quantize_activations(x, buffer.recipe)
    routes = (made.topk_idx, made.topk_weights)
    buffer.fill(x_fp8, x_sf, *routes)
    y = torch.empty_like(x)
    kernel, schedule = prepare(buffer, num_tokens)
    stats = torch.zeros(problem.num_local_experts, dtype=torch.int32, device=buffer.device)
    l1, l2 = layer.weights.l1, layer.weights.l2
    operator = torch.ops.tl_megamoe.mega_moe.default
    forms: list[tuple[str, Callable[[], object]]] = [
        (YARDSTICK, y.zero_),
        (
            "CompiledKernel.launch, tilelang's wrapper",
            lambda: kernel.launch(buffer, layer.weights, y, num_tokens, schedule),
        ),
        ("fp8_mega_moe(y, l1, l2, buffer)", lambda: fp8_mega_moe(y, l1, l2, buffer)),
        ("the same with counts", lambda: fp8_mega_moe(y, l1, l2, buffer, stats)),
        ("buffer.quantize(x, idx, weights)", lambda: buffer.quantize(x, *routes)),
        ("mega_moe(x, None, ...) -> y", lambda: mega_moe(x, None, *routes, layer.weights, buffer)),
        (
            "torch.ops.tl_megamoe.mega_moe -> y",
            lambda: operator(x, None, *routes, *l1, *l2, buffer.key),
        ),
        ("MegaMoE.forward(x, idx, weights)", lambda: layer(x, *routes)),
    ]
    out = []
    with torch.inference_mode():
        for form, call in forms:
            call()
            times = time_calls(call, torch.cuda.synchronize)
            out.append(HostTime(form, median(times), min(times)))
    return out
