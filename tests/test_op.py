"""Arguments of the op, checked before anything is compiled or launched."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import SMALL

from tl_megamoe import (
    Problem,
    Recipe,
    SymmBuffer,
    VirtualGroup,
    fp8_mega_moe,
    fp8_mega_moe_cooperative,
    fp8_mega_moe_pingpong,
    loading,
    selection,
    transform_weights,
)
from tl_megamoe.frozen import resolve
from tl_megamoe.kernel import CompiledKernel, KernelSpec
from tl_megamoe.op import prepare, weight_shapes
from tl_megamoe.recipe import as_recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule
from tl_megamoe.selection import KERNEL_VARIABLE, THRESHOLD_VARIABLE
from tl_megamoe.synthetic import random_weights

CAPACITY = 32


@pytest.fixture(scope="module")
def arguments() -> dict[str, Any]:
    """Arguments that are right except that the buffer is on the CPU."""
    plain = random_weights(SMALL)
    weights = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), SMALL)
    return {
        "y": torch.empty(8, SMALL.hidden, dtype=torch.bfloat16),
        "l1_weights": weights.l1,
        "l2_weights": weights.l2,
        "sym_buffer": SymmBuffer(SMALL, CAPACITY, device="cpu"),
    }


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same shape and values with transposed strides."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.empty(8, 512)}, "y must be torch.bfloat16, found torch.float32"),
        ({"y": torch.empty(512)}, "y must be a (num_tokens, hidden) tensor, found (512,)"),
        (
            {"y": torch.empty(8, 256, dtype=torch.bfloat16)},
            "y must have shape (8, 512) for problem 'small', found (8, 256)",
        ),
        (
            {"y": torch.empty(33, 512, dtype=torch.bfloat16)},
            "y has 33 tokens, more than capacity=32 of the buffer",
        ),
        (
            {"y": torch.empty(512, 8, dtype=torch.bfloat16).T},
            "y must be contiguous, found strides (1, 8)",
        ),
        ({"activation": "gelu"}, "activation='gelu' must be 'swiglu'"),
        ({"activation_clamp": 0.0}, "activation_clamp=0.0 must be a positive number"),
        ({"activation_clamp": True}, "activation_clamp=True must be a positive number"),
        ({"activation_clamp": float("nan")}, "activation_clamp=nan must be a positive number"),
        ({"recipe": (1, 1, 32)}, "recipe=(1, 1, 32) must be a tl_megamoe.Recipe, (1, 128, 128) or"),
        (
            {"recipe": Recipe(scale="pow2")},
            "recipe=pow2-128 differs from the buffer's, exact-128, for which its pools are laid",
        ),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(8)},
            "cumulative_local_expert_recv_stats must be torch.int32",
        ),
        ({"l1_weights": torch.empty(3)}, "l1_weights must be a (weight, scale) pair"),
        ({"schedule": Schedule(stages=9)}, "stages=9"),
        ({"schedule": "m64"}, "schedule must be a Schedule, found str"),
        ({"math_mode": "solo"}, "math_mode='solo'"),
        (
            {"schedule": Schedule(stages=2), "math_mode": "pingpong"},
            "math_mode='pingpong' together with a schedule",
        ),
        ({"activation_clamp": "x"}, "activation_clamp='x' must be a positive number"),
        ({"recipe": [1, 128, 128]}, "sym_buffer is on cpu: the kernel needs an SM90 GPU"),
        ({"recipe": (128, 128, 128)}, "sym_buffer is on cpu: the kernel needs an SM90 GPU"),
        ({"recipe": None}, "sym_buffer is on cpu: the kernel needs an SM90 GPU"),
        ({"token_bound": 7}, "token_bound=7 must be an integer from num_tokens=8 to capacity=32"),
        ({"token_bound": 33}, "token_bound=33 must be an integer from num_tokens=8 to capacity=32"),
        ({"token_bound": 8.0}, "token_bound=8.0 must be an integer"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_a_bad_argument_is_named(
    arguments: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8_mega_moe(**{**arguments, **change})


def test_a_misaligned_tensor_is_refused(arguments: dict[str, Any]) -> None:
    flat = torch.empty(8 * SMALL.hidden + 8, dtype=torch.bfloat16)
    shift = 1 if flat.data_ptr() % 16 == 0 else 0
    y = flat[shift : shift + 8 * SMALL.hidden].view(8, SMALL.hidden)
    with pytest.raises(ValueError, match="y must start at a multiple of 16 bytes"):
        fp8_mega_moe(**{**arguments, "y": y})


def test_weights_that_are_not_pretiled(arguments: dict[str, Any]) -> None:
    plain = random_weights(SMALL)
    with pytest.raises(ValueError, match=r"l1_weights\[0\] must have shape .*transform_weights"):
        fp8_mega_moe(**{**arguments, "l1_weights": (plain.l1, plain.l1_sf)})
    weight, scale = arguments["l2_weights"]
    with pytest.raises(ValueError, match=r"l2_weights\[1\] must be contiguous, found strides"):
        fp8_mega_moe(**{**arguments, "l2_weights": (weight, strided(scale))})


def test_shapes_are_those_of_the_transform(arguments: dict[str, Any]) -> None:
    shapes = weight_shapes(SMALL)
    for name in ("l1_weights", "l2_weights"):
        assert tuple(tuple(t.shape) for t in arguments[name]) == shapes[name]


def test_schedule_errors_are_schedule_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="experts_per_wave=5 does not divide"):
        prepare(arguments["sym_buffer"], 8, schedule=Schedule(experts_per_wave=5, stages=2))


def test_deepgemm_recipe_tuple() -> None:
    assert as_recipe((1, 128, 128)) == Recipe()
    assert as_recipe([1, 128, 128]) == Recipe()
    assert as_recipe(Recipe(intermediate_group=64)) == Recipe(intermediate_group=64)


def test_the_buffer_says_the_recipe() -> None:
    pow2 = Recipe(scale="pow2", intermediate_group=64)
    buffer = SymmBuffer(SMALL, CAPACITY, device="cpu", recipe=pow2)
    for recipe in (None, (1, 128, 128), pow2):
        with pytest.raises(ValueError, match="sym_buffer is on cpu"):
            prepare(buffer, 8, recipe=recipe)
    with pytest.raises(ValueError, match="recipe=exact-128 differs from the buffer's, pow2-64"):
        prepare(buffer, 8, recipe=Recipe())


def test_the_forced_variants_take_the_same_arguments() -> None:
    whole = inspect.signature(fp8_mega_moe).parameters
    wanted = [p for p in whole.values() if p.name not in ("schedule", "math_mode")]
    assert list(whole)[-2:] == ["schedule", "math_mode"]
    for variant in (fp8_mega_moe_pingpong, fp8_mega_moe_cooperative):
        assert list(inspect.signature(variant).parameters.values()) == wanted


# ---- the choice of a schedule; kernels are not compiled: what would be is recorded


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Specs that the op compiles, on a device that no table knows and without its variables."""
    compiled: list[KernelSpec] = []

    def compile_kernel(spec: KernelSpec) -> Any:
        compiled.append(spec)
        return FakeKernel(spec)

    monkeypatch.setattr(loading, "compile_kernel", compile_kernel)
    monkeypatch.setattr(selection, "_said", set())
    for variable in (KERNEL_VARIABLE, THRESHOLD_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return compiled


class FakeKernel(CompiledKernel):
    """Takes down what the program would be called with."""

    def __init__(self, spec: KernelSpec) -> None:
        self.launches: list[tuple[Any, ...]] = []
        super().__init__(spec, lambda *values: self.launches.append(values))


def on_gpu(buffer: SymmBuffer, num_sms: int = 132) -> SymmBuffer:
    """A CPU buffer that says it is on a GPU that no frozen table knows."""
    buffer.device = torch.device("cuda", 0)
    buffer.device_name = "unknown"
    buffer.num_sms = num_sms
    return buffer


def one(capacity: int = 1024, problem: Problem = SMALL, **options: Any) -> SymmBuffer:
    return on_gpu(SymmBuffer(problem, capacity, device="cpu"), **options)


def test_one_rank_chooses_by_its_tokens(specs: list[KernelSpec]) -> None:
    buffer = one()
    for tokens in (8, 8, 512, 8):
        _, chosen = prepare(buffer, tokens)
        assert chosen == default_schedule(SMALL, tokens)
    assert [s.schedule.math_mode for s in specs] == ["pingpong", "cooperative"]  # loaded once each
    assert prepare(buffer, 8, token_bound=512)[1] == default_schedule(SMALL, 512)
    assert len(specs) == 2


def test_many_ranks_choose_by_the_bound_that_they_share(specs: list[KernelSpec]) -> None:
    problem = replace(SMALL, num_ranks=2)
    buffers = [on_gpu(b, 66) for b in VirtualGroup(2, "cpu").buffers(problem, 600)]
    for bound in (None, 600, 100):
        chosen = {
            prepare(buffer, tokens, token_bound=bound)[1]
            for buffer in buffers
            for tokens in (0, 3, 100)
        }
        assert chosen == {replace(default_schedule(problem, bound or 600), num_sms=66)}
    with pytest.raises(ValueError, match="token_bound=100 must be an integer from num_tokens=101"):
        prepare(buffers[0], 101, token_bound=100)


def test_num_sms_is_the_share_of_a_rank(specs: list[KernelSpec]) -> None:
    problem = replace(SMALL, num_ranks=4)
    buffer = on_gpu(VirtualGroup(4, "cpu").buffers(problem, 32)[1], 33)
    kernel, chosen = prepare(buffer, 8)
    assert kernel.spec.schedule.num_sms == chosen.num_sms == 33
    with pytest.raises(
        ScheduleError, match="num_sms=34 exceeds the 33 SMs that a virtual rank of 4"
    ):
        prepare(buffer, 8, schedule=replace(chosen, num_sms=34))
    assert prepare(buffer, 8, schedule=replace(chosen, num_sms=32))[1].num_sms == 32
    with pytest.raises(ScheduleError, match="num_sms=132 exceeds the 100 SMs of unknown"):
        prepare(one(num_sms=100), 8, schedule=default_schedule(SMALL, 8))


@pytest.mark.parametrize("mode", ["pingpong", "cooperative"])
@pytest.mark.parametrize("tokens", [8, 900])
def test_forced_modes(
    specs: list[KernelSpec],
    arguments: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    tokens: int,
) -> None:
    free = one()
    other = "cooperative" if mode == "pingpong" else "pingpong"
    schedule = prepare(free, tokens, math_mode=mode)[1]
    assert schedule == default_schedule(SMALL, tokens, mode)
    assert prepare(free, tokens)[1] == default_schedule(SMALL, tokens)  # and does not stick
    caplog.clear()
    monkeypatch.setenv(KERNEL_VARIABLE, mode)
    forced = one()
    with caplog.at_level(logging.WARNING):
        assert [prepare(forced, tokens)[1] for _ in range(3)] == [schedule] * 3
        assert prepare(one(), tokens)[1] == schedule
    assert [r.getMessage() for r in caplog.records if KERNEL_VARIABLE in r.getMessage()] == [
        f"{KERNEL_VARIABLE}={mode} forces schedules of math mode {mode}; results do not change"
    ]
    # The variant of the op is stronger than the variable, and a schedule than both.
    assert prepare(forced, tokens, math_mode=other)[1].math_mode == other
    explicit = default_schedule(SMALL, tokens, other)
    assert prepare(forced, tokens, schedule=explicit)[1] == explicit
    # A buffer looks once; the next one looks anew.
    assert prepare(free, tokens)[1] == default_schedule(SMALL, tokens)
    monkeypatch.delenv(KERNEL_VARIABLE)
    assert prepare(forced, tokens)[1] == schedule
    assert prepare(one(), tokens)[1] == default_schedule(SMALL, tokens)
    with pytest.raises(ValueError, match="together with a schedule"):
        prepare(free, tokens, schedule=explicit, math_mode=other)


def test_variants_launch_their_mode(specs: list[KernelSpec], arguments: dict[str, Any]) -> None:
    buffer = one(CAPACITY)
    buffer.device = torch.device("cpu")  # where the arguments are; nothing is launched
    modes = ("pingpong", "cooperative")
    made = {mode: FakeKernel(spec_of(default_schedule(SMALL, 8, mode))) for mode in modes}
    for kernel in made.values():
        buffer.kernels[kernel.spec.schedule, False, True] = kernel
    rest = {**arguments, "sym_buffer": buffer}
    fp8_mega_moe_pingpong(**rest)
    fp8_mega_moe_cooperative(**rest, token_bound=8)
    fp8_mega_moe(**rest)
    assert {mode: len(kernel.launches) for mode, kernel in made.items()} == {
        "pingpong": 2,
        "cooperative": 1,
    }
    assert not specs


def spec_of(schedule: Schedule, capacity: int = CAPACITY) -> KernelSpec:
    return KernelSpec(problem=SMALL, schedule=schedule, capacity=capacity)


def test_a_mode_that_the_problem_does_not_have(
    specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(SMALL, hidden=384)
    buffer = one(problem=narrow)
    assert prepare(buffer, 8)[1].math_mode == "cooperative"
    with pytest.raises(ScheduleError, match=r"'pingpong' is forced and not valid .*block_n=256"):
        prepare(buffer, 8, math_mode="pingpong")
    monkeypatch.setenv(KERNEL_VARIABLE, "pingpong")
    with pytest.raises(ScheduleError, match=f"{KERNEL_VARIABLE}=pingpong: .*'pingpong' is forced"):
        prepare(one(problem=narrow), 8)


def test_the_threshold(
    specs: list[KernelSpec],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = one()
    modes = [prepare(buffer, n)[1].math_mode for n in (255, 256)]
    assert modes == ["pingpong", "cooperative"]
    for value, expected, said in (
        ("0", "cooperative", 1),
        ("256", "pingpong", 0),  # the default's own: changes nothing
        ("1000", "pingpong", 1),  # from 256 to 999 tokens
        ("255", "cooperative", 1),
    ):
        monkeypatch.setenv(THRESHOLD_VARIABLE, value)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert prepare(one(), 255)[1].math_mode == expected
        assert prepare(buffer, 255)[1].math_mode == "pingpong"  # it has looked
        assert caplog.text.count(f"{THRESHOLD_VARIABLE}={value} makes built-in schedules") == said


def test_a_threshold_counts_only_where_it_is_read(
    specs: list[KernelSpec],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(THRESHOLD_VARIABLE, "many")
    explicit = default_schedule(SMALL, 8)
    assert prepare(one(), 8, schedule=explicit)[1] == explicit
    assert prepare(one(), 8, math_mode="cooperative")[1].math_mode == "cooperative"
    monkeypatch.setenv(KERNEL_VARIABLE, "cooperative")
    assert prepare(one(), 8)[1].math_mode == "cooperative"
    monkeypatch.delenv(KERNEL_VARIABLE)
    with pytest.raises(ValueError, match=f"{THRESHOLD_VARIABLE}='many'"):
        prepare(one(), 8)
    monkeypatch.setenv(THRESHOLD_VARIABLE, "1000")
    with caplog.at_level(logging.WARNING):  # a hidden size without pingpong
        assert prepare(one(problem=replace(SMALL, hidden=384)), 8)[1].math_mode == "cooperative"
    assert THRESHOLD_VARIABLE not in caplog.text


def test_the_default_follows_the_recipe_of_the_buffer(specs: list[KernelSpec]) -> None:
    for group, mode in ((128, "pingpong"), (64, "cooperative")):
        recipe = Recipe(intermediate_group=group)  # type: ignore[arg-type]
        buffer = on_gpu(SymmBuffer(SMALL, CAPACITY, device="cpu", recipe=recipe))
        assert prepare(buffer, 8)[1].math_mode == mode
        assert prepare(buffer, 8, math_mode="pingpong")[1].math_mode == "pingpong"


def test_a_frozen_table_is_stronger_than_the_threshold(
    specs: list[KernelSpec],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = Schedule(experts_per_wave=8, stages=2, prefetch=4)
    found = resolve(SMALL, "unknown", 1024, 8, quiet=True)
    monkeypatch.setattr(
        selection, "resolve", lambda *_, **__: replace(found, schedule=frozen, origin="frozen")
    )
    monkeypatch.setenv(THRESHOLD_VARIABLE, "1000")
    with caplog.at_level(logging.WARNING):
        assert prepare(one(), 8)[1] == frozen
        monkeypatch.setenv(THRESHOLD_VARIABLE, "many")  # not even read
        assert prepare(one(), 8)[1] == frozen
    assert THRESHOLD_VARIABLE not in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (KERNEL_VARIABLE, "Pingpong", "TL_MEGAMOE_KERNEL='Pingpong' must be one of cooperative, p"),
        (THRESHOLD_VARIABLE, "-1", "TL_MEGAMOE_COOPERATIVE_THRESHOLD='-1' must be a number of tok"),
        (THRESHOLD_VARIABLE, "1e3", "TL_MEGAMOE_COOPERATIVE_THRESHOLD='1e3' must be a number of"),
    ],
)
def test_a_bad_variable_is_named(
    specs: list[KernelSpec],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(one(), 8)
    monkeypatch.setenv(variable, "")  # empty is unset
    prepare(one(), 8)


def test_a_process_group_loads_together_once(
    specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(SMALL, num_ranks=2)
    buffer = on_gpu(VirtualGroup(2, "cpu").buffers(problem, 64)[0])
    buffer.group, buffer.rank_mode = "group", "real"
    calls: list[dict[str, Any]] = []

    def load_together(choice: Any, load: Any, check: Any, group: Any, device: Any) -> Any:
        check()
        calls.append({"choice": choice, "group": group, "device": device})
        return load()

    monkeypatch.setattr(loading, "load_together", load_together)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for tokens in (0, 7, 64, 3):
        prepare(buffer, tokens)
    prepare(buffer, 5, activation_clamp=10.0)
    prepare(buffer, 5, activation_clamp=7.0)  # the bound is a launch argument
    assert len(calls) == len(specs) == 2
    assert calls[1]["choice"]["activation_clamp"]
    assert calls[1]["choice"]["stages"] == specs[1].schedule.stages
    assert calls[0]["group"] == "group"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    prepare(buffer, 5)  # loaded: may be captured
    with pytest.raises(RuntimeError, match=r"prepare on every rank before"):
        prepare(buffer, 5, fast_math=False)
