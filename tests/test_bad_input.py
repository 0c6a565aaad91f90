"""Bad input on a CPU: refused with one error that names it, and the next call is right.

The calls go to the reference, which checks its arguments as the kernel's calls do. On a GPU:
test_sm90_4_bad_input.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import small

from tl_megamoe import ReferenceBuffer, fp8_mega_moe, reference
from tl_megamoe.layout import make_layout
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights, transform_weights

LAYER = small(hidden=256, intermediate=128)
TOKENS, CAPACITY = 6, 8


@pytest.fixture(scope="module")
def plain() -> PlainWeights:
    return random_weights(LAYER)


@pytest.fixture(scope="module")
def weights(plain: PlainWeights) -> MoEWeights:
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), LAYER)


def expected(inputs: Inputs, plain: PlainWeights) -> torch.Tensor:
    i = inputs
    return reference.moe(LAYER, i.x, i.x_sf, i.topk_idx, i.topk_weights, plain)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, from an address that is no multiple of 16 bytes."""
    flat = torch.cat((tensor.flatten()[:1], tensor.flatten()))
    return flat[1:].view(tensor.shape)


def y_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


STATS = "cumulative_local_expert_recv_stats"
REFUSED = {
    "y-dtype": (
        lambda w: {"y": y_of(TOKENS, 256, dtype=torch.float16)},
        "y must be torch.bfloat16",
    ),
    "y-device": (lambda w: {"y": y_of(TOKENS, 256).to("meta")}, "y must be on cpu"),
    "y-shape": (lambda w: {"y": y_of(TOKENS, 128)}, "y must have shape"),
    "y-strides": (lambda w: {"y": y_of(TOKENS, 512)[:, ::2]}, "y must be contiguous"),
    "y-address": (lambda w: {"y": shifted(y_of(TOKENS, 256))}, "y must start at a multiple of 16"),
    "capacity": (lambda w: {"y": y_of(CAPACITY + 1, 256)}, "9 tokens, more than capacity=8"),
    "weights-address": (
        lambda w: {"l2_weights": (w.l2[0], shifted(w.l2[1]))},
        r"l2_weights\[1\] must start at a multiple of 16",
    ),
    "weights-strides": (
        lambda w: {"l1_weights": (w.l1[0].transpose(3, 4), w.l1[1])},
        r"l1_weights\[0\] must be contiguous",
    ),
    "weights-of-another-phase": (
        lambda w: {"l1_weights": w.l2},
        r"l1_weights\[0\] must have shape",
    ),
    "counts-dtype": (
        lambda w: {STATS: torch.zeros(8, dtype=torch.int64)},
        f"{STATS} must be torch",
    ),
    "counts-address": (
        lambda w: {STATS: shifted(torch.zeros(8, dtype=torch.int32))},
        f"{STATS} must start at a multiple of 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_leaves_the_buffer_usable(
    plain: PlainWeights, weights: MoEWeights, case: str, seed: int
) -> None:
    change, message = REFUSED[case]
    buffer, inputs = ReferenceBuffer(LAYER, CAPACITY), random_inputs(LAYER, TOKENS, seed=seed)
    buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    y = y_of(TOKENS, 256)
    good: dict[str, Any] = {
        "y": y,
        "l1_weights": weights.l1,
        "l2_weights": weights.l2,
        "sym_buffer": buffer,
    }
    with pytest.raises(ValueError, match=message):
        fp8_mega_moe(**{**good, **change(weights)})
    fp8_mega_moe(**good)
    assert torch.equal(y, expected(inputs, plain))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["x_sf", "topk_weights", "l1_sf", "l2_sf"])
def test_what_is_not_finite_stays_in_its_tokens(
    plain: PlainWeights, which: str, bad: float, seed: int
) -> None:
    """The rule that the kernel is held to, of the reference itself."""
    inputs = random_inputs(LAYER, 20, seed=seed)
    clean = expected(inputs, plain)
    if which in ("x_sf", "topk_weights"):
        getattr(inputs, which)[7, 1] = bad
        touched, changed = torch.arange(20) == 7, plain
    else:
        expert = int(inputs.topk_idx[7, 1])
        changed = PlainWeights(plain.l1, plain.l1_sf.clone(), plain.l2, plain.l2_sf.clone())
        getattr(changed, which)[expert, 0, 0] = bad
        touched = (inputs.topk_idx == expert).any(1)
    y = expected(inputs, changed)
    assert torch.equal(y[~touched], clean[~touched])
    assert not y[touched].isfinite().all(1).any()


@pytest.mark.parametrize(
    ("capacity", "sizes", "message"),
    [
        (10**9, {}, "capacity=1000000000 x num_topk=3 exceeds 2"),
        (10**30, {}, "exceeds 2"),
        (2**23, {"num_experts": 16, "num_ranks": 16, "num_topk": 2}, "pool rows, over"),
        (0, {}, "capacity=0 tokens a rank must be a positive integer"),
        (True, {}, "capacity=True tokens"),
        (2.0, {}, r"capacity=2\.0 tokens"),
        (8, {"num_experts": 17, "num_ranks": 17}, "num_ranks=17 of problem"),
    ],
)
def test_buffers_that_cannot_be(capacity: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout(small(**sizes), capacity)
