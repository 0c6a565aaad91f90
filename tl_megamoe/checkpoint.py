"""Expert weights from a model's checkpoint: a rank reads the experts that it owns, and no others.

Names are those of Hugging Face checkpoints under the prefix of a layer's experts, for example
`model.layers.3.mlp.experts`:

    <prefix>.<n>.gate_proj.weight  (intermediate, hidden), and up_proj     one expert each,
    <prefix>.<n>.down_proj.weight  (hidden, intermediate)                  n counts all experts
    <prefix>.<n>.w1.weight, w3, w2                                         the same three, as
                                                                           DeepSeek-V4 names them
    <prefix>.gate_up_proj          (experts, 2*intermediate, hidden)       stacked: gate rows,
    <prefix>.down_proj             (experts, hidden, intermediate)         then up rows

Experts that every token visits are one matrix each beside those, as wide as all of them together:

    <shared>.gate_proj.weight      (shared*intermediate, hidden), and up_proj
    <shared>.down_proj.weight      (hidden, shared*intermediate); w1, w3, w2 here too

FP8 weights (e4m3) come with a scale per 128 x 128 block that multiplies, under their name and
`_scale_inv`, or as `.scale` in place of `.weight`; BF16, FP16, FP32 or e8m0, all exact in FP32.
Wider weights are quantised to the same while they are read. Packed FP4 experts and biases are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3, quantize_blocks
from .sources import Source, open_source
from .swizzle import swizzle_rows
from .weights import INTERLEAVE, MoEWeights, PlainWeights

Naming = tuple[str, str, str]
NAMINGS: tuple[Naming, ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down of an expert."""
STACKED = ("gate_up_proj", "down_proj")
SHARED_WORDS = ("shared_experts", "shared_expert")
"""How models call the experts that every token visits."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are quantised."""


