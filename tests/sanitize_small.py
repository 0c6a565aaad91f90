"""Launch every small variant a few times, for compute-sanitizer.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize_small.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from gpu_cases import SMALL, SMALL_CAPACITY, variants
from gpu_world import world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 1, 129])
    tokens = parser.parse_args().tokens
    w = world(SMALL, SMALL_CAPACITY)
    w.ranks.first.timeout_ms = 120_000  # instrumented code is slow, not stuck
    for n in tokens:
        w.fill(n, seed=n, routing="zipf:1.0", mask=0.1)
        for name, schedule in variants(SMALL).items():
            for walk in (schedule, replace(schedule, order="lag", lag=1)):
                w.check({f"{name} {walk.order}": walk}, launches=1)
                print(f"{n} tokens, {name}, {walk.order}: ok", flush=True)


if __name__ == "__main__":
    main()
