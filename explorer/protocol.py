"""The timing protocol: the one way in which this project times anything.

An H200 is power-bound under FP8 load: a time means little without the card's state. Therefore
launches rotate over three sets of weights, inputs and buffers (cold caches) inside CUDA graphs that
are replayed back to back; a warm-up of at least 100 ms with every candidate comes first, so that no
capture idles the card between blocks; blocks of at least 20 samples and 50 ms of every candidate
are interleaved in random order over three rounds; and a yardstick, an FP8 8192 x 8192 x 8192
product, is read before and after each block. A block whose two readings differ by more than 3 % is
repeated.

`measure` times any callables, also a foreign kernel beside ours:

    result = measure({"ours": launch, "theirs": other})   # each called with a set index 0, 1, 2
    result["ours"].median_us, result["ours"].yardstick_tflops
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

logger = logging.getLogger(__name__)

NUM_SETS = 3
YARDSTICK_SIZE = 8192
YARDSTICK_LAUNCHES = 5

Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the protocol; times in milliseconds."""

    rounds: int = 3
    warm_up_ms: float = 100.0
    min_samples: int = 20
    min_block_ms: float = 50.0
    min_sample_ms: float = 0.3
    max_drift: float = 0.03
    max_repeats: int = 2


@dataclass(frozen=True, slots=True)
class GpuState:
    """The card while a block ran; None where it cannot be read."""

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of one block, microseconds a launch, and the card meanwhile."""

    samples_us: tuple[float, ...]
    state: GpuState = field(default_factory=GpuState)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate over all rounds.

    Attributes:
        median_us, p10_us, p90_us: over all samples of all rounds.
        num_samples: how many.
        yardstick_tflops: median over its blocks; a block's is the mean of its two readings.
        max_yardstick_tflops: the highest of its blocks, drifted ones left out if there are others.
        rounds_us: median of each round.
        drifted: blocks that were kept although their two yardsticks differ.
        state: medians over the blocks.
    """

    median_us: float
    p10_us: float
    p90_us: float
    num_samples: int
    yardstick_tflops: float
    max_yardstick_tflops: float
    rounds_us: tuple[float, ...]
    drifted: int
    state: GpuState


@dataclass(frozen=True, slots=True)
class Failure:
    """A candidate that stopped during timing."""

    status: str
    reason: str


class CandidateFailed(RuntimeError):  # noqa: N818 - the bench says so; it is not the bench's error
    """A bench could not run a candidate, and can go on with the others."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Bench(Protocol):
    """What the loop needs: a GPU in this process, in a child, or a fake."""

    def warm_up(self, name: str) -> None:
        """Run a candidate for `Rules.warm_up_ms`."""

    def block(self, name: str) -> Block:
        """One block of a candidate. Raises CandidateFailed."""

    def yardstick(self) -> float:
        """One reading, TFLOP/s."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(slots=True)
class _Collected:
    blocks: list[Block] = field(default_factory=list)
    yardsticks: list[float] = field(default_factory=list)
    drifts: list[bool] = field(default_factory=list)


def run_rounds(
    bench: Bench,
    names: Sequence[str],
    *,
    rules: Rules | None = None,
    seed: int = 0,
    on_block: Callable[[str], None] | None = None,
) -> dict[str, Measurement | Failure]:
    """Time candidates interleaved. A reading between two blocks is after one and before the other.

    Args:
        bench: runs blocks and yardstick.
        names: candidates.
        rules: the protocol's numbers.
        seed: of the order within each round.
        on_block: called when a block is done, for progress.

    Returns:
        For each name its measurement, or why it stopped.
    """
    rules = rules or Rules()
    shuffler = random.Random(seed)
    collected = {name: _Collected() for name in names}
    failed: dict[str, Failure] = {}
    for name in names:
        try:
            bench.warm_up(name)
        except CandidateFailed as error:
            failed[name] = Failure(error.status, error.reason)
    cold, before = bool(failed), None
    for _ in range(rules.rounds):
        order = [name for name in names if name not in failed]
        shuffler.shuffle(order)
        for name in order:
            try:
                if before is None:
                    if cold:
                        bench.warm_up(name)
                    before = bench.yardstick()
                block, drifted, readings = _steady_block(bench, name, before, rules)
            except CandidateFailed as error:
                failed[name] = Failure(error.status, error.reason)
                cold, before = True, None  # the bench may have started anew on a cold card
                continue
            before = readings[1]
            found = collected[name]
            found.blocks.append(block)
            found.yardsticks.append(sum(readings) / 2)
            found.drifts.append(drifted)
            if on_block is not None:
                on_block(name)
    return {name: failed.get(name) or _summarise(collected[name]) for name in names}


