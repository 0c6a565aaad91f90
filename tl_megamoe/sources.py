"""Where a checkpoint's tensors come from: a state dict, or safetensors files, read lazily."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"


def open_source(checkpoint: Path | str | Mapping[str, Tensor]) -> Tensors | Files:
    """A checkpoint as a context manager.

    Args:
        checkpoint: a folder of .safetensors files (with an index or without), one such file, or a
            state dict.

    Raises:
        ValueError: there is none, or a name is in two of its files.
    """
    return Tensors(checkpoint) if isinstance(checkpoint, Mapping) else Files(checkpoint)


class Source(Protocol):
    """Tensors by name; `read` gives a whole one, or one row of its first dimension."""

    names: Collection[str]

    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, row: int | None) -> Tensor: ...


class Tensors:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names: Collection[str] = tensors.keys()
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, row: int | None) -> Tensor:
        found = self._tensors[name].detach()
        return found if row is None else found[row]

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: object) -> None: ...


class Files:
    """Safetensors files; one is opened when something in it is asked for."""

    def __init__(self, checkpoint: Path | str):
        path = Path(checkpoint)
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        index = path if path.name.endswith(".index.json") else path / INDEX
        if index.is_file():
            try:
                places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"{index} is no index of safetensors files: {error}") from error
            for name, file in places.items():
                if not isinstance(file, str) or Path(file).is_absolute() or ".." in file.split("/"):
                    raise ValueError(
                        f"{index}: {name!r} lies in {file!r}, which must be the name of a file in "
                        "the index's folder. Take the index that came with the checkpoint"
                    )
            self._where = {name: index.parent / file for name, file in places.items()}
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
        with torch.device("cpu"):  # within torch.device("meta") it would come without values
            found: Tensor = self._slice(name)[:] if row is None else self._slice(name)[row]
        return found

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
