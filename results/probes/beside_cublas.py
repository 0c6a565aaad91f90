r"""Linear1 and linear2 alone beside cuBLAS's products of the same sizes, at the power limit.

    python results/probes/beside_cublas.py           time, power and SM clock, on an H200
    ncu --clock-control none --profile-from-start off --metrics M \
        python results/probes/beside_cublas.py once

8192 tokens of deepseek-v4-flash on one rank of eight: 49,152 rows, 4096 x 4096 weights. cuBLAS
multiplies all rows by one expert's weights, by torch._scaled_mm with BF16 out: `fast` with one
scale a matrix, `promoted` the same with use_fast_accum=False, `scaled` with a scale per row and 128
columns and per 128 x 128 weights, which is linear1's product without its SwiGLU and quantisation.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from statistics import fmean, median

import pynvml
import torch
import variants

from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.worker import Worker
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import E4M3, E4M3_MAX

TOKENS = 8192
ROWS, N, K = 49_152, 4096, 4096
LAUNCHES, REPLAYS, ROUNDS = 6, 25, 4
WARM_UP_S = 0.25
Launch = Callable[[int], object]


def operand(rows: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values as e4m3, (rows, K), and scales of blocks of `block_rows` x 128."""
    x = torch.randn(rows // block_rows, block_rows, K // 128, 128, device="cuda")
    sf = x.abs().amax((1, 3), keepdim=True) / E4M3_MAX
    return (x / sf).reshape(rows, K).to(E4M3), sf[:, 0, :, 0].contiguous()


def cublas() -> dict[str, Launch]:
    """The three products."""
    (a, a_sf), (b, b_sf), one = operand(ROWS, 1), operand(N, 128), torch.ones((), device="cuda")
    a_sf = a_sf.t().contiguous().t()  # outer dimension contiguous, as cuBLAS wants it

    def product(sf_a: torch.Tensor, sf_b: torch.Tensor, fast: bool) -> Launch:
        return lambda _: torch._scaled_mm(
            a, b.t(), scale_a=sf_a, scale_b=sf_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return {
        "fast": product(one, one, True),
        "promoted": product(one, one, False),
        "scaled": product(a_sf, b_sf.t(), False),
    }


def ours(names: tuple[str, ...]) -> dict[str, Launch]:
    """Stand-alone phases, behind launches of the phases before them."""
    config = WorkerConfig(problem=variants.PROBLEM, capacity=variants.CAPACITY, recipe=Recipe())
    worker = Worker(config)
    worker.cell(TOKENS, "uniform")

    def phase(name: str) -> Launch:
        made, schedule = variants.compiled(f":{name}:128")

        def launch(index: int) -> None:
            i = index % len(worker.outputs)
            buffer, weights = worker.buffers[i][0], worker.weights[i][0]
            made.launch(buffer, weights, worker.outputs[i], TOKENS, schedule)

        return launch

    found = {name: phase(name) for name in ("dispatch", *names)}
    for launch in found.values():
        for index in range(len(worker.outputs)):
            launch(index)
    return {name: found[name] for name in names}


def graph_of(launch: Launch) -> torch.cuda.CUDAGraph:
    """LAUNCHES launches in a graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for index in range(LAUNCHES):
            launch(index)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            launch(index)
    return graph


class Readings:
    """Power in W and SM clock in MHz every 10 ms."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.all: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            watts = pynvml.nvmlDeviceGetPowerUsage(self.device) / 1000
            clock = pynvml.nvmlDeviceGetClockInfo(self.device, pynvml.NVML_CLOCK_SM)
            self.all.append((time.monotonic(), watts, clock))
            time.sleep(0.01)

    def between(self, start: float, end: float) -> tuple[float, float]:
        found = [r for r in self.all if start <= r[0] <= end] or self.all[-1:]
        return fmean(r[1] for r in found), fmean(r[2] for r in found)


def main() -> None:
    """Time all, or launch each once for a profiler."""
    launches = {**ours(("linear1", "linear2")), **cublas()}
    if sys.argv[1:] == ["once"]:
        for launch in launches.values():
            launch(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for launch in launches.values():
            launch(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return
    graphs = {name: graph_of(launch) for name, launch in launches.items()}
    readings = Readings()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            warm = time.monotonic() + WARM_UP_S
            while time.monotonic() < warm:
                graph.replay()
                torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start = time.monotonic()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            us = begin.elapsed_time(end) * 1000 / (LAUNCHES * REPLAYS)
            found[name].append((us, *readings.between(start + 0.05, time.monotonic())))
    for name, rounds in found.items():
        us, watts, clock = (median(r[i] for r in rounds[1:]) for i in range(3))
        flops = 2 * ROWS * N * K / (2 if name == "linear2" else 1)
        rate = flops / us / 1e6
        print(f"{name:9s} {us:8.1f} us {rate:6.0f} TFLOP/s {watts:5.0f} W {clock:5.0f} MHz")


if __name__ == "__main__":
    main()
