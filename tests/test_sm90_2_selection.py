"""Tier 2, selection rules: which schedule the op takes, and that the result never depends on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_cases import (
    FLASH,
    FROZEN_TOKENS,
    MODES,
    ON_RANKS,
    PRESET_CAPACITY,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    SPLITS,
    each_rank_count,
    fit,
    rank_schedules,
    schedules,
)
from gpu_world import World, world

from tl_megamoe import (
    fp8_mega_moe,
    fp8_mega_moe_cooperative,
    fp8_mega_moe_pingpong,
    reference,
    selection,
)
from tl_megamoe.frozen import lookup, resolve
from tl_megamoe.op import prepare
from tl_megamoe.schedule import Schedule, ScheduleError
from tl_megamoe.selection import KERNEL_VARIABLE, THRESHOLD_VARIABLE

pytestmark = pytest.mark.sm90

FORCED: dict[str, Callable[..., None]] = {
    "pingpong": fp8_mega_moe_pingpong,
    "cooperative": fp8_mega_moe_cooperative,
    "swapped": partial(fp8_mega_moe, math_mode="swapped"),
}
modes = pytest.mark.parametrize("mode", MODES)
each_number = pytest.mark.parametrize("num_ranks", each_rank_count())


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNEL_VARIABLE, raising=False)
    monkeypatch.delenv(THRESHOLD_VARIABLE, raising=False)
    monkeypatch.setattr(selection, "_said", set())


def filled(tokens: int, seed: int) -> World:
    """A small layer whose result is known from an explicit schedule."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, seed, "zipf:0.8", 0.1)
    w.check(schedules(SMALL, ("wide128",)), launches=1)
    w.ranks.first.reload_schedules()  # what the environment of the test before chose
    return w


def call(w: World, function: Callable[..., None] = fp8_mega_moe, **options: Any) -> torch.Tensor:
    y = torch.full_like(w.y, torch.nan)
    function(y, w.weights[0].l1, w.weights[0].l2, w.ranks.first, **options)
    w.ranks.synchronize()
    return y


def chosen(w: World, **options: Any) -> Schedule:
    return prepare(w.ranks.first, w.inputs[0].num_tokens, **options)[1]


@modes
@pytest.mark.parametrize("tokens", [5, 700])
def test_forced_variants(tokens: int, mode: str, shared_seed: int) -> None:
    w = filled(tokens, shared_seed)
    assert chosen(w, math_mode=mode).math_mode == mode
    assert torch.equal(call(w, FORCED[mode]), w.y)


