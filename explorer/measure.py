"""Check and time the candidates of a cell in a child process that may hang or crash.

Every message to the child has a deadline. A candidate that misses it, or takes the CUDA context
with it, gets its status; the child is replaced and first runs a control before anything else. A
candidate with a wrong or unsteady result may have written where it should not: the control runs in
the same child, which is replaced if even that is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from tl_megamoe.schedule import Schedule

from .child import SETUP_TIMEOUT_S, Child, ChildDied, ChildError, ChildTimeout
from .messages import CellInfo, CheckResult, WorkerConfig
from .protocol import Block, CandidateFailed, Rules
from .worker import make_worker

logger = logging.getLogger(__name__)

CONTROL = "control"
SUSPECT = ("incorrect", "nondeterministic")
"""Results after which the memory of the process may hold what a kernel wrote by mistake."""
STATUS_OF = {"OutOfMemoryError": "oom", "MegaMoeTimeout": "timeout"}
"""Statuses of what a worker raises, by the exception's class; a launch error if it is another."""


class GpuUnusable(RuntimeError):  # noqa: N818 - the state of the GPU, not an error of the search
    """Even the control fails: nothing measured now would mean anything."""


class Process(Protocol):
    """What `Child` and `real_ranks.RealRanksProcess` offer."""

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any: ...
    def kill(self) -> None: ...


def spawn_worker(config: WorkerConfig) -> Process:
    """A fresh GPU process; one a rank where each has a GPU."""
    if config.rank_mode == "real":
        from .real_ranks import spawn_real_ranks

        return spawn_real_ranks(config)
    return Child(make_worker, (config,))


