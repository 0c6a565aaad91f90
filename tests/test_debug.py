"""Debug buffers on a CPU: guards, poisoned pools, routes looked at before a launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_cases import SMALL, small

from tl_megamoe import BufferOverwrittenError, SymmBuffer, VirtualGroup, fp8_mega_moe, mega_moe
from tl_megamoe import virtual as virtual_module
from tl_megamoe.debug import GUARD_CODE
from tl_megamoe.kernel import CompiledKernel, KernelSpec
from tl_megamoe.schedule import default_schedule
from tl_megamoe.synthetic import random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, transform_weights

CAPACITY = 32
POOLS = ("l1_acts", "l1_acts_sf", "l1_topk_weights", "l2_acts", "l2_acts_sf")
PEERS_WRITE = ("combine_acts", "src_routes")
ON_TWO = small(num_ranks=2)


@pytest.fixture(scope="module")
def weights() -> MoEWeights:
    plain = random_weights(SMALL)
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), SMALL)


def load(buffer: SymmBuffer, work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Give a CPU buffer a kernel that does `work`; returns where its launches are taken down."""
    launches: list[tuple[Any, ...]] = []

    def run(*values: Any) -> None:
        launches.append(values)
        work()

    problem, schedule = buffer.problem, default_schedule(buffer.problem, 8)
    spec = KernelSpec(problem=problem, schedule=schedule, capacity=CAPACITY)
    for bound in (8, CAPACITY):
        chosen = default_schedule(problem, bound)
        buffer.kernels[chosen, False, True] = CompiledKernel(spec, run)
    return launches


@pytest.fixture
def buffer() -> SymmBuffer:
    return SymmBuffer(SMALL, CAPACITY, device="cpu", debug=True)


def call(buffer: SymmBuffer, weights: MoEWeights, tokens: int = 8) -> None:
    y = torch.empty(tokens, SMALL.hidden, dtype=torch.bfloat16)
    fp8_mega_moe(y, weights.l1, weights.l2, buffer)


def test_guards_surround_every_section(buffer: SymmBuffer) -> None:
    guards = sorted(buffer.layout.guards.values())
    sections = sorted(s.offset for s in buffer.layout.sections.values())
    assert guards[0][0] == 0
    for offset, (start, length), (behind, _) in zip(sections, guards, guards[1:], strict=False):
        assert start + length <= offset < behind
        assert length >= 1024
    assert len(guards) == len(sections) + 1
    for start, length in guards:
        assert (buffer.raw[start : start + length] == GUARD_CODE).all()
    buffer.check_guards()


@pytest.mark.parametrize("end", [0, -1], ids=["first", "last"])
def test_a_write_into_any_guard_is_named(buffer: SymmBuffer, end: int) -> None:
    for name, (start, length) in buffer.layout.guards.items():
        at = start if end == 0 else start + length - 1
        buffer.raw[at] = 7
        with pytest.raises(BufferOverwrittenError, match=f"guard {name!r} was overwritten") as told:
            buffer.check_guards()
        error = told.value
        assert (error.guard, error.offset, error.value) == (name, at, 7)
        assert f"byte {at} of the buffer is 0x07, not 0xc5" in str(error)
        buffer.check_guards()  # told once


def test_the_first_of_several_is_named_with_its_neighbours(buffer: SymmBuffer) -> None:
    section = buffer.layout.sections["l1_acts"]
    end = section.offset + section.num_bytes
    for at in (end + 5, end + 900):
        buffer.raw[at] = 0
    start, length = buffer.layout.guards[max(buffer.layout.guards)]
    buffer.raw[start : start + length] = 1
    with pytest.raises(BufferOverwrittenError) as told:
        buffer.check_guards()
    assert told.value.offset in (end + 5, start)
    if told.value.offset == end + 5:
        assert "(5 bytes behind l1_acts, " in str(told.value)
        assert "bytes before l1_acts_sf)" in str(told.value)


def test_a_launch_that_writes_outside_is_told_and_the_next_is_not(
    buffer: SymmBuffer, weights: MoEWeights
) -> None:
    start, _ = buffer.layout.guards[next(iter(buffer.layout.guards))]
    wrong = [True]
    launches = load(buffer, lambda: buffer.raw[start].fill_(9) if wrong else None)
    for _ in range(2):  # checked in full, then as known
        with pytest.raises(BufferOverwrittenError, match="0x09"):
            call(buffer, weights)
    wrong.clear()
    call(buffer, weights)
    assert len(launches) == 3


def test_pools_are_poisoned_before_each_launch(buffer: SymmBuffer, weights: MoEWeights) -> None:
    seen: list[bool] = []

    def look() -> None:
        pools = (*POOLS, "combine_acts")
        seen.append(all(getattr(buffer, n).float().isnan().all() for n in pools))
        seen.append(bool((buffer.token_src_metadata == -1).all()))
        seen.append(bool((buffer.src_routes == -1).all()))
        for name in pools:
            getattr(buffer, name).view(torch.uint8).fill_(0)  # what a launch leaves
        buffer.src_routes.zero_()

    load(buffer, look)
    inputs = random_inputs(SMALL, 8)
    buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    buffer.workspace.fill_(3)
    buffer.recv_stats.fill_(4)
    for _ in range(2):
        call(buffer, weights)
    assert seen == [True] * 6
    assert torch.equal(buffer.x[:8].view(torch.uint8), inputs.x.view(torch.uint8))
    assert torch.equal(buffer.topk_idx[:8], inputs.topk_idx)
    assert (buffer.workspace == 3).all()
    assert (buffer.recv_stats == 4).all()


