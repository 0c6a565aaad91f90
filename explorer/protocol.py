"""The timing protocol: the one way in which this project times anything.

An H200 is power-bound under FP8 load: a time means little without the card's state. Therefore
launches rotate over three sets of weights, inputs and buffers (cold caches) inside CUDA graphs that
are replayed back to back; a warm-up of at least 100 ms with every candidate comes first, so that no
capture idles the card between blocks; blocks of at least 20 samples and 50 ms of every candidate
are interleaved in random order over three rounds; and a yardstick, an FP8 8192 x 8192 x 8192
product, is read before and after each block. A block whose two readings differ by more than 3 % is
repeated, and so is one after which the card is more than 7 % below what the readings before say is
usual: it has throttled for a moment (DESIGN.md has an example). Clocks, power and temperature are
read twice in a block, at its start and near its end.

With a GPU a rank every rank runs the same blocks at the same time; a time is then the maximum over
the ranks of the median of each.

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

from .gpu_state import GpuState, device_uuid, open_handle, read_state

logger = logging.getLogger(__name__)

NUM_SETS = 3
YARDSTICK_SIZE = 8192
YARDSTICK_LAUNCHES = 5
END_FRACTION = 0.9
"""Part of a block that has run when its second state is read: later, and a short block may be over
before NVML has answered."""

USUAL_READINGS = 8
"""Readings whose median is the usual one; with fewer nothing is usual yet."""

Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the protocol; times in milliseconds.

    Attributes:
        max_drift: by how much the readings around a block may differ, as a part of the larger.
        max_drop: by how much the reading after a block may lie below the usual one.
        max_repeats: of a block that breaks either.
    """

    rounds: int = 3
    warm_up_ms: float = 100.0
    min_samples: int = 20
    min_block_ms: float = 50.0
    min_sample_ms: float = 0.3
    max_drift: float = 0.03
    max_drop: float = 0.07
    max_repeats: int = 2


