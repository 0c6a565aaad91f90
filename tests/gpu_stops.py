"""A rank with a GPU of its own stops; the other tells.

`torchrun --nproc_per_node=2 tests/gpu_stops.py waits|exits SCHEDULE`: rank 1 launches once less
than rank 0, and then stays, or ends its process. Rank 0 prints the attributes and text of its
MegaMoeTimeout as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_cases import ON_RANKS, RANKS_CAPACITY, rank_schedules
from gpu_world import World

from tl_megamoe import MegaMoeTimeout

TIMEOUT_MS = 1500
TOKENS = 100
FIELDS = ("phase", "rank", "peer", "expert", "tile", "have", "want")


def main(how: str, name: str) -> None:
    """One launch together, then one of rank 0 alone."""
    problem = ON_RANKS[2]
    chosen = rank_schedules(problem)[name]
    w = World(problem, RANKS_CAPACITY)
    w.fill(TOKENS, 0)
    w.launch(chosen)
    rank = dist.get_rank()
    told = Path(os.environ["TOLD"])
    if rank == 1:
        if how == "waits":
            while not told.exists():
                time.sleep(0.1)
        os._exit(0)
    buffer = w.ranks.buffers[0]
    buffer.timeout_ms, buffer.timeout_s = TIMEOUT_MS, TIMEOUT_MS / 1000
    time.sleep(3.0)  # until rank 1 is gone, where it goes
    y = torch.empty(TOKENS, problem.hidden, dtype=torch.bfloat16, device=buffer.device)
    try:
        w.kernel(chosen).launch(buffer, w.weights[0], y, TOKENS, chosen)
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    try:
        buffer.check_report()
    except MegaMoeTimeout as error:
        words = {field: getattr(error, field) for field in FIELDS}
        print(json.dumps({**words, "message": str(error)}), flush=True)
    told.touch()
    os._exit(0)  # the context is lost: nothing more can be asked of the GPU


if __name__ == "__main__":
    main(*sys.argv[1:])
