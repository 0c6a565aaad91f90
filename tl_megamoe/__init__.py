"""One expert-parallel FP8 MoE layer in one persistent SM90 kernel.

Names below load on first use: importing the package imports neither torch nor tilelang, and nothing
touches CUDA before a kernel is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .problem import PRESETS, Problem, load_problem
from .recipe import Recipe
from .schedule import Schedule, ScheduleError

if TYPE_CHECKING:
    from .buffer import SymmBuffer as SymmBuffer
    from .checkpoint import load_experts as load_experts
    from .compat import get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe
    from .compat import get_symm_buffer_for_sm90_mega_moe as get_symm_buffer_for_sm90_mega_moe
    from .compat import (
        get_symm_buffer_size_for_sm90_mega_moe as get_symm_buffer_size_for_sm90_mega_moe,
    )
    from .compat import (
        get_token_alignment_for_sm90_mega_moe as get_token_alignment_for_sm90_mega_moe,
    )
    from .compat import transform_weights_for_mega_moe_sm90 as transform_weights_for_mega_moe_sm90
    from .debug import BufferOverwrittenError as BufferOverwrittenError
    from .handshake import disable_multicast as disable_multicast
    from .loading import NotLoadedError as NotLoadedError
    from .loading import prepare as prepare
    from .module import MegaMoE as MegaMoE
    from .op import fp8_mega_moe as fp8_mega_moe
    from .op import fp8_mega_moe_cooperative as fp8_mega_moe_cooperative
    from .op import fp8_mega_moe_pingpong as fp8_mega_moe_pingpong
    from .op import mega_moe as mega_moe
    from .reference_buffer import ReferenceBuffer as ReferenceBuffer
    from .shared_experts import with_shared as with_shared
    from .timeouts import MegaMoeTimeout as MegaMoeTimeout
    from .virtual import VirtualGroup as VirtualGroup
    from .weights import MoEWeights as MoEWeights
    from .weights import PlainWeights as PlainWeights
    from .weights import transform_separate as transform_separate
    from .weights import transform_weights as transform_weights

__version__ = "0.1.0"

_LAZY = {
    "BufferOverwrittenError": "debug",
    "MegaMoE": "module",
    "MegaMoeTimeout": "timeouts",
    "ReferenceBuffer": "reference_buffer",
    "SymmBuffer": "buffer",
    "VirtualGroup": "virtual",
    "load_experts": "checkpoint",
    "fp8_mega_moe": "op",
    "fp8_mega_moe_cooperative": "op",
    "fp8_mega_moe_pingpong": "op",
    "mega_moe": "op",
    "NotLoadedError": "loading",
    "prepare": "loading",
    "with_shared": "shared_experts",
    "MoEWeights": "weights",
    "PlainWeights": "weights",
    "transform_separate": "weights",
    "transform_weights": "weights",
    "get_symm_buffer_for_mega_moe": "compat",
    "get_symm_buffer_for_sm90_mega_moe": "compat",
    "get_symm_buffer_size_for_sm90_mega_moe": "compat",
    "get_token_alignment_for_sm90_mega_moe": "compat",
    "transform_weights_for_mega_moe_sm90": "compat",
    "disable_multicast": "handshake",
}

__all__ = [
    "PRESETS",
    "BufferOverwrittenError",
    "MegaMoE",
    "MegaMoeTimeout",
    "MoEWeights",
    "NotLoadedError",
    "PlainWeights",
    "Problem",
    "Recipe",
    "ReferenceBuffer",
    "Schedule",
    "ScheduleError",
    "SymmBuffer",
    "VirtualGroup",
    "__version__",
    "disable_multicast",
    "fp8_mega_moe",
    "fp8_mega_moe_cooperative",
    "fp8_mega_moe_pingpong",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "get_symm_buffer_size_for_sm90_mega_moe",
    "get_token_alignment_for_sm90_mega_moe",
    "load_experts",
    "load_problem",
    "mega_moe",
    "prepare",
    "transform_separate",
    "transform_weights",
    "transform_weights_for_mega_moe_sm90",
    "with_shared",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
