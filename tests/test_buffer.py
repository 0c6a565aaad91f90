"""The symmetric buffer on a CPU: views, counters, inputs, reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_megamoe
from tl_megamoe import MegaMoeTimeout, Problem, Recipe, SymmBuffer, VirtualGroup
from tl_megamoe.buffer import check_reports
from tl_megamoe.synthetic import Inputs, random_inputs
from tl_megamoe.timeouts import REPORT_FIELDS, REPORT_SLOT, TIMEOUT_TAGS

PROBLEM = Problem(
    name="small", hidden=256, intermediate=128, num_experts=5, num_topk=3, num_ranks=1
)


@pytest.fixture
def buffer() -> SymmBuffer:
    return SymmBuffer(PROBLEM, 40, device="cpu", timeout_s=2.5)


def test_views_lie_where_the_layout_says(buffer: SymmBuffer) -> None:
    base = buffer.raw.data_ptr()
    for name, section in buffer.layout.sections.items():
        view = getattr(buffer, name)
        assert view.data_ptr() == base + section.offset
        assert tuple(view.shape) == section.shape
        assert str(view.dtype) == f"torch.{section.dtype}"
        assert view.is_contiguous()
    for name, length in (
        ("expert_recv_count_sum", 5),
        ("l1_arrival_count", buffer.layout.max_pool_blocks),
        ("l2_arrival", buffer.layout.max_pool_blocks),
        ("l2_done", buffer.layout.max_pool_blocks),
        ("dispatch_signal", 32),
        ("combine_signal", 32),
    ):
        view = getattr(buffer, name)
        offset = buffer.layout.workspace_offsets[name]
        assert view.data_ptr() == buffer.workspace.data_ptr() + 4 * offset
        assert tuple(view.shape) == (length,)
    assert buffer.peers.tolist() == [base]
    assert (buffer.rank, buffer.rank_mode, buffer.group) == (0, "one", None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("group", [128, 64])
def test_allocated_bytes_are_the_printed_formula(ranks: int, group: Any) -> None:
    problem = replace(PROBLEM, num_experts=8, num_ranks=ranks)
    recipe = Recipe(intermediate_group=group)
    if ranks == 1:
        buffer = SymmBuffer(problem, 40, device="cpu", recipe=recipe)
    else:
        buffer = VirtualGroup(ranks, "cpu").buffers(problem, 40, recipe=recipe)[-1]
    assert buffer.recipe == recipe
    assert buffer.raw.numel() == buffer.num_bytes == buffer.layout.num_bytes
    lines = buffer.describe().splitlines()
    assert f": {buffer.num_bytes:,} bytes" in lines[0]
    end, sizes = 0, 0
    for line in lines[1 : 1 + len(buffer.layout.sections)]:  # name, bytes, at, offset, ...
        name, size, _, offset = line.split()[:4]
        assert getattr(buffer, name).nbytes == number(size)
        assert end + 1024 <= number(offset) < end + 2048  # the guard before it
        assert number(offset) % 1024 == 0
        end, sizes = number(offset) + number(size), sizes + number(size)
    assert end + 1024 <= buffer.raw.numel() < end + 2048
    terms = re.findall(r"(?<= )[\d,]+(?= )", lines[len(buffer.layout.sections) + 1])
    symmetric, local, padding, total = map(number, terms[:4])
    assert symmetric + local == sizes
    assert symmetric + local + padding == total == buffer.raw.numel()


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_starts_with_no_routes_and_zero_counters(buffer: SymmBuffer) -> None:
    assert (buffer.topk_idx == -1).all()
    assert not buffer.workspace.any()
    assert not buffer.recv_stats.any()
    assert buffer.timeout_ms == 2500


def test_poison_leaves_inputs_and_counters(buffer: SymmBuffer, seed: int) -> None:
    inputs = random_inputs(PROBLEM, 40, seed=seed)
    fill(buffer, inputs)
    buffer.poison()
    assert torch.equal(buffer.x.view(torch.uint8), inputs.x.view(torch.uint8))
    assert torch.equal(buffer.topk_idx, inputs.topk_idx)
    assert not buffer.workspace.any()
    for name in ("l1_acts", "l2_acts", "l1_acts_sf", "l2_acts_sf", "combine_acts"):
        assert getattr(buffer, name).float().isnan().all()
    assert (buffer.token_src_metadata == -1).all()


def test_poison_of_a_rank_reaches_its_ring_and_leaves_signals_and_siblings(seed: int) -> None:
    problem = replace(PROBLEM, num_experts=8, num_ranks=4)
    first, second = VirtualGroup(4, "cpu").buffers(problem, 400)[:2]
    assert first.layout.ring_rows < first.layout.pool_rows
    first.workspace.fill_(7)
    before = second.raw.clone()
    first.poison()
    assert (first.workspace == 7).all()
    for name in ("l1_acts", "l2_acts", "l1_acts_sf", "l2_acts_sf", "l1_topk_weights"):
        assert getattr(first, name).float().isnan().all()
    assert torch.equal(second.raw, before)
    fill(second, random_inputs(replace(problem, num_ranks=1), 3, seed=seed))
    assert (first.topk_idx == -1).all()


def fill(buffer: SymmBuffer, inputs: Inputs) -> int:
    return buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_fill(buffer: SymmBuffer, seed: int, tokens: int) -> None:
    inputs = random_inputs(PROBLEM, tokens, seed=seed)
    assert fill(buffer, inputs) == tokens
    assert torch.equal(buffer.x[:tokens].view(torch.uint8), inputs.x.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:tokens], inputs.x_sf)
    assert torch.equal(buffer.topk_weights[:tokens], inputs.topk_weights)
    assert (buffer.topk_idx[tokens:] == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_sf": torch.ones(4, 3)}, r"x_sf of shape \(4, 3\) must be \(tokens, hidden/128\)"),
        ({"topk_idx": torch.zeros(4, 3, dtype=torch.int32)}, "topk_idx of dtype torch.int32"),
        ({"topk_idx": torch.zeros(3, 3, dtype=torch.int64)}, r"topk_idx of shape \(3, 3\)"),
        ({"topk_weights": torch.ones(4, 3).double()}, "topk_weights of dtype torch.float64"),
        ({"x": torch.ones(4, 256)}, "x of dtype torch.float32"),
        ({"x": torch.ones(256)}, r"x must have shape .*, found \(256,\)"),
        ({"x_sf": torch.ones(4, 2, device="meta")}, "x_sf is on meta"),
    ],
)
def test_fill_refuses(
    buffer: SymmBuffer, seed: int, change: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fill(buffer, replace(random_inputs(PROBLEM, 4, seed=seed), **change))
    assert (buffer.topk_idx == -1).all()  # nothing is copied unless all is right


def test_capacity_plus_one(buffer: SymmBuffer) -> None:
    with pytest.raises(ValueError, match="41 tokens, more than capacity=40"):
        fill(buffer, random_inputs(PROBLEM, 41))


def test_more_ranks_name_the_other_makers() -> None:
    with pytest.raises(ValueError, match="num_ranks=8") as caught:
        SymmBuffer(tl_megamoe.PRESETS["mimo-v2.5"], 4, device="cpu")
    for maker in ("SymmBuffer.from_process_group", "VirtualGroup(8)", "problem.one_rank()"):
        assert maker in str(caught.value)
    with pytest.raises(ValueError, match="timeout_s=0"):
        SymmBuffer(PROBLEM, 4, device="cpu", timeout_s=0)
    with pytest.raises(ValueError, match="timeout_s='60' must be a positive number"):
        SymmBuffer(PROBLEM, 4, device="cpu", timeout_s="60")  # type: ignore[arg-type]


def test_a_process_group_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first, in a process that torchrun"):
        SymmBuffer.from_process_group(PROBLEM, 4, device="cpu")


def test_destroy_frees_the_memory(buffer: SymmBuffer) -> None:
    buffer.destroy()
    assert not [name for name, value in vars(buffer).items() if isinstance(value, torch.Tensor)]


def report(buffer: SymmBuffer, tag: int, **fields: int) -> None:
    """What the device writes when a wait times out; -1 where a field does not apply."""
    values = [tag, *(fields.get(name, -1) for name in REPORT_FIELDS[1:])]
    start = tag * REPORT_SLOT
    buffer.report[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)


AT = {"rank": 0, "block": 17, "thread": 96, "have": 14, "want": 32}


def caught_by(buffers: tuple[SymmBuffer, ...]) -> MegaMoeTimeout:
    with pytest.raises(MegaMoeTimeout) as caught:
        check_reports(buffers)
    return caught.value


def test_report(buffer: SymmBuffer) -> None:
    buffer.check_report()
    report(buffer, 5, **AT, pool_block=3, expert=2, tile=6)
    report(buffer, 6, **{**AT, "have": 9, "want": 132})
    with pytest.raises(MegaMoeTimeout, match="linear2: pool block 3 waits for linear1") as caught:
        buffer.check_report()
    parts = ("rank 0", "block 17", "thread 96", "counted 14 of 32", "2.5 s", "behind it: combine")
    for part in (*parts, "expert 2, tile 6"):
        assert part in str(caught.value)
    error = caught.value
    assert (error.phase, error.rank, error.pool_block) == ("linear2", 0, 3)
    assert (error.expert, error.tile, error.have, error.want) == (2, 6, 14, 32)
    assert error.peer is None
    report(buffer, 2, **AT, peer=5)
    error = caught_by((buffer,))
    assert (error.phase, error.peer, error.expert, error.tile) == ("dispatch", 5, None, None)
    assert "dispatch: rank 5 has not arrived with its counts" in str(error)
    assert "counted 14 of 32 launches" in str(error)
    buffer.report[15 * REPORT_SLOT] = 99
    assert str(caught_by((buffer,))).startswith("dispatch")  # what nobody knows comes last
    buffer.report[: 15 * REPORT_SLOT] = 0
    assert "tag 99" in str(caught_by((buffer,)))


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        # linear1 of block 2 never ends: dispatch cannot reuse its rows, linear2 cannot start.
        ([(3, 10), (5, 2), (8, 10)], "linear2: pool block 2 waits for linear1"),
        ([(5, 2), (4, 2)], "linear1: pool block 2 waits for its tokens"),
        ([(3, 10), (4, 10), (8, 9)], "linear1: pool block 9 waits for linear2 to free"),
        ([(4, 10), (3, 10)], "dispatch: pool block 10 waits for linear1 to free"),
        ([(7, -1), (4, 31)], "linear1: pool block 31 waits for its tokens"),
    ],
)
def test_the_earliest_cause_is_named(
    buffer: SymmBuffer, waits: list[tuple[int, int]], cause: str
) -> None:
    for tag, block in waits:
        report(buffer, tag, **AT, pool_block=block)
    assert str(caught_by((buffer,))).startswith(cause)


def test_ranks_that_share_a_gpu_report_together() -> None:
    problem = replace(PROBLEM, num_experts=8, num_ranks=4)
    buffers = VirtualGroup(4, "cpu").buffers(problem, 4)
    check_reports(buffers)
    report(buffers[0], 7, **AT, peer=2)
    report(buffers[1], 7, **{**AT, "rank": 1}, peer=2)
    report(buffers[2], 7, **{**AT, "rank": 2}, peer=2)
    error = caught_by(buffers)  # rank 2 holds the others up
    assert (error.phase, error.rank, error.peer) == ("combine", 2, 2)
    assert "combine: not all blocks of this rank have written their rows" in str(error)
    assert "stuck behind it: rank 0 combine, rank 1 combine" in str(error)
    report(buffers[3], 4, **{**AT, "rank": 3}, pool_block=1, expert=0, tile=0)
    error = caught_by(buffers)
    assert (error.phase, error.rank, error.pool_block) == ("linear1", 3, 1)
    assert "did CUDA start without CUDA_DEVICE_MAX_CONNECTIONS=32, or did a rank" in str(error)
    buffers[0].report.zero_()
    buffers[0].check_report()


def test_every_tag_of_the_device_code_has_a_text() -> None:
    source = Path(tl_megamoe.__file__).with_name("device") / "barriers.py"
    tags = re.findall(r"^TAG_\w+ = (\d+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert tags
    assert {int(tag) for tag in tags} == set(TIMEOUT_TAGS)


def test_describe(buffer: SymmBuffer) -> None:
    assert f"{buffer.num_bytes:,} bytes" in buffer.describe()
    assert "rank 0 of 1, mode one, on cpu" in buffer.describe()
    assert "capacity=40" in repr(buffer)
    problem = replace(PROBLEM, num_experts=8, num_ranks=4)
    rank = VirtualGroup(4, "cpu").buffers(problem, 4)[3]
    assert "rank 3 of 4, mode virtual, on cpu" in rank.describe()
    assert "rank=3 of 4 (virtual)" in repr(rank)


def test_inputs_can_be_written_in_compiled_code(buffer: SymmBuffer) -> None:
    """Views of one storage with different dtypes could not; they are part of `raw` even so."""

    def fill(x: torch.Tensor, sf: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
        buffer.x[:2] = x
        buffer.x_sf[:2] = sf
        buffer.topk_idx[:2] = idx
        buffer.topk_weights[:2] = weights

    p = buffer.problem
    x = torch.ones(2, p.hidden).to(torch.float8_e4m3fn)
    values = (x, torch.full((2, p.hidden // 128), 2.0), torch.full((2, p.num_topk), 3))
    torch._dynamo.reset()
    torch.compile(fill, fullgraph=True, backend="aot_eager")(
        *values, torch.full_like(values[2], 4.0, dtype=torch.float32)
    )
    for name, value in zip(("x", "x_sf", "topk_idx", "topk_weights"), (1, 2, 3, 4), strict=True):
        view = getattr(buffer, name)
        assert (view[:2].float() == value).all()
        section = buffer.layout.sections[name]
        held = buffer.raw[section.offset : section.offset + section.num_bytes]
        assert torch.equal(held, view.contiguous().view(torch.uint8).flatten())
