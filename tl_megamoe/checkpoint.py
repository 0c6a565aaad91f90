"""Expert weights from a model's checkpoint: a rank reads the experts that it owns, and no others.

Names are those of Hugging Face checkpoints under the prefix of a layer's experts, for example
`model.layers.3.mlp.experts`:

    <prefix>.<n>.gate_proj.weight  (intermediate, hidden), and up_proj     one expert each,
    <prefix>.<n>.down_proj.weight  (hidden, intermediate)                  n counts all experts
    <prefix>.<n>.w1.weight, w3, w2                                         the same three, as
                                                                           DeepSeek-V4 names them
    <prefix>.gate_up_proj          (experts, 2*intermediate, hidden)       stacked: gate rows,
    <prefix>.down_proj             (experts, hidden, intermediate)         then up rows

FP8 weights (e4m3) come with a scale per 128 x 128 block that multiplies, under their name and
`_scale_inv`, or as `.scale` in place of `.weight`; BF16, FP16, FP32 or e8m0, all exact in FP32.
Wider weights are quantised to the same while they are read. Packed FP4 experts and biases are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3, quantize_blocks
from .weights import PlainWeights

NAMINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down of an expert."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
INDEX = "model.safetensors.index.json"
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
    num_ranks = problem.table_num_ranks
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} must be within 0 and the {num_ranks} ranks of the layer")
    experts = range(rank * problem.num_local_experts, (rank + 1) * problem.num_local_experts)
    with _Tensors(checkpoint) if isinstance(checkpoint, Mapping) else _Files(checkpoint) as source:
        _refuse_biases(source.names, prefix)
        if f"{prefix}.gate_up_proj" in source.names:
            out = _empty(problem, torch.device(device))
            _fill_stacked(out, prefix, problem, experts, source)
        else:
            naming = _check_count(source.names, prefix, problem)
            out = _empty(problem, torch.device(device))
            _fill_each(out, prefix, problem, experts, source, naming)
    return out


def _empty(problem: Problem, device: torch.device) -> PlainWeights:
    local, hidden, inter = problem.num_local_experts, problem.hidden, problem.intermediate

    def pair(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty((local, rows, columns), dtype=torch.uint8, device=device).view(E4M3)
        blocks = (local, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
        return codes, torch.empty(blocks, dtype=torch.float32, device=device)

    return PlainWeights(*pair(2 * inter, hidden), *pair(hidden, inter))


def _place(codes: Tensor, sf: Tensor, rows: slice, weight: Tensor, weight_sf: Tensor) -> None:
    """Put rows of one expert, and their scales, where they belong."""
    codes.view(torch.uint8)[rows] = weight.view(torch.uint8).to(codes.device)
    sf[slice(rows.start // SCALE_BLOCK, rows.stop // SCALE_BLOCK)] = weight_sf.to(sf.device)


def _fill_each(
    out: PlainWeights,
    prefix: str,
    problem: Problem,
    experts: range,
    source: _Source,
    naming: tuple[str, str, str],
) -> None:
    """From a tensor for every expert and projection."""
    hidden, rows = problem.hidden, problem.intermediate
    gate, up, down = naming
    for local, expert in enumerate(experts):
        for word, part in ((gate, slice(0, rows)), (up, slice(rows, 2 * rows))):
            weight, sf = _read(source, f"{prefix}.{expert}.{word}.weight", (rows, hidden))
            _place(out.l1[local], out.l1_sf[local], part, weight, sf)
        weight, sf = _read(source, f"{prefix}.{expert}.{down}.weight", (hidden, rows))
        _place(out.l2[local], out.l2_sf[local], slice(0, hidden), weight, sf)


def _fill_stacked(
    out: PlainWeights, prefix: str, problem: Problem, experts: range, source: _Source
) -> None:
    """From one tensor of all experts for each linear, expert by expert: they are gigabytes."""
    hidden, inter, whole = problem.hidden, problem.intermediate, _num_experts(problem)
    pairs = (
        ("gate_up_proj", (2 * inter, hidden), out.l1, out.l1_sf),
        ("down_proj", (hidden, inter), out.l2, out.l2_sf),
    )
    for word, shape, codes, sf in pairs:
        for local, expert in enumerate(experts):
            weight, weight_sf = _read(source, f"{prefix}.{word}", shape, (expert, whole))
            _place(codes[local], sf[local], slice(0, shape[0]), weight, weight_sf)


def _read(
    source: _Source, name: str, shape: tuple[int, int], of: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of one expert's weight; quantised if it is not FP8.

    Args:
        source: the checkpoint.
        name: of the tensor.
        shape: (rows, columns) of one expert.
        of: number of the expert in a stacked tensor, and how many that must hold.
    """

    def get(name: str, shape: tuple[int, int]) -> Tensor:
        if name not in source.names:
            raise ValueError(f"the checkpoint has no {name!r}{_near(name, source.names)}")
        held, wanted = source.shape(name), shape if of is None else (of[1], *shape)
        if held != wanted:
            turned = held == (*wanted[:-2], wanted[-1], wanted[-2])
            hint = ": it is transposed; swap its last two dimensions" if turned else ""
            raise ValueError(f"{name} has shape {held}, and must have {wanted}{hint}")
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
        return weight, sf.float()
    if weight.dtype not in WIDE_DTYPES:
        words = ", ".join(str(dtype) for dtype in (E4M3, *WIDE_DTYPES))
        packed = " (packed FP4? convert it to FP8 first)" if weight.dtype == torch.int8 else ""
        raise ValueError(f"{name} is {weight.dtype}, and must be one of {words}{packed}")
    if scale_name in source.names:
        raise ValueError(
            f"{name} is {weight.dtype} and has scales in {scale_name}: only {E4M3} weights do"
        )
    return quantize_blocks(weight)


