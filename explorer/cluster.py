"""Where a search compiles and times: this machine, or a Ray cluster.

A search asks an `Executor` for a farm and for GPU processes and knows no more of either:

    with make_executor("ray", address=address) as executor:
        build_cells(options, cells, executor.farm)
        bench = RemoteBench(config, control=control, spawn=executor.spawn)
        ...  # up to executor.num_gpus benches at once, each with cells of its own

On a cluster each compile is a task with one CPU, which ends as a local one does: same statuses,
time limit and second try. The kernel comes back to the driver's cache. A GPU process is an actor;
the driver sends it the kernels of a schedule before the first call about it, so GPU nodes compile
nothing. Nodes need this package, tilelang and, for compiling, nvcc installed: the same versions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from .doctor import find_gpu
from .farm import Build, Farm, build_kernel
from .kernel_store import KernelStore
from .measure import Process, spawn_worker
from .messages import WorkerConfig, kernel_specs
from .ray_processes import RayFarm, RayProcess, SpecsOf, facts, import_ray, last_line
from .worker import make_worker

if TYPE_CHECKING:
    from typing_extensions import Self

NODE_TIMEOUT_S = 120.0
"""Bound for a node of the cluster to say what is installed there."""


class Executor(Protocol):
    """Compiles and times for a search.

    Attributes:
        farm: compiles; its kernels are in this machine's cache afterwards.
        num_gpus: GPU processes that can run at once; 0 if there is no GPU to time on.
    """

    farm: Farm
    num_gpus: int

    def gpu_name(self) -> str | None:
        """Name of the SM90 GPU that is timed on; None if there is none."""
        ...

    def spawn(self, config: WorkerConfig) -> Process:
        """A fresh GPU process; `measure.RemoteBench(spawn=executor.spawn)`."""
        ...

    def close(self) -> None:
        """End what the executor started; GPU processes are ended by their owners before."""
        ...

    def __enter__(self) -> Executor: ...
    def __exit__(self, *error: object) -> None: ...


class _Closing:
    """`with executor:` closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """See `Executor`."""


class LocalExecutor(_Closing):
    """This machine: compile processes, and one GPU process at a time."""

    num_gpus = 1

    def __init__(self, farm: Farm, spawn: Callable[[WorkerConfig], Process] = spawn_worker):
        self.farm = farm
        self._spawn = spawn

    def spawn(self, config: WorkerConfig) -> Process:
        """See `Executor`."""
        return self._spawn(config)

    def gpu_name(self) -> str | None:
        """See `Executor`."""
        return find_gpu()


def make_executor(
    name: str,
    *,
    jobs: int | None = None,
    timeout_s: float = 180.0,
    prebuilt: bool = False,
    rank_mode: str = "one",
    address: str | None = None,
) -> Executor:
    """The executor of a search by its word.

    Args:
        name: `local` or `ray`.
        jobs: compiles at once; the CPUs of the machine or cluster when None.
        timeout_s: bound of one compile.
        prebuilt: compile nothing.
        rank_mode: of the search.
        address: of the Ray cluster (`RayExecutor`).

    Raises:
        ValueError: an unknown word, an address without ray, a rank mode that it cannot time; as
            `RayExecutor`.
    """
    if name == "ray":
        if rank_mode == "real":
            raise ValueError(
                "--executor ray with --rank-mode real: a GPU process of the cluster has one GPU. "
                "Search real ranks on a machine that has them all, with --executor local"
            )
        return RayExecutor(address, jobs=jobs, timeout_s=timeout_s, prebuilt=prebuilt)
    if name != "local":
        raise ValueError(f"executor={name!r} must be 'local' or 'ray'")
    if address is not None:
        raise ValueError(f"--ray-address {address} needs --executor ray")
    return LocalExecutor(Farm(jobs=jobs, timeout_s=timeout_s, prebuilt=prebuilt))


