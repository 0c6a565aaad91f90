"""Random layers, schedules and launches against rules, models and the reference.

    python tests/fuzz_layer.py --seconds 240 --seed 1 --kernels 48 [--part 1/3] [--cases N]
    python tests/fuzz_layer.py --build --seed 1 --kernels 48 --jobs 2
    python tests/fuzz_layer.py --reproduce 'LINE'

On an SM90 GPU: launches of random kernels against the float32 reference, each twice. `--build`
compiles those kernels on any machine into tilelang's disk cache (TILELANG_CACHE_DIR); what is not
there is compiled when its turn comes. Several processes with a part each fill a GPU. Without a GPU,
or with --cpu: cases that need none. Cases run in a child process under a time limit. One that fails
is printed as the line that reproduces it, made simpler as long as it fails, and printed again; the
others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Protocol

import fuzz_checks
import torch
from fuzz_cases import ENDS, NUM_SMS, Case, draw_case, draw_kernel, draw_launch
from fuzz_launch import check_layer
from fuzz_shrink import shrink
from torch import Tensor

from tl_megamoe.explorer.child import Child, ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.explorer.ranks import open_ranks
from tl_megamoe.kernel import compile_kernel

CASE_TIMEOUT_S = 60.0
"""Limit of a case, the waits of its launches included."""
KERNEL_TIMEOUT_S = 10.0
"""Limit of a wait inside a launch."""
BUILD_TIMEOUT_S = 300.0
"""Limit for a kernel and its layer's weights and buffers."""
LAYER_BYTES = 20 * 2**30
"""Memory that the layers of a process may keep."""
MAX_SHRUNK = 5
"""Failures that are made simpler; of a kernel only the first."""
PATIENCE = 3
"""Failures of a kernel after which its other launches are left out."""
LAUNCHES_IN_A_ROW = 20
"""Cases of one kernel before the next."""
ROUND = (
    *("schedule", "layout", "walk", "schedule", "scaling") * 40,
    *("reference", "walk", "layout") * 10,
    *("launches",) * 5,
)
"""Checks that take turns without a GPU; `lowers`, of seconds, comes once in LOWER_EVERY cases."""
LOWER_EVERY = 2500


# ---- one case


def open_layer(case: Case) -> Layer:
    """A layer of the case's sizes on the current GPU."""
    mode = "one" if case.num_ranks == 1 else "virtual"
    ranks = open_ranks(
        case.problem,
        case.capacity,
        mode=mode,
        recipe=case.numeric,
        timeout_s=KERNEL_TIMEOUT_S,
    )
    return Layer(ranks, seed=1)


class Worker:
    """Checks cases, in a child process or in place; keeps layers, for weights take long to make.

    Args:
        make_layer: of a case; tests pass one with fake kernels.
    """

    def __init__(self, make_layer: Callable[[Case], Layer] = open_layer) -> None:
        self._make_layer = make_layer
        self._layers: dict[Any, tuple[Layer, tuple[Tensor, Tensor]]] = {}

    def prepare(self, case: Case) -> None:
        """Everything of a launch that takes long: weights, buffers, the kernel."""
        if case.check != "layer":
            return
        sizes = self._sizes(case)
        if sizes not in self._layers:
            while self._layers and torch.cuda.memory_allocated() > LAYER_BYTES:
                self._layers.pop(next(iter(self._layers)))
                torch.cuda.empty_cache()
            layer = self._make_layer(case)
            self._layers[sizes] = layer, (layer.plain.l1_sf.clone(), layer.plain.l2_sf.clone())
        layer, _ = self._layers[sizes]
        layer.kernel(case.schedule, clamp=case.clamp is not None, fast_math=case.fast_math)

    def run(self, case: Case) -> tuple[str, list[str]]:
        """Why a prepared case fails, empty where it does not, and what is to be counted of it."""
        if case.check != "layer":
            return fuzz_checks.CHECKS[case.check](case), []
        reason, notes = check_layer(case, *self._layers[self._sizes(case)])
        if reason:  # nobody knows what else the launch wrote to
            del self._layers[self._sizes(case)]
        return reason, notes

    def _sizes(self, case: Case) -> Any:
        return case.problem, case.capacity, case.recipe


def child_worker() -> Worker:
    """The worker of a child process, which logs no warning: every case would have its own."""
    logging.disable(logging.WARNING)
    return Worker()


class Process(Protocol):
    """What `Child` offers."""

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any: ...
    def kill(self) -> None: ...


