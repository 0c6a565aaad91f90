"""Other ways to run the same layer, each in a file of its own, for `tl-megamoe bench`.

`BASELINES` holds all of them. One that needs several GPUs is called from a script under torchrun:

    layer = Layer(problem, recipe, sets, group=torch.distributed.group.WORLD)
    prepared = named("v1-ll").prepare(layer)
    protocol.measure({"ours": launch, "v1-ll": prepared.launch})
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Baseline, Layer, LayerSet, Prepared
from .deepgemm import DeepGemm
from .deepgemm_mega_moe import DeepGemmMegaMoe
from .torch_bf16 import TorchBf16
from .torch_fp8 import TorchFp8
from .unfused import Unfused
from .v1_contig import V1Contig
from .v1_ll import V1LowLatency
from .v2 import V2

__all__ = ["BASELINES", "Baseline", "Layer", "LayerSet", "Prepared", "named"]

BASELINES: tuple[Baseline, ...] = (
    Unfused(),
    TorchFp8(),
    TorchBf16(),
    DeepGemm(),
    DeepGemm(masked=True),
    DeepGemmMegaMoe(),
    V1Contig(),
    V1LowLatency(),
    V2(),
)


def named(name: str, every: Sequence[Baseline] = BASELINES) -> Baseline:
    """The baseline of a name.

    Args:
        name: as `Baseline.name`.
        every: those there are.

    Raises:
        ValueError: there is none.
    """
    for baseline in every:
        if baseline.name == name:
            return baseline
    names = ", ".join(baseline.name for baseline in every)
    raise ValueError(f"--baseline {name}: there is no such baseline. All: {names}")
