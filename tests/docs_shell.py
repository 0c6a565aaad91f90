"""The shell blocks of README.md and docs/: what each command line names must exist.

`tl-megamoe` lines go through its own parser, and those that change nothing and end within seconds
run. Of everything else the targets, files, extras, modules, scripts and variables are looked up.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence

from docs_blocks import ROOT, Block, BlockError, blocks_of

from tl_megamoe.explorer.args import whole_problem
from tl_megamoe.explorer.cli import main as run_command
from tl_megamoe.explorer.cli import make_parser

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - exercised on Python 3.10 only
    import tomli as tomllib

CHEAP = {"doctor", "list", "why", "report"}
WRITES = ("--write",)
"""Flags with which a cheap command is parsed only."""
DEVICE = "nvidia-h200"
"""Named where a command speaks of this machine's GPU, which there need not be."""


def commands_of(block: Block) -> list[list[str]]:
    """The commands of a block, split into words, comments and continuations taken out.

    Raises:
        BlockError: a line that is no shell.
    """
    out = []
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise BlockError(f"{block.where}: {line!r}: {error}") from error
        command: list[str] = []
        for word in [*words, "&&"]:
            if word != "&&":
                command.append(word)
            elif command:
                out.append(command)
                command = []
    return out


def check_shell(block: Block, files: Sequence[str] = ()) -> list[list[str]]:
    """Check the commands of a block; returns them. `files` are names of files that its page shows.

    Raises:
        BlockError: as `commands_of` and `check_command`.
    """
    commands = commands_of(block)
    for words in commands:
        check_command(block, words, files)
    return commands


def check_command(block: Block, words: Sequence[str], files: Sequence[str] = ()) -> None:
    """Check one command.

    Args:
        block: where it stands.
        words: the command.
        files: names of files that the page shows.

    Raises:
        BlockError: it names something that does not exist, or is a command that nothing here knows.
    """
    words = list(words)
    while words and (found := re.fullmatch(r"([A-Z][A-Z0-9_]*)=.*", words[0])):
        _check_variable(block, found[1])
        words.pop(0)
    if not words:
        return
    check = CHECKS.get(words[0])
    if check is None:
        raise BlockError(
            f"{block.where}: {words[0]!r} is none of the commands that are checked "
            f"({', '.join(CHECKS)})"
        )
    check(block, words[1:], files)


def run_if_cheap(words: Sequence[str]) -> str | None:
    """What a cheap command prints; None for others.

    Raises:
        BlockError: it ends with another exit code than 0.
    """
    if words[0] != "tl-megamoe" or words[1] not in CHEAP or any(w in words for w in WRITES):
        return None
    if words[1] == "list" and not {"--explain", "--names"} & set(words):
        return None
    argv = list(words[1:])
    if words[1] == "why" and "--device" not in argv:
        argv += ["--device", DEVICE]
    out, said = io.StringIO(), io.StringIO()
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = run_command(argv)
    finally:
        os.chdir(before)
    if code:
        raise BlockError(f"{shlex.join(words)} ends with {code}: {said.getvalue()}")
    return out.getvalue()


def shown_files(page: str) -> tuple[str, ...]:
    """Names of files that blocks of the page say they are."""
    return tuple(block.file for block in blocks_of(page) if block.file)


# ---- a check a command


def _tl_megamoe(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = make_parser().parse_args(list(words))
        except SystemExit as end:
            if end.code:
                raise BlockError(f"{block.where}: {said.getvalue().strip()}") from end
            return
    if getattr(args, "problem", None) is not None or getattr(args, "hidden", None) is not None:
        if str(args.problem).endswith(".toml") and args.problem in files:
            return
        try:
            whole_problem(argparse.Namespace(**vars(args)))
        except ValueError as error:
            raise BlockError(f"{block.where}: {shlex.join(words)}: {error}") from error


def _make(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} \?=" if equals else rf"^{re.escape(name)}:"
        if not re.search(pattern, text, re.M):
            kind = "variable" if equals else "target"
            raise BlockError(f"{block.where}: the Makefile has no {kind} {name!r}")


def _pip(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    if words[:1] != ["install"]:
        raise BlockError(f"{block.where}: pip {words[:1]}: only pip install is checked")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = rf"(?:{project['name']}|\.)(?:\[(.*)\])?"
    extras = [found[1] for word in words[1:] if (found := re.fullmatch(own, word)) and found[1]]
    for extra in ",".join(extras).split(",") if extras else ():
        if extra not in project["optional-dependencies"]:
            raise BlockError(f"{block.where}: pyproject.toml has no extra {extra!r}")


def _python(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    words = list(words)
    if words[:1] == ["-m"]:
        module, rest = words[1], words[2:]
        if importlib.util.find_spec(module) is None:
            raise BlockError(f"{block.where}: there is no module {module!r}")
        if module == "pytest":
            _pytest(block, rest)
        elif module == "tl_megamoe.explorer":
            _tl_megamoe(block, rest, files)
        return
    if words and words[0] not in files and not (ROOT / words[0]).is_file():
        raise BlockError(f"{block.where}: there is no file {words[0]}, here or on the page")


def _pytest(block: Block, words: Sequence[str]) -> None:
    for word in words:
        if "/" in word or word.endswith(".py") or word == "tests":
            path = word.partition("::")[0]
            if not (ROOT / path).exists():
                raise BlockError(f"{block.where}: there is no {path}")
    if "-m" in words:
        markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("markers =")[2]
        for name in re.findall(r"\w+", words[list(words).index("-m") + 1]):
            if name not in ("and", "or", "not") and f'"{name}' not in markers:
                raise BlockError(f"{block.where}: there is no marker {name!r}")


def _torchrun(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    words = list(words)
    while words and words[0].startswith("--"):
        flag, equals, _ = words.pop(0).partition("=")
        if not equals and flag != "--standalone":
            raise BlockError(f"{block.where}: write {flag} of torchrun with its value, as {flag}=2")
    _python(block, words, files)


def _sanitizer(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    if "python" not in words:
        raise BlockError(f"{block.where}: compute-sanitizer runs python here")
    _python(block, list(words)[list(words).index("python") + 1 :], files)


def _export(block: Block, words: Sequence[str], files: Sequence[str]) -> None:
    for word in words:
        _check_variable(block, word.partition("=")[0])


def _check_variable(block: Block, name: str) -> None:
    """A variable must be one that the project's code knows, or CUDA's for its users."""
    if name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"):
        return
    for folder in ("tl_megamoe", "explorer"):
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")):
                return
    raise BlockError(f"{block.where}: nothing in the project reads the variable {name}")


CHECKS: dict[str, Callable[[Block, Sequence[str], Sequence[str]], None]] = {
    "tl-megamoe": _tl_megamoe,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
    "compute-sanitizer": _sanitizer,
    "export": _export,
}
