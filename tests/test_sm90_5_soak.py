"""Tier 5, soak: a short one. `python tests/soak.py` is the long one."""

from __future__ import annotations

import pytest
from soak import SETS, TOKENS, soak

pytestmark = pytest.mark.sm90


def test_a_short_soak(seed: int) -> None:
    """Eager and from graphs, every number of tokens: the same bits, and the same memory."""
    found = soak(5000, seed, 60.0, look_every=500)
    assert not found.reasons
    assert found.launches >= 5000
    assert found.replays > SETS * len(TOKENS)
    assert len(set(found.allocated[1:])) == 1