@pytest.mark.parametrize("value", [-2, SMALL.num_experts, 2**32 + 3, 2**63 - 1, -(2**63)])
def test_a_route_to_no_expert_is_refused_before_the_launch(
    buffer: SymmBuffer, weights: MoEWeights, value: int
) -> None:
    launches = load(buffer, lambda: None)
    inputs = random_inputs(SMALL, 8)
    buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    buffer.topk_idx[0, 0] = -1  # no route
    buffer.topk_idx[8:] = value  # rows that no launch reads
    call(buffer, weights)
    buffer.topk_idx[5, 1] = value
    buffer.topk_idx[7, 0] = value
    with pytest.raises(ValueError, match=rf"topk_idx\[5, 1\]={value} of SymmBuffer") as told:
        call(buffer, weights)
    assert "must be an expert, 0 to num_experts - 1 = 7, or -1 for no route" in str(told.value)
    assert "2 of 24 routes are neither" in str(told.value)
    assert len(launches) == 1
    buffer.topk_idx[:8] = inputs.topk_idx
    call(buffer, weights)
    call(buffer, weights, 0)
    assert len(launches) == 3


def test_the_function_form_is_checked_too(buffer: SymmBuffer, weights: MoEWeights) -> None:
    load(buffer, lambda: None)
    inputs = random_inputs(SMALL, 8)
    given = (inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights, weights, buffer)
    mega_moe(*given)
    inputs.topk_idx[3, 0] = 8
    with pytest.raises(ValueError, match=r"topk_idx\[3, 0\]=8"):
        mega_moe(*given)


def test_without_debug_nothing_is_looked_at(weights: MoEWeights) -> None:
    buffer = SymmBuffer(SMALL, CAPACITY, device="cpu")
    assert buffer.debug is None
    launches = load(buffer, lambda: None)
    buffer.topk_idx.fill_(99)
    call(buffer, weights)
    assert len(launches) == 1
    assert not buffer.raw[: buffer.layout.guards[next(iter(buffer.layout.guards))][1]].any()
    with pytest.raises(ValueError, match="has no guards to look at: make it with debug=True"):
        buffer.check_guards()


def test_a_capture_is_left_alone(
    buffer: SymmBuffer, weights: MoEWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = load(buffer, lambda: None)
    monkeypatch.setattr("tl_megamoe.debug.is_capturing", lambda _: True)
    buffer.topk_idx.fill_(99)
    buffer.raw[0] = 0
    buffer.l1_acts.view(torch.uint8).fill_(1)
    call(buffer, weights)
    assert len(launches) == 1
    assert (buffer.l1_acts.view(torch.uint8) == 1).all()
    with pytest.raises(BufferOverwrittenError):
        buffer.check_guards()


def test_a_debug_buffer_goes(weights: MoEWeights) -> None:
    made = SymmBuffer(SMALL, CAPACITY, device="cpu", debug=True)
    load(made, lambda: None)
    call(made, weights)
    debug, alive = weakref.ref(made.debug), weakref.ref(made)
    made.destroy()
    assert debug() is None
    del made
    assert alive() is None


# ---- several ranks


def test_ranks_poison_what_peers_do_not_write(weights: MoEWeights) -> None:
    """A peer may be in the launch already, and write."""
    first = VirtualGroup(2, "cpu").buffers(ON_TWO, CAPACITY, debug=True)[0]
    own = MoEWeights((weights.l1[0][:4], weights.l1[1][:4]), (weights.l2[0][:4], weights.l2[1][:4]))
    seen: list[bool] = []

    def look() -> None:
        seen.extend(bool(getattr(first, n).float().isnan().all()) for n in POOLS)
        seen.extend(bool((getattr(first, n) == 5).all()) for n in PEERS_WRITE)

    load(first, look)
    for name in PEERS_WRITE:
        getattr(first, name).fill_(5)
    call(first, own)
    assert len(seen) == len(POOLS) + len(PEERS_WRITE)
    assert all(seen)


def test_virtual_ranks_are_looked_at_when_all_are_launched(
    weights: MoEWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for the first rank alone would be to wait for ever."""
    group = VirtualGroup(2, "cpu")
    buffers = group.buffers(ON_TWO, CAPACITY, debug=True)
    own = MoEWeights((weights.l1[0][:4], weights.l1[1][:4]), (weights.l2[0][:4], weights.l2[1][:4]))
    running: list[int] = []
    stream = SimpleNamespace(wait_event=lambda _: None, wait_stream=lambda _: None)
    event = SimpleNamespace(record=lambda _: None)
    fake = SimpleNamespace(
        current_stream=lambda _: stream, stream=lambda _: nullcontext(), Event=lambda: event
    )
    monkeypatch.setattr(virtual_module, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(group, "streams", (stream, stream))
    end = buffers[1].raw.numel() - 1

    def work(rank: int) -> None:
        running.append(rank)
        if rank == 0:
            buffers[1].raw[end] = 0  # a peer's guard

    for rank, made in enumerate(buffers):
        load(made, lambda rank=rank: work(rank))

    def launch(rank: int) -> None:
        call(buffers[rank], own)
        assert running[-1] == rank

    with pytest.raises(BufferOverwrittenError, match="rank=1 of 2") as told:
        group.run(launch)
    assert running == [0, 1]
    assert told.value.offset == end
    group.run(lambda _: None)  # nothing was launched
    assert not any(made.debug is not None and made.debug.due for made in buffers)


def test_the_host_memory_of_the_checks_is_on_the_host() -> None:
    """Whatever torch's default device is."""
    with torch.device("meta"):
        made = SymmBuffer(SMALL, CAPACITY, device="cpu", debug=True)
        made.check_guards()
    at, _ = made.layout.guards["x"]
    made.raw[at] = 0
    with pytest.raises(BufferOverwrittenError):
        made.check_guards()
