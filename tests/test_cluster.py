"""A Ray cluster of this machine compiles and times as local processes do."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_cache import (
    CRASHES,
    FAILS,
    HANGS,
    SMALL,
    SPILLS,
    WORKS,
    FakeWorker,
    build,
    build_nothing,
    build_with_lost_node,
    name_gpu,
    spec,
    text_of,
)

from tl_megamoe.explorer import cluster
from tl_megamoe.explorer.child import Child, ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.cluster import LocalExecutor, RayExecutor, make_executor
from tl_megamoe.explorer.farm import NOT_BUILT, BuildResult, Farm
from tl_megamoe.explorer.kernel_store import KernelStore
from tl_megamoe.explorer.measure import Process
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.ray_processes import RayFarm, RayProcess
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.recipe import Recipe

# Not importorskip: a module that is skipped as a whole fails the run on a GPU machine.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray")

CONFIG = WorkerConfig(problem=SMALL, capacity=64, recipe=Recipe())


@pytest.fixture(scope="session")
def node_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of this machine; the cache that its nodes have."""
    import ray

    folder = tmp_path_factory.mktemp("node")
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"TILELANG_CACHE_DIR": str(folder), "PYTHONPATH": paths}},
    )
    yield folder
    ray.shutdown()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's own cache."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ray_executor(**options: Any) -> RayExecutor:
    options = {"build": build, "timeout_s": 60.0, **options}
    return RayExecutor(factory=FakeWorker, gpus_per_worker=0, **options)


@needs_ray
def test_compiles_end_as_local_ones(
    node_cache: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec(b) for b in (WORKS, FAILS, SPILLS, CRASHES)] + [spec(WORKS, stages=4)]
    seen: list[KernelSpec] = []
    with ray_executor() as executor:
        found = executor.farm.run(specs, lambda key, result: seen.append(key))
        # Once built it is known here: nothing is sent to the cluster.
        monkeypatch.setattr(executor.farm, "_attempts", lambda specs, jobs: iter_nothing(specs))
        built = [s for s in specs if found[s.key()].report is not None]
        assert executor.farm.run(built) == {s.key(): found[s.key()] for s in built}
    assert len(seen) == 5
    assert found[spec(WORKS).key()].reason == found[spec(WORKS, stages=4).key()].reason == ""
    ours = {wanted: KernelStore().reports.get(wanted) for wanted in specs}
    hashes = {w: r.source_hash for w, r in ours.items() if r is not None}
    assert set(hashes) == {spec(WORKS), spec(WORKS, stages=4), spec(SPILLS)}
    for wanted in (spec(WORKS), spec(WORKS, stages=4)):
        (entry,) = KernelStore().entries_of(hashes[wanted])
        assert entry.is_relative_to(cache)
        assert (entry / "device_kernel.cu").read_text() == text_of(wanted)
    assert KernelStore().entries_of(hashes[spec(SPILLS)]) == []

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "local"))
    local = Farm(build, jobs=2).run(specs)
    assert {k: (r.status, r.report) for k, r in found.items()} == {
        k: (r.status, r.report) for k, r in local.items()
    }
    for wanted in (spec(FAILS), spec(CRASHES)):
        assert found[wanted.key()].reason == local[wanted.key()].reason
    assert {w.schedule.rows_in_flight: local[w.key()].status for w in specs} == {
        WORKS: "ok",
        FAILS: "compile_error",
        SPILLS: "spilled",
        CRASHES: "compile_error",
    }


def iter_nothing(specs: list[KernelSpec]) -> Any:
    assert specs == []
    yield from ()


@needs_ray
def test_a_compile_that_hangs_is_a_timeout(node_cache: Path, cache: Path) -> None:
    start = time.monotonic()
    with ray_executor(timeout_s=0.5) as executor:
        (found,) = executor.farm.run([spec(HANGS)]).values()
    assert time.monotonic() - start < 60
    assert (found.status, found.report) == ("timeout", None)
    assert "compiling took over 0.5 s; compiled a second time, alone" in found.reason


