"""Launch every small variant a few times, for compute-sanitizer.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize_small.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from gpu_cases import SMALL, SMALL_CAPACITY, variants
from gpu_world import world

from tl_megamoe import reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 1, 129])
    tokens = parser.parse_args().tokens
    w = world(SMALL, SMALL_CAPACITY)
    w.buffer.timeout_ms = 120_000  # instrumented code is slow, not stuck
    for n in tokens:
        w.fill(n, seed=n, routing="zipf:1.0", mask=0.1)
        expected = w.expected()
        for name, schedule in variants(SMALL).items():
            for walk in (schedule, replace(schedule, order="lag", lag=1)):
                y = w.launch(walk)
                found = reference.compare(y, expected, intermediate=SMALL.intermediate)
                print(f"{n} tokens, {name}, {walk.order}: {found}", flush=True)
                assert found, found.reason
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
