"""Names of DeepGEMM: what its callers write works, and what has no kernel here is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import tl_megamoe
from tl_megamoe import (
    Problem,
    Recipe,
    SymmBuffer,
    VirtualGroup,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    get_symm_buffer_size_for_sm90_mega_moe,
    get_token_alignment_for_sm90_mega_moe,
    transform_weights,
    transform_weights_for_mega_moe_sm90,
)
from tl_megamoe.synthetic import random_weights

SIZES = (16, 100, 2, 512, 256)
"""num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden"""
PROBLEM = Problem(name="p", hidden=512, intermediate=256, num_experts=16, num_topk=2, num_ranks=1)


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_arguments_come_in_the_order_of_deepgemm() -> None:
    sizes = ["num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"]
    rest = ["use_fp8_dispatch", "activation"]
    assert names(get_symm_buffer_for_mega_moe)[:8] == ["group", *sizes, *rest]
    assert names(get_symm_buffer_size_for_sm90_mega_moe)[:8] == ["num_ranks", *sizes, *rest]
    assert names(transform_weights_for_mega_moe_sm90) == ["l1_weights", "l2_weights"]
    assert names(fp8_mega_moe)[:9] == [
        "y",
        "l1_weights",
        "l2_weights",
        "sym_buffer",
        "cumulative_local_expert_recv_stats",
        "recipe",
        "activation",
        "activation_clamp",
        "fast_math",
    ]
    assert get_symm_buffer_for_sm90_mega_moe is get_symm_buffer_for_mega_moe


def test_all_names_are_of_the_package() -> None:
    for name in tl_megamoe.__all__:
        assert getattr(tl_megamoe, name) is not None


def test_buffer_of_one_process() -> None:
    alignment = get_token_alignment_for_sm90_mega_moe()
    buffer = get_symm_buffer_for_mega_moe(None, *SIZES, device="cpu", timeout_s=3.0, debug=True)
    buffer.check_guards()
    assert isinstance(buffer, SymmBuffer)
    assert buffer.capacity % alignment == 0
    assert 100 <= buffer.capacity < 100 + alignment
    assert buffer.problem.key() == PROBLEM.key()
    assert buffer.timeout_s == 3.0
    assert buffer.x.shape == (128, 512)
    assert buffer.x_sf.shape == (128, 4)
    same = get_symm_buffer_for_mega_moe(
        None, *SIZES, True, "swiglu", device="cpu", recipe=Recipe(intermediate_group=64)
    )
    assert same.recipe == Recipe(intermediate_group=64)


@pytest.mark.parametrize("recipe", [(1, 128, 128), (128, 128, 128), [1, 128, 128]])
def test_every_maker_takes_the_recipe_of_deepgemm(recipe: Any) -> None:
    made = get_symm_buffer_for_mega_moe(None, *SIZES, device="cpu", recipe=recipe)
    others = VirtualGroup(1, "cpu").buffers(PROBLEM, 100, recipe=recipe)
    plain = SymmBuffer(PROBLEM, 100, "cpu", recipe=recipe)
    assert [b.recipe for b in (made, plain, *others)] == [Recipe()] * 3
    assert get_symm_buffer_size_for_sm90_mega_moe(1, *SIZES, recipe=recipe)[0] == plain.num_bytes
    with pytest.raises(ValueError, match=r"recipe=\(1, 64, 128\) must be"):
        get_symm_buffer_for_mega_moe(None, *SIZES, device="cpu", recipe=(1, 64, 128))


@pytest.mark.parametrize("ranks", [1, 4])
def test_size_and_views(ranks: int) -> None:
    size, views = get_symm_buffer_size_for_sm90_mega_moe(ranks, *SIZES)
    problem = Problem(
        name="p", hidden=512, intermediate=256, num_experts=16, num_topk=2, num_ranks=ranks
    )
    expected = VirtualGroup(ranks, "cpu").buffers(problem, 100)[0]
    assert size == expected.num_bytes
    raw = torch.zeros(size, dtype=torch.int8)
    found = views(raw)
    for name, view in zip(
        ("x", "x_sf", "topk_idx", "topk_weights", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf"),
        found,
        strict=True,
    ):
        wanted = getattr(expected, name)
        assert (view.shape, view.dtype) == (wanted.shape, wanted.dtype)
        offset = view.data_ptr() - raw.data_ptr()
        assert offset == wanted.data_ptr() - expected.raw.data_ptr()
    with pytest.raises(ValueError, match=f"must be one row of {size} bytes"):
        views(raw[:-1])


def test_weights_are_those_of_transform_weights() -> None:
    plain = random_weights(PROBLEM)
    l1, l2 = transform_weights_for_mega_moe_sm90((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))
    wanted = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))
    for found, expected in zip((*l1, *l2), (*wanted.l1, *wanted.l2), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match=r"l2_weights must be a \(codes, scales\) pair"):
        transform_weights_for_mega_moe_sm90((plain.l1, plain.l1_sf), plain.l2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "situ"}, "activation='situ' must be 'swiglu'"),
        ({"use_fp8_dispatch": False}, "use_fp8_dispatch=False must be None or True"),
        ({"mma_type": "fp8xfp4"}, "mma_type='fp8xfp4' must be None or 'fp8xfp8'"),
        ({"num_shared_experts": 1}, "num_shared_experts=1 must be 0"),
        ({"num_topk": 0}, "num_topk=0"),
        ({"num_max_tokens_per_rank": "8"}, "capacity='8' tokens a rank"),
    ],
)
def test_what_has_no_kernel_is_refused(options: dict[str, Any], message: str) -> None:
    sizes = dict(zip(names(get_symm_buffer_for_mega_moe)[1:6], SIZES, strict=True))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        get_symm_buffer_for_mega_moe(None, **{**sizes, "device": "cpu", **options})
    assert message in str(caught.value)


def test_a_virtual_group_makes_its_own_buffers() -> None:
    with pytest.raises(ValueError, match=r"group\.buffers\(problem, capacity\)"):
        get_symm_buffer_for_mega_moe(VirtualGroup(2, "cpu"), *SIZES, device="cpu")
