"""Virtual ranks as far as they go without a GPU: buffers, addresses, queues, errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tl_megamoe import Problem, Recipe, VirtualGroup
from tl_megamoe import virtual as module
from tl_megamoe.kernel import CompiledKernel
from tl_megamoe.schedule import Schedule
from tl_megamoe.virtual import CONNECTIONS, ensure_connections

SIZES = {"hidden": 256, "intermediate": 128, "num_experts": 48, "num_topk": 3}


def problem(ranks: int) -> Problem:
    return Problem(name="small", num_ranks=ranks, **SIZES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_peers_point_at_each_other(ranks: int) -> None:
    buffers = VirtualGroup(ranks, "cpu").buffers(problem(ranks), 20, timeout_s=3.0)
    bases = [buffer.raw.data_ptr() for buffer in buffers]
    assert len(set(bases)) == ranks
    for rank, buffer in enumerate(buffers):
        assert buffer.rank == rank
        assert buffer.rank_mode == "virtual"
        assert buffer.peers.tolist() == bases
        assert buffer.group is None
        assert buffer.timeout_ms == 3000
        assert not buffer.workspace.any()
        assert (buffer.topk_idx == -1).all()
    sections = buffers[0].layout.sections
    for buffer in buffers:  # base + the same offset is the section of every rank
        assert buffer.layout.sections == sections
        assert buffer.combine_acts.data_ptr() - buffer.raw.data_ptr() == (
            sections["combine_acts"].offset
        )


def test_a_rank_keeps_its_peers_alive() -> None:
    last = VirtualGroup(3, "cpu").buffers(problem(3), 20)[2]
    others = [(torch.zeros(1 << 20), i) for i in range(8)]  # would reuse freed memory
    assert others
    raws = last._keep
    assert [raw.data_ptr() for raw in raws] == last.peers.tolist()


def test_the_recipe_reaches_the_pools() -> None:
    recipe = Recipe(scale="pow2", intermediate_group=64)
    buffer = VirtualGroup(2, "cpu").buffers(problem(2), 20, recipe=recipe)[0]
    assert buffer.recipe == recipe
    assert buffer.l2_acts_sf.shape[0] == SIZES["intermediate"] // 64


@pytest.mark.parametrize("ranks", [0, 17, "4", True, 2.0])
def test_bad_number_of_ranks(ranks: object) -> None:
    with pytest.raises(ValueError, match=r"num_ranks=.* must be an integer in 1\.\.16"):
        VirtualGroup(ranks, "cpu")  # type: ignore[arg-type]


def test_the_problem_must_have_the_ranks_of_the_group() -> None:
    with pytest.raises(ValueError, match=r"num_ranks=4 .* the VirtualGroup, 2\. Make a Virt"):
        VirtualGroup(2, "cpu").buffers(problem(4), 20)
    with pytest.raises(ValueError, match="timeout_s=-1"):
        VirtualGroup(2, "cpu").buffers(problem(2), 20, timeout_s=-1)
    with pytest.raises(ValueError, match="capacity=0"):
        VirtualGroup(2, "cpu").buffers(problem(2), 0)


def test_a_cpu_group_does_not_run() -> None:
    group = VirtualGroup(2, "cpu")
    assert (group.num_sms, group.streams) == (None, ())
    with pytest.raises(RuntimeError, match="VirtualGroup on cpu cannot run"):
        group.run(lambda rank: rank)


@pytest.mark.parametrize("value", [None, "32", "64"])
def test_queues_are_asked_for_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setattr(module.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(CONNECTIONS, value or "")
    if value is None:
        monkeypatch.delenv(CONNECTIONS)
    ensure_connections()
    assert module.os.environ[CONNECTIONS] == (value or "32")


@pytest.mark.parametrize(
    ("started", "value", "message"),
    [
        (
            True,
            None,
            "CUDA_DEVICE_MAX_CONNECTIONS=unset: virtual ranks need 32, and CUDA has start",
        ),
        (True, "8", "CUDA_DEVICE_MAX_CONNECTIONS=8: virtual ranks need 32"),
        (False, "1", "and CUDA would start with that"),
        (False, "many", "CUDA_DEVICE_MAX_CONNECTIONS=many"),
    ],
)
def test_too_few_queues(
    monkeypatch: pytest.MonkeyPatch, started: bool, value: str | None, message: str
) -> None:
    monkeypatch.setattr(module.torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setenv(CONNECTIONS, value or "")
    if value is None:
        monkeypatch.delenv(CONNECTIONS)
    with pytest.raises(RuntimeError) as caught:
        VirtualGroup(2)
    assert message in str(caught.value)
    assert "a kernel can wait behind another" in str(caught.value)
    assert "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before starting python" in str(caught.value)


def test_started_cuda_with_enough_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(CONNECTIONS, "32")
    ensure_connections()


def test_import_leaves_the_environment_alone() -> None:
    code = (
        "import os; os.environ.pop('CUDA_DEVICE_MAX_CONNECTIONS', None); "
        "import tl_megamoe.virtual; assert 'CUDA_DEVICE_MAX_CONNECTIONS' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prepare_wants_one_kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    group = VirtualGroup(2, "cpu")
    buffers = group.buffers(problem(2), 20)
    seen = []

    def prepare(buffer: object, tokens: int, **options: object) -> tuple[CompiledKernel, Schedule]:
        seen.append((tokens, options))
        schedule = Schedule(block_m=128 if tokens > 10 else 64, prefetch=tokens % 3)
        return object.__new__(CompiledKernel), schedule

    monkeypatch.setattr("tl_megamoe.op.prepare", prepare)
    assert len(group.prepare(buffers, 4, token_bound=20)) == 2
    assert seen == [(4, {"token_bound": 20})] * 2
    assert len(group.prepare(buffers, [11, 20])) == 2  # fields that only the walk reads may differ
    with pytest.raises(ValueError, match="the ranks would run different kernels"):
        group.prepare(buffers, [4, 20])
    with pytest.raises(ValueError, match="zip"):
        group.prepare(buffers, [4])
