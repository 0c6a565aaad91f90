"""Launch a small layer very often, with changing token counts, by itself and in CUDA graphs.

    python tests/soak.py --launches 100000 --seed 0 --seconds 60

Every result must be that of the first launch of its tokens to the bit, and memory must stay what it
was. Results are compared on the GPU, the host looks every few thousand launches. Prints one line of
JSON; the exit status is 0 if all launches were made and nothing differs, 1 if something does, 2 if
the seconds did not suffice.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_cases import SMALL, SMALL_CAPACITY

from tl_megamoe import ReferenceBuffer, SymmBuffer, fp8_mega_moe, reference
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, transform_weights

TOKENS = (0, 1, 7, 64, 65, 129, 257, 500, 777, SMALL_CAPACITY)
ROUTINGS = ("uniform", "zipf:1.2", "skew")
SETS = 3
"""Inputs of each number of tokens."""
IN_A_GRAPH = 20
GRAPH_SHARE = 0.05
"""Of the steps; with 20 launches each that is half of the launches."""
LOOK_EVERY = 2000
POISON_EVERY = 50
"""Steps between two fills of the pools with NaN."""
RSS_SLACK = 16 << 20
"""Bytes by which the host's memory may differ: allocators keep what they get."""


@dataclass(eq=False)
class Case:
    """Tokens, where their results go, and what the first result was."""

    inputs: Inputs
    y: torch.Tensor
    expected: torch.Tensor
    graph: Any = None


@dataclass
class Found:
    """What a soak saw.

    Attributes:
        launches, replays: launches in all, and graphs replayed.
        differing: launches whose result was another.
        allocated, reserved: bytes of torch on the GPU, at each look.
        rss: bytes of the process, at each look.
        digest: of all first results; the same for a seed wherever it runs.
        reasons: why it failed.
    """

    launches: int = 0
    replays: int = 0
    differing: int = 0
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    digest: str = ""
    reasons: list[str] = field(default_factory=list)