def _steady_block(
    bench: Bench, name: str, before: float, rules: Rules
) -> tuple[Block, bool, tuple[float, float]]:
    for attempt in range(rules.max_repeats + 1):
        block = bench.block(name)
        after = bench.yardstick()
        drift = abs(after - before) / max(after, before)
        if drift <= rules.max_drift:
            return block, False, (before, after)
        if attempt < rules.max_repeats:
            logger.info("%s: yardstick drifted by %.1f %%, block repeated", name, 100 * drift)
            before = after
    return block, True, (before, after)


def _summarise(found: _Collected) -> Measurement:
    samples = [s for block in found.blocks for s in block.samples_us]
    steady = [y for y, d in zip(found.yardsticks, found.drifts, strict=True) if not d]

    def state(name: str) -> float | None:
        values = [v for b in found.blocks if (v := getattr(b.state, name)) is not None]
        return median(values) if values else None

    return Measurement(
        median_us=median(samples),
        p10_us=percentile(samples, 0.1),
        p90_us=percentile(samples, 0.9),
        num_samples=len(samples),
        yardstick_tflops=median(found.yardsticks),
        max_yardstick_tflops=max(steady or found.yardsticks),
        rounds_us=tuple(median(b.samples_us) for b in found.blocks),
        drifted=sum(found.drifts),
        state=GpuState(
            sm_clock_mhz=state("sm_clock_mhz"),
            mem_clock_mhz=state("mem_clock_mhz"),
            power_w=state("power_w"),
            temperature_c=state("temperature_c"),
        ),
    )


# ---- on the GPU


