"""The layer as PyTorch operators: `torch.ops.tl_megamoe.mega_moe` and `.fp8_mega_moe`.

torch.compile, torch.export and CUDA graphs see operators with a schema, a fake for shapes and
their mutations declared. A buffer crosses as its name (`SymmBuffer.key`), a schedule as its own.

`mega_moe` is functional: the buffer is workspace that nobody else reads, so a compiler may neither
copy it nor has anything to order but the operator's inputs and its result. `fp8_mega_moe` takes the
buffer's inputs as arguments and mutates `y` and the counts: what is written to `buffer.x` before it
is then seen to come before it. An argument that a compiler has moved elsewhere is copied back.

`Library` with define and impl, not the custom_op decorator, which does more in Python in every call
where an argument is mutated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import calls
from .arguments import check_activation, check_grad, check_recipe, copy_inputs
from .loading import Options
from .registry import buffer_of
from .schedule import Schedule
from .weights import MoEWeights

NAMESPACE = "tl_megamoe"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define(
    "mega_moe(Tensor x, Tensor? x_sf, Tensor topk_idx, Tensor topk_weights, Tensor l1, "
    "Tensor l1_sf, Tensor l2, Tensor l2_sf, str buffer, int num_shared=0, "
    "SymInt? token_bound=None, float? activation_clamp=None, bool fast_math=True) -> Tensor"
)
_LIBRARY.define(
    "fp8_mega_moe(Tensor(a!) y, Tensor x, Tensor x_sf, Tensor topk_idx, Tensor topk_weights, "
    "Tensor l1, Tensor l1_sf, Tensor l2, Tensor l2_sf, Tensor(b!)? recv_stats, str buffer, "
    "SymInt? token_bound=None, float? activation_clamp=None, bool fast_math=True, "
    "str schedule='', str math_mode='') -> ()"
)


def _mega_moe(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1: Tensor,
    l1_sf: Tensor,
    l2: Tensor,
    l2_sf: Tensor,
    buffer: str,
    num_shared: int = 0,
    token_bound: int | None = None,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> Tensor:
    return calls.forward(
        x,
        x_sf,
        topk_idx,
        topk_weights,
        MoEWeights((l1, l1_sf), (l2, l2_sf)),
        buffer_of(buffer),
        num_shared,
        Options(None, activation_clamp, fast_math, token_bound),
    )


def _mega_moe_fake(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    torch._check(
        x.dim() == 2 and topk_idx.dim() == 2 and topk_weights.dim() == 2,
        lambda: "x must be (tokens, hidden), topk_idx and topk_weights (tokens, top_k)",
    )
    for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        torch._check(
            value.shape[0] == x.shape[0],
            lambda name=name: f"{name} and x must have a row for every token",
        )
    wanted = torch.bfloat16 if x_sf is None else torch.float8_e4m3fn
    torch._check(x.dtype == wanted, lambda: f"x of dtype {x.dtype} must be {wanted}")
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _fp8_mega_moe(
    y: Tensor,
    x: Tensor,
    x_sf: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1: Tensor,
    l1_sf: Tensor,
    l2: Tensor,
    l2_sf: Tensor,
    recv_stats: Tensor | None,
    buffer: str,
    token_bound: int | None = None,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    schedule: str = "",
    math_mode: str = "",
) -> None:
    found = buffer_of(buffer)
    chosen = _schedule_of(found, schedule) if schedule else None
    options = Options(None, activation_clamp, fast_math, token_bound, chosen, math_mode or None)
    with found.lock:
        found.launcher.enter_stream()  # a copy, too, comes behind the launch before it
        copy_inputs(found, x, x_sf, topk_idx, topk_weights)
        calls.run(y, (l1, l1_sf), (l2, l2_sf), found, recv_stats, "swiglu", options, may_load=False)


def _fp8_mega_moe_fake(y: Tensor, *_: Any, **__: Any) -> None:
    torch._check(y.dim() == 2, lambda: "y must be (tokens, hidden)")
    torch._check(y.dtype == torch.bfloat16, lambda: f"y of dtype {y.dtype} must be bfloat16")


def _mega_moe_autograd(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Refuses what would have to be differentiated: the default would drop its gradient."""
    check_grad(x=x, x_sf=x_sf, topk_weights=topk_weights)
    with torch._C._AutoDispatchBelowAutograd():
        found: Tensor = torch.ops.tl_megamoe.mega_moe.default(
            x, x_sf, topk_idx, topk_weights, *rest, **options
        )
    return found


_LIBRARY.impl("mega_moe", _mega_moe_autograd, "Autograd")
# One implementation for every device: which one is right follows from the buffer.
_LIBRARY.impl("mega_moe", _mega_moe, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_mega_moe", _fp8_mega_moe, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::mega_moe", _mega_moe_fake, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::fp8_mega_moe", _fp8_mega_moe_fake, lib=_LIBRARY)


def _schedule_of(buffer: Any, name: str) -> Schedule:
    """A schedule by its name, among those whose kernels the buffer has loaded."""
    for schedule, _, _ in getattr(buffer, "kernels", ()):
        if schedule.name == name:
            found: Schedule = schedule
            return found
    raise ValueError(
        f"schedule={name!r} is not loaded on buffer {buffer.key!r}. Call tl_megamoe.prepare("
        "buffer, num_tokens, schedule=...) on every rank before: an operator never compiles."
    )


# ---- what torch.compile traces in place of the functions of op.py


def trace_launch(
    y: Tensor,
    l1_weights: Any,
    l2_weights: Any,
    sym_buffer: Any,
    stats: Tensor | None,
    activation: str,
    options: tuple[Any, ...],
) -> None:
    """`op.fp8_mega_moe` as an operator; the arguments are its own."""
    recipe, activation_clamp, fast_math, token_bound, schedule, math_mode = options
    check_activation(activation)
    if recipe is not None:
        check_recipe(recipe, sym_buffer)
    tokens = y.shape[0]
    torch.ops.tl_megamoe.fp8_mega_moe(
        y,
        sym_buffer.x[:tokens],
        sym_buffer.x_sf[:tokens],
        sym_buffer.topk_idx[:tokens],
        sym_buffer.topk_weights[:tokens],
        *l1_weights,
        *l2_weights,
        stats,
        sym_buffer.key,
        token_bound,
        activation_clamp,
        fast_math,
        "" if schedule is None else schedule.name,
        math_mode or "",
    )


def trace_mega_moe(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: MoEWeights,
    sym_buffer: Any,
    *,
    recipe: Any = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    token_bound: int | None = None,
) -> Tensor:
    """`op.mega_moe` as an operator; the arguments are its own."""
    check_activation(activation)
    if recipe is not None:
        check_recipe(recipe, sym_buffer)
    found: Tensor = torch.ops.tl_megamoe.mega_moe(
        x,
        x_sf,
        topk_idx,
        topk_weights,
        *weights.l1,
        *weights.l2,
        sym_buffer.key,
        0,
        token_bound,
        activation_clamp,
        fast_math,
    )
    return found
