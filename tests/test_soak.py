"""The soak on a CPU, the reference in place of the kernel: what it would find, it finds."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import soak


def test_nothing_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(
        sys, "argv", ["soak.py", "--device", "cpu", "--launches", "12", "--seconds", "60"]
    )
    assert soak.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["launches"], told["differing"], told["reasons"]) == (12, 0, [])
    assert len(told["digest"]) == 16


def test_what_a_soak_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed weight in one launch, and memory that grows."""

    def disturb(run: soak.Soak, step: int) -> None:
        if step == 3:
            run.weights.l2[1].mul_(2.0)

    growing = itertools.count(1 << 30, 8 << 20)
    monkeypatch.setattr(soak, "resident_bytes", lambda: next(growing))
    monkeypatch.setattr(soak.Soak, "step", lambda self, _: (self.launch(self.cases[-1]), (1, 0))[1])
    found = soak.soak(10, 0, 60.0, "cpu", look_every=1, disturb=disturb)
    assert (found.differing, found.launches) == (1, 4)  # told at the next look
    assert found.reasons[0] == "1 of 4 launches gave other bits"
    assert "memory of the process grew" in found.reasons[1]


def test_too_few_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(soak, "soak", lambda *_: soak.Found(launches=7, rss=[0]))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--device", "cpu"])
    assert soak.main() == 2
    assert json.loads(capsys.readouterr().out)["launches"] == 7
