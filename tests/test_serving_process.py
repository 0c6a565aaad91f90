"""A process that serves from exported kernels: no tilelang, no compiler, and it starts at once."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import SMALL, SMALL_CAPACITY, variants

from tl_megamoe import SymmBuffer, fp8_mega_moe, transform_weights
from tl_megamoe.explorer import cli
from tl_megamoe.exported import export_kernels
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.quantize import QuantizeSpec
from tl_megamoe.synthetic import random_inputs, random_weights

MAX_START_S = 3.0
"""From the end of `import torch` to kernels that can be launched; 0.2 s on 2 cores."""
SPEC = KernelSpec(problem=SMALL, schedule=variants(SMALL)["wide128"], capacity=SMALL_CAPACITY)
QUANTIZE = QuantizeSpec(
    hidden=SMALL.hidden,
    num_topk=SMALL.num_topk,
    num_shared=0,
    num_local_experts=SMALL.num_local_experts,
    num_experts=SMALL.num_experts,
    capacity=SMALL_CAPACITY,
    scale="exact",
)
LOAD = """
import json, pickle, sys, time
import torch

start = time.perf_counter()
import tl_megamoe
from tl_megamoe.exported import ExportedKernels

folder, specs = sys.argv[1:3]
fused, quantize = pickle.load(open(specs, "rb"))
kernels = ExportedKernels.open(folder)
functions = [kernels.fused(fused).kernel, kernels.quantize(quantize).function]
seconds = time.perf_counter() - start
"""
REPORT = """
refused = []
for function in functions:  # reaches the module's own check of its arguments
    try:
        function(1)
    except Exception as error:
        refused.append(str(error))
maps = open("/proc/self/maps").read()
print(json.dumps({
    "seconds": seconds,
    "refused": refused,
    "modules": [name for name in sys.modules if name.split(".")[0] in ("tilelang", "tvm")],
    "libraries": [name for name in ("libtvm_compiler", "libtilelang", "libz3") if name in maps],
    "runtime": "libtvm_runtime" in maps,
}))
"""
BOTH = """
import tilelang
from tl_megamoe.kernel import compile_kernel

compiled = compile_kernel(fused)
print(json.dumps({"text": "mega_moe" in compiled.source(), "same": compiled.spec == fused}))
"""
RUN = """
from tl_megamoe import SymmBuffer, mega_moe, MoEWeights

problem, weights, x, topk_idx, topk_weights, out = torch.load(sys.argv[3], weights_only=False)
buffer = SymmBuffer(problem, fused.capacity, kernels=folder)
buffer.warmup(num_shared=0)
y = mega_moe(x, None, topk_idx, topk_weights, MoEWeights(l1=weights[0], l2=weights[1]), buffer)
torch.cuda.synchronize()
torch.save(y.cpu(), out)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a small layer; its fused kernel is one that the lowering tests compile too."""
    folder = tmp_path_factory.mktemp("export") / "kernels"
    export_kernels(folder, [SPEC], [QUANTIZE])
    (folder.parent / "specs").write_bytes(pickle.dumps((SPEC, QUANTIZE)))
    return folder


def child(code: str, folder: Path, *words: str) -> dict[str, Any]:
    """Run Python in a process of its own; what its last line says."""
    command = [sys.executable, "-c", code, str(folder), str(folder.parent / "specs"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_serving_process_is_light(folder: Path) -> None:
    found = child(LOAD + REPORT, folder)
    assert found["modules"] == []
    assert found["libraries"] == []
    assert found["runtime"]
    assert found["seconds"] < MAX_START_S
    first, second = found["refused"]
    assert "num_args should be 24" in first
    assert "num_args should be" in second


def test_tilelang_may_come_later(folder: Path) -> None:
    found = child(LOAD + BOTH, folder)
    assert found == {"text": True, "same": True}


def test_nothing_heavy_is_imported_to_look_at_an_export(folder: Path) -> None:
    code = (
        "import json, sys\n"
        "from tl_megamoe.exported import ExportedKernels\n"
        "kernels = ExportedKernels.open(sys.argv[1])\n"
        "heavy = {'torch', 'tilelang', 'tvm', 'tvm_ffi'} & set(sys.modules)\n"
        "print(json.dumps([len(kernels.manifest.kernels), sorted(heavy)]))"
    )
    assert child(code, folder) == [2, []]


@pytest.mark.sm90
def test_an_exported_layer_computes_the_same_bits(tmp_path: Path, seed: int) -> None:
    problem, capacity, tokens = replace(SMALL, name="exported"), 128, 65
    sizes = [f"--{name.replace('_', '-')} {value}" for name, value in problem.key().items()]
    folder = tmp_path / "kernels"
    words = f"export {' '.join(sizes)} --capacity {capacity} --out {folder}".split()
    assert cli.main(words) == 0
    plain = random_weights(problem, "cuda", seed)
    weights = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)
    inputs = random_inputs(problem, tokens, seed=seed, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, device="cuda", generator=generator).bfloat16()
    buffer = SymmBuffer(problem, capacity)
    expected = torch.empty_like(x)
    buffer.quantize(x, inputs.topk_idx, inputs.topk_weights)
    fp8_mega_moe(expected, weights.l1, weights.l2, buffer)
    torch.cuda.synchronize()

    spec = KernelSpec(problem=problem, schedule=SPEC.schedule, capacity=capacity)
    (tmp_path / "specs").write_bytes(pickle.dumps((spec, QUANTIZE)))
    routes = (inputs.topk_idx, inputs.topk_weights)
    layer = (problem, (weights.l1, weights.l2), x, *routes, str(tmp_path / "y"))
    torch.save(layer, tmp_path / "layer")
    # The process opens the export through its buffer; nothing of it is loaded before.
    opening = LOAD[: LOAD.index("kernels =")] + "functions, seconds = [], 0.0\n"
    found = child(opening + RUN + REPORT, folder, str(tmp_path / "layer"))
    assert found["modules"] == []
    assert found["libraries"] == []
    y = torch.load(tmp_path / "y")
    assert y.isfinite().all()
    assert y.abs().max() > 0
    assert torch.equal(y, expected.cpu())
