"""The experts modules of transformers 5: what they hold, and whether this layer computes the same.

Their weights are stacked, `gate_up_proj` (experts, 2*intermediate, hidden) and `down_proj`
(experts, hidden, intermediate). Both shapes together tell a transposed pair, whatever the sizes: of
the one the first has twice the columns of the second's rows, of the other twice the rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .checkpoint import refuse_biases
from .reference import swiglu

SAMPLE_WIDTH = 128
SAMPLE_RANGE = 64.0
"""Gate and up of the sample reach so far: past every clamp that a published model has."""


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, under their names, without a copy."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def stacked_sizes(experts: nn.Module, clamp: float | None) -> tuple[int, int, int]:
    """(hidden, intermediate, num_experts) of a stacked experts module that this layer can replace.

    Shapes are read and no values: the module may be on the meta device.

    Args:
        experts: the module.
        clamp: of the layer.

    Raises:
        ValueError: it has not the two stacked tensors, has biases or another activation, or the
            tensors are transposed or do not match.
    """
    held = module_tensors(experts)
    kind = type(experts).__name__
    pair = [held.get(word) for word in ("gate_up_proj", "down_proj")]
    if any(tensor is None or tensor.dim() != 3 for tensor in pair):
        raise ValueError(
            f"{kind} has no stacked gate_up_proj and down_proj of three dimensions, as experts "
            "modules of transformers 5 do. Load other layouts with load_checkpoint or "
            "load_state_dict."
        )
    # What no other layout of the weights would change comes first.
    refuse_biases(held, "")
    check_activation(experts, clamp)
    gate_up, down = (tuple(tensor.shape) for tensor in pair if tensor is not None)
    count, hidden, inter = down
    if gate_up == (count, 2 * inter, hidden):
        return hidden, inter, count
    shapes = f"gate_up_proj {gate_up} and down_proj {down} of {kind}"
    if gate_up == (count, inter, 2 * hidden):
        raise ValueError(
            f"{shapes} are transposed: (experts, hidden, 2*intermediate) and (experts, "
            "intermediate, hidden). Swap their last two dimensions, and see that all gate rows "
            "come before the up rows and that routing weights multiply the output."
        )
    raise ValueError(
        f"{shapes} do not belong together: they must be (experts, 2*intermediate, hidden) and "
        "(experts, hidden, intermediate)"
    )


def num_shared(shared: nn.Module, hidden: int, intermediate: int) -> int:
    """How many of the routed experts' size make a module of shared experts.

    Raises:
        ValueError: no whole number.
    """
    kind, down = type(shared).__name__, module_tensors(shared).get("down_proj.weight")
    if down is None or down.dim() != 2:
        raise ValueError(f"{kind} has no down_proj.weight: it is no gated MLP of shared experts")
    width = down.shape[1]
    if down.shape[0] != hidden or width % intermediate or not width:
        raise ValueError(
            f"down_proj.weight of {kind} has shape {tuple(down.shape)}: it must be (hidden, "
            f"shared*intermediate), a multiple of {intermediate} columns beside hidden={hidden}. "
            "Leave such shared experts outside."
        )
    return int(width // intermediate)


def check_activation(module: nn.Module, clamp: float | None) -> None:
    """Raise ValueError where a module's gate is not this layer's, tried on a sample.

    Args:
        module: with `_apply_gate` of gate and up columns, or `act_fn` of the gate, as modules of
            transformers have; one with neither passes.
        clamp: of the layer.
    """
    # Each value of the gate meets every sign and size of up. On the CPU, whatever the default is.
    line = torch.linspace(
        -SAMPLE_RANGE, SAMPLE_RANGE, SAMPLE_WIDTH, dtype=torch.float32, device="cpu"
    )
    gate, up = torch.meshgrid(line, line, indexing="ij")
    apply_gate, act = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    kind, limit = type(module).__name__, _limit(module)
    found = torch.empty(0)  # of an activation with weights of its own, which are not SiLU's
    with torch.no_grad():
        if isinstance(act, nn.Module) and module_tensors(act):
            pass
        elif callable(apply_gate):
            found = apply_gate(torch.cat((gate, up), -1))
        elif limit is not None:
            raise ValueError(
                f"{kind} has the limit {limit} and no _apply_gate that shows what it does with "
                "it. Leave such experts to the model; or make the layer by its sizes, with the "
                "activation_clamp that it is to have, and load_checkpoint."
            )
        elif callable(act):
            found = act(gate) * up
        else:
            return

    def matches(clamp: float | None) -> bool:
        wanted = swiglu(gate, up, clamp)
        return found.shape == wanted.shape and torch.allclose(found, wanted, 1e-3, 1e-3)

    if matches(clamp):
        return
    if clamp is not None and matches(None):
        advice = "It does not clamp: leave activation_clamp away."
    elif limit is not None and limit != clamp and matches(limit):
        advice = f"Its limit is {limit}: pass activation_clamp={limit}."
    else:
        advice = "No activation_clamp makes it so: leave these experts to the model."
    raise ValueError(
        f"{kind} does not compute silu(gate) * up with activation_clamp={clamp} of gate and up "
        f"columns, which is what this layer does. {advice}"
    )


def _limit(module: nn.Module) -> float | None:
    """Where a module says that it clamps gate and up; None where it does not."""
    for word in ("limit", "swiglu_limit"):
        limit = getattr(module, word, None)
        if isinstance(limit, (int, float)) and 0 < limit < math.inf:
            return float(limit)
    return None
