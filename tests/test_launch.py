"""Repeated launches: what is kept of the first, and what makes the next one look again."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import SMALL

from tl_megamoe import PRESETS, Recipe, SymmBuffer, fp8_mega_moe, launch, loading, mega_moe
from tl_megamoe.kernel import CompiledKernel, KernelSpec, _program
from tl_megamoe.launch import NUM_TOKENS, STATS, WEIGHTS, Y
from tl_megamoe.schedule import default_schedule
from tl_megamoe.selection import (
    KERNEL_VARIABLE,
    THRESHOLD_VARIABLE,
    choose_schedule,
    schedule_intervals,
)
from tl_megamoe.synthetic import random_weights
from tl_megamoe.weights import MoEWeights, transform_weights

CAPACITY = 512


class Recorder(CompiledKernel):
    """A kernel that takes down what the program would be called with."""

    def __init__(self, spec: KernelSpec) -> None:
        self.launches: list[tuple[Any, ...]] = []
        super().__init__(spec, lambda *values: self.launches.append(values))


def make_weights(seed: int = 0) -> MoEWeights:
    plain = random_weights(SMALL, seed=seed)
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), SMALL)


@pytest.fixture
def buffer() -> SymmBuffer:
    """A CPU buffer whose kernels are recorders."""
    made = SymmBuffer(SMALL, CAPACITY, device="cpu")
    for mode, tokens in (("pingpong", 8), ("cooperative", 400)):
        schedule = default_schedule(SMALL, tokens, mode)
        for clamp in (False, True):
            spec = KernelSpec(problem=SMALL, schedule=schedule, capacity=CAPACITY, clamp=clamp)
            made.kernels[schedule, clamp, True] = Recorder(spec)
    return made


def ids(weights: MoEWeights) -> tuple[int, ...]:
    return tuple(map(id, (*weights.l1, *weights.l2)))


def launches(buffer: SymmBuffer) -> list[tuple[Any, ...]]:
    return [values for kernel in buffer.kernels.values() for values in kernel.launches]  # type: ignore[attr-defined]


def output(tokens: int = 8) -> torch.Tensor:
    return torch.empty(tokens, SMALL.hidden, dtype=torch.bfloat16)


def test_places_in_the_program() -> None:
    spec = KernelSpec(problem=SMALL, schedule=default_schedule(SMALL, 8), capacity=64)
    names = [str(p.name).removesuffix("_handle") for p in _program(spec).params]
    assert names[WEIGHTS] == ["w1", "w1_sf", "w2", "w2_sf"]
    assert (names[STATS], names[Y], names[NUM_TOKENS]) == ("recv_stats", "y_address", "num_tokens")


def test_a_repeated_call_passes_what_the_first_did(buffer: SymmBuffer) -> None:
    weights = make_weights()
    outputs = [output() for _ in range(3)]
    for y in outputs:
        fp8_mega_moe(y, weights.l1, weights.l2, buffer)
    first, *rest = launches(buffer)
    schedule = default_schedule(SMALL, 8)
    assert len(first) == 24
    assert first[STATS] is buffer.recv_stats
    assert first[Y + 1 :] == (
        buffer.report.data_ptr(),
        buffer.timeout_ms,
        0,
        8,
        0,
        schedule.experts_per_wave,
        schedule.prefetch,
        schedule.evict_first,
        0.0,
    )
    for values, y in zip((first, *rest), outputs, strict=True):
        assert values[:Y] == first[:Y]
        assert values[Y] == y.data_ptr()
        assert values[Y + 1 :] == first[Y + 1 :]
    assert len(buffer.launcher.known) == len(buffer.launcher.weights) == 1


def test_what_a_call_chooses_reaches_the_kernel(buffer: SymmBuffer) -> None:
    weights = make_weights()
    pair = weights.l1, weights.l2
    stats = torch.zeros(SMALL.num_local_experts, dtype=torch.int32)
    for _ in range(2):
        fp8_mega_moe(output(400), *pair, buffer)
        fp8_mega_moe(output(3), *pair, buffer, stats, activation_clamp=2.5)
        fp8_mega_moe(output(3), *pair, buffer, token_bound=400)
        fp8_mega_moe(output(0), *pair, buffer, recipe=[1, 128, 128])
    of = {
        (schedule.math_mode, clamp): [v[NUM_TOKENS] for v in kernel.launches]  # type: ignore[attr-defined]
        for (schedule, clamp, _), kernel in buffer.kernels.items()  # type: ignore[misc]
    }
    assert of == {
        ("pingpong", False): [0, 0],
        ("pingpong", True): [3, 3],
        ("cooperative", False): [400, 3, 400, 3],
        ("cooperative", True): [],
    }
    clamped = [values for values in launches(buffer) if values[-1] == 2.5]
    assert len(clamped) == 2
    assert all(values[STATS] is stats for values in clamped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": output().float()}, "y must be torch.bfloat16"),
        ({"y": torch.empty(8, 256, dtype=torch.bfloat16)}, "y must have shape"),
        ({"y": torch.empty(8, 1024, dtype=torch.bfloat16)[:, ::2]}, "y must be contiguous"),
        ({"y": output(8).flatten()}, r"y must be a \(num_tokens, hidden\) tensor"),
        ({"y": None}, r"y must be a \(num_tokens, hidden\) tensor"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"activation_clamp": -1.0}, "activation_clamp=-1.0"),
        ({"token_bound": 3}, "token_bound=3"),
        ({"recipe": Recipe(scale="pow2")}, "recipe=pow2-128 differs"),
        ({"l1_weights": None}, "l1_weights must be a"),
        ({"l2_weights": (torch.empty(1), torch.empty(1))}, "l2_weights.*must be torch.float8"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(9, dtype=torch.int32)},
            "cumulative_local_expert_recv_stats must have shape",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_a_bad_argument_is_found_after_good_calls(
    buffer: SymmBuffer, change: dict[str, Any], message: str
) -> None:
    weights = make_weights()
    good = {
        "y": output(),
        "l1_weights": weights.l1,
        "l2_weights": weights.l2,
        "sym_buffer": buffer,
    }
    for _ in range(2):
        fp8_mega_moe(**good)
    with pytest.raises(ValueError, match=message):
        fp8_mega_moe(**{**good, **change})
    fp8_mega_moe(**good)
    assert len(launches(buffer)) == 3


def test_weights_that_moved_are_found(buffer: SymmBuffer) -> None:
    weights, other = make_weights(), make_weights(1)
    call = (weights.l1, weights.l2, buffer)
    fp8_mega_moe(output(), *call)
    before = buffer.launcher.weights[ids(weights)].values
    weights.l2[1].data = other.l2[1]
    fp8_mega_moe(output(), *call)
    after = buffer.launcher.weights[ids(weights)].values
    held = torch.from_dlpack(after[3])
    assert held.data_ptr() == other.l2[1].data_ptr() != torch.from_dlpack(before[3]).data_ptr()
    assert launches(buffer)[-1][WEIGHTS] == after
    weights.l1[1].data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"l1_weights\[1\] must have shape"):
        fp8_mega_moe(output(), *call)


def test_a_layer_s_weights_are_let_go(buffer: SymmBuffer) -> None:
    for seed in range(3):
        weights = make_weights(seed)
        fp8_mega_moe(output(), weights.l1, weights.l2, buffer)
        storage = weakref.ref(weights.l1[0])
        for kernel in buffer.kernels.values():
            kernel.launches.clear()  # type: ignore[attr-defined]
        del weights
        gc.collect()
        assert storage() is None
        assert not buffer.launcher.weights
    assert len(buffer.launcher.known) == 1  # what does not depend on weights stays


def test_layers_share_a_buffer(buffer: SymmBuffer) -> None:
    layers = [make_weights(seed) for seed in range(3)]
    for _ in range(2):
        for weights in layers:
            fp8_mega_moe(output(), weights.l1, weights.l2, buffer)
    assert len(buffer.launcher.weights) == 3
    assert len(buffer.launcher.known) == 1
    addresses = [torch.from_dlpack(v[WEIGHTS.start]).data_ptr() for v in launches(buffer)]
    assert addresses == [w.l1[0].data_ptr() for w in layers] * 2


def test_layers_may_share_tensors(buffer: SymmBuffer) -> None:
    one, other = make_weights(), make_weights(1)
    for _ in range(2):
        fp8_mega_moe(output(), one.l1, one.l2, buffer)
        fp8_mega_moe(output(), one.l1, other.l2, buffer)
    assert len(buffer.launcher.weights) == 2
    addresses = [torch.from_dlpack(v[WEIGHTS.start + 2]).data_ptr() for v in launches(buffer)]
    assert addresses == [one.l2[0].data_ptr(), other.l2[0].data_ptr()] * 2
    gone = one.l1[1].data_ptr()
    for kernel in buffer.kernels.values():
        kernel.launches.clear()  # type: ignore[attr-defined]
    replaced = (one.l1[0], one.l1[1].clone())
    fp8_mega_moe(output(), replaced, one.l2, buffer)
    (values,) = launches(buffer)
    assert torch.from_dlpack(values[WEIGHTS.start + 1]).data_ptr() == replaced[1].data_ptr() != gone


# ---- the schedules that a buffer may choose


@pytest.mark.parametrize(
    ("problem", "device", "threshold"),
    [
        (SMALL, "unknown", None),
        (SMALL, "unknown", "100"),
        (replace(SMALL, hidden=384), "unknown", None),
        (replace(SMALL, name="few", num_experts=64), "unknown", "900"),
        ("deepseek-v4-flash", "NVIDIA H200", None),
        ("mimo-v2.5-pro", "NVIDIA H200", "4000"),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_intervals_are_what_every_token_count_would_choose(
    monkeypatch: pytest.MonkeyPatch, problem: Any, device: str, threshold: str | None
) -> None:
    problem = PRESETS[problem].one_rank() if isinstance(problem, str) else problem
    if threshold is None:
        monkeypatch.delenv(THRESHOLD_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(THRESHOLD_VARIABLE, threshold)
    capacity = 1500
    options: dict[str, Any] = {"rank_mode": problem.rank_mode, "recipe": Recipe()}
    intervals = schedule_intervals(problem, device, capacity, **options)
    assert intervals[-1][0] == capacity
    assert len({schedule for _, schedule in intervals}) == len(intervals)
    start = 0
    for end, schedule in intervals:
        for tokens in {*range(start, end + 1, 7), start, end}:
            found = choose_schedule(problem, device, capacity, tokens, quiet=True, **options)
            assert found.schedule == schedule
        start = end + 1


def test_warmup_loads_what_a_call_may_choose(
    buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KernelSpec] = []
    monkeypatch.setattr(loading, "compile_kernel", lambda spec: made.append(spec) or Recorder(spec))
    fresh = SymmBuffer(replace(SMALL, num_topk=2), CAPACITY, device="cpu")
    with pytest.raises(ValueError, match="sym_buffer is on cpu: the kernel needs an SM90 GPU"):
        fresh.warmup(num_shared=None)
    with pytest.raises(ValueError, match="the kernel that quantises needs an SM90 GPU"):
        fresh.warmup()
    fresh.device, fresh.device_name, fresh.num_sms = torch.device("cuda", 0), "unknown", 132
    intervals = fresh.warmup(activation_clamp=True, num_shared=None)
    assert [(end, s.math_mode, s.block_m) for end, s in intervals] == [
        (255, "pingpong", 64),
        (256, "cooperative", 64),
        (512, "cooperative", 128),
    ]
    assert [(spec.schedule, spec.clamp) for spec in made] == [(s, True) for _, s in intervals]
    fresh.warmup(activation_clamp=True, num_shared=None)
    assert len(made) == 3
    with pytest.raises(ValueError, match="num_shared=2 must be below num_topk=2"):
        fresh.warmup(num_shared=2)


def test_a_layer_that_is_not_tuned_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    problem = replace(SMALL, name="untuned", intermediate=384)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            options: dict[str, Any] = {"rank_mode": "one", "recipe": Recipe()}
            schedule_intervals(problem, "NVIDIA H200", 1000, **options)
    sizes = "--hidden 512 --intermediate 384 --num-experts 8 --num-topk 3 --num-ranks 1"
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.endswith(
        f"To tune it: tl-megamoe search {sizes} --tokens 16,64,256,512,1000 && "
        f"tl-megamoe freeze {sizes}"
    )


def test_what_a_buffer_remembers_is_bounded(
    buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_KNOWN", 20)
    weights = make_weights()
    for bound in range(8, 108):
        fp8_mega_moe(output(), weights.l1, weights.l2, buffer, token_bound=bound)
        assert len(buffer.launcher.known) <= 20
    assert len(launches(buffer)) == 100
    assert len(buffer.launcher.weights[ids(weights)].launches) == 1


def test_a_destroyed_buffer_says_so() -> None:
    made = SymmBuffer(SMALL, CAPACITY, device="cpu")
    weights = make_weights()
    x = torch.zeros(4, SMALL.hidden, dtype=torch.bfloat16)
    routes = (torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2))
    assert not made.destroyed
    made.destroy()
    assert made.destroyed
    for call in (
        lambda: fp8_mega_moe(output(), weights.l1, weights.l2, made),
        lambda: mega_moe(x, None, *routes, weights, made),
        lambda: made.warmup(),
        lambda: loading.prepare(made, 4),
    ):
        with pytest.raises(ValueError, match="destroyed: make a new one"):
            call()
    with pytest.raises(ValueError, match="sym_buffer must be a SymmBuffer, found NoneType"):
        fp8_mega_moe(output(), weights.l1, weights.l2, None)  # type: ignore[arg-type]


def test_schedules_can_be_read_anew(buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights()
    call = (weights.l1, weights.l2, buffer)
    monkeypatch.delenv(KERNEL_VARIABLE, raising=False)
    fp8_mega_moe(output(), *call)
    monkeypatch.setenv(KERNEL_VARIABLE, "cooperative")
    fp8_mega_moe(output(), *call)
    buffer.reload_schedules()
    buffer.kernels.update(
        {
            (replace(schedule, **rest), clamp, True): kernel
            for (schedule, clamp, _), kernel in list(buffer.kernels.items())  # type: ignore[misc]
            for rest in ({}, {"block_m": 64})
            if schedule.math_mode == "cooperative"
        }
    )
    fp8_mega_moe(output(), *call)
    modes = [
        schedule.math_mode
        for (schedule, _, _), kernel in buffer.kernels.items()  # type: ignore[misc]
        for _ in kernel.launches  # type: ignore[attr-defined]
    ]
    assert modes.count("pingpong") == 2
    assert "cooperative" in modes
