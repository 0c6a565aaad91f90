"""A kernel that holds some multiprocessors for a bounded time: nothing of the layer fits beside it.

with held(16, milliseconds=300):
    ...  # 16 SMs are taken, by blocks that have started
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

MAX_BLOCKS = 132
SMEM_BYTES = 200 * 1024
"""Of a block: an SM has 228 KiB, so it holds one such block and no block of the layer beside it."""
START_S = 20.0
HOLD_CUDA = r"""
static __device__ void hold_sm(void* pad, long long started, int block, int milliseconds) {
  volatile unsigned char* used = (volatile unsigned char*)pad;
  unsigned long long begin, now;
  used[threadIdx.x] = 1;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin) :: "memory");
  if (threadIdx.x == 0) {
    ((volatile int*)started)[block] = 1;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
  } while (now - begin < 1000000ull * (unsigned long long)milliseconds);
}
"""


def build_hold() -> Any:
    """The TileLang program: (device tensor, address of MAX_BLOCKS int32, blocks, milliseconds)."""
    import tilelang.language as T  # noqa: N812

    @T.prim_func
    def hold(
        where: T.Tensor((1,), "int32"),
        started: T.int64,
        num_blocks: T.int32,
        milliseconds: T.int32,
    ):
        with T.Kernel(num_blocks, threads=32) as block:
            T.import_source(HOLD_CUDA)
            pad = T.alloc_shared((SMEM_BYTES,), "uint8")
            T.call_extern("handle", "hold_sm", T.address_of(pad[0]), started, block, milliseconds)
            if block == num_blocks:  # never: the launch needs a tensor to find its stream by
                where[0] = 0

    return hold


@lru_cache(maxsize=1)
def hold_kernel() -> Any:
    """Compiled, or from tilelang's disk cache."""
    import tilelang

    return tilelang.compile(build_hold(), target={"kind": "cuda", "arch": "sm_90a"})


@contextmanager
def held(num_blocks: int, milliseconds: int) -> Iterator[torch.cuda.Event]:
    """Hold SMs on a stream of its own, from the first statement inside; waits for its end.

    Args:
        num_blocks: SMs.
        milliseconds: how long each block spins.

    Yields:
        The event of the kernel's end.
    """
    kernel = hold_kernel()
    where = torch.zeros(1, dtype=torch.int32, device="cuda")
    started = torch.zeros(MAX_BLOCKS, dtype=torch.int32, pin_memory=True)
    kernel(where, started.data_ptr(), 1, 0)  # loads it
    torch.cuda.synchronize()
    started.zero_()
    stream, end = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        kernel(where, started.data_ptr(), num_blocks, milliseconds)
        end.record()
    limit = time.monotonic() + START_S
    while int(started.sum()) < num_blocks:
        assert time.monotonic() < limit, f"{int(started.sum())} of {num_blocks} blocks started"
    yield end
    end.synchronize()