def load_experts(
    checkpoint: Path | str | Mapping[str, Tensor],
    prefix: str,
    problem: Problem,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> PlainWeights:
    """The weights of one rank's experts, as `transform_weights` takes them.

    Args:
        checkpoint: a folder of .safetensors files (with an index or without), one such file, or a
            state dict.
        prefix: of the layer's experts, for example `model.layers.3.mlp.experts`.
        problem: the layer; a one-rank view stands for one of its ranks.
        rank: whose experts.
        device: where the weights are put.

    Raises:
        ValueError: no such checkpoint or experts, a tensor is missing or has another shape or
            dtype, or the checkpoint holds another number of experts.
    """
    with open_source(checkpoint) as source:
        pieces = plan_experts(source, prefix, problem, rank)
        target = PlainTarget(problem, torch.device(device))
        for piece in pieces:
            place(source, piece, target)
    return target.weights


# ---- where weights go


class Target(Protocol):
    """Weights of one rank, filled part by part."""

    device: torch.device

    def put(self, local: int, part: str, codes: Tensor, sf: Tensor) -> None:
        """Copy one matrix of one expert.

        Args:
            local: number of the expert on this rank.
            part: `gate`, `up` or `down`.
            codes: (intermediate, hidden), of `down` (hidden, intermediate), e4m3; any strides.
            sf: (rows/128, columns/128) float32.
        """


class PlainTarget:
    """Row-major weights, allocated here."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        local, hidden, inter = problem.num_local_experts, problem.hidden, problem.intermediate

        def pair(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.empty((local, rows, columns), dtype=torch.uint8, device=device)
            blocks = (local, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
            return codes.view(E4M3), torch.empty(blocks, dtype=torch.float32, device=device)

        self.device = device
        self.weights = PlainWeights(*pair(2 * inter, hidden), *pair(hidden, inter))

    def put(self, local: int, part: str, codes: Tensor, sf: Tensor) -> None:
        w = self.weights
        out, out_sf = (w.l2, w.l2_sf) if part == "down" else (w.l1, w.l1_sf)
        first = codes.shape[0] if part == "up" else 0
        out[local].view(torch.uint8)[first : first + codes.shape[0]] = codes.view(torch.uint8)
        _scale_rows(out_sf[local], part, sf)


class TiledTarget:
    """Weights that the kernel reads (`transform_weights`), filled where they are."""

    def __init__(self, weights: MoEWeights) -> None:
        self.weights = weights
        self.device = weights.l1[0].device

    def put(self, local: int, part: str, codes: Tensor, sf: Tensor) -> None:
        out, out_sf = self.weights.l2 if part == "down" else self.weights.l1
        tiles = out[local].view(torch.uint8)
        if part != "down":  # its half of the rows of every tile
            tiles = tiles[:, :, :INTERLEAVE] if part == "gate" else tiles[:, :, INTERLEAVE:]
        rows = codes.view(torch.uint8).unflatten(0, (-1, tiles.shape[2]))
        tiles.copy_(swizzle_rows(rows.unflatten(2, (-1, SCALE_BLOCK)).transpose(1, 2)))
        _scale_rows(out_sf[local], part, sf)


def _scale_rows(out: Tensor, part: str, sf: Tensor) -> None:
    first = sf.shape[0] if part == "up" else 0
    out[first : first + sf.shape[0]] = sf


# ---- what a rank reads


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix of the checkpoint, and the experts of a rank that it belongs to.

    Attributes:
        name: of its tensor.
        part: `gate`, `up`, `down`, or `gate_up`: gate rows, then up rows.
        shape: (rows, columns).
        experts: local numbers; more than one divide the intermediate among them.
        of: number of the expert in a stacked tensor, and how many that must hold.
    """

    name: str
    part: str
    shape: tuple[int, int]
    experts: tuple[int, ...]
    of: tuple[int, int] | None = None


def own_experts(problem: Problem, rank: int) -> range:
    """The numbers of a rank's experts among all of the layer.

    Raises:
        ValueError: the layer has no such rank.
    """
    num_ranks = problem.table_num_ranks
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} must be within 0 and the {num_ranks} ranks of the layer")
    return range(rank * problem.num_local_experts, (rank + 1) * problem.num_local_experts)


def plan_experts(source: Source, prefix: str, problem: Problem, rank: int) -> list[Piece]:
    """The pieces of a rank's experts in a checkpoint that must hold the whole layer.

    Args:
        source: the checkpoint.
        prefix: of the layer's experts, without a dot at the end.
        problem: the layer without shared experts.
        rank: whose experts.

    Raises:
        ValueError: no experts under that prefix, another number of them, or biases.
    """
    experts, base = own_experts(problem, rank), f"{prefix}."
    refuse_biases(source.names, base)
    if f"{base}gate_up_proj" in source.names:
        check_stacked(source, base, problem)
        return list(stacked_pieces(base, problem, experts))
    return list(each_pieces(base, problem, experts, _check_count(source.names, base, problem)))


def plan_shared(source: Source, prefix: str, problem: Problem, num_shared: int) -> list[Piece]:
    """The pieces of the shared experts.

    Args:
        source: the checkpoint.
        prefix: of the shared experts, without a dot at the end.
        problem: the layer without shared experts.
        num_shared: how many of the layer's intermediate make theirs.

    Raises:
        ValueError: biases, or a gate that the layer does not compute.
    """
    base = f"{prefix}."
    refuse_biases(source.names, base)
    refuse_gate(source.names, prefix)
    naming = naming_of(source.names, re.escape(base)) or NAMINGS[0]
    return list(shared_pieces(base, problem, num_shared, naming))


def each_pieces(base: str, problem: Problem, experts: range, naming: Naming) -> Iterator[Piece]:
    """A tensor for every expert and projection."""
    hidden, inter = problem.hidden, problem.intermediate
    for local, expert in enumerate(experts):
        for word, part in zip(naming, ("gate", "up", "down"), strict=True):
            shape = (hidden, inter) if part == "down" else (inter, hidden)
            yield Piece(f"{base}{expert}.{word}.weight", part, shape, (local,))


