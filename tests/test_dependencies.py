"""Ranges of the dependencies, and the versions that CI installs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = ROOT / "requirements.lock"
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
REQUIRED = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["project"]["dependencies"],
    *(text for extra in EXTRAS.values() for text in extra),
]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("text", sorted(set(REQUIRED)))
def test_every_range_ends(text: str) -> None:
    """A major version that does not exist yet may break anything."""
    wanted = Requirement(text)
    operators = {specifier.operator for specifier in wanted.specifier}
    assert operators & {"==", "<", "<=", "~="}, text
    assert wanted.url is None


def test_an_extra_asks_for_what_the_tools_of_development_ask_for() -> None:
    of_development = {Requirement(text).name: text for text in EXTRAS["dev"]}
    for name, extra in EXTRAS.items():
        if name not in ("dev", "gpu"):
            assert [of_development[Requirement(text).name] for text in extra] == extra


def locked(python: str) -> dict[str, Requirement]:
    """What the lock asks for on Linux with a Python."""
    environment: dict[str, Any] = {**default_environment(), "extra": "", "sys_platform": "linux"}
    environment |= {"python_version": python, "python_full_version": f"{python}.9"}
    environment |= {"platform_machine": "x86_64", "platform_system": "Linux", "os_name": "posix"}
    found: dict[str, Requirement] = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            name = canonicalize_name(wanted.name)
            assert name not in found, f"two versions of {name} on Python {python}"
            found[name] = wanted
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_one_version_of_each(python: str) -> None:
    lock = locked(python)
    for name, wanted in lock.items():
        assert re.fullmatch(r"==[^*,]+", str(wanted.specifier)), (name, str(wanted))
    for text in PROJECT["project"]["dependencies"] + EXTRAS["dev"]:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"python_version": python}):
            continue
        (specifier,) = lock[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(specifier.version), f"make lock: {text} and {specifier}"


@pytest.mark.parametrize("python", PYTHONS)
def test_compiler_and_headers_are_of_one_release(python: str) -> None:
    """cccl refuses a compiler whose headers are of another one; `cuda-toolkit` binds its parts."""
    wanted = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    assert wanted["cuda-toolkit"].extras == {"crt", "cudart", "nvcc", "nvvm"}
    lock, parts = locked(python), ("cuda-crt", "cuda-nvcc", "cuda-runtime", "nvvm")
    names = ["cuda-toolkit", *(f"nvidia-{part}" for part in parts)]
    versions = {name: str(lock[name].specifier).removeprefix("==") for name in names}
    assert len({tuple(v.split(".")[:2]) for v in versions.values()}) == 1, versions


def test_ci_installs_the_lock() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    torch = re.search(r"TORCH=(torch==\S+) LOCK=requirements\.lock", run)
    assert torch is not None
    assert str(locked("3.11")["torch"]) == torch[1]
    assert f"LOCKED_TORCH ?= {torch[1]}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