class CudaBench:
    """A bench on a GPU of this process: CUDA graphs, events and NVML.

    Args:
        cell: launches by name; each is called with a set index and launches on the current stream.
        rules: the protocol's numbers.
        device: CUDA device; the current one when None.
        prepare: called before a candidate's block, outside the timing, for kernels that need state
            in the buffers.
    """

    def __init__(
        self,
        cell: Mapping[str, Launch],
        *,
        rules: Rules | None = None,
        device: Any = None,
        prepare: Callable[[str], None] | None = None,
    ):
        import torch

        self._torch = torch
        self.cell = dict(cell)
        self.rules = rules or Rules()
        self.prepare = prepare
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device is None else torch.device(device).index
        )
        self._graphs: dict[str, tuple[Any, int]] = {}
        self._yardstick: Any = None
        self._stream = torch.cuda.Stream(self.device)
        self._nvml = _nvml_handle(torch, self.device)

    def forget(self, name: str) -> None:
        """Free a candidate's graph."""
        self.cell.pop(name, None)
        self._graphs.pop(name, None)

    def warm_up(self, name: str) -> None:
        """Replay a candidate for the warm-up time."""
        graph, _ = self._graph(name)
        one = self._time(graph, 1)[0]
        self._time(graph, max(1, int(self.rules.warm_up_ms / one) + 1))

    def block(self, name: str) -> Block:
        """One block: an untimed replay, then the samples back to back."""
        if self.prepare is not None:
            self.prepare(name)
        graph, launches = self._graph(name)
        estimate = self._time(graph, 2)[1]
        count = max(self.rules.min_samples, int(self.rules.min_block_ms / estimate) + 1)
        state: list[GpuState] = []
        times = self._time(graph, count, lambda: state.append(self._state()))
        return Block(tuple(1e3 * t / launches for t in times), state[0])

    def yardstick(self) -> float:
        """FP8 product of 8192 x 8192 x 8192 on random data, BF16 out, fast accumulation."""
        if self._yardstick is None:
            launch = self._yardstick_launch()
            # Kept with its launch, which owns the operands: a graph only knows their addresses.
            self._yardstick = self._capture(launch, YARDSTICK_LAUNCHES), launch
            self._time(self._yardstick[0], 2)
        milliseconds = self._time(self._yardstick[0], 1)[0]
        flops = 2 * YARDSTICK_SIZE**3 * YARDSTICK_LAUNCHES
        return float(flops / (milliseconds * 1e9))

    def _yardstick_launch(self) -> Launch:
        torch, size = self._torch, YARDSTICK_SIZE
        generator = torch.Generator(self.device).manual_seed(0)
        a, b = (
            torch.randn((size, size), generator=generator, device=self.device).to(
                torch.float8_e4m3fn
            )
            for _ in range(2)
        )
        one = torch.ones((), device=self.device)

        def launch(_: int) -> None:
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return launch

    def _graph(self, name: str) -> tuple[Any, int]:
        """The candidate's graph and the launches in it: a multiple of the sets, long enough."""
        if name not in self._graphs:
            launch = self.cell[name]
            graph, launches = self._capture(launch, NUM_SETS), NUM_SETS
            milliseconds = min(self._time(graph, 3))
            turns = -(-self.rules.min_sample_ms // milliseconds)
            if turns > 1:
                launches = NUM_SETS * int(turns)
                graph = self._capture(launch, launches)
            self._graphs[name] = graph, launches
        return self._graphs[name]

    def _capture(self, launch: Launch, launches: int) -> Any:
        torch = self._torch
        for index in range(NUM_SETS):  # loads the kernel: nothing may be loaded while capturing
            launch(index)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: its emptying of the allocator's cache costs more than a block.
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for index in range(launches):
                    launch(index % NUM_SETS)
            finally:
                graph.capture_end()
        return graph

    def _time(
        self, graph: Any, count: int, meanwhile: Callable[[], None] | None = None
    ) -> list[float]:
        """Milliseconds of each of `count` replays back to back."""
        torch = self._torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]

    def _state(self) -> GpuState:
        if self._nvml is None:
            return GpuState()
        nvml, handle = self._nvml  # read while the block runs

        def read(function: Callable[..., Any], *args: Any, scale: float = 1.0) -> float | None:
            try:
                return float(function(handle, *args)) * scale
            except Exception:  # a reading that this card or driver does not have
                return None

        return GpuState(
            sm_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            mem_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=read(nvml.nvmlDeviceGetPowerUsage, scale=1e-3),
            temperature_c=read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        )


def _nvml_handle(torch: Any, device: Any) -> tuple[Any, Any] | None:
    """NVML and its handle of a CUDA device, found by UUID: NVML numbers all cards of the host."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # not installed, or no driver library: readings stay empty
        logger.info("no NVML, clocks and power are not recorded: %s", error)
        return None
    try:  # a card may be visible to CUDA and not to NVML, or the bindings be old
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:
        logger.info("NVML does not know the device, clocks and power are not recorded: %s", error)
        return None


def measure(
    cell: Mapping[str, Launch],
    *,
    rules: Rules | None = None,
    seed: int = 0,
    device: Any = None,
    bench: Bench | None = None,
) -> dict[str, Measurement | Failure]:
    """Time callables under the protocol, interleaved.

    Args:
        cell: name -> launch; called with a set index in 0..2, launches on torch's current stream
            and may be captured in a CUDA graph. Each index must have its own weights, inputs and
            buffers.
        rules: the protocol's numbers.
        seed: of the interleaving order.
        device: CUDA device.
        bench: another bench than the GPU of this process.
    """
    bench = bench or CudaBench(cell, rules=rules, device=device)
    return run_rounds(bench, list(cell), rules=rules, seed=seed)