def _num_experts(problem: Problem) -> int:
    """Experts of the layer over all ranks."""
    return problem.num_local_experts * problem.table_num_ranks


def _check_count(names: Collection[str], prefix: str, problem: Problem) -> tuple[str, str, str]:
    """How the checkpoint names an expert's tensors; refuses another number of experts."""
    whole = _num_experts(problem)
    for naming in NAMINGS:
        pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.{naming[0]}\.weight")
        found = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
        if found == set(range(whole)):
            return naming
        if found:
            raise ValueError(
                f"the checkpoint has {len(found)} experts under {prefix!r}, numbers {min(found)} "
                f"to {max(found)}, and problem {problem.name!r} {whole} over all ranks"
            )
    raise ValueError(
        f"the checkpoint has no experts under {prefix!r}: neither {prefix}.0.gate_proj.weight nor "
        f"{prefix}.0.w1.weight nor {prefix}.gate_up_proj{_near('gate_proj.weight', names)}"
    )


def _refuse_biases(names: Collection[str], prefix: str) -> None:
    biases = sorted(
        n for n in names if n.startswith(f"{prefix}.") and n.endswith(("bias", "_bias"))
    )
    if biases:
        raise ValueError(f"{biases[0]}: experts with biases are not what this layer computes")


def _near(name: str, names: Collection[str]) -> str:
    """A hint: an expert's tensor that the checkpoint has, one that begins or ends alike."""
    experts = sorted(n for n in names if ".experts." in n)
    ending = name.split(".")[-2:]
    alike = [n for n in experts if n.startswith(name.removesuffix("_scale_inv")) and n != name]
    alike += [n for n in experts if n.split(".")[-2:] == ending]
    alike = [n for n in alike if n != name.removesuffix("_scale_inv")] or experts
    return f"; it has, for example, {alike[0]!r}" if alike else ""


# ---- where tensors come from


class _Source(Protocol):
    """Tensors by name; `read` gives a whole one, or one row of its first dimension."""

    names: Collection[str]

    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, row: int | None) -> Tensor: ...


class _Tensors:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names: Collection[str] = tensors.keys()
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, row: int | None) -> Tensor:
        found = self._tensors[name].detach()
        return found if row is None else found[row]

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Files:
    """Safetensors files; one is opened when something in it is asked for."""

    def __init__(self, checkpoint: Path | str):
        path = Path(checkpoint)
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        index = path if path.name.endswith(".index.json") else path / INDEX
        if index.is_file():
            try:
                places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index} is no index of safetensors files: {error}") from error
            self._where = {name: index.parent / str(file) for name, file in places.items()}
        else:
            files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
            if not files:
                raise ValueError(f"there is no .safetensors file at {path}")
            self._where = {}
            for file in files:
                for name in self._open(file).keys():
                    if name in self._where:
                        raise ValueError(
                            f"{name!r} is in {self._where[name]} and in {file}: keep one of them, "
                            f"or add the {INDEX} that says which counts"
                        )
                    self._where[name] = file
        self.names: Collection[str] = self._where.keys()

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            from safetensors import safe_open

            if not file.is_file():
                raise ValueError(f"there is no file {file}, which the checkpoint's index names")
            try:
                opened = safe_open(file, framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own kind
                raise ValueError(f"{file} is no safetensors file: {error}") from error
            self._opened[file] = self._stack.enter_context(opened)
        return self._opened[file]

    def _slice(self, name: str) -> Any:
        file = self._where[name]
        opened = self._open(file)
        try:
            return opened.get_slice(name)
        except Exception as error:  # safetensors raises its own kind
            raise ValueError(f"{file} has no {name!r}, as the index says: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, row: int | None) -> Tensor:
        found: Tensor = self._slice(name)[:] if row is None else self._slice(name)[row]
        return found

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