@needs_ray
def test_a_lost_task_is_tried_again_alone(node_cache: Path, cache: Path) -> None:
    wanted = spec(WORKS, stages=3)
    with ray_executor(build=build_with_lost_node) as executor:
        found = executor.farm.run([wanted])[wanted.key()]
    assert found.status == "ok"
    assert (
        "compiled a second time, alone; the first time: the compile task was lost" in found.reason
    )


@needs_ray
def test_what_a_node_built_before_is_not_built_again(node_cache: Path, cache: Path) -> None:
    wanted = spec(WORKS, stages=2)
    with ray_executor() as executor:
        first = executor.farm.run([wanted])
    for path in cache.rglob("*.json"):
        path.unlink()
    with ray_executor(build=build_nothing) as executor:
        assert executor.farm.run([wanted]) == first
    assert len(KernelStore().entries_of(first[wanted.key()].report.source_hash)) == 1  # type: ignore[union-attr]


@needs_ray
def test_prebuilt_compiles_nothing(node_cache: Path, cache: Path) -> None:
    with ray_executor(prebuilt=True) as executor:
        assert executor.farm.run([spec(WORKS)]) == {spec(WORKS).key(): BuildResult(NOT_BUILT)}


def spawn_child(config: WorkerConfig) -> Process:
    return Child(FakeWorker, (config,))


@pytest.fixture(params=["local", pytest.param("ray", marks=needs_ray)])
def spawn(request: pytest.FixtureRequest, cache: Path) -> Iterator[Callable[[Any], Process]]:
    """`Executor.spawn`, with the kernel of `spec(WORKS)` in the driver's cache."""
    KernelStore().reports.put(spec(WORKS), build(spec(WORKS)))
    if request.param == "ray":
        request.getfixturevalue("node_cache")
        executor: Any = ray_executor()
    else:
        executor = LocalExecutor(Farm(build), spawn_child)
    started: list[Process] = []

    def start(config: Any) -> Process:
        started.append(executor.spawn(config))
        return started[-1]

    with executor:
        yield start
        for process in started:
            process.kill()


def test_a_process_answers_with_the_kernels_it_needs(spawn: Callable[[Any], Process]) -> None:
    process = spawn(CONFIG)
    schedule = spec(WORKS).schedule
    assert process.call("check", "a", schedule, timeout_s=60) == ("a 1", True)
    # What raises is told, and the object lives on.
    for how, kind, text in (
        ("raise", "MemoryError", "no room"),
        ("unpicklable", "UnpicklableError", "but it is told"),
    ):
        with pytest.raises(ChildError, match=text) as error:
            process.call("misbehave", how, timeout_s=60)
        assert error.value.kind == kind
    assert process.call("check", "b", schedule, timeout_s=60) == ("b 4", True)
    # A kernel that nobody built is the worker's to report.
    other = spec(WORKS, stages=4).schedule
    assert process.call("check", "c", other, timeout_s=60)[0] == "c 5"


def test_a_process_that_ends_is_replaced(spawn: Callable[[Any], Process]) -> None:
    schedule = spec(WORKS).schedule
    for how, limit_s, raised, message in (
        ("die", 60.0, ChildDied, "process ended during 'misbehave'"),
        ("hang", 0.5, ChildTimeout, "no answer to 'misbehave' in 0.5 s"),
    ):
        process = spawn(CONFIG)
        assert process.call("check", "a", schedule, timeout_s=60) == ("a 1", True)
        with pytest.raises(raised, match=message):
            process.call("misbehave", how, timeout_s=limit_s)
        with pytest.raises(ChildDied):
            process.call("check", "b", schedule, timeout_s=60)
        process.kill()  # harmless


