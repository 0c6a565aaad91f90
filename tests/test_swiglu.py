"""The text of the approximate SwiGLU, compiled for the host: one reciprocal for four values."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest

from tl_megamoe.phases.linear1 import LINEAR1_CUDA

Swiglu = ctypes.CDLL


@pytest.fixture(scope="module")
def device_text(tmp_path_factory: pytest.TempPathFactory) -> Swiglu:
    """With exact functions for its two instructions, which differ from them in the last bits."""
    text, powers = re.subn(
        r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((.*?)\)\s*: "f"\((.*?)\)\);(.*)',
        r"\1 = exp2f(\2);\3",
        LINEAR1_CUDA,
    )
    text, reciprocals = re.subn(
        r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\((.*?)\) : "f"\((.*?)\)\);',
        r"\1 = 1.0f / (\2);",
        text,
    )
    assert (powers, reciprocals, text.count("asm")) == (1, 1, 0)
    source = tmp_path_factory.mktemp("swiglu") / "swiglu.cpp"
    source.write_text(f'#include <cmath>\n#define TLMM_DEV extern "C"\n{text}', encoding="utf-8")
    library = source.with_suffix(".so")
    compiler = shutil.which("c++") or "g++"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def run(library: Swiglu, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Of 32 gates and their ups, as a thread holds them."""
    total = np.concatenate([gate, up]).astype(np.float32)
    library.tlmm_swiglu(total.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
    return total[:32]


def exact(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = gate.astype(np.float32).astype(np.float64), up.astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1.0 + np.exp(-gate)) * up)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 80.0])
def test_it_is_silu_times_up(device_text: Swiglu, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        gate, up = rng.uniform(-scale, scale, 32), rng.normal(size=32)
        np.testing.assert_allclose(run(device_text, gate, up), exact(gate, up), rtol=6e-6)


def test_values_at_the_ends(device_text: Swiglu) -> None:
    """Far below zero the value fades out, far above it is gate times up, and no sum overflows."""
    gate = np.array([-3e38, -1e4, -200.0, -0.0, 0.0, 200.0, 1e4, 3e38] * 4, np.float32)
    found = run(device_text, gate, np.ones(32, np.float32))
    assert np.array_equal(found, np.where(gate > 0, gate, gate * 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_near(device_text: Swiglu, bad: float, seed: int) -> None:
    """NaN reaches four values of its row (v // 2 % 2 is the row half), an infinity the last bits
    of three."""
    rng = np.random.default_rng(seed)
    gate, up = rng.normal(size=32), rng.normal(size=32)
    clean = run(device_text, gate, up)
    for place in range(32):
        gates = gate.copy()
        gates[place] = bad
        found = run(device_text, gates, up)
        group = [v for v in range(32) if v // 8 == place // 8 and v // 2 % 2 == place // 2 % 2]
        touched = group if np.isnan(bad) else [place]
        others = [v for v in range(32) if v not in touched]
        np.testing.assert_allclose(found[others], clean[others], rtol=5e-7)
        assert not np.isfinite(found[touched]).any()
