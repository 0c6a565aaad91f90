"""Two ranks with a GPU each: when one stops, the other's launch ends and names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_cases import real_ranks

SCRIPT = Path(__file__).with_name("gpu_stops.py")


if not real_ranks():  # it starts a job of its own

    @pytest.mark.multi_gpu(2)
    @pytest.mark.parametrize("how", ["waits", "exits"])
    def test_the_other_rank_tells(how: str, tmp_path: Path) -> None:
        job = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        run = subprocess.run(
            [*job, str(SCRIPT), how, "wide128"],
            env={**os.environ, "TOLD": str(tmp_path / "told")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == 1, run.stdout[-2000:] + run.stderr[-2000:]
        told = json.loads(lines[0])
        assert (told["phase"], told["rank"], told["peer"]) == ("dispatch", 0, 1)
        assert (told["have"], told["want"], told["expert"], told["tile"]) == (1, 2, None, None)
        assert told["message"].startswith(
            "dispatch: rank 1 has not arrived with its counts: rank 0"
        )
        assert "counted 1 of 2 launches in 1.5 s" in told["message"]
        assert "CUDA context is lost" in told["message"]