def stacked_pieces(base: str, problem: Problem, experts: range) -> Iterator[Piece]:
    """One tensor of all experts for each linear, expert by expert: they are gigabytes."""
    whole = num_experts_of(problem)
    for word, shape in zip(STACKED, _stacked_shapes(problem), strict=True):
        for local, expert in enumerate(experts):
            part = word.removesuffix("_proj")
            yield Piece(f"{base}{word}", part, shape, (local,), (expert, whole))


def shared_pieces(base: str, problem: Problem, num_shared: int, naming: Naming) -> Iterator[Piece]:
    hidden, inter = problem.hidden, num_shared * problem.intermediate
    first = problem.num_local_experts
    locals_ = tuple(range(first, first + num_shared))
    for word, part in zip(naming, ("gate", "up", "down"), strict=True):
        shape = (hidden, inter) if part == "down" else (inter, hidden)
        yield Piece(f"{base}{word}.weight", part, shape, locals_)


def _stacked_shapes(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * problem.intermediate, problem.hidden), (problem.hidden, problem.intermediate)


def num_experts_of(problem: Problem) -> int:
    """Experts of the layer over all ranks."""
    return problem.num_local_experts * problem.table_num_ranks


# ---- reading


class MissingTensorError(ValueError):
    """A tensor that the checkpoint does not have."""

    def __init__(self, name: str, names: Collection[str]) -> None:
        super().__init__(f"the checkpoint has no {name!r}{_near(name, names)}")
        self.name = name


def place(source: Source, piece: Piece, target: Target) -> None:
    """Read a piece, quantise it if it is not FP8, and put it where it belongs.

    Raises:
        ValueError: the tensor or its scales are missing, or have another shape or dtype.
    """
    codes, sf = _read(source, piece, target.device)
    if piece.part == "gate_up":
        (gate, up), (gate_sf, up_sf) = codes.chunk(2), sf.chunk(2)
        target.put(piece.experts[0], "gate", gate, gate_sf)
        target.put(piece.experts[0], "up", up, up_sf)
        return
    axis, many = (1 if piece.part == "down" else 0), len(piece.experts)
    slices = zip(piece.experts, codes.chunk(many, axis), sf.chunk(many, axis), strict=True)
    for local, part, part_sf in slices:
        target.put(local, piece.part, part, part_sf)