class InPlace:
    """A worker in this process, which no time limit ends: for tests that patch what it runs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        try:
            return getattr(self.worker, method)(*payload)
        except Exception as error:
            raise ChildError(type(error).__name__, str(error)) from error

    def kill(self) -> None:
        """Nothing is left open."""


class Runner:
    """Runs cases in a process that is replaced when it dies, or when a launch raises.

    Attributes:
        notes: what is to be counted of the last case.

    Args:
        spawn: starts a process.
    """

    def __init__(self, spawn: Callable[[], Process] = lambda: Child(child_worker)) -> None:
        self._spawn = spawn
        self._process: Process | None = None
        self.notes: list[str] = []

    def fails(self, case: Case) -> str:
        """Why a case fails; empty where it does not."""
        self.notes = []
        try:
            if self._process is None:
                self._process = self._spawn()
            self._process.call("prepare", case, timeout_s=BUILD_TIMEOUT_S)
            reason, self.notes = self._process.call("run", case, timeout_s=CASE_TIMEOUT_S)
        except (ChildError, ChildTimeout, ChildDied) as error:
            kind = error.kind if isinstance(error, ChildError) else type(error).__name__
            reason = f"{kind}: {error}"
            if case.check == "layer" or not isinstance(error, ChildError):
                self.end()
        return " ".join(reason.split())[:2000]

    def end(self) -> None:
        """Kill the process; the next case gets a new one."""
        if self._process is not None:
            self._process.kill()
            self._process = None


# ---- many cases


@dataclass
class Summary:
    """What a run did.

    Attributes:
        kinds: cases by check; of layers also by ranks, routing profile, routing weights,
            recipe, mode and walk, and what was noted.
        kernels: those that were launched, and how often each failed.
        failures: (simplest case, reason) of each.
        left_out: cases of kernels that had failed too often.
        seconds: how long it took.
    """

    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    kernels: Counter[Any] = field(default_factory=Counter)
    failures: list[tuple[Case, str]] = field(default_factory=list)
    left_out: int = 0
    seconds: float = 0.0

    def count(self, case: Case, notes: Sequence[str]) -> None:
        """One more case."""
        kinds = {"cases": [case.check]}
        if case.check == "layer":
            kinds["ranks"] = [str(case.num_ranks)]
            kinds["profiles"] = [case.routing]
            kinds["weights"] = [case.weights]
            kinds["recipes"] = [case.recipe]
            kinds["modes"] = [f"{case.schedule.math_mode} {case.schedule.order}"]
            kinds["of these"] = [*notes, *(["clamp"] if case.clamp is not None else [])]
        for kind, words in kinds.items():
            self.kinds.setdefault(kind, Counter()).update(words)

    @property
    def num_cases(self) -> int:
        return sum(self.kinds.get("cases", Counter()).values())

    def __str__(self) -> str:
        launches = 2 * self.kinds.get("cases", Counter())["layer"]
        out = [
            f"{self.num_cases} cases",
            f"{launches} GPU launches",
            f"{len(self.kernels)} kernels",
        ]
        for kind, counter in self.kinds.items():
            counts = ", ".join(f"{word} {n}" for word, n in sorted(counter.items()))
            out.append(f"{kind}: {counts}")
        out += [f"left out: {self.left_out}"] if self.left_out else []
        return f"{'; '.join(out)}; {len(self.failures)} failures in {self.seconds:.1f} s"


def command(case: Case) -> str:
    """What reproduces a case."""
    return f"python tests/fuzz_layer.py --reproduce {shlex.quote(case.line)}"


def fuzz(
    cases: Iterable[Case],
    runner: Runner,
    *,
    seconds: float,
    max_cases: int | None = None,
    shrink_seconds: float = 60.0,
    say: Callable[[str], None] = print,
) -> Summary:
    """Run cases until time or cases end, and shrink some of those that fail.

    Args:
        cases: as many as there are.
        runner: what runs them; it is ended.
        seconds: after which no case is begun; shrinking comes on top.
        max_cases: no more than these.
        shrink_seconds: of all failures together; each may take half of what is left.
        say: gets a line for every failure.
    """
    summary, start = Summary(), time.monotonic()
    lost = 0.0
    try:
        for case in itertools.islice(cases, max_cases):
            if time.monotonic() - start - lost > seconds:
                break
            kernel = case.spec.key() if case.check == "layer" else case.check
            if case.check == "layer" and summary.kernels[kernel] >= PATIENCE:
                summary.left_out += 1
                continue
            reason = runner.fails(case)
            summary.count(case, runner.notes)
            if case.check == "layer":
                summary.kernels[kernel] += bool(reason)
            if not reason:
                continue
            say(f"FAILED {case.check}: {reason}\n  {command(case)}")
            before, simplest = time.monotonic(), case
            if summary.kernels[kernel] <= 1 and len(summary.failures) < MAX_SHRUNK:
                left = (shrink_seconds - lost) / 2
                simplest, reason = shrink(case, reason, runner.fails, seconds=left)
                lost += time.monotonic() - before
            if simplest != case:
                say(f"  SHRUNK: {reason}\n  {command(simplest)}")
            summary.failures.append((simplest, reason))
    finally:
        runner.end()
    summary.seconds = time.monotonic() - start
    return summary


def cpu_cases(seed: int, lower_every: int = LOWER_EVERY) -> Iterator[Case]:
    """Cases that need no GPU; the same for a seed, however many are taken.

    Args:
        seed: any integer.
        lower_every: cases between two that lower a program; 0: none does.
    """
    for number in itertools.count():
        lowers = lower_every and number % lower_every == lower_every // 2
        check = "lowers" if lowers else ROUND[number * 7 % len(ROUND)]
        yield draw_case(random.Random(f"{seed}:{number}"), check)


def draw_kernels(seed: int, number: int) -> list[Case]:
    """Cases of random kernels; the same on every machine."""
    return [
        draw_kernel(random.Random(f"{seed}:kernel:{n}"), "layer", ENDS[n % len(ENDS)])
        for n in range(number)
    ]


def launches_of(kernels: Sequence[Case], seed: int | str) -> Iterator[Case]:
    """Launches of some kernels, each in turn; the same for a seed, however many are taken."""
    for number in itertools.count():
        kernel = kernels[number // LAUNCHES_IN_A_ROW % len(kernels)]
        yield draw_launch(random.Random(f"{seed}:{number}"), kernel)


def build_one(case: Case) -> str:
    """Compile a case's kernel into the disk cache; why that fails."""
    try:
        compile_kernel(case.spec)
    except Exception as error:  # TVM's errors cannot be pickled
        return f"{type(error).__name__}: {str(error)[-2000:]}"
    return ""