class RayExecutor(_Closing):
    """A Ray cluster: tasks compile, actors time, one GPU each.

    Args:
        address: of the cluster, as `ray.init` takes it; None joins the cluster that RAY_ADDRESS or
            this machine names, else starts one of this machine.
        factory: makes the object of a GPU process from its config.
        gpus_per_worker: GPUs of a GPU process; 0 for a factory that needs none.
        build, jobs, timeout_s, prebuilt: of the farm.
        specs_of: the kernels of a schedule by phase, from the config of `spawn` and the schedule.
        name_gpu: says on a node which GPU it has.

    Raises:
        ValueError: ray is not installed; no such cluster; a node that has other versions installed.
    """

    def __init__(
        self,
        address: str | None = None,
        factory: Callable[[Any], Any] = make_worker,
        gpus_per_worker: float = 1.0,
        *,
        build: Build = build_kernel,
        jobs: int | None = None,
        timeout_s: float = 180.0,
        prebuilt: bool = False,
        specs_of: SpecsOf = kernel_specs,
        name_gpu: Callable[[], str | None] = find_gpu,
    ):
        self._ray = ray = import_ray()
        self._name_gpu = name_gpu
        self._factory = factory
        self._gpus_per_worker = gpus_per_worker
        self._specs_of = specs_of
        self._started = not ray.is_initialized()
        if self._started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray.init(
                    address, logging_level=logging.WARNING, log_to_driver=False, **_local(address)
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ValueError(f"ray address {address!r}: no cluster there: {error}") from error
        try:
            self._check_nodes()
            self.farm: Farm = RayFarm(build, jobs=jobs, timeout_s=timeout_s, prebuilt=prebuilt)
        except BaseException:
            self.close()
            raise
        self._store = KernelStore()
        resources = ray.cluster_resources()
        if gpus_per_worker:
            self.num_gpus = int(resources.get("GPU", 0) / gpus_per_worker)
        else:
            self.num_gpus = max(1, int(resources.get("CPU", 1)))

    def spawn(self, config: Any) -> Process:
        """See `Executor`.

        Raises:
            ValueError: the cluster has no GPU for it.
        """
        if self.num_gpus < 1:
            raise ValueError(
                f"the ray cluster has {self._ray.cluster_resources().get('GPU', 0):g} GPUs, and a "
                f"GPU process takes {self._gpus_per_worker:g}. Add a node with one, or search with "
                "--compile-only"
            )
        return RayProcess(
            self._factory,
            config,
            num_gpus=self._gpus_per_worker,
            store=self._store,
            specs_of=self._specs_of,
        )

    def close(self) -> None:
        """Leave the cluster; one that this object started ends."""
        if self._started:
            self._ray.shutdown()
            self._started = False

    def gpu_name(self) -> str | None:
        """See `Executor`.

        Raises:
            ValueError: the GPUs of the cluster differ: times would not compare.
        """
        found: dict[str, str | None] = {}
        if self.num_gpus:
            gpus = self._gpus_per_worker
            found = self._ask(
                self._name_gpu, lambda node: not gpus or node["Resources"].get("GPU", 0), gpus
            )
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{node}: {name or 'no SM90'}" for node, name in found.items())
            raise ValueError(
                f"the ray cluster has GPUs that differ ({listed}). Search on nodes of one kind"
            )
        return next(iter(found.values()), None)

    def _check_nodes(self) -> None:
        """Refuse a node on which other kernels would be made, or none found."""
        here = facts()
        for name, there in self._ask(facts, lambda node: True).items():
            wrong = [f"{k} {v!r} and not {here[k]!r}" for k, v in there.items() if v != here[k]]
            if wrong:
                raise ValueError(
                    f"ray node {name} has {', '.join(wrong)}: kernels could not travel. Install "
                    "the same versions there"
                )

    def _ask(
        self, question: Callable[[], Any], of: Callable[[dict[str, Any]], Any], num_gpus: float = 0
    ) -> dict[str, Any]:
        """What a function returns on each living node that `of` chooses, by the node's name."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        task = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(question)
        asked = {
            f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in ray.nodes()
            if node["Alive"] and of(node)
        }
        answers: dict[str, Any] = {}
        for name, ref in asked.items():
            try:
                answers[name] = ray.get(ref, timeout=NODE_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                raise ValueError(
                    f"ray node {name} cannot run tl_megamoe: {last_line(error)}. Install the same "
                    "tl_megamoe there, or wait until its GPUs are free"
                ) from error
        return answers


def _local(address: str | None) -> dict[str, Any]:
    """Options of a cluster that may be started here."""
    return {"include_dashboard": False} if address is None else {}