@modes
@pytest.mark.parametrize("tokens", [5, 700])
def test_forced_by_the_environment(
    tokens: int,
    mode: str,
    shared_seed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = filled(tokens, shared_seed)
    monkeypatch.setenv(KERNEL_VARIABLE, mode)
    with caplog.at_level(logging.WARNING, "tl_megamoe.op"):
        for _ in range(3):
            assert torch.equal(call(w), w.y)
    assert chosen(w).math_mode == mode
    said = [r.message for r in caplog.records if KERNEL_VARIABLE in r.message]
    assert len(said) == 1, said
    other = next(m for m in MODES if m != mode)
    assert chosen(w, math_mode=other).math_mode == other  # an argument beats the environment
    explicit = fit(SMALL, block_m=64)
    assert chosen(w, schedule=explicit) == explicit
    assert torch.equal(call(w, schedule=explicit), w.y)
    monkeypatch.setenv(KERNEL_VARIABLE, "fastest")
    assert chosen(w).math_mode == mode  # a buffer looks once
    w.ranks.first.reload_schedules()
    with pytest.raises(ValueError, match="TL_MEGAMOE_KERNEL='fastest' must be one of"):
        chosen(w)


def test_the_threshold_decides_where_no_table_does(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for tokens, mode in ((255, "pingpong"), (256, "cooperative")):
        w = filled(tokens, seed)
        assert chosen(w).math_mode == mode
        assert torch.equal(call(w), w.y)
    monkeypatch.setenv(THRESHOLD_VARIABLE, "100")
    with caplog.at_level(logging.WARNING, "tl_megamoe.op"):
        for tokens, mode in ((99, "pingpong"), (100, "cooperative")):
            w = filled(tokens, seed)
            assert chosen(w).math_mode == mode
            assert torch.equal(call(w), w.y)
    assert sum(THRESHOLD_VARIABLE in r.message for r in caplog.records) == 1
    monkeypatch.setenv(THRESHOLD_VARIABLE, "many")
    with pytest.raises(ValueError, match="TL_MEGAMOE_COOPERATIVE_THRESHOLD='many' must be"):
        chosen(filled(98, seed))


def test_token_bound(seed: int) -> None:
    """One bound, one schedule, however many tokens there are."""
    w = filled(40, seed)
    assert chosen(w) == chosen(w, token_bound=40)
    wide = chosen(w, token_bound=1000)
    assert wide.math_mode == "cooperative"
    assert wide != chosen(w)
    assert torch.equal(call(w, token_bound=1000), w.y)
    with pytest.raises(ValueError, match="token_bound=39"):
        chosen(w, token_bound=39)
    with pytest.raises(ValueError, match="token_bound=1025"):
        chosen(w, token_bound=SMALL_CAPACITY + 1)


def test_explicit_schedules(seed: int) -> None:
    w = filled(333, seed)
    for schedule in schedules(SMALL, SPLITS).values():
        assert chosen(w, schedule=schedule) == schedule
        assert torch.equal(call(w, schedule=schedule), w.y)
    with pytest.raises(ScheduleError, match="num_sms=1000 exceeds the"):
        call(w, schedule=fit(SMALL, num_sms=1000))
    with pytest.raises(ScheduleError, match="block_m=32 is below the 64 rows"):
        call(w, schedule=fit(SMALL, block_m=32))


@pytest.mark.parametrize("tokens", FROZEN_TOKENS)
def test_the_frozen_table(tokens: int, seed: int) -> None:
    """Without a schedule the op takes the frozen one, compiled here for it if need be."""
    w = world(FLASH, PRESET_CAPACITY)
    found = resolve(FLASH, w.ranks.first.device_name, PRESET_CAPACITY, tokens)
    assert found.origin == "frozen", found
    w.fill(tokens, seed)
    y = torch.empty((tokens, FLASH.hidden), dtype=torch.bfloat16, device="cuda")
    fp8_mega_moe(y, w.weights[0].l1, w.weights[0].l2, w.ranks.first)
    assert chosen(w) == found.schedule
    same = reference.compare(y, w.expected(0), intermediate=FLASH.intermediate)
    assert same, same.reason


def test_the_frozen_table_between_below_and_above_its_entries() -> None:
    device = world(FLASH, PRESET_CAPACITY).ranks.first.device_name
    first = lookup(FLASH, device, 0)
    assert first is not None
    assert first.entry is not None
    bound = first.entry.max_tokens
    at, above = lookup(FLASH, device, bound), lookup(FLASH, device, bound + 1)
    assert at is not None
    assert above is not None
    assert at.entry == first.entry != above.entry
    last = lookup(FLASH, device, 10**6)
    assert last is not None
    assert last.entry is not None
    assert last.entry.max_tokens < 10**6


@modes
@each_number
def test_ranks_choose_alike(num_ranks: int, mode: str, shared_seed: int) -> None:
    """Ranks with different token counts, one of them without any, take one schedule."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(300, 0, 7, 129)[r % 4] for r in range(num_ranks)], shared_seed)
    w.check({"wide128": rank_schedules(w.problem)["wide128"]}, launches=1)
    expected = {rank: w._first[None, True][rank] for rank in w.ranks.here}
    for function, options in (
        (FORCED[mode], {}),
        (fp8_mega_moe, {"token_bound": RANKS_CAPACITY}),
        (fp8_mega_moe, {}),
    ):
        force = {"math_mode": mode} if function is FORCED[mode] else {}
        found = {
            rank: prepare(buffer, w.inputs[rank].num_tokens, **options, **force)[1].name
            for rank, buffer in w.ranks.buffers.items()
        }
        assert len(set(w.ranks.gather(found))) == 1
        y = w.outputs()

        def launch(rank: int, function=function, options=options, y=y) -> None:  # type: ignore[no-untyped-def]
            weights = w.weights[rank]
            function(y[rank], weights.l1, weights.l2, w.ranks.buffers[rank], **options)

        w.ranks.run(launch)
        w.ranks.barrier()
        wrong = {r: "" if torch.equal(y[r], expected[r]) else "other bits" for r in w.ranks.here}
        w.agree(wrong)
