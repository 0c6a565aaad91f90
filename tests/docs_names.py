"""Python blocks of README.md and docs/, checked without running them: they may need a GPU."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from docs_blocks import GIVEN, Block, BlockError, compiled


def check_names(blocks: Sequence[Block]) -> None:
    """Check the Python blocks of a page.

    Every import must be found, every name defined by an earlier block or given, and of the
    package's functions and classes every attribute and keyword that a block uses must exist.

    Raises:
        BlockError: one does not.
    """
    known = {*vars(builtins), *GIVEN, "__name__"}
    objects: dict[str, Any] = {}
    types: dict[str, type] = {}
    for block in blocks:
        compiled(block)
        tree = ast.parse(block.text)
        _check_imports(block, tree, objects)
        known |= _stored(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in known:
                raise BlockError(f"{block.where}: no block above defines {node.id!r}")
            if isinstance(node, ast.Attribute):
                _resolve(block, node, objects)
            if isinstance(node, ast.Call):
                _check_call(block, node, objects)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = _class_made(block, node.value, objects)
                for target in node.targets:
                    if isinstance(target, ast.Name) and made is not None:
                        types[target.id] = made
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                made = types.get(node.value.id)
                if made is not None and node.attr not in attributes_of(made):
                    raise BlockError(f"{block.where}: {made.__name__} has no {node.attr!r}")


def _check_imports(block: Block, tree: ast.AST, objects: dict[str, Any]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _find_module(block, alias.name)
                name = alias.asname or alias.name.split(".")[0]
                if alias.name.split(".")[0] == "tl_megamoe":
                    module = importlib.import_module(alias.name)
                    objects[name] = (
                        module if alias.asname else importlib.import_module("tl_megamoe")
                    )
        elif isinstance(node, ast.ImportFrom):
            _find_module(block, node.module or "")
            if (node.module or "").split(".")[0] != "tl_megamoe":
                continue
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    raise BlockError(f"{block.where}: {node.module} has no {alias.name!r}")
                objects[alias.asname or alias.name] = getattr(module, alias.name)


def _find_module(block: Block, name: str) -> None:
    if "dev" in block.needs and name.split(".")[0] != "tl_megamoe":
        return
    if not name or importlib.util.find_spec(name) is None:
        raise BlockError(f"{block.where}: there is no module {name!r}")


def _stored(tree: ast.AST) -> set[str]:
    """Every name that a block binds anywhere."""
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            out.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            out.add(node.name)
        elif isinstance(node, ast.arg):
            out.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            out.add(node.name)
        elif isinstance(node, ast.alias):
            out.add((node.asname or node.name).split(".")[0])
    return out


def _resolve(block: Block, node: ast.expr, objects: dict[str, Any]) -> Any:
    """The package's object that an expression names; None where it names another."""
    if isinstance(node, ast.Name):
        return objects.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    base = _resolve(block, node.value, objects)
    if base is None or not (inspect.ismodule(base) or inspect.isclass(base)):
        return None
    if not hasattr(base, node.attr):
        name = f"{base.__name__}.{node.attr}"
        if hasattr(base, "__path__") and importlib.util.find_spec(name):
            return importlib.import_module(name)
        raise BlockError(f"{block.where}: {base.__name__} has no {node.attr!r}")
    return getattr(base, node.attr)


def _check_call(block: Block, node: ast.Call, objects: dict[str, Any]) -> None:
    called = _resolve(block, node.func, objects)
    if called is None or not callable(called):
        return
    given = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    positional = [] if starred else [None] * len(node.args)
    try:
        inspect.signature(called).bind_partial(*positional, **given)
    except TypeError as error:
        raise BlockError(f"{block.where}: {ast.unparse(node.func)}(): {error}") from error


def _class_made(block: Block, node: ast.Call, objects: dict[str, Any]) -> type | None:
    """The class of what a call makes: a class's own, or that of its constructor methods."""
    called = _resolve(block, node.func, objects)
    if inspect.isclass(called):
        return called
    owner = getattr(called, "__self__", None)
    return owner if inspect.isclass(owner) else None


def attributes_of(cls: type) -> set[str]:
    """What instances have: methods, fields, what methods set, and what the docstring promises."""
    out = set(dir(cls))
    for base in cls.__mro__:
        out |= set(vars(base).get("__annotations__", {}))
        if not base.__module__.startswith("tl_megamoe"):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                out.add(node.attr)
        promised = (base.__doc__ or "").partition("Attributes")[2].partition("Args:")[0]
        for names in re.findall(r"^ {8}(\w+(?:, \w+)*): ", promised, re.M):
            out |= set(names.split(", "))
    return out
