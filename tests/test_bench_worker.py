"""What the GPU process of `tl-megamoe bench` checks and times, on a fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_bench import TINY

from tl_megamoe import reference
from tl_megamoe.explorer.baselines.base import Layer, Prepared
from tl_megamoe.explorer.baselines.serve import BenchWorker
from tl_megamoe.explorer.baselines.torch_bf16 import TorchBf16
from tl_megamoe.explorer.baselines.unfused import Unfused
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule
from tl_megamoe.weights import restore_weights


class FakeKernel:
    """The layer by the reference, in its fused form or in the last of the phases."""

    def __init__(self, spec: KernelSpec, log: list[str]):
        self.spec = spec
        self.log = log

    def launch(self, buffer: Any, weights: Any, y: torch.Tensor, n: int, s: Schedule) -> None:
        self.log.append(self.spec.phase)
        if self.spec.phase in ("fused", "combine"):
            inputs = [t[:n] for t in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]
            y.copy_(reference.moe(self.spec.problem, *inputs, restore_weights(weights)))


class FakeCudaBench:
    def __init__(self) -> None:
        self.cell: dict[str, Any] = {}
        self.prepare: Any = None
        self.agree: Any = None
        self.meet: Any = None

    def forget(self, name: str) -> None:
        self.cell.pop(name, None)


class Off(TorchBf16):
    """Right at first; wrong or broken as asked."""

    def __init__(self, name: str, factor: float = 1.0, error: Exception | None = None):
        self.name = name
        self.factor = factor
        self.error = error

    def prepare(self, layer: Layer) -> Prepared:
        if self.error is not None:
            raise self.error
        prepared = super().prepare(layer)

        def launch(index: int) -> None:
            prepared.launch(index)
            prepared.outputs[index].mul_(self.factor)

        return Prepared(launch, prepared.outputs, "pieces=fake")


@pytest.fixture
def worker() -> tuple[BenchWorker, list[str]]:
    log: list[str] = []
    baselines: list[Any] = [
        Unfused(),
        Off("right"),
        Off("wrong", 1.5),
        Off("nan", float("nan")),
        Off("broken", error=RuntimeError("no kernel image")),
        Off("large", error=torch.cuda.OutOfMemoryError("no room")),
    ]
    bench: Any = FakeCudaBench()
    compile_spec: Any = lambda spec: FakeKernel(spec, log)  # noqa: E731
    config = WorkerConfig(problem=TINY, capacity=24, recipe=Recipe())
    made = BenchWorker(config, baselines, device="cpu", compile_spec=compile_spec, bench=bench)
    made.cell(17, "zipf:1")
    return made, log


def test_a_baseline_is_checked_like_a_candidate(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    schedule = default_schedule(TINY, 16)
    statuses = {
        "ours": ("ok", ""),
        "right": ("ok", ""),
        "unfused": ("ok", ""),
        "wrong": ("incorrect", "relative error 5.0"),
        "nan": ("incorrect", "values are NaN or infinite on one side"),
        "broken": ("launch_error", "no kernel image"),
        "large": ("oom", "no room"),
    }
    for name, (status, reason) in statuses.items():
        found = made.check(name, schedule)
        assert found.status == status, (name, found)
        assert reason in found.reason
    assert set(made.bench.cell) == {"ours", "right", "unfused"}
    assert set(made.prepared) == {"right", "unfused"}
    assert "pieces=fake" in made.check("right", schedule).observation


def test_unfused_runs_the_phases_in_order_on_its_own_output(
    worker: tuple[BenchWorker, list[str]],
) -> None:
    made, log = worker
    made.check("ours", default_schedule(TINY, 16))
    made.check("unfused", default_schedule(TINY, 16))
    outputs = [y.clone() for y in made.outputs]
    log.clear()
    for index in range(3):
        made.bench.cell["unfused"](index)
    assert log == ["dispatch", "linear1", "linear2", "combine"] * 3
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(outputs, made.outputs, strict=True)
    )
    assert torch.equal(made.prepared["unfused"].outputs[0], made.results["ours"])


def test_recheck_sees_a_baseline_that_went_wrong(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    made.check("right", default_schedule(TINY, 16))
    assert made.recheck("right").status == "ok"
    made.baselines["right"].factor = 1.2  # type: ignore[attr-defined]
    found = made.recheck("right")
    assert found.status == "incorrect"
    assert "relative error" in found.reason
    assert not made.bench.cell


def test_recheck_sees_what_timed_launches_left(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    for index, wrong in ((0, 2.0), (2, torch.nan)):
        made.check("right", default_schedule(TINY, 16))
        made.prepared["right"].outputs[index].mul_(wrong)
        assert made.recheck("right").status == "incorrect"
        assert not made.bench.cell


def test_unfused_that_writes_nothing_is_not_right(
    worker: tuple[BenchWorker, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = worker
    schedule = default_schedule(TINY, 16)
    made.check("ours", schedule)
    monkeypatch.setattr(FakeKernel, "launch", lambda *arguments: None)
    found = made.check("unfused", schedule)
    assert found.status == "incorrect"
    assert "values are NaN or infinite on one side" in found.reason


def test_a_new_cell_forgets_prepared_baselines(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    made.check("right", default_schedule(TINY, 16))
    made.cell(5, "uniform")
    assert not made.prepared
    assert made.check("right", default_schedule(TINY, 16)).status == "ok"
    assert made.prepared["right"].outputs[0].shape == (5, 256)
