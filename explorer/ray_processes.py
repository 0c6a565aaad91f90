"""Compile tasks and GPU processes of a Ray cluster, for `cluster.RayExecutor`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any

from tl_megamoe.kernel import KernelSpec
from tl_megamoe.schedule import Schedule

from .bundle import add_kernels, pack_kernels
from .child import ChildDied, ChildError, ChildTimeout
from .farm import (
    Attempt,
    Build,
    BuildResult,
    Farm,
    build_kernel,
    classify,
    kernel_digest,
    package_version,
)
from .kernel_store import KernelStore, host_platform
from .messages import kernel_specs

SpecsOf = Callable[[Any, Schedule], Mapping[str, KernelSpec]]


def import_ray() -> Any:
    """The ray module.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"--executor ray needs the package ray, which cannot be imported ({error}). Install it "
            "with: pip install 'tl_megamoe[ray]'"
        ) from error
    return ray


def last_line(error: BaseException) -> str:
    """What happened, from the traceback that Ray makes of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][-1500:] if lines else type(error).__name__


# ---- what runs on the nodes


def facts() -> dict[str, str]:
    """What must be the same on every node for kernels to travel."""
    return {
        "tilelang": package_version("tilelang"),
        "kernel": kernel_digest(),
        "platform": host_platform(),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def _compile(build: Build, spec: KernelSpec, timeout_s: float) -> tuple[Attempt, bytes]:
    """One try of a compile on a node, in a process of its own, and the kernel it made."""
    farm = Farm(build, jobs=1, timeout_s=timeout_s)
    known = farm.cache.get(spec)
    if known is not None:
        with suppress(ValueError):  # the node has the report and no kernel any more
            return Attempt(spec, classify(spec, known)), pack_kernels([spec])
    (attempt,) = farm.try_once([spec])
    made = attempt.result.report is not None
    return attempt, pack_kernels([spec]) if made else b""


class _Host:
    """The actor of a GPU process: holds `factory(config)`, made at the first call."""

    def __init__(self, factory: Callable[[Any], Any], config: Any):
        self._factory = factory
        self._config = config
        self._handler: Any = None

    def add(self, kernels: bytes) -> None:
        add_kernels(kernels)

    def call(self, method: str, payload: tuple[Any, ...]) -> tuple[Any, ...]:
        """As `child.Child` answers: an exception is data, so that it need not be picklable."""
        try:
            if self._handler is None:
                self._handler = self._factory(self._config)
            return "ok", getattr(self._handler, method)(*payload)
        except Exception as error:  # every failure of the work is an answer
            return "error", type(error).__name__, str(error)[-4000:]


# ---- the driver's side


class RayFarm(Farm):
    """A farm whose compiles are Ray tasks; otherwise as `Farm`.

    Args:
        build: as of `Farm`; the nodes must be able to import it.
        jobs: compiles at once; the cluster's CPUs when None.
        timeout_s: bound of one compile on its node.
        prebuilt: as of `Farm`.
    """

    def __init__(
        self,
        build: Build = build_kernel,
        *,
        jobs: int | None = None,
        timeout_s: float = 180.0,
        prebuilt: bool = False,
    ):
        self._ray = import_ray()
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        jobs = jobs or max(1, cpus)
        super().__init__(build, jobs=jobs, timeout_s=timeout_s, prebuilt=prebuilt)

    def _attempts(self, specs: list[KernelSpec], jobs: int) -> Generator[Attempt, None, None]:
        ray = self._ray
        # A second try is the farm's business (`Farm.run`): it comes alone and is told in the row.
        task = ray.remote(num_cpus=1, max_retries=0)(_compile)
        waiting = list(reversed(specs))
        running: dict[Any, KernelSpec] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    spec = waiting.pop()
                    running[task.remote(self.build, spec, self.timeout_s)] = spec
                for ref in ray.wait(list(running), num_returns=1, timeout=0.5)[0]:
                    yield self._finished(ref, running.pop(ref))
        finally:
            for ref in running:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(ref, force=True)

    def _finished(self, ref: Any, spec: KernelSpec) -> Attempt:
        ray = self._ray
        try:
            attempt, kernels = ray.get(ref)
            if kernels:
                add_kernels(kernels)
        except ray.exceptions.RayTaskError as error:  # the task raised; the machine is well
            reason = f"the compile task failed: {last_line(error)}"
            return Attempt(spec, BuildResult("compile_error", None, reason))
        except ray.exceptions.RayError as error:  # its node died, or killed it for memory
            reason = f"the compile task was lost: {type(error).__name__}: {last_line(error)}"
            return Attempt(spec, BuildResult("compile_error", None, reason), True)
        except (ValueError, OSError) as error:
            reason = f"the kernel could not be added to this machine's cache: {error}"
            return Attempt(spec, BuildResult("compile_error", None, reason))
        assert isinstance(attempt, Attempt)
        return attempt


class RayProcess:
    """A GPU process on the cluster (`measure.Process`): a Ray actor that holds `factory(config)`.

    The first call about a schedule sends its kernels before; the time for it counts.

    Args:
        factory: makes what serves the calls; the nodes must be able to import it.
        config: its argument.
        num_gpus: GPUs that the actor takes.
        store: the driver's kernels; None sends none.
        specs_of: the kernels of a schedule by phase, from config and schedule.
    """

    def __init__(
        self,
        factory: Callable[[Any], Any],
        config: Any,
        *,
        num_gpus: float = 1.0,
        store: KernelStore | None = None,
        specs_of: SpecsOf = kernel_specs,
    ):
        self._ray = import_ray()
        self._config = config
        self._store = store
        self._specs_of = specs_of
        self._sent: set[KernelSpec] = set()
        host = self._ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(_Host)
        self._actor = host.remote(factory, config)

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        """Run a method in the process and return its answer.

        Args:
            method: of the factory's object.
            payload: its arguments; of a `Schedule` among them the kernels are sent before.
            timeout_s: bound in seconds, which includes the wait for a GPU and the transfer.

        Raises:
            ChildTimeout: no answer in time; the process is dead now.
            ChildDied: the process ended, or its node was lost.
            ChildError: the method raised; the process lives.
        """
        ray = self._ray
        sent = self._send(item for item in payload if isinstance(item, Schedule))
        answer = self._actor.call.remote(method, payload)
        try:
            # An actor serves in order: both are answered within the one bound.
            reply = ray.get([*sent, answer], timeout=timeout_s)[-1]
        except ray.exceptions.GetTimeoutError:
            self.kill()
            raise ChildTimeout(f"no answer to {method!r} in {timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise ChildError(type(error.cause).__name__, last_line(error)) from error
        except ray.exceptions.RayError as error:
            self.kill()
            raise ChildDied(f"process ended during {method!r}: {last_line(error)}") from error
        if reply[0] == "error":
            raise ChildError(reply[1], reply[2])
        return reply[1]

    def kill(self) -> None:
        """End the process; harmless if it has ended."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)

    def _send(self, schedules: Iterable[Schedule]) -> list[Any]:
        """Queue the kernels of schedules that this process has not got."""
        if self._store is None:
            return []
        new: dict[KernelSpec, KernelSpec] = {}
        for schedule in schedules:
            for spec in self._specs_of(self._config, schedule).values():
                # One that is not built is the worker's to report.
                if spec.key() not in self._sent and self._store.reports.get(spec) is not None:
                    new[spec.key()] = spec
        if not new:
            return []
        try:
            packed = pack_kernels(new.values(), self._store)
        except (ValueError, OSError) as error:  # a kernel that cannot be sent cannot be loaded
            raise ChildError(type(error).__name__, str(error)) from error
        self._sent.update(new)
        return [self._actor.add.remote(packed)]
