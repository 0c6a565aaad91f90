"""The example of a serving loop, on a CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from example_modules import CPU, run_main, serving
from example_modules import one_thread as one_thread
from torch import Tensor, nn


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    made: nn.ModuleList = serving.make_layers(serving.SMALL, 64, CPU, backend="reference")
    return made


def make_engine(layers: nn.ModuleList, capacity: int = 64) -> Any:
    buckets = serving.make_buckets(capacity)
    return serving.Engine(layers, serving.SMALL.hidden, buckets, CPU, graphs=False)


def test_buckets() -> None:
    assert serving.make_buckets(2048) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert serving.make_buckets(300)[-2:] == (256, 300)
    assert serving.make_buckets(1) == (1,)


def test_layers_share_a_buffer_and_have_other_weights(layers: nn.ModuleList) -> None:
    first, second = (layer.moe for layer in layers)
    assert first.buffer is second.buffer
    assert not torch.equal(first.l1.view(torch.uint8), second.l1.view(torch.uint8))
    assert first.l1_sf.min() > 0


def test_engine_equals_the_layers_whatever_the_rows_behind_hold(
    layers: nn.ModuleList, seed: int
) -> None:
    engine = make_engine(layers)
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int) -> Tensor:
        return torch.randn((count, serving.SMALL.hidden), generator=generator).bfloat16()

    engine.step(rows(64), 64)
    engine.x[20:] = torch.nan  # what an earlier step may have left
    for num_tokens, most in ((5, 5), (8, 8), (3, 20), (0, 1), (0, 16)):
        x = rows(num_tokens)
        y = engine.step(x, most)
        bucket = engine.bucket_of(most)
        expected = torch.zeros((bucket, serving.SMALL.hidden), dtype=torch.bfloat16)
        expected[:num_tokens] = x
        for layer in layers:
            expected = layer(expected, torch.tensor(num_tokens), bucket)
        assert torch.equal(y, expected[:num_tokens]), (num_tokens, most)
        if num_tokens:  # the layers did something
            assert (y.float() - x.float()).norm() > 0.1 * x.float().norm()


def test_padded_rows_reach_no_expert(layers: nn.ModuleList) -> None:
    buffer = layers[0].moe.buffer
    x = torch.randn((8, serving.SMALL.hidden), generator=torch.Generator().manual_seed(1))
    buffer.recv_stats.zero_()
    layers[0](x.bfloat16(), torch.tensor(3), 8)
    assert int(buffer.recv_stats.sum()) == 3 * serving.SMALL.num_topk


def test_a_step_over_the_capacity_is_refused(layers: nn.ModuleList) -> None:
    engine = make_engine(layers)
    with pytest.raises(ValueError, match="a step of 65 tokens is over the capacity=64"):
        engine.bucket_of(65)
    words = serving.make_words(serving.SMALL.hidden, CPU)
    with pytest.raises(ValueError, match="a request of 65 prompt tokens and 1 new"):
        serving.Scheduler(engine, *words, [serving.Request([0] * 65, 1)])


def test_drained_requests_say_what_follows_from_their_last_token(layers: nn.ModuleList) -> None:
    engine = make_engine(layers)
    embedding, head = serving.make_words(serving.SMALL.hidden, CPU)
    requests = serving.make_requests(9, seed=3, longest=20, num_new=5)
    wanted = [(list(r.prompt), r.num_new) for r in requests]
    stats = serving.Scheduler(engine, embedding, head, requests).drain()
    assert [(r.prompt, r.num_new) for r in requests] == wanted
    assert [len(r.tokens) for r in requests] == [num_new for _, num_new in wanted]
    assert sum(stats.tokens.values()) == sum(len(p) + new - 1 for p, new in wanted)
    assert set(stats.steps) <= set(engine.buckets)
    said = {t for r in requests for t in (r.prompt[-1], *r.tokens[:-1])}
    following = {}
    for token in said:  # alone in its batch
        following[token] = (engine.step(embedding[[token]], 1) @ head)[0].float()
    for request in requests:
        before = request.prompt[-1]
        for token in request.tokens:
            scores = following[before]
            # Products of other row counts round otherwise, which decides between equal scores.
            assert scores[token] >= scores.amax() - 0.02 * scores.abs().amax()
            before = token


def test_more_requests_than_run_at_once(
    layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_RUNNING", 4)
    engine = make_engine(layers)
    requests = [serving.Request([i], 1 + i % 3) for i in range(11)]
    scheduler = serving.Scheduler(engine, *serving.make_words(serving.SMALL.hidden, CPU), requests)
    scheduler.drain()
    assert [len(r.tokens) for r in requests] == [1 + i % 3 for i in range(11)]
    assert sorted(scheduler.free) == [0, 1, 2, 3]


class Recorder(nn.Module):
    """In place of a layer: notes what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, int]] = []

    def forward(self, x: Tensor, num_tokens: Tensor, token_bound: int) -> Tensor:
        self.calls.append((len(x), int(num_tokens), token_bound))
        return x + 1


def test_ranks_replay_one_bucket_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, own = 3, threading.local()
    meeting = threading.Barrier(ranks)
    counts = [0] * ranks

    def agree(self: Any, num_tokens: int) -> int:
        counts[own.rank] = num_tokens
        meeting.wait(timeout=30)
        most = max(counts)
        meeting.wait(timeout=30)
        return most

    monkeypatch.setattr(serving.Engine, "agree", agree)
    words = serving.make_words(128, CPU)
    recorders = [Recorder() for _ in range(ranks)]
    requests = [serving.make_requests(6, 1, 40, 4), [], serving.make_requests(2, 2, 10, 9)]

    def work(rank: int) -> None:
        own.rank = rank
        model = nn.ModuleList([recorders[rank]])
        engine = serving.Engine(model, 128, serving.make_buckets(64), CPU, graphs=False)
        serving.Scheduler(engine, *words, requests[rank]).drain()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    calls = [recorder.calls for recorder in recorders]
    bounds = [[bound for _, _, bound in own_calls] for own_calls in calls]
    assert bounds[0] == bounds[1] == bounds[2]
    assert len(bounds[0]) >= 9
    assert all(rows == bound >= tokens for own_calls in calls for rows, tokens, bound in own_calls)
    assert [tokens for _, tokens, _ in calls[1]] == [0] * len(bounds[0])
    assert all(len(r.tokens) == r.num_new for own_requests in requests for r in own_requests)


def test_serving_prints_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs without graphs, whatever the device."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(serving, "disable_multicast", lambda: None)
    made: list[bool] = []

    class Watched(serving.Engine):  # type: ignore[name-defined,misc]
        def __init__(self, *arguments: Any, graphs: bool, **options: Any) -> None:
            made.append(graphs)
            super().__init__(*arguments, graphs=graphs, **options)

    monkeypatch.setattr(serving, "Engine", Watched)
    arguments = ("--requests", "3", "--longest", "9", "--new", "3", "--capacity", "32")
    run_main(serving, monkeypatch, "--backend", "reference", *arguments)
    printed = capsys.readouterr().out
    assert "host us a step" in printed
    assert "tokens/s" in printed
    assert made == [False]
