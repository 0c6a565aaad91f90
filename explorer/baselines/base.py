"""What a baseline is, what it is given, and what it hands back."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from ..farm import package_version

if TYPE_CHECKING:
    from torch import Tensor

    from tl_megamoe.buffer import SymmBuffer
    from tl_megamoe.kernel import CompiledKernel, KernelSpec
    from tl_megamoe.synthetic import Inputs
    from tl_megamoe.weights import MoEWeights, PlainWeights


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of the relative error against the reference.

    Attributes:
        result: of a result of many tokens.
        token: of its worst token.
    """

    result: float
    token: float

    def result_of(self, num_tokens: int) -> float:
        """`result` for this many tokens: few hold few flipped codes, whose sizes fluctuate."""
        return min(self.result * (1.0 + 1.0 / math.sqrt(max(num_tokens, 1))), self.token)


BF16_GATE_UP = Tolerance(2.2e-2, 6.5e-2)
"""For the recipe with gate and up rounded to BF16 between the products. Each is off by 1.6e-3 of
its size, so the product by 2.5e-3: beside e4m3 steps of 0.09 that flips 2 to 3 % of the codes, each
by 0.09 of its value, 1.3e-2 to 1.6e-2 of a row. A token is off by up to 4.5e-2 where a flip hits
its largest value or a power-of-two scale. Another recipe is 3.7e-2 away, over many tokens."""
OTHER_RECIPE = Tolerance(5e-2, 1e-1)
"""For other scales of the intermediate: two unrelated roundings of 0.027 of a value, 3.7e-2."""
NO_FP8_INTERMEDIATE = Tolerance(4e-2, 6.5e-2)
"""For an intermediate that stays BF16: the reference's rounding to e4m3, 0.027 of a value, and five
BF16 roundings of 1e-3 to 2e-3."""


@dataclass(frozen=True, slots=True)
class LayerSet:
    """One of the sets that launches rotate over; the sets share a routing, and nothing else.

    Attributes:
        plain: weights of this rank's experts.
        inputs: this rank's tokens.
        buffer, weights: the same as our kernels read them; None when ours do not run beside.
    """

    plain: PlainWeights
    inputs: Inputs
    buffer: SymmBuffer | None = None
    weights: MoEWeights | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """What a baseline runs.

    Attributes:
        problem: the layer over the ranks that run: of one rank, or of all ranks of `group`.
        recipe: how the intermediate is scaled.
        sets: one for each set index.
        schedule, compile_spec: of our kernels; None when ours do not run beside.
        group: process group of several ranks, a GPU each.
    """

    problem: Problem
    recipe: Recipe
    sets: Sequence[LayerSet]
    schedule: Schedule | None = None
    compile_spec: Callable[[KernelSpec], CompiledKernel] | None = None
    group: Any = None

    @property
    def num_tokens(self) -> int:
        return self.sets[0].inputs.num_tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """A baseline that is ready to run.

    Attributes:
        launch: runs the layer on a set, on torch's current stream; may be captured in a CUDA graph
            once it has run.
        outputs: by set, (tokens, hidden) bf16 of its last launch.
        notes: what is worth recording of how it runs.
    """

    launch: Callable[[int], None]
    outputs: list[Tensor]
    notes: str = ""


class Baseline(Protocol):
    """A way to run the layer.

    Attributes:
        name: as on the command line and in tables.
        what: what it runs, what it is given beforehand, and where it computes something else.
        tested: where and when it last ran against the real package; empty: it never did.
        tolerance: of its result; None: that of the recipe (`reference.tolerances`).
    """

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def tested(self) -> str: ...
    @property
    def tolerance(self) -> Tolerance | None: ...

    def available(self) -> str | None:
        """Why it does not run on this machine; None when it does."""

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        """Why it does not run this layer; None when it does."""

    def version(self) -> str:
        """Version of the package that does the work; empty when it is not installed."""

    def prepare(self, layer: Layer) -> Prepared:
        """Make what launches need. May take seconds; nothing of it is timed."""


def no_gpu() -> str | None:
    """Why there is no GPU for FP8 products; None when there is one."""
    from ..doctor import find_gpu

    return None if find_gpu() else "no SM90 GPU here"


def import_problem(*modules: str, attributes: Sequence[str] = ()) -> str | None:
    """Why packages cannot be used; None when they import and the first has the attributes."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            return f"{name} is not installed"
        except Exception as error:  # foreign packages load libraries and start JITs when imported
            return f"{name} does not import: {type(error).__name__}: {error}"[:200]
        missing = [a for a in attributes if not hasattr(module, a)] if name == modules[0] else []
        if missing:
            return f"{name} {installed_version(name)} has no {', '.join(missing)}"
    return None


def no_ranks() -> str | None:
    """Why there are no ranks with a GPU each; None when this process is one of several."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return None
    return "needs torch.distributed with 2 ranks or more, a GPU each: call it under torchrun"


def installed_version(module: str) -> str:
    """The version of a package by the name that it is imported by; empty when not installed."""
    return package_version(module) or package_version(module.replace("_", "-"))
