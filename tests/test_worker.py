"""The GPU worker on the CPU: kernels that are right, wrong, unsteady or broken; rechecks; ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_kernels import loop_ranks

from tl_megamoe import reference
from tl_megamoe.buffer import MegaMoeTimeout
from tl_megamoe.explorer import worker as module
from tl_megamoe.explorer.measure import RemoteBench
from tl_megamoe.explorer.messages import STAGES, WorkerConfig
from tl_megamoe.explorer.protocol import SCREEN_RULES, Block, Measurement, Rules, run_rounds
from tl_megamoe.explorer.ranks import Ranks
from tl_megamoe.explorer.worker import Worker, make_worker
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule, default_schedule
from tl_megamoe.weights import PlainWeights, restore_weights

TINY = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
PAIR = replace(TINY, num_ranks=2)
GOOD = default_schedule(PAIR, 16)

# What the fake kernel does, by rows_in_flight.
RIGHT, WRONG, UNSTEADY, RAISES, NO_KERNEL, TIMES_OUT, NO_MEMORY, DRIFTS = 3, 4, 5, 6, 7, 8, 9, 10


def schedule(behaviour: int) -> Schedule:
    return replace(GOOD, rows_in_flight=behaviour)


class FakeKernel:
    """Computes the layer by the reference, in its fused form or in the last of the phases."""

    def __init__(self, spec: KernelSpec, log: list[tuple[str, int]]):
        self.spec = spec
        self.log = log
        self.launches = 0
        self.arrived: list[tuple[Any, Any, torch.Tensor]] = []

    def launch(self, buffer: Any, weights: Any, y: torch.Tensor, n: int, s: Schedule) -> None:
        self.launches += 1
        behaviour = self.spec.schedule.rows_in_flight
        self.log.append((self.spec.phase, buffer.x.data_ptr()))
        if behaviour == RAISES:
            raise RuntimeError("CUDA error: misaligned address")
        if behaviour == NO_MEMORY:
            raise torch.cuda.OutOfMemoryError("no room")
        if behaviour == TIMES_OUT:
            buffer.report[:10] = torch.tensor([5, buffer.rank, 1, 2, -1, 3, 0, 1, 4, 32])
            raise RuntimeError("CUDA error: illegal address")
        if self.spec.phase not in ("fused", "combine"):
            return
        self.arrived.append((buffer, weights, y))
        if len(self.arrived) < self.spec.problem.num_ranks:
            return  # a rank alone cannot finish
        ranks, self.arrived = self.arrived, []
        assert [b.rank for b, _, _ in ranks] == list(range(len(ranks)))
        parts = [restore_weights(w) for _, w, _ in ranks]
        names = ("l1", "l1_sf", "l2", "l2_sf")
        plain = PlainWeights(*(torch.cat([getattr(p, name) for p in parts]) for name in names))
        for rank, (b, _, out) in enumerate(ranks):
            inputs = [t[:n] for t in (b.x, b.x_sf, b.topk_idx, b.topk_weights)]
            result = reference.moe(self.spec.problem, *inputs, plain, self.spec.recipe)
            if rank == len(ranks) - 1:
                if behaviour == WRONG:
                    result[1] *= 1.5
                if behaviour == UNSTEADY or (
                    behaviour == DRIFTS and self.launches > 2 * len(ranks)
                ):
                    result[0, 0] += result[0, 0].abs() * 0.01 * self.launches + 1e-3
            out.copy_(result)


class FakeBench:
    """Stands for CudaBench."""

    def __init__(self) -> None:
        self.cell: dict[str, Any] = {}
        self.prepare: Any = None

    def forget(self, name: str) -> None:
        self.cell.pop(name, None)

    def warm_up(self, name: str) -> None:
        self.cell[name](0)

    def block(self, name: str) -> Block:
        self.prepare(name)
        for index in range(3):
            self.cell[name](index)
        return Block((1.0,))

    def yardstick(self) -> float:
        return 1.0


def cpu_sets(config: WorkerConfig, device: str) -> list[Ranks]:
    """Ranks whose launches run one after the other."""
    return [loop_ranks(config.problem, config.capacity, config.recipe) for _ in range(3)]


def make(
    phase: str = "fused", problem: Problem = TINY, recipe: Recipe | None = None
) -> tuple[Worker, list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []

    def compile_spec(spec: KernelSpec) -> Any:
        if spec.schedule.rows_in_flight == NO_KERNEL:
            raise RuntimeError("nvcc failed")
        return FakeKernel(spec, log)

    config = WorkerConfig(
        problem=problem,
        capacity=24,
        recipe=recipe or Recipe(),
        rank_mode="one" if problem.num_ranks == 1 else "virtual",
        phase=phase,
    )
    bench: Any = FakeBench()
    worker = Worker(
        config,
        device="cpu",
        compile_spec=compile_spec,
        bench=bench,
        open_sets=cpu_sets if problem.num_ranks > 1 else None,
    )
    return worker, log


@pytest.mark.parametrize("problem", [TINY, PAIR], ids=["one", "virtual"])
@pytest.mark.parametrize("phase", ["fused", "linear1"])
def test_statuses(phase: str, problem: Problem) -> None:
    worker, _ = make(phase, problem)
    ranks = problem.num_ranks
    info = worker.cell(17, "uniform")
    assert (info.touched, info.pairs) == (4, 34 * ranks)
    expected = {
        RIGHT: ("ok", ""),
        WRONG: ("incorrect", f"token {17 * (ranks - 1) + 1} has relative error"),
        UNSTEADY: ("nondeterministic", "1 values differ between two launches"),
        RAISES: ("launch_error", "misaligned address"),
        NO_KERNEL: ("compile_error", "nvcc failed"),
        TIMES_OUT: ("timeout", "pool block 3 waits for linear1"),
        NO_MEMORY: ("oom", "no room"),
    }
    for behaviour, (status, reason) in expected.items():
        for buffer in (b for buffers in worker.buffers for b in buffers):
            buffer.report.zero_()
        found = worker.check(f"c{behaviour}", schedule(behaviour))
        assert (found.status, found.context_lost) == (status, False), found
        assert reason in found.reason
        if status in ("ok", "incorrect", "nondeterministic"):
            assert "rel_error=" in found.observation
    assert set(worker.bench.cell) == {f"c{RIGHT}"}
    assert set(worker.results) == {f"c{RIGHT}"}


def test_three_sets_share_a_routing_and_nothing_else() -> None:
    worker, log = make()
    worker.cell(16, "zipf:1.2")
    a, b, c = (buffers[0] for buffers in worker.buffers)
    assert torch.equal(a.topk_idx[:16], b.topk_idx[:16])
    assert torch.equal(a.topk_weights[:16], c.topk_weights[:16])
    for first, second in ((a, b), (b, c), (a, c)):
        assert not torch.equal(first.x.view(torch.uint8), second.x.view(torch.uint8))
    codes = [ranks[0].l1[0].view(torch.uint8) for ranks in worker.weights]
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[1], codes[2])
    worker.check("a", schedule(RIGHT))
    log.clear()
    worker.block("a")
    assert log == [("fused", buffer.x.data_ptr()) for buffer in (a, b, c)]


def test_ranks_have_their_own_tokens_weights_and_memory() -> None:
    worker, log = make(problem=PAIR)
    info = worker.cell(16, "zipf:1.2")
    routes = []
    for index, (first, second) in enumerate(worker.buffers):
        assert (first.rank, second.rank) == (0, 1)
        assert first.peers.tolist() == [first.raw.data_ptr(), second.raw.data_ptr()]
        assert not torch.equal(first.topk_idx[:16], second.topk_idx[:16])
        assert not torch.equal(first.x.view(torch.uint8), second.x.view(torch.uint8))
        routes.append(torch.cat([first.topk_idx[:16], second.topk_idx[:16]]))
        codes = [worker.weights[index][rank].l1[0].view(torch.uint8) for rank in (0, 1)]
        assert not torch.equal(*codes)
        assert codes[0].shape[0] == PAIR.num_local_experts
    assert torch.equal(routes[0], routes[1])
    assert torch.equal(routes[0], routes[2])
    received = [(routes[0][16:] < 2).sum(), (routes[0][:16] >= 2).sum()]
    assert info.max_remote_pairs == int(max(received))
    assert info.pairs == 64
    worker.check("a", schedule(RIGHT))
    log.clear()
    worker.block("a")
    order = [buffer.x.data_ptr() for buffers in worker.buffers for buffer in buffers]
    assert log == [("fused", address) for address in order]
    assert len(set(order)) == 6


def test_the_weights_of_all_ranks_are_those_of_the_whole_layer() -> None:
    alone, pair = make()[0], make(problem=PAIR)[0]
    for one, two in zip(alone.weights, pair.weights, strict=True):
        whole = one[0].l1[0].view(torch.uint8)
        assert torch.equal(whole, torch.cat([w.l1[0].view(torch.uint8) for w in two]))


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_every_recipe_is_checked_against_itself(recipe: Recipe) -> None:
    worker, _ = make(problem=PAIR, recipe=recipe)
    worker.cell(24, "uniform")
    assert {buffer.recipe for buffers in worker.buffers for buffer in buffers} == {recipe}
    assert worker.check("a", schedule(RIGHT)).status == "ok"
    other = next(r for r in ALL_RECIPES if r.scale != recipe.scale)
    worker.config = replace(worker.config, recipe=other)  # a kernel of another recipe
    assert worker.check("b", schedule(RIGHT)).status == "incorrect"


def test_a_timeout_of_the_second_rank_is_found() -> None:
    worker, _ = make(problem=PAIR)
    worker.cell(16, "uniform")
    second = worker.buffers[1][1]
    second.report[2 * 16 : 2 * 16 + 10] = torch.tensor([2, 1, 3, 0, 0, -1, -1, -1, 4, 5])
    found = worker.check("a", schedule(RAISES))
    assert found.status == "timeout"
    assert "rank 0 has not arrived" in found.reason
    assert "rank 1, block 3" in found.reason


def test_a_grid_that_a_rank_has_no_room_for_is_not_launched() -> None:
    worker, log = make(problem=PAIR)
    worker.cell(16, "uniform")
    worker.buffers[0][0].num_sms = 66
    found = worker.check("a", replace(schedule(RIGHT), num_sms=67))
    assert found.status == "invalid"
    assert found.reason == "num_sms=67 exceeds the 66 SMs that a rank has here"
    assert not log
    assert worker.check("b", replace(schedule(RIGHT), num_sms=66)).status == "ok"


def test_a_phase_alone_needs_all_its_rows_in_memory() -> None:
    worker, log = make("linear2", replace(PAIR, num_topk=256, name="w"))
    worker.cell(24, "uniform")  # 6,144 rows a rank, and a ring of 7/16 of that and a block each
    assert [sum(counts) for counts in worker.received] == pytest.approx([6144] * 2, rel=0.05)
    found = worker.check("a", schedule(RIGHT))
    assert found.status == "invalid"
    assert "phases one after the other have memory for 46 at --capacity 24" in found.reason
    assert "pass --capacity 128 or more" in found.reason
    assert not log
    worker.cell(4, "uniform")
    assert worker.check("a", schedule(RIGHT)).status == "ok"


@pytest.mark.parametrize(
    ("problem", "mode", "phase", "match"),
    [
        (PAIR, "many", "fused", "rank_mode='many' of a worker must be one of one, virtual, real"),
        (PAIR, "one", "fused", "num_ranks=2 of problem 't' with rank_mode='one'"),
        (TINY, "real", "fused", "num_ranks=1 of problem 't' with rank_mode='real'"),
        (PAIR, "real", "linear2", "phase='linear2' with rank_mode='real': .* meet on the host"),
    ],
)
def test_what_a_worker_cannot_be_built_for(
    problem: Problem, mode: str, phase: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        WorkerConfig(problem=problem, capacity=24, recipe=Recipe(), rank_mode=mode, phase=phase)


@pytest.mark.parametrize("problem", [TINY, PAIR], ids=["one", "virtual"])
def test_recheck_sees_a_result_that_moved(problem: Problem) -> None:
    worker, _ = make(problem=problem)
    worker.cell(16, "uniform")
    for name, behaviour in (("right", RIGHT), ("drifts", DRIFTS)):
        assert worker.check(name, schedule(behaviour)).status == "ok"
    for index in (1, 2):  # as the timed launches of any candidate do
        worker._run_once("right", index)
    assert worker.recheck("right").status == "ok"
    found = worker.recheck("drifts")
    assert found.status == "nondeterministic"
    assert "differ after timing" in found.reason
    assert set(worker.results) == {"right"}


def test_a_phase_is_fed_by_the_others_and_timed_alone() -> None:
    worker, log = make("linear2")
    worker.cell(16, "uniform")
    assert worker.check("a", schedule(RIGHT)).status == "ok"
    assert [phase for phase, _ in log] == list(STAGES) * 2
    log.clear()
    worker.block("a")
    assert [phase for phase, _ in log] == list(STAGES) * 3 + ["linear2"] * 3
    assert len({address for _, address in log[-3:]}) == 3


def test_a_new_cell_forgets_the_old_one() -> None:
    worker, _ = make()
    worker.cell(16, "uniform")
    worker.check("a", schedule(RIGHT))
    worker.cell(5, "uniform")
    assert not worker.bench.cell
    assert not worker.kernels
    assert worker.outputs[0].shape == (5, 256)
    assert worker.check("a", schedule(RIGHT)).status == "ok"


@pytest.mark.parametrize("problem", [TINY, PAIR], ids=["one", "virtual"])
def test_a_cell_has_a_seed_and_the_weights_keep_theirs(problem: Problem) -> None:
    worker, _ = make(problem=problem)
    rank = problem.num_ranks - 1

    def drawn() -> list[torch.Tensor]:
        b = worker.buffers[0][rank]
        return [b.topk_idx[:16].clone(), b.x[:16].view(torch.uint8).clone()]

    weights = worker.weights[0][rank].l1[0].view(torch.uint8).clone()
    worker.cell(16, "uniform")
    default = drawn()
    worker.cell(16, "uniform", 5)
    other = drawn()
    assert worker.check("a", schedule(RIGHT)).status == "ok"  # the reference follows
    worker.cell(16, "uniform", 0)  # the config's seed
    assert all(torch.equal(a, b) for a, b in zip(default, drawn(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(default, other, strict=True))
    assert torch.equal(weights, worker.weights[0][rank].l1[0].view(torch.uint8))


def test_a_cell_has_rules() -> None:
    worker, _ = make()
    worker.cell(16, "uniform", None, SCREEN_RULES)
    assert worker.bench.rules == SCREEN_RULES
    worker.cell(16, "uniform")
    assert worker.bench.rules == worker.config.rules == Rules()


@pytest.mark.parametrize("problem", [TINY, PAIR], ids=["one", "virtual"])
def test_large_cells_are_checked_in_some_tokens(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKED_TOKENS", 10)
    worker, _ = make(problem=problem)
    total = 24 * problem.num_ranks
    asked: list[int] = []
    moe = reference.moe

    def counted(problem: Problem, x: torch.Tensor, *args: Any) -> torch.Tensor:
        asked.append(len(x))
        return moe(problem, x, *args)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "moe", counted)
        worker.cell(24, "uniform", 3)
    assert asked == [10]
    assert worker.checked is not None
    chosen = worker.checked.tolist()
    assert chosen == sorted(set(chosen))
    assert worker.check("a", schedule(RIGHT)).status == "ok"
    y = worker.results["a"]
    assert len(y) == total
    bad = y.clone()
    bad[chosen[4]] *= 1.5
    found = worker.compare(bad)
    assert "token 4 has relative error" in found.reason
    assert f"(rows count the 10 of {total} tokens that are checked)" in found.reason
    skipped = next(t for t in range(total) if t not in chosen)
    bad = y.clone()
    bad[skipped] *= 1.5
    assert worker.compare(bad)
    worker.cell(24, "uniform", 4)
    assert worker.checked.tolist() != chosen


@pytest.mark.parametrize(
    ("value", "status", "reason"),
    [
        (float("nan"), "incorrect", "values of tokens that are not checked are NaN or infinite"),
        (None, "nondeterministic", "values differ between two launches"),
    ],
)
def test_the_other_tokens_are_finite_and_steady(
    monkeypatch: pytest.MonkeyPatch, value: float | None, status: str, reason: str
) -> None:
    monkeypatch.setattr(module, "CHECKED_TOKENS", 10)
    worker, _ = make()
    worker.cell(24, "uniform")
    assert worker.checked is not None
    skipped = next(t for t in range(24) if t not in worker.checked.tolist())
    launch, launches = FakeKernel.launch, []

    def breaks(self: FakeKernel, buffer: Any, weights: Any, y: torch.Tensor, *rest: Any) -> None:
        launch(self, buffer, weights, y, *rest)
        launches.append(1)
        y[skipped, 7] = len(launches) if value is None else value

    monkeypatch.setattr(FakeKernel, "launch", breaks)
    found = worker.check("a", schedule(RIGHT))
    assert (found.status, found.reason) == (status, f"1 {reason}")


def test_a_set_that_nothing_was_timed_on_is_not_compared() -> None:
    """In a process that replaced the one that timed, the outputs hold no result."""
    worker, _ = make()
    worker.cell(16, "uniform")
    for name in ("a", "b"):
        assert worker.check(name, schedule(RIGHT)).status == "ok"
    assert worker.recheck("a").status == "ok"
    worker.outputs[2][3, 3] += 1.0
    found = worker.recheck("a")
    assert found.reason == "1 values of set 2 differ after timing"
    assert worker.recheck("b").status == "ok"  # is not blamed for what another left


@pytest.mark.parametrize("problem", [TINY, PAIR], ids=["one", "virtual"])
def test_a_recorded_routing_with_dropped_routes(problem: Problem, tmp_path: Path) -> None:
    total = 16 * problem.num_ranks
    routes = torch.arange(2 * total).view(total, 2) % 3  # expert 3 gets nothing
    routes[::4, 1] = -1
    torch.save(routes, tmp_path / "routes.pt")
    worker, _ = make(problem=problem)
    info = worker.cell(16, f"file:{tmp_path / 'routes.pt'}")
    assert (info.touched, info.pairs) == (3, 2 * total - total // 4)
    assert sum(map(sum, worker.received)) == info.pairs
    assert worker.received[-1][-1] == 0
    assert info.max_pairs == max(map(sum, worker.received))
    assert info.max_touched == (3 if problem is TINY else 2)
    assert worker.check("a", schedule(RIGHT)).status == "ok"


def test_a_launch_that_fails_while_timed_says_what_timed_out() -> None:
    worker, _ = make()
    worker.cell(16, "uniform")
    assert worker.check("a", schedule(RIGHT)).status == "ok"

    def fails(index: int) -> None:
        slot = torch.tensor([5, 0, 1, 2, -1, 3, 0, 1, 4, 32])
        worker.buffers[1][0].report[5 * 16 : 5 * 16 + 10] = slot
        raise RuntimeError("CUDA error: illegal address")

    worker.bench.cell["a"] = fails
    for work in (worker.warm_up, worker.block):
        with pytest.raises(MegaMoeTimeout, match="pool block 3 waits for linear1"):
            work("a")


def test_a_worker_describes_itself() -> None:
    found = make()[0].describe()
    assert found == {"device": "cpu", "torch": torch.__version__, "card": "", "driver": ""}


@pytest.mark.sm90
def test_a_real_worker_checks_and_times() -> None:
    """The default schedule of a small layer through check, timing and recheck on the GPU."""
    problem = replace(TINY, hidden=512, intermediate=256, num_experts=8)
    rules = Rules(rounds=2, warm_up_ms=10.0, min_block_ms=5.0)
    worker = make_worker(WorkerConfig(problem=problem, capacity=1024, recipe=Recipe(), rules=rules))
    info = worker.cell(512, "uniform")
    assert (info.touched, info.pairs) == (8, 1024)
    chosen = default_schedule(problem, 512)
    chosen = replace(chosen, stages=2, prefetch=4)  # a kernel that the other sm90 tests build
    assert worker.check("a", chosen).status == "ok"
    found = run_rounds(worker, ["a"], rules=rules)["a"]
    assert isinstance(found, Measurement)
    assert 1.0 < found.median_us < 1000.0
    assert 300.0 < found.yardstick_tflops < 2500.0
    assert found.end.sm_clock_mhz is None or found.end.sm_clock_mhz > 300.0
    assert worker.recheck("a").status == "ok"
    assert len(worker.describe()["card"]) == 8
    assert not worker.context_lost()


@pytest.mark.sm90
def test_a_real_worker_checks_and_times_virtual_ranks() -> None:
    """Two ranks, in a process of their own: CUDA must start with enough hardware queues."""
    problem = replace(TINY, hidden=512, intermediate=256, num_experts=8, num_ranks=2)
    rules = Rules(rounds=2, warm_up_ms=10.0, min_block_ms=5.0)
    config = WorkerConfig(
        problem=problem, capacity=1024, recipe=Recipe(), rank_mode="virtual", rules=rules
    )
    chosen = replace(default_schedule(problem, 512), stages=2, prefetch=4, num_sms=66)
    bench = RemoteBench(config, control=chosen)
    try:
        info = bench.cell(512, "uniform")
        assert (info.touched, info.pairs) == (8, 2048)
        assert 0 < info.max_remote_pairs < 1024
        checked = bench.check("a", chosen)
        assert checked.status == "ok", checked
        found = run_rounds(bench, ["a"], rules=rules)["a"]
        assert isinstance(found, Measurement), found
        assert 1.0 < found.median_us < 2000.0
        assert bench.recheck("a").status == "ok"
    finally:
        bench.close()
