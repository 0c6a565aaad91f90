"""Arguments of the op, checked before anything is compiled or launched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from gpu_cases import SMALL

from tl_megamoe import Recipe, SymmBuffer, fp8_mega_moe, transform_weights
from tl_megamoe.op import prepare, weight_shapes
from tl_megamoe.recipe import as_recipe
from tl_megamoe.schedule import Schedule, ScheduleError
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
            "y has num_tokens=33 rows, over the buffer's capacity=32",
        ),
        (
            {"y": torch.empty(512, 8, dtype=torch.bfloat16).T},
            "y must be contiguous, found strides (1, 8)",
        ),
        ({"activation": "gelu"}, "activation='gelu' must be 'swiglu'"),
        ({"activation_clamp": 0.0}, "activation_clamp=0.0 must be a positive number"),
        ({"activation_clamp": float("nan")}, "activation_clamp=nan must be a positive number"),
        ({"recipe": (1, 1, 32)}, "recipe=(1, 1, 32) must be a tl_megamoe.Recipe or (1, 128, 128)"),
        ({"recipe": Recipe(scale="pow2")}, "recipe pow2-128 has no kernel"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(8)},
            "cumulative_local_expert_recv_stats must be torch.int32",
        ),
        ({"l1_weights": torch.empty(3)}, "l1_weights must be a (weight, scale) pair"),
        ({"schedule": Schedule(stages=9)}, "stages=9"),
        ({"schedule": "m64"}, "schedule must be a Schedule, found str"),
        ({"activation_clamp": "x"}, "activation_clamp='x' must be a positive number"),
        ({"recipe": [1, 128, 128]}, "sym_buffer is on cpu: the kernel needs an SM90 GPU"),
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