SCREEN_RULES = Rules(rounds=1, warm_up_ms=30, min_samples=8, min_block_ms=15, max_repeats=1)
"""Enough to tell candidates that differ by several percent; what is close needs `Rules()`."""


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of one block, microseconds a launch, and the card meanwhile.

    Attributes:
        samples_us: of the GPU; of the slowest rank, by median, where each rank has a GPU.
        state: of that GPU when the block had just been queued.
        end: of that GPU when about 90 % of the block had run.
        ranks: samples of each rank where each has a GPU, else empty.
    """

    samples_us: tuple[float, ...]
    state: GpuState = field(default_factory=GpuState)
    end: GpuState = field(default_factory=GpuState)
    ranks: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate over all rounds; where each rank has a GPU, its slowest rank.

    Attributes:
        median_us, p10_us, p90_us: over all samples of all rounds.
        num_samples: how many.
        yardstick_tflops: median over its blocks; a block's is the mean of its two readings.
        max_yardstick_tflops: the highest of its blocks, drifted ones left out if there are others.
        rounds_us: median of each round.
        drifted: blocks that were kept although their two yardsticks differ.
        state: medians over the blocks, at their start.
        end: the same near their end.
        ranks_us: median of each rank over all blocks where each has a GPU, else empty; `median_us`
            is the largest.
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
    end: GpuState = field(default_factory=GpuState)
    ranks_us: tuple[float, ...] = ()


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
    warm_up: bool = True,
    readings: list[float] | None = None,
) -> dict[str, Measurement | Failure]:
    """Time candidates interleaved. A reading between two blocks is after one and before the other.

    Args:
        bench: runs blocks and yardstick.
        names: candidates.
        rules: the protocol's numbers.
        seed: of the order within each round.
        on_block: called when a block is done, for progress.
        warm_up: run every candidate for `Rules.warm_up_ms` first. False only where the card is warm
            and has captured these candidates, as in a second observation right after the first. A
            bench that may have started anew after a failure is warmed up with all in any case.
        readings: yardsticks of earlier calls on this card, which say what is usual; this call
            appends its own.

    Returns:
        For each name its measurement, or why it stopped.
    """
    rules, readings = rules or Rules(), [] if readings is None else readings
    shuffler = random.Random(seed)
    collected = {name: _Collected() for name in names}
    failed: dict[str, Failure] = {}
    cold, before = warm_up, None
    for _ in range(rules.rounds):
        order = [name for name in names if name not in failed]
        shuffler.shuffle(order)
        for name in order:
            if cold:
                _warm_up_all(bench, names, failed)
                cold, before = False, None
            if name in failed:
                continue
            try:
                if before is None:
                    before = bench.yardstick()
                block, drifted, around = _steady_block(bench, name, before, rules, readings)
            except CandidateFailed as error:
                failed[name] = Failure(error.status, error.reason)
                cold = True  # the bench may have started anew on a cold card
                continue
            before = around[1]
            found = collected[name]
            found.blocks.append(block)
            found.yardsticks.append(sum(around) / 2)
            found.drifts.append(drifted)
            if on_block is not None:
                on_block(name)
    return {name: failed.get(name) or _summarise(collected[name]) for name in names}


def _warm_up_all(bench: Bench, names: Sequence[str], failed: dict[str, Failure]) -> None:
    """Warm up with every candidate that has not failed; anew after one that does so now."""
    before = -1
    while before != len(failed):
        before = len(failed)
        for name in names:
            if name not in failed:
                try:
                    bench.warm_up(name)
                except CandidateFailed as error:
                    failed[name] = Failure(error.status, error.reason)


def _steady_block(
    bench: Bench, name: str, before: float, rules: Rules, readings: list[float]
) -> tuple[Block, bool, tuple[float, float]]:
    """A block, whether it had to be kept although unsteady, and the readings around it."""
    for attempt in range(rules.max_repeats + 1):
        block = bench.block(name)
        after = bench.yardstick()
        last = readings[-USUAL_READINGS:]
        usual = median(last) if len(last) == USUAL_READINGS else after
        readings.append(after)
        drift = abs(after - before) / max(after, before)
        drop = 1 - after / usual
        if drift <= rules.max_drift and drop <= rules.max_drop:
            return block, False, (before, after)
        if attempt < rules.max_repeats:
            logger.info(
                "%s: yardstick drifted by %.1f %% and is %.1f %% below the usual, block repeated",
                name,
                100 * drift,
                100 * drop,
            )
            before = after
    return block, True, (before, after)


def _summarise(found: _Collected) -> Measurement:
    by_rank = [_samples_of(found.blocks, rank) for rank in range(len(found.blocks[0].ranks))]
    ranks_us = tuple(median(sum(blocks, ())) for blocks in by_rank)
    slowest = ranks_us.index(max(ranks_us)) if ranks_us else None
    rounds = [b.samples_us for b in found.blocks] if slowest is None else by_rank[slowest]
    samples = [s for block in rounds for s in block]
    steady = [y for y, d in zip(found.yardsticks, found.drifts, strict=True) if not d]
    return Measurement(
        median_us=median(samples),
        p10_us=percentile(samples, 0.1),
        p90_us=percentile(samples, 0.9),
        num_samples=len(samples),
        yardstick_tflops=median(found.yardsticks),
        max_yardstick_tflops=max(steady or found.yardsticks),
        rounds_us=tuple(median(block) for block in rounds),
        drifted=sum(found.drifts),
        state=_median_state([b.state for b in found.blocks]),
        end=_median_state([b.end for b in found.blocks]),
        ranks_us=ranks_us,
    )


def _samples_of(blocks: Sequence[Block], rank: int) -> list[tuple[float, ...]]:
    return [block.ranks[rank] for block in blocks]


def _median_state(states: Sequence[GpuState]) -> GpuState:
    def middle(name: str) -> float | None:
        values = [v for state in states if (v := getattr(state, name)) is not None]
        return median(values) if values else None

    return GpuState(
        sm_clock_mhz=middle("sm_clock_mhz"),
        mem_clock_mhz=middle("mem_clock_mhz"),
        power_w=middle("power_w"),
        temperature_c=middle("temperature_c"),
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
        agree: of a duration measured here, the one by which all ranks count their launches: kernels
            of several GPUs wait for each other, so one launch more on a rank hangs. The same number
            where nobody else takes part.
        meet: returns when all ranks are idle and have called it; nothing to wait for when None.
    """

    def __init__(
        self,
        cell: Mapping[str, Launch],
        *,
        rules: Rules | None = None,
        device: Any = None,
        prepare: Callable[[str], None] | None = None,
        agree: Callable[[float], float] = float,
        meet: Callable[[], None] | None = None,
    ):
        import torch

        self._torch = torch
        self.cell = dict(cell)
        self.rules = rules or Rules()
        self.prepare = prepare
        self.agree = agree
        self.meet = meet
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device is None else torch.device(device).index
        )
        self._graphs: dict[str, tuple[Any, int]] = {}
        self._yardstick: Any = None
        self._stream = torch.cuda.Stream(self.device)
        self._handle = open_handle(device_uuid(self.device))

    def forget(self, name: str) -> None:
        """Free a candidate's graph."""
        self.cell.pop(name, None)
        self._graphs.pop(name, None)

    def warm_up(self, name: str) -> None:
        """Replay a candidate for the warm-up time."""
        graph, _ = self._graph(name)
        one = self.agree(self._time(graph, 1)[0])
        self._time(graph, max(1, int(self.rules.warm_up_ms / one) + 1))

    def block(self, name: str) -> Block:
        """One block: an untimed replay, then the samples back to back."""
        if self.prepare is not None:
            self.prepare(name)
        graph, launches = self._graph(name)
        estimate = self.agree(self._time(graph, 2)[1])
        count = max(self.rules.min_samples, int(self.rules.min_block_ms / estimate) + 1)
        if self.meet is not None:
            self.meet()
        states: list[GpuState] = []
        times = self._time(graph, count, states)
        return Block(tuple(1e3 * t / launches for t in times), states[0], states[1])

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
            milliseconds = self.agree(min(self._time(graph, 3)))
            turns = -(-self.rules.min_sample_ms // milliseconds)
            if turns > 1:
                launches = NUM_SETS * int(turns)
                graph = self._capture(launch, launches)
            self._graphs[name] = graph, launches
        return self._graphs[name]

    def _capture(self, launch: Launch, launches: int) -> Any:
        torch = self._torch
        if self.meet is not None:
            self.meet()
        for index in range(NUM_SETS):  # loads the kernel: nothing may be loaded while capturing
            launch(index)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: its emptying of the allocator's cache costs more than a block.
        with torch.cuda.stream(self._stream):
            # Other threads may go on: NCCL's watchdog asks for the state of events.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for index in range(launches):
                    launch(index % NUM_SETS)
            finally:
                graph.capture_end()
        return graph

    def _time(self, graph: Any, count: int, states: list[GpuState] | None = None) -> list[float]:
        """Milliseconds of each of `count` replays back to back.

        Args:
            graph: what is replayed.
            count: how many are timed.
            states: makes it a block: gets the card's state right after queueing and near the end,
                and a replay that is not timed comes first. The first one would hold what ranks lose
                by not starting together.
        """
        torch = self._torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        if states is not None:
            graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        if states is not None:
            states.append(read_state(self._handle))
            events[int(END_FRACTION * count)].synchronize()
            states.append(read_state(self._handle))
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


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