def build(kernels: Sequence[Case], jobs: int, say: Callable[[str], None] = print) -> int:
    """Compile kernels side by side; returns how many do not compile."""
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        todo = {pool.submit(build_one, case): case for case in kernels}
        for done, future in enumerate(as_completed(todo), 1):
            case = todo[future]
            reason = future.result() if future.exception() is None else str(future.exception())
            sizes = f"{case.hidden}x{case.intermediate}x{case.num_experts} ranks {case.num_ranks}"
            say(f"[{done}/{len(kernels)}] {sizes} {case.recipe} {case.schedule.name}")
            if reason:
                failed += 1
                say(f"FAILED: {reason}\n  {case.line}")
    return failed


# ---- command line


def num_sm90_sms() -> int:
    """Multiprocessors of the current GPU; 0 where there is no SM90 GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return 0
    return min(NUM_SMS, torch.cuda.get_device_properties(0).multi_processor_count)


def part_of(text: str) -> tuple[int, int]:
    """`2/3` as (2, 3)."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N, as 1/3, with I in 1..N")
    return int(number), int(parts)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all cases; default 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, metavar="N", help="no more than N")
    parser.add_argument("--kernels", type=int, default=8, metavar="K", help="on a GPU; default 8")
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="I/N", help="every Nth kernel, from the Ith"
    )
    parser.add_argument("--build", action="store_true", help="compile the kernels, launch none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of --build")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for all failures")
    parser.add_argument("--cpu", action="store_true", help="what needs no GPU, though there is one")
    parser.add_argument("--reproduce", metavar="LINE", help="run the case of a line, nothing else")
    args = parser.parse_args(arguments)
    positive = (args.kernels, args.jobs, 1 if args.cases is None else args.cases)
    if min(positive) < 1 or args.seconds <= 0:
        parser.error("--kernels, --jobs, --seconds and --cases must be positive")
    return args


def reproduce(line: str) -> int:
    """Run one case; the exit code."""
    case = Case.parse(line)
    if case.check == "layer" and not num_sm90_sms():
        print("a case of check 'layer' needs an SM90 GPU", file=sys.stderr)
        return 2
    runner = Runner()
    reason = runner.fails(case)
    runner.end()
    print(f"FAILED {case.check}: {reason}" if reason else f"ok {case.check}")
    return 1 if reason else 0


def say_now(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a case fails."""
    args = parse_arguments(arguments)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if args.reproduce:
        return reproduce(args.reproduce)
    number, parts = args.part
    num_sms = 0 if args.cpu or args.build else num_sm90_sms()
    name = f"seed {args.seed}" + (f" part {number}/{parts}" if parts > 1 else "")
    if args.build or num_sms:
        kernels = draw_kernels(args.seed, args.kernels)[number - 1 :: parts]
        if args.build:
            return 1 if build(kernels, args.jobs, say_now) else 0
        fitting = [k for k in kernels if k.schedule.num_sms * k.num_ranks <= num_sms]
        if len(fitting) < len(kernels):
            say_now(f"{len(kernels) - len(fitting)} kernels need more than {num_sms} SMs: left out")
        cases = launches_of(fitting, f"{args.seed}:{number}/{parts}")
    else:
        cases = cpu_cases(args.seed)
    summary = fuzz(
        cases,
        Runner(),
        seconds=args.seconds,
        max_cases=args.cases,
        shrink_seconds=args.shrink_seconds,
        say=say_now,
    )
    say_now(f"{name}: {summary}")
    for case, reason in summary.failures:
        say_now(f"{reason[:200]}\n  {command(case)}")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
