"""`tl-megamoe host` without a GPU: the arithmetic, and what it refuses."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from tl_megamoe.explorer.cli import main
from tl_megamoe.explorer.host import CALLS, ROUNDS, time_calls


def test_times_are_of_one_call() -> None:
    """A clock on which a call takes 3 us, and waiting for the GPU a second."""
    now = 0
    calls = count()

    def call() -> None:
        nonlocal now
        now += 3000
        next(calls)

    def synchronize() -> None:
        nonlocal now
        now += 10**9

    assert list(time_calls(call, synchronize, lambda: now)) == [3.0] * ROUNDS
    assert next(calls) == CALLS * ROUNDS


def test_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["host", "--problem", "deepseek-v4-flash"]) == 2
    assert "host needs an SM90 GPU" in capsys.readouterr().err