def test_a_factory_that_fails_is_told(spawn: Callable[[Any], Process]) -> None:
    process = spawn(WorkerConfig(problem=SMALL, capacity=64, recipe=Recipe(), seed=-1))
    with pytest.raises(ChildError, match="no such seed") as error:
        process.call("check", "a", spec(WORKS).schedule, timeout_s=60)
    assert error.value.kind == "ValueError"


@needs_ray
def test_the_driver_sends_a_kernel_once(
    node_cache: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[KernelSpec]] = []
    from tl_megamoe.explorer import ray_processes

    pack = ray_processes.pack_kernels
    monkeypatch.setattr(
        ray_processes,
        "pack_kernels",
        lambda specs, store: (sent.append(list(specs)), pack(sent[-1], store))[1],
    )
    wanted = [spec(WORKS, stages=stages) for stages in (3, 4)]
    for one in wanted:
        KernelStore().reports.put(one, build(one))
    process = RayProcess(FakeWorker, CONFIG, num_gpus=0, store=KernelStore())
    for one in (wanted[0], wanted[0], wanted[1], wanted[0]):
        assert process.call("check", "a", one.schedule, timeout_s=60)[1]
    assert sent == [[wanted[0]], [wanted[1]]]
    # A kernel that was lost here cannot be sent: it is that candidate's failure.
    (entry,) = KernelStore().entries_of(KernelStore().reports.get(wanted[0]).source_hash)  # type: ignore[union-attr]
    (entry / "params.json").write_text("[1]")
    other = RayProcess(FakeWorker, CONFIG, num_gpus=0, store=KernelStore())
    with pytest.raises(ChildError, match="is damaged"):
        other.call("check", "a", wanted[0].schedule, timeout_s=60)
    process.kill()
    other.kill()


@needs_ray
def test_the_cluster_is_looked_at_first(
    node_cache: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    with RayExecutor(factory=FakeWorker, build=build) as executor:
        assert executor.num_gpus == 0
        assert executor.gpu_name() is None
        with pytest.raises(ValueError, match="cluster has 0 GPUs, and a GPU process takes 1"):
            executor.spawn(CONFIG)
    with ray_executor(name_gpu=name_gpu) as executor:
        assert executor.num_gpus == 2
        assert executor.farm.jobs == 2
        assert executor.gpu_name() == "NVIDIA H200"
    here = cluster.facts()
    monkeypatch.setattr(cluster, "facts", lambda: {**here, "kernel": "other"})
    monkeypatch.setattr(RayExecutor, "_ask", lambda self, question, of: {"far": here})
    with pytest.raises(ValueError, match=f"ray node far has kernel '{here['kernel']}' and not 'o"):
        ray_executor()
    assert ray.is_initialized()  # it was there before and stays


@needs_ray
def test_gpus_that_differ_are_refused(
    node_cache: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_executor() as executor:
        names = {"a": "NVIDIA H200", "b": None}
        monkeypatch.setattr(executor, "_ask", lambda *args: names)
        with pytest.raises(ValueError, match="differ .a: NVIDIA H200, b: no SM90."):
            executor.gpu_name()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    for make in (RayFarm, lambda: make_executor("ray")):
        with pytest.raises(
            ValueError, match=r"cannot be imported.*pip install 'tl_megamoe\[ray\]'"
        ):
            make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "ray", "rank_mode": "real"}, "ray with --rank-mode real"),
        ({"name": "local", "address": "a:1"}, "--ray-address a:1 needs --executor ray"),
        ({"name": "slurm"}, "executor='slurm' must be 'local' or 'ray'"),
    ],
)
def test_executors_that_there_are_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_executor(**options)


def test_the_local_executor(cache: Path) -> None:
    with make_executor("local", jobs=3, timeout_s=7.0, prebuilt=True) as executor:
        assert (executor.farm.jobs, executor.farm.timeout_s, executor.num_gpus) == (3, 7.0, 1)
        assert {r.status for r in executor.farm.run([spec(WORKS)]).values()} == {NOT_BUILT}
