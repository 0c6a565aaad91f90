"""Run the checks of a layer one after the other, each under a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .child import SETUP_TIMEOUT_S, Child, ChildDied, ChildError, ChildTimeout

KERNEL_TIMEOUT_S = 10.0
"""Bound of a wait inside a kernel; the limit of a check is longer."""
MAX_LOST = 3
"""Processes that a phase may lose before the rest of its checks is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """What a run checks; travels to its processes.

    Attributes:
        problem: the layer as it runs.
        rank_mode: `one`, `virtual` or `real`.
        capacity: tokens of a rank's buffer.
        seed: of weights and inputs.
    """

    problem: Problem
    rank_mode: str
    capacity: int
    recipe: Recipe = Recipe()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        phase: whose check it is.
        check: its name (`checks.PHASE_CHECKS`).
        schedule: of the kernel; None where none runs.
        tokens: of every rank.
        routing: as for `random_inputs`.
    """

    phase: str
    check: str
    schedule: Schedule | None
    tokens: tuple[int, ...]
    routing: str = "uniform"


@dataclass(frozen=True, slots=True)
class Row:
    """A finished case: the cells of the table (`check.HEADER`), and why it is not ok."""

    cells: tuple[str, ...]
    reason: str = ""
    context_lost: bool = False

    @property
    def status(self) -> str:
        return self.cells[-1]


class Process(Protocol):
    """What `Child` offers."""

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class Checker:
    """The layer of a run on its ranks; serves one case at a time, in a child or in place."""

    def __init__(self, config: CheckConfig):
        from .layer import Layer
        from .ranks import open_ranks

        self.config = config
        ranks = open_ranks(
            config.problem,
            config.capacity,
            mode=config.rank_mode,
            recipe=config.recipe,
            timeout_s=KERNEL_TIMEOUT_S,
        )
        self.layer = Layer(ranks, config.seed)
        self._filled: tuple[tuple[int, ...], str] | None = None

    def ready(self) -> bool:
        """Called once, so that making weights and buffers has its own time limit."""
        return True

    def run(self, case: Case) -> Row:
        """A case; a failure of its launch is a row too."""
        from tl_megamoe.buffer import MegaMoeTimeout

        from .checks import PHASE_CHECKS
        from .ranks import RankFailed

        try:
            self._prepare(case)
            found = PHASE_CHECKS[case.phase][case.check](self.layer, case.schedule)
        except MegaMoeTimeout as error:
            return blank_row(self.config, case, "timeout", str(error), context_lost=True)
        except RankFailed as error:
            status = "timeout" if error.kind == "MegaMoeTimeout" else "error"
            return blank_row(self.config, case, status, str(error), context_lost=True)
        except Exception as error:  # TVM and CUDA raise many kinds; after most the context is lost
            reason = f"{type(error).__name__}: {error}"
            return blank_row(self.config, case, "error", reason, context_lost=True)
        cells = (
            found.check,
            found.schedule,
            input_text(case),
            str(found.block_m or ""),
            found.ranks,
            found.error,
            found.bound,
            found.status,
        )
        return Row(cells, found.reason)

    def _prepare(self, case: Case) -> None:
        """The inputs of a case, and counters that no check before has touched."""
        for buffer in self.layer.ranks.buffers.values():
            buffer.workspace.zero_()
        self.layer.ranks.barrier()
        if (case.tokens, case.routing) != self._filled:
            self._filled = None
            seed = self.config.seed + 1 + sum(case.tokens)
            self.layer.fill(case.tokens, seed, case.routing)
            self._filled = case.tokens, case.routing


def make_checker(config: CheckConfig) -> Any:
    """The factory that a child process imports."""
    from .farm import quiet_tilelang

    quiet_tilelang()
    return Checker(config)


def input_text(case: Case) -> str:
    """Tokens and routing of a case as the table names them."""
    from .checks import token_text

    text = token_text(case.tokens)
    return text if case.routing == "uniform" else f"{text} {case.routing}"


def blank_row(
    config: CheckConfig, case: Case, status: str, reason: str, *, context_lost: bool = False
) -> Row:
    """The row of a case that has no result."""
    from .checks import label

    cells = (
        case.check,
        label(case.schedule),
        input_text(case),
        "" if case.schedule is None else str(case.schedule.block_m),
        f"{config.problem.num_ranks} {config.rank_mode}",
        "-",
        "",
        status,
    )
    return Row(cells, " ".join(reason.split())[:1000], context_lost)


def run_in_children(
    config: CheckConfig,
    cases: dict[str, list[Case]],
    timeout_s: float,
    *,
    spawn: Callable[[CheckConfig], Process] = lambda config: Child(make_checker, (config,)),
) -> Iterator[Row]:
    """Run the cases, those of a phase in a child process of their own; a row each, in order.

    Args:
        config: of the run.
        cases: from `plan_cases`.
        timeout_s: limit of one case, its compile included where that is not done.
        spawn: starts a process; tests pass a fake.
    """
    for group in cases.values():
        process: Process | None = None
        lost = 0
        for case in group:
            if lost >= MAX_LOST:
                yield blank_row(config, case, "skipped", f"{lost} processes were lost before it")
                continue
            try:
                if process is None:
                    process = spawn(config)
                    process.call("ready", timeout_s=SETUP_TIMEOUT_S)
                row = process.call("run", case, timeout_s=timeout_s)
                assert isinstance(row, Row)
            except ChildTimeout as error:
                row = blank_row(config, case, "timeout", str(error), context_lost=True)
            except (ChildDied, ChildError) as error:
                row = blank_row(config, case, "error", str(error), context_lost=True)
            if row.context_lost and process is not None:
                process.kill()
                process = None
                lost += 1
            yield row
        if process is not None:
            process.close()


def run_in_place(
    config: CheckConfig,
    cases: dict[str, list[Case]],
    timeout_s: float,
    *,
    make: Callable[[CheckConfig], Any] = make_checker,
    give_up: Callable[[Row], None],
) -> Iterator[Row]:
    """Run the cases as one rank of a torchrun job; a row each, the same on every rank.

    Args:
        config: of the run.
        cases: from `plan_cases`.
        timeout_s: limit of one case.
        make: makes the checker.
        give_up: called from another thread with the row of a case that took too long; it ends the
            process.
    """
    todo = [case for group in cases.values() for case in group]
    with _watchdog(SETUP_TIMEOUT_S, lambda: give_up(late(config, todo[0], SETUP_TIMEOUT_S))):
        checker = make(config)
    failed = False
    for case in todo:
        if failed:
            yield blank_row(config, case, "skipped", "the ranks cannot go on after a failed launch")
            continue
        with _watchdog(timeout_s, lambda case=case: give_up(late(config, case, timeout_s))):  # type: ignore[misc]
            row = checker.run(case)
        failed = row.context_lost
        yield row


def late(config: CheckConfig, case: Case, timeout_s: float) -> Row:
    """The row of a case that took too long."""
    reason = f"took over {timeout_s:g} s; the job was ended"
    return blank_row(config, case, "timeout", reason, context_lost=True)


@contextmanager
def _watchdog(timeout_s: float, expired: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(timeout_s, expired)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
