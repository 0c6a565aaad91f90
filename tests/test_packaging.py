"""What ships, what importing costs, and rules that the source text has to follow."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tl_megamoe

ROOT = Path(__file__).parents[1]
FOLDERS = {"tl_megamoe": "tl_megamoe", "schedules": "tl_megamoe/schedules"}
FOLDERS["explorer"] = "tl_megamoe/explorer"
LIBRARY = sorted((ROOT / "tl_megamoe").rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree: building in place leaves files that later wheels pick up."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(work), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(work.glob("*.whl"))


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    expected = {"tl_megamoe/py.typed"}
    for folder, package in FOLDERS.items():
        for pattern in ("*.py", "*.json", "*.toml"):
            for path in (ROOT / folder).rglob(pattern):
                expected.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert len(names) == len(set(names))


def test_wheel_metadata(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    info = f"tl_megamoe-{tl_megamoe.__version__}.dist-info/"
    scripts = files.read(info + "entry_points.txt").decode()
    assert "[console_scripts]\ntl-megamoe = tl_megamoe.explorer.cli:main" in scripts
    metadata = files.read(info + "METADATA").decode()
    assert "Requires-Dist: tilelang[nvcc]==0.1.15" in metadata
    assert "License-Expression: MIT" in metadata
    assert any(name.endswith("LICENSE") for name in files.namelist())


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_editable_install_maps_the_folders(folder: str) -> None:
    spec = importlib.util.find_spec(FOLDERS[folder].replace("/", "."))
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == (ROOT / folder / "__init__.py").resolve()


def test_console_script_is_callable() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="tl-megamoe")
    main = next(iter(scripts)).load()
    assert callable(main)


def test_import_is_light() -> None:
    code = "import sys, tl_megamoe; print(sorted({'torch', 'tilelang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_public_name_loads() -> None:
    for name in tl_megamoe.__all__:
        assert getattr(tl_megamoe, name) is not None
    assert set(tl_megamoe.__all__) <= set(dir(tl_megamoe))
    with pytest.raises(AttributeError, match="no_such_name"):
        tl_megamoe.no_such_name  # noqa: B018


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_library_rules(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [n for n in imported_names(tree) if "explorer" in n.split(".")]
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]


# ---- traced code


def is_traced(function: ast.FunctionDef) -> bool:
    """Whether TileLang traces the body: decorated with T.macro, T.prim_func or T.inline."""
    for decorator in function.decorator_list:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(node, ast.Attribute) and node.attr in ("macro", "prim_func", "inline"):
            return True
    return False


def untraceable(tree: ast.AST) -> list[str]:
    """Uses of `in`, `any()` and `all()` in traced functions.

    On traced values they ask Python for a truth value while tracing, which is always true: the
    condition vanishes from the kernel without a message.
    """
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or not is_traced(function):
            continue
        for node in ast.walk(function):
            where = f"{function.name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Compare) and any(
                isinstance(op, (ast.In, ast.NotIn)) for op in node.ops
            ):
                found.append(f"{where}: in")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("any", "all"):
                    found.append(f"{where}: {node.func.id}()")
    return found


TRACED = [p for p in LIBRARY if p.parent.name in ("device", "phases") or p.name == "program.py"]


@pytest.mark.parametrize("path", TRACED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_untraceable_conditions(path: Path) -> None:
    assert untraceable(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_untraceable_finds_them() -> None:
    code = """
@T.macro
def a(x):
    if x in (1, 2):
        pass
    for q in (0, 1):
        pass
@T.prim_func
def b(x):
    if any(x):
        return all(x)
def host(x):
    return x not in (1, 2) and any(x)
"""
    assert untraceable(ast.parse(code)) == [
        "a, line 4: in",
        "b, line 10: any()",
        "b, line 11: all()",
    ]
    assert len(TRACED) > 8
