"""The ranks behind one interface, on the CPU: one, virtual, and two processes that meet."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import pytest
import torch
from fake_kernels import fake_layer, loop_ranks

from tl_megamoe.buffer import MegaMoeTimeout, SymmBuffer
from tl_megamoe.explorer import ranks as module
from tl_megamoe.explorer.ranks import OneRank, RankFailed, RealRanks, open_ranks
from tl_megamoe.problem import Problem
from tl_megamoe.timeouts import REPORT_SLOT

ONE = Problem(name="t", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=1)
THREE = Problem(name="t", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=3)


def test_one_rank() -> None:
    ranks = open_ranks(ONE, 8, mode="one", device="cpu", timeout_s=3.0)
    assert (ranks.here, ranks.mode, ranks.num_ranks, ranks.leads) == ((0,), "one", 1, True)
    assert ranks.first.timeout_s == 3.0
    seen: list[int] = []
    ranks.run(seen.append)
    ranks.barrier()
    assert seen == [0]
    assert ranks.gather({0: "a"}) == ["a"]
    assert ranks.in_turn(lambda: 7) == 7


def test_virtual_ranks() -> None:
    ranks = open_ranks(THREE, 8, mode="virtual", device="cpu")
    assert (ranks.here, ranks.mode) == ((0, 1, 2), "virtual")
    assert len({b.raw.data_ptr() for b in ranks.buffers.values()}) == 3
    assert ranks.buffers[2].peers.tolist() == [b.raw.data_ptr() for b in ranks.buffers.values()]
    assert ranks.gather({2: "c", 0: "a", 1: "b"}) == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="cannot run"):
        ranks.run(lambda rank: None)


def test_unknown_mode_and_missing_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode='many' of ranks must be one of one, virtual, real"):
        open_ranks(ONE, 8, mode="many")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, LOCAL_RANK is not set"):
        open_ranks(THREE, 8, mode="real")


def test_a_failed_launch_is_a_timeout_if_a_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(OneRank):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda")

    def broken(device: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    buffer = SymmBuffer(ONE, 8, "cpu")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        OnGpu(ONE, {0: buffer}).synchronize()
    slot = torch.tensor([4, 0, 1, 2, -1, 3, 5, 0, 10, 32], dtype=torch.int32)
    buffer.report[4 * REPORT_SLOT : 4 * REPORT_SLOT + len(slot)] = slot
    with pytest.raises(MegaMoeTimeout, match="pool block 3 waits for its tokens"):
        OnGpu(ONE, {0: buffer}).barrier()


def test_inputs_are_one_draw_for_all_ranks() -> None:
    layer = fake_layer(loop_ranks(THREE, 64))
    layer.fill([5, 0, 60], 3, "hot1")
    assert layer.num_tokens == (5, 0, 60)
    experts = torch.cat([i.topk_idx.flatten() for i in layer.inputs])
    assert experts.unique().numel() == 1
    for rank, buffer in layer.ranks.buffers.items():
        n = layer.num_tokens[rank]
        assert torch.equal(buffer.topk_idx[:n], layer.inputs[rank].topk_idx)
        assert (buffer.topk_idx[n:] == 2**40).all()
        assert buffer.topk_weights[n:].isnan().all()
    rows = sum(sum(layer.counts(rank)) for rank in range(3))
    assert rows == 65 * 2
    with pytest.raises(ValueError, match="2 inputs for 3 ranks"):
        layer.set(layer.inputs[:2])


def test_received_rows_are_every_route_once() -> None:
    layer = fake_layer(loop_ranks(THREE, 64))
    layer.fill([17, 0, 40], 3, mask=0.3)
    seen = []
    for rank in range(3):
        received = layer.received(rank)
        pool = received.pool
        assert pool.counts == layer.counts(rank)
        for n in range(len(pool.x)):
            inputs = layer.inputs[int(received.source[n])]
            token, slot = int(pool.token[n]), int(pool.slot[n])
            assert int(inputs.topk_idx[token, slot]) == rank * 2 + int(pool.expert[n])
            assert torch.equal(inputs.x_sf[token], pool.x_sf[n])
            seen.append((int(received.source[n]), token, slot))
        order = [(int(e), int(s)) for e, s in zip(pool.expert, received.source, strict=True)]
        assert order == sorted(order)
    total = sum(int((i.topk_idx >= 0).sum()) for i in layer.inputs)
    assert len(set(seen)) == len(seen) == total


# ---- two processes


def _process(rank: int, port: int, results: Any) -> None:

    import torch.distributed as dist

    os.environ.update(LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    problem = Problem(
        name="t", hidden=128, intermediate=128, num_experts=2, num_topk=1, num_ranks=2
    )
    view = SymmBuffer(problem.one_rank(), 4, "cpu")
    ranks = RealRanks(problem, {rank: view})
    out: dict[str, Any] = {"gather": ranks.gather({rank: f"r{rank}"}), "here": ranks.here}
    turns: list[str] = []
    out["turn"] = ranks.in_turn(lambda: turns.append("worked") or rank)
    ranks.run(lambda r: turns.append(f"launch {r}"))
    out["turns"] = turns
    ranks.barrier()

    def fails() -> int:
        raise ValueError(f"rank {rank} cannot")

    for name, bad in (("first", 0), ("second", 1)):
        try:
            ranks.in_turn(fails if rank == bad else lambda: 1)
        except (RankFailed, ValueError) as error:
            out[name] = (type(error).__name__, str(error))
    out["after"] = module.exchange(rank)
    results.put((rank, out))
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # all is said; the threads of libraries need not end in order


def test_two_processes_meet_and_fail_together() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_process, args=(r, port, results)) for r in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    for rank in range(2):
        assert found[rank]["gather"] == ["r0", "r1"]
        assert found[rank]["here"] == (rank,)
        assert found[rank]["turn"] == rank
        assert found[rank]["turns"] == ["worked", f"launch {rank}"]
        assert found[rank]["after"] == [0, 1]
    for name, bad in (("first", 0), ("second", 1)):
        own = ("ValueError", f"rank {bad} cannot")
        assert found[bad][name] == own
        assert found[1 - bad][name] == ("RankFailed", f"rank {bad}: ValueError: rank {bad} cannot")
