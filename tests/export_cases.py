"""Exports made by a fake compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_modules import FakeCompiler, build_module
from gpu_cases import SMALL, fit

from tl_megamoe.explorer import doctor
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.manifest import MANIFEST
from tl_megamoe.quantize import QuantizeSpec

DEVICE = "nvidia-h200"
FLASH = ["--problem", "deepseek-v4-flash"]


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_module(tmp_path_factory.mktemp("module"))


@pytest.fixture
def compiler(module: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    compiler = FakeCompiler(module)
    compiler.use(monkeypatch)
    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    return compiler


def spec(**changes: Any) -> KernelSpec:
    values: dict[str, Any] = {"problem": SMALL, "schedule": fit(SMALL), "capacity": 64}
    return KernelSpec(**{**values, **changes})


def quantize_spec(num_shared: int = 0, capacity: int = 64) -> QuantizeSpec:
    sizes = {"hidden": 512, "num_topk": 2, "num_local_experts": 8, "num_experts": 8}
    return QuantizeSpec(**sizes, num_shared=num_shared, capacity=capacity, scale="exact")


def change(folder: Path, **values: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
