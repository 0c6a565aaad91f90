"""Who looks at a call: tracers, transforms, other threads that compile, streams, autograd."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from gpu_cases import SMALL
from test_launch import buffer as buffer  # a fixture
from test_launch import launches, make_weights, output
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tl_megamoe import MegaMoE, SymmBuffer, fp8_mega_moe, library, mega_moe
from tl_megamoe.launch import Launcher

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def layer() -> MegaMoE:
    made = MegaMoE(512, 256, 8, 2, capacity=32, device="cpu", backend="reference")
    weights = make_weights()
    made.load_state_dict(
        {
            "l1": weights.l1[0],
            "l1_sf": weights.l1[1],
            "l2": weights.l2[0],
            "l2_sf": weights.l2[1],
        }
    )
    return made


@pytest.fixture
def given(seed: int) -> Given:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, 512, generator=generator).bfloat16(),
        torch.randint(0, 8, (8, 2), generator=generator),
        torch.rand(8, 2, generator=generator),
    )


def test_no_kernel_runs_on_a_fake_tensor(buffer: SymmBuffer) -> None:
    """It has no memory; CUDA would find out."""
    weights = make_weights()
    fp8_mega_moe(output(), weights.l1, weights.l2, buffer)
    with FakeTensorMode():
        fake = output()
    with pytest.raises(Exception, match="Fake"):
        fp8_mega_moe(fake, weights.l1, weights.l2, buffer)
    assert len(launches(buffer)) == 1


def test_a_trace_holds_the_operator(layer: MegaMoE, given: Given) -> None:
    targets = {node.target for node in make_fx(lambda *a: layer(*a))(*given).graph.nodes}
    assert torch.ops.tl_megamoe.mega_moe.default in targets


def test_transforms_of_functions(layer: MegaMoE, given: Given) -> None:
    wanted = layer(*given)
    assert torch.equal(torch.func.functionalize(lambda x: layer(x, *given[1:]))(given[0]), wanted)
    many = torch.vmap(lambda x: layer(x, *given[1:]))(torch.stack([given[0]] * 2))
    assert torch.equal(many[1], wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_refuses_a_gradient(layer: MegaMoE, given: Given, backend: str) -> None:
    """Not that the layer counts as a constant."""
    x = given[0].requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: 2 * x + layer(x, *given[1:]), backend=backend)
    with pytest.raises(Exception, match="no backward pass"):
        compiled(x).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert not compiled(x).requires_grad


def test_another_thread_compiles(
    layer: MegaMoE, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch says of compiling it says of the process; a serving thread does not care."""
    found, real = layer.buffer, layer.buffer.quantize
    counts = torch.zeros(8, dtype=torch.int32)
    errors: list[Exception] = []

    def slow_quantize(*a: Any, **k: Any) -> int:
        time.sleep(0.1)
        return real(*a, **k)

    monkeypatch.setattr(found, "quantize", slow_quantize)

    def serve() -> None:
        try:
            for _ in range(4):
                inputs = (given[0], None, *given[1:], layer.weights, found)
                mega_moe(*inputs)
                mega_moe(*inputs, cumulative_local_expert_recv_stats=counts)
        except Exception as error:
            errors.append(error)

    def slow_backend(module: Any, _: Any) -> Any:
        time.sleep(0.5)
        return module

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    torch._dynamo.reset()
    torch.compile(lambda a: a + 1, backend=slow_backend)(torch.ones(3))
    thread.join(30)
    assert not thread.is_alive()
    assert not errors
    assert counts.sum() == 4 * 16


@pytest.fixture
def in_thread() -> Any:
    """Runs a function in a thread that may hang."""

    def run(function: Any) -> None:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    return run


def test_calls_within_the_lock(layer: MegaMoE, given: Given, in_thread: Any) -> None:
    results: list[torch.Tensor] = []

    def locked() -> None:
        with layer.buffer.lock:
            results.append(torch.compile(lambda: layer(*given), backend="eager")())
            results.append(mega_moe(given[0], None, *given[1:], layer.weights, layer.buffer))

    in_thread(locked)
    assert len(results) == 2
    assert torch.equal(*results)


def test_inputs_are_copied_behind_the_last_launch(
    buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights()
    said: list[str] = []
    monkeypatch.setattr(Launcher, "enter_stream", lambda self: said.append("enter"))
    monkeypatch.setattr(library, "copy_inputs", lambda *_: said.append("copy"))
    fp8_mega_moe(output(), weights.l1, weights.l2, buffer)
    said.clear()
    rows = [t[:8] for t in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]
    torch.ops.tl_megamoe.fp8_mega_moe(output(), *rows, *weights.l1, *weights.l2, None, buffer.key)
    assert said[:2] == ["enter", "copy"]


def test_defaults_of_torch_do_not_matter() -> None:
    """Engines make models with a default device and dtype."""
    with torch.device("meta"):
        assert SymmBuffer(SMALL, 64, device="cpu").report.device.type == "cpu"
    torch.set_default_dtype(torch.bfloat16)
    try:
        experts: Any = torch.nn.Module()
        experts.gate_up_proj = torch.nn.Parameter(torch.randn(8, 512, 512))
        experts.down_proj = torch.nn.Parameter(torch.randn(8, 512, 256))
        experts.act_fn = torch.nn.SiLU()
        MegaMoE.from_experts(experts, 2, capacity=32, device="cpu", backend="reference")
    finally:
        torch.set_default_dtype(torch.float32)