class RemoteBench:
    """A worker in a child process: `protocol.Bench`, and the checks around it.

    Args:
        config: what the worker is built for.
        timeout_s: deadline of one message about one candidate.
        control: a schedule that is known to work; None when the search has none.
        spawn: starts a process; tests pass a fake.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        timeout_s: float = 120.0,
        control: Schedule | None = None,
        spawn: Callable[[WorkerConfig], Process] = spawn_worker,
    ):
        self.config = config
        self.timeout_s = timeout_s
        self.control = control
        self._spawn = spawn
        self._process: Process | None = None
        self._cell: tuple[int, str, int | None, Rules | None] | None = None
        self._info: CellInfo | None = None
        self._facts: dict[str, str] = {}
        self._suspect = False
        self._schedules: dict[str, Schedule] = {}
        self._loaded: set[str] = set()

    def start(self) -> dict[str, str]:
        """Start the worker; its `device`, `torch`, anonymous `card` and `driver`.

        Raises:
            GpuUnusable: weights and buffers cannot be made.
            ValueError: the config does not fit this machine, as too few GPUs for its ranks.
        """
        self._ensure()
        return self.facts()

    def facts(self) -> dict[str, str]:
        """What `start` said, of the process that ran last: on a cluster it may be another card."""
        return dict(self._facts)

    def cell(
        self,
        num_tokens: int,
        routing: str,
        seed: int | None = None,
        rules: Rules | None = None,
    ) -> CellInfo:
        """Begin the cell of a token count; forgets the candidates before.

        A process that replaces this one begins the same cell.

        Args:
            num_tokens: of each rank.
            routing: as for `random_inputs`.
            seed: of routing and inputs; that of the config when None.
            rules: of the blocks of this cell; those of the config when None.

        Raises:
            GpuUnusable: the inputs cannot be made, or a new process does not run even the control.
            ValueError: a routing that is not one of `random_inputs`, or more tokens than fit.
        """
        self._cell = (num_tokens, routing, seed, rules)
        self._schedules.clear()
        self._loaded.clear()
        if self._process is None:
            self._ensure()
        else:
            self._info = self._setup_call(self._process, "cell", *self._cell)
            self._ensure()
        assert isinstance(self._info, CellInfo)
        return self._info

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        """Run a candidate against the reference. Never raises for the candidate's failures."""
        self._schedules[name] = schedule
        try:
            result = self._call("check", name, schedule)
        except CandidateFailed as error:
            return CheckResult(error.status, "", error.reason)
        result = self._noted(result)
        if result.status == "ok":
            self._loaded.add(name)
        return result

    def recheck(self, name: str) -> CheckResult:
        """Compare a candidate's result after timing with the one before."""
        try:
            self._load(name)
            result = self._call("recheck", name)
        except CandidateFailed as error:
            return CheckResult(error.status, "", error.reason)
        return self._noted(result)

    def warm_up(self, name: str) -> None:
        """See `protocol.Bench`."""
        self._load(name)
        self._call("warm_up", name)

    def block(self, name: str) -> Block:
        """See `protocol.Bench`."""
        self._load(name)
        block = self._call("block", name)
        assert isinstance(block, Block)
        return block

    def yardstick(self) -> float:
        """See `protocol.Bench`. A reading that fails is tried once more in a new process.

        Raises:
            GpuUnusable: it fails again: that is no candidate's fault.
        """
        try:
            return float(self._call("yardstick"))
        except CandidateFailed as error:
            logger.warning("the yardstick failed (%s), a new GPU process tries it", error)
        try:
            return float(self._call("yardstick"))
        except CandidateFailed as error:
            raise GpuUnusable(f"the yardstick fails twice: {error.reason}") from error

    def close(self) -> None:
        """End the worker."""
        self._kill()

    def _load(self, name: str) -> None:
        """Make sure the worker of today knows a candidate that an earlier one has checked."""
        self._ensure()
        if name not in self._loaded:
            result = self.check(name, self._schedules[name])
            if result.status != "ok":
                raise CandidateFailed(result.status, result.reason)

    def _call(self, method: str, *payload: Any) -> Any:
        process = self._ensure()
        try:
            return process.call(method, *payload, timeout_s=self.timeout_s)
        except ChildTimeout:
            self._kill()
            raise CandidateFailed(
                "timeout", f"{method} took over {self.timeout_s:g} s; its process was killed"
            ) from None
        except ChildDied as error:
            self._kill()
            raise CandidateFailed("launch_error", str(error)) from error
        except ChildError as error:
            self._kill()  # the worker answers failures; what it raises may have lost the context
            status = STATUS_OF.get(error.kind, "launch_error")
            raise CandidateFailed(status, f"{method}: {error.kind}: {error}"[:1000]) from error

    def _setup_call(self, process: Process, method: str, *payload: Any) -> Any:
        try:
            return process.call(method, *payload, timeout_s=SETUP_TIMEOUT_S)
        except (ChildTimeout, ChildDied, ChildError) as error:
            self._kill()
            if isinstance(error, ChildError) and error.kind == "ValueError":
                raise ValueError(str(error)) from error  # a rule that the caller broke
            raise GpuUnusable(f"the GPU worker failed to start: {error}") from error

    def _noted(self, result: CheckResult) -> CheckResult:
        """A result, with what it says about the process taken to heart."""
        assert isinstance(result, CheckResult)
        if result.context_lost:
            self._kill()
        elif result.status in SUSPECT:
            self._suspect = True
        return result

    def _ensure(self) -> Process:
        """The running worker if it is sound, or a new one that has begun the cell.

        Raises:
            GpuUnusable: a new worker fails to start or does not run the control.
        """
        if self._process is not None and self._suspect:
            self._examine(self._process)
        if self._process is not None:
            return self._process
        self._process = process = self._spawn(self.config)
        self._loaded.clear()
        self._facts = self._setup_call(process, "describe")
        if self._cell is not None:
            self._info = self._setup_call(process, "cell", *self._cell)
            if self.control is not None:
                logger.info("a new GPU process runs the control first")
                result = self._run_control(process)
                if result.status != "ok":
                    self._kill()
                    raise GpuUnusable(
                        f"after a failure the control {self.control.name} is {result.status}: "
                        f"{result.reason}. Finished rows are kept; look at the GPU."
                    )
        return process

    def _examine(self, process: Process) -> None:
        """Run the control in a process that gave a wrong result; end it if that is wrong too."""
        self._suspect = False
        if self.control is None:
            self._kill()  # nothing says that the process is sound
            return
        logger.info("the control runs after a wrong result")
        try:
            result = self._run_control(process)
        except (GpuUnusable, ValueError) as error:
            logger.warning("the control failed after a wrong result, a new process: %s", error)
            return
        if result.status != "ok":
            logger.warning(
                "the control is %s after a wrong result, a new process: %s",
                result.status,
                result.reason,
            )
            self._kill()

    def _run_control(self, process: Process) -> CheckResult:
        result = self._setup_call(process, "check", CONTROL, self.control)
        assert isinstance(result, CheckResult)
        if result.status == "ok":
            self._setup_call(process, "drop", CONTROL)
        return result

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._suspect = False
        self._loaded.clear()
