"""Waits that end one after the other, in a process whose CUDA context is lost then.

`python tests/gpu_waits.py 0,49,98,147 3,2,1,0` starts four waits of device/barriers.py that never
end: their bounds in ms, and the pool blocks that wait. Prints the slots they filled, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from typing import Any

import torch

from tl_megamoe.device.barriers import BARRIERS_CUDA, TAG_LINEAR1
from tl_megamoe.timeouts import REPORT_FIELDS, REPORT_LENGTH, REPORT_SLOT

WAITS = 4


def build_waits() -> Any:
    """The TileLang program: (counter, bounds in ms, pool blocks, address of the report)."""
    import tilelang.language as T  # noqa: N812

    @T.prim_func
    def waits(
        counter: T.Tensor((1,), "int32"),
        bounds: T.Tensor((WAITS,), "int32"),
        blocks: T.Tensor((WAITS,), "int32"),
        report: T.int64,
    ):
        with T.Kernel(WAITS, threads=32) as i:
            T.import_source(BARRIERS_CUDA)
            if T.get_thread_binding() == 0:
                T.call_extern(
                    "handle",
                    "tlmm_wait_equal",
                    T.address_of(counter[0]),
                    1,
                    report,
                    bounds[i],
                    TAG_LINEAR1,
                    0,
                    blocks[i],
                    0,
                    0,
                )

    return waits


@lru_cache(maxsize=1)
def wait_kernel() -> Any:
    """Compiled, or from tilelang's disk cache."""
    import tilelang

    return tilelang.compile(build_waits(), target={"kind": "cuda", "arch": "sm_90a"})


def main(bounds: str, blocks: str) -> int:
    report = torch.zeros(REPORT_LENGTH, dtype=torch.int32, pin_memory=True)

    def device(values: str) -> torch.Tensor:
        return torch.tensor([int(v) for v in values.split(",")], dtype=torch.int32).cuda()

    wait_kernel()(device("0"), device(bounds), device(blocks), report.data_ptr())
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        slots = [s for s in report.view(-1, REPORT_SLOT).tolist() if s[0]]
        told = [dict(zip(REPORT_FIELDS, slot, strict=False)) for slot in slots]
        print(json.dumps({"error": str(error), "reports": told}), flush=True)
        return 0
    return 3


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    os._exit(code)  # what asks the GPU once more, while objects go, would abort the process