class Soak:
    """The layer, its cases, and their launches.

    Args:
        device: `cuda`, or `cpu` for the reference in place of the kernel, without graphs.
        seed: of tokens and of their order.
    """

    def __init__(self, device: str, seed: int) -> None:
        self.on_gpu = device == "cuda"
        self.draw = random.Random(seed)
        self.plain = random_weights(SMALL, device)
        self.weights: MoEWeights = transform_weights(
            (self.plain.l1, self.plain.l1_sf), (self.plain.l2, self.plain.l2_sf), SMALL
        )
        self.buffer: Any
        if self.on_gpu:
            self.buffer = SymmBuffer(SMALL, SMALL_CAPACITY, timeout_s=10.0)
            self.buffer.warmup(num_shared=None)
        else:
            self.buffer = ReferenceBuffer(SMALL, SMALL_CAPACITY, device)
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self.equal = torch.empty((SMALL_CAPACITY, SMALL.hidden), dtype=torch.bool, device=device)
        self.any = torch.empty((), dtype=torch.bool, device=device)
        self.cases = [
            self._case(tokens, routing, seed + part)
            for tokens in (TOKENS if self.on_gpu else (0, 7))
            for part, routing in enumerate(ROUTINGS[:SETS])
        ]
        if self.on_gpu:
            for case in self.cases:
                case.graph = self._capture(case)

    def _case(self, tokens: int, routing: str, seed: int) -> Case:
        inputs = random_inputs(SMALL, tokens, routing, 0.1, seed, self.buffer.device)
        y = torch.empty((tokens, SMALL.hidden), dtype=torch.bfloat16, device=self.buffer.device)
        case = Case(inputs, y, y)
        self.launch(case)
        case.expected = y.view(torch.int16).clone()
        i = inputs
        wanted = reference.moe(SMALL, i.x, i.x_sf, i.topk_idx, i.topk_weights, self.plain)
        same = reference.compare(y, wanted, intermediate=SMALL.intermediate)
        assert same, f"{tokens} tokens: {same.reason}"
        return case

    def launch(self, case: Case) -> None:
        """Bring the tokens in, launch, and count if the result differs; nothing waits."""
        i, y = case.inputs, case.y
        self.buffer.fill(i.x, i.x_sf, i.topk_idx, i.topk_weights)
        y.fill_(torch.nan)
        fp8_mega_moe(y, self.weights.l1, self.weights.l2, self.buffer)
        if case.expected is not y and y.shape[0]:
            differs = self.equal[: y.shape[0]]
            torch.ne(y.view(torch.int16), case.expected, out=differs)
            torch.any(differs.view(-1), dim=0, out=self.any)
            self.differing.add_(self.any)

    def _capture(self, case: Case) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(IN_A_GRAPH):
                self.launch(case)
        return graph

    def step(self, number: int) -> tuple[int, int]:
        """Launch one case, by itself or as a graph: launches and replays made."""
        case = self.draw.choice(self.cases)
        if number % POISON_EVERY == 0 and self.on_gpu:
            self.buffer.poison()
        if case.graph is not None and self.draw.random() < GRAPH_SHARE:
            case.graph.replay()
            return IN_A_GRAPH, 1
        self.launch(case)
        return 1, 0

    def look(self, found: Found) -> None:
        """Wait, and write down what differs and how much memory there is."""
        if self.on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self.buffer.check_report()
                raise
            found.allocated.append(torch.cuda.memory_allocated())
            found.reserved.append(torch.cuda.memory_reserved())
        found.differing = int(self.differing)
        gc.collect()
        found.rss.append(resident_bytes())

    def digest(self) -> str:
        """Of all first results."""
        total = hashlib.sha256()
        for case in self.cases:
            total.update(case.expected.view(torch.uint8).cpu().numpy().tobytes())
        return total.hexdigest()[:16]


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(
    launches: int,
    seed: int,
    seconds: float,
    device: str = "cuda",
    look_every: int = LOOK_EVERY,
    disturb: Callable[[Soak, int], None] | None = None,
) -> Found:
    """Make the launches, or as many as the seconds allow.

    Args:
        launches: at least as many are made.
        seed: of tokens and of their order.
        seconds: after which no more are started.
        device: as for `Soak`.
        look_every: launches between two looks of the host.
        disturb: called before each step with its number; tests break things with it.
    """
    ready = Soak(device, seed)
    found = Found(digest=ready.digest())
    ready.look(found)
    end, steps, next_look = time.monotonic() + seconds, 0, look_every
    while found.launches < launches and time.monotonic() < end and not found.differing:
        if disturb is not None:
            disturb(ready, steps)
        made, replays = ready.step(steps)
        steps += 1
        found.launches += made
        found.replays += replays
        if found.launches >= next_look:
            ready.look(found)
            next_look += look_every
    ready.look(found)
    if found.differing:
        found.reasons.append(f"{found.differing} of {found.launches} launches gave other bits")
    settled = found.allocated[1:]
    if settled and min(settled) != max(settled):
        found.reasons.append(f"memory of the GPU went from {min(settled)} to {max(settled)} bytes")
    rss = found.rss[len(found.rss) // 4 :]  # code and tables that first launches load
    if max(rss) - rss[0] > RSS_SLACK:
        found.reasons.append(f"memory of the process grew from {rss[0]} to {max(rss)} bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="start none after that")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu soaks the reference")
    begin = time.monotonic()
    found = soak(args.launches, args.seed, args.seconds, args.device)
    told = {
        "launches": found.launches,
        "replays": found.replays,
        "differing": found.differing,
        "digest": found.digest,
        "seconds": round(time.monotonic() - begin, 1),
        "gpu_bytes": sorted(set(found.allocated[1:])),
        "gpu_reserved_bytes": sorted(set(found.reserved[1:])),
        "rss_mib": [round(n / 2**20, 1) for n in (found.rss[0], found.rss[-1], max(found.rss))],
        "reasons": found.reasons,
    }
    print(json.dumps(told), flush=True)
    if found.reasons:
        return 1
    return 0 if found.launches >= args.launches else 2


if __name__ == "__main__":
    sys.exit(main())