def _read(source: Source, piece: Piece, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of a piece, on a device."""
    name, of, shape = piece.name, piece.of, piece.shape

    def get(name: str, shape: tuple[int, int]) -> Tensor:
        if name not in source.names:
            raise MissingTensorError(name, source.names)
        _check_shape(source, name, shape if of is None else (of[1], *shape))
        return source.read(name, None if of is None else of[0])

    weight = get(name, shape)
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values: load the model first")
    scale_name = f"{name}_scale_inv"
    other = f"{name.removesuffix('.weight')}.scale"
    if other in source.names and scale_name not in source.names:
        scale_name = other
    if weight.dtype == E4M3:
        sf = get(scale_name, (shape[0] // SCALE_BLOCK, shape[1] // SCALE_BLOCK))
        if sf.dtype not in SCALE_DTYPES:
            words = ", ".join(map(str, SCALE_DTYPES))
            raise ValueError(f"{scale_name} is {sf.dtype}, and must be one of {words}")
        return weight.to(device), sf.to(device).float()
    if weight.dtype not in WIDE_DTYPES:
        words = ", ".join(str(dtype) for dtype in (E4M3, *WIDE_DTYPES))
        packed = " (packed FP4? convert it to FP8 first)" if weight.dtype == torch.int8 else ""
        raise ValueError(f"{name} is {weight.dtype}, and must be one of {words}{packed}")
    if scale_name in source.names:
        raise ValueError(
            f"{name} is {weight.dtype} and has scales in {scale_name}: only {E4M3} weights do"
        )
    return quantize_blocks(weight.to(device))


def _check_shape(source: Source, name: str, wanted: tuple[int, ...]) -> None:
    held = source.shape(name)
    if held != wanted:
        turned = held == (*wanted[:-2], wanted[-1], wanted[-2])
        hint = ": it is transposed; swap its last two dimensions" if turned else ""
        raise ValueError(f"{name} has shape {held}, and must have {wanted}{hint}")


def check_stacked(source: Source, base: str, problem: Problem) -> None:
    """Refuse stacked tensors that are transposed, also where one of them is square.

    The shape of one that is square does not tell; the other one's, which then is not, does.
    """
    whole = num_experts_of(problem)
    names = [f"{base}{word}" for word in STACKED]
    found = [name in source.names for name in names]
    for name, shape, here, other in zip(
        names, _stacked_shapes(problem), found, reversed(names), strict=True
    ):
        if here:
            _check_shape(source, name, (whole, *shape))
        if here and not all(found) and shape[0] == shape[1]:
            raise ValueError(
                f"{name} holds square matrices, {shape[0]} x {shape[1]}: only {other} beside it "
                "tells whether they are transposed, and it is missing. Load both at once."
            )


# ---- names


def naming_of(names: Collection[str], pattern: str) -> Naming | None:
    """How the checkpoint names the tensors of experts that a pattern finds."""
    for naming in NAMINGS:
        words = "|".join(naming)
        if any(re.fullmatch(rf"{pattern}({words})\.weight", name) for name in names):
            return naming
    return None


def _check_count(names: Collection[str], base: str, problem: Problem) -> Naming:
    """How the checkpoint names an expert's tensors; refuses another number of experts."""
    whole, prefix = num_experts_of(problem), base.removesuffix(".")
    for naming in NAMINGS:
        pattern = re.compile(rf"{re.escape(base)}(\d+)\.{naming[0]}\.weight")
        found = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
        if found == set(range(whole)):
            return naming
        if found:
            raise ValueError(
                f"the checkpoint has {len(found)} experts under {prefix!r}, numbers {min(found)} "
                f"to {max(found)}, and problem {problem.name!r} {whole} over all ranks"
            )
    raise ValueError(
        f"the checkpoint has no experts under {prefix!r}: neither {base}0.gate_proj.weight nor "
        f"{base}0.w1.weight nor {base}gate_up_proj{_near('gate_proj.weight', names)}"
    )


def refuse_biases(names: Collection[str], base: str) -> None:
    words = "|".join({word for naming in (*NAMINGS, STACKED) for word in naming})
    pattern = re.compile(rf"{re.escape(base)}(\d+\.)?({words})[._]bias")
    biases = sorted(name for name in names if pattern.fullmatch(name))
    if biases:
        raise ValueError(
            f"{biases[0]}: experts with biases are not what this layer computes. Leave them to the "
            "model."
        )


def refuse_gate(names: Collection[str], shared: str) -> None:
    gate = f"{shared}_gate.weight"
    if gate in names:
        raise ValueError(
            f"{gate}: the model multiplies its shared expert by a gate, and this layer adds shared "
            "experts as they are. Leave it outside: num_shared_experts=0."
        )


def _near(name: str, names: Collection[str]) -> str:
    """A hint: an expert's tensor that the checkpoint has, one that begins or ends alike."""
    experts = sorted(n for n in names if ".experts." in n)
    ending = name.split(".")[-2:]
    alike = [n for n in experts if n.startswith(name.removesuffix("_scale_inv")) and n != name]
    alike += [n for n in experts if n.split(".")[-2:] == ending]
    alike = [n for n in alike if n != name.removesuffix("_scale_inv")] or experts
    return f"; it has, for example, {alike[0]!r}" if alike else ""
