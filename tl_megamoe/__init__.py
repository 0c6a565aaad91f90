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
    from .buffer import MegaMoeTimeout as MegaMoeTimeout
    from .buffer import SymmBuffer as SymmBuffer
    from .op import fp8_mega_moe as fp8_mega_moe
    from .op import mega_moe as mega_moe
    from .weights import MoEWeights as MoEWeights
    from .weights import PlainWeights as PlainWeights
    from .weights import transform_separate as transform_separate
    from .weights import transform_weights as transform_weights

__version__ = "0.1.0"

_LAZY = {
    "MegaMoeTimeout": "buffer",
    "SymmBuffer": "buffer",
    "fp8_mega_moe": "op",
    "mega_moe": "op",
    "MoEWeights": "weights",
    "PlainWeights": "weights",
    "transform_separate": "weights",
    "transform_weights": "weights",
}

__all__ = [
    "PRESETS",
    "MegaMoeTimeout",
    "MoEWeights",
    "PlainWeights",
    "Problem",
    "Recipe",
    "Schedule",
    "ScheduleError",
    "SymmBuffer",
    "__version__",
    "fp8_mega_moe",
    "load_problem",
    "mega_moe",
    "transform_separate",
    "transform_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
