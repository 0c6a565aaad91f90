r"""Launch every small variant once, for compute-sanitizer.

    compute-sanitizer --tool memcheck --kernel-name kernel_substring=mega_moe \
        --kernel-name kernel_substring=quantize --error-exitcode 9 python tests/sanitize_small.py

Likewise with --tool racecheck, and with --tool initcheck, which wants no --kernel-name: it follows
what torch's kernels write. Every tensor has an allocation of its own here, so that a write past the
end of one is seen. Results are compared with the reference, guards with their pattern.

Groups: `variants` (all math modes, block_m 64 and 128, 1 and 2 load warps, few blocks) and
`recipes`, in wave and in lag order; `quantize`; `ranks`, two virtual ranks, whose kernels wait for
each other: a tool that runs one kernel at a time makes them time out. 129 and 300 tokens: blocks
count the routes alone, and together. After --seconds nothing new
is started, and what was left out is named; the exit status is then 3.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from gpu_cases import (
    ON_RANKS,
    RANKS_CAPACITY,
    RECIPE_SPLITS,
    SMALL,
    SMALL_CAPACITY,
    Schedules,
    rank_schedules,
    schedules,
    variants,
)
from gpu_world import World, world

from tl_megamoe.quantize import QuantizeSpec, compile_quantize, quantize_activations
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.synthetic import random_inputs

TIMEOUT_MS = 120_000
"""Of a wait: instrumented code is slow, not stuck."""
RANKS_TIMEOUT_MS = 30_000
Launch = tuple[str, Callable[[], None]]


def in_both_orders(chosen: Schedules, make: Callable[[], World], at: str) -> Iterator[Launch]:
    """Each schedule in wave order, then each in lag order."""

    def launch(schedule: object, name: str) -> None:
        make().check({name: schedule}, launches=1)  # type: ignore[dict-item]

    for order in ("wave", "lag"):
        for name, schedule in chosen.items():
            lag = {"order": "lag", "lag": 1} if order == "lag" else {}
            walk = replace(schedule, **lag)  # type: ignore[arg-type]
            label = f"{at}{name} {order}"
            yield label, lambda walk=walk, label=label: launch(walk, label)  # type: ignore[misc]


def on_one(tokens: int, recipe: Recipe | None = None) -> World:
    w = world(SMALL, SMALL_CAPACITY, recipe)
    w.ranks.first.timeout_ms = TIMEOUT_MS
    w.fill(tokens, seed=tokens, routing="zipf:1.0", mask=0.1)
    return w


def on_ranks(tokens: int) -> World:
    w = world(ON_RANKS[2], RANKS_CAPACITY)
    for buffer in w.ranks.buffers.values():
        buffer.timeout_ms = RANKS_TIMEOUT_MS
    w.fill((tokens, tokens // 2), seed=tokens, routing="zipf:1.0", mask=0.1)
    return w


def quantize(tokens: int) -> None:
    """Of BF16 rows, into the buffer; compared with its twin."""
    w = on_one(tokens)
    buffer, i = w.ranks.first, random_inputs(SMALL, tokens, seed=tokens, device="cuda")
    x = torch.randn((tokens, SMALL.hidden), device="cuda").bfloat16()
    spec = QuantizeSpec.of(SMALL, SMALL_CAPACITY, buffer.recipe)
    compile_quantize(spec).launch(buffer, x, i.topk_idx, i.topk_weights)
    buffer.check_guards()
    codes, sf = quantize_activations(x)
    assert torch.equal(buffer.x[:tokens].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:tokens], sf)


def launches_of(group: str, tokens: int) -> Iterator[Launch]:
    """The launches of a group, by what they are called."""
    at = f"{group} {tokens} tokens "
    if group == "variants":
        yield from in_both_orders(variants(SMALL), lambda: on_one(tokens), at)
    elif group == "recipes":
        for recipe in ALL_RECIPES[1:] if ALL_RECIPES[0] == Recipe() else ALL_RECIPES:
            chosen = schedules(SMALL, RECIPE_SPLITS, recipe)
            make = lambda recipe=recipe: on_one(tokens, recipe)  # noqa: E731
            yield from in_both_orders(chosen, make, f"{at}{recipe} ")
    elif group == "ranks":
        chosen = rank_schedules(ON_RANKS[2])
        yield from in_both_orders(chosen, lambda: on_ranks(tokens), at)
    else:
        yield at.strip(), lambda: quantize(tokens)


GROUPS = ("variants", "recipes", "quantize", "ranks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[129, 300])
    parser.add_argument("--seconds", type=float, default=60.0, help="start nothing after that")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    begin, left = time.monotonic(), []
    every = [launch for n in args.tokens for g in args.groups for launch in launches_of(g, n)]
    for name, launch in every:
        if time.monotonic() - begin > args.seconds:
            left.append(name)
            continue
        launch()
        print(f"{time.monotonic() - begin:6.1f} s  {name}: ok", flush=True)
    print(f"{len(every) - len(left)} of {len(every)} launches are right", flush=True)
    if left:
        print(f"left out after {args.seconds:g} s: {'; '.join(left)}", flush=True)
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
