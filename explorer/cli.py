"""The `tl-megamoe` command. Data goes to stdout, progress and messages to stderr."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tl_megamoe

from . import (
    bench,
    bundle,
    check,
    export_command,
    freeze_command,
    host,
    listing,
    merge,
    model,
    report,
    search_command,
    t4,
    trace_command,
)
from .args import add_problem
from .doctor import diagnose

COMMAND = "COMMAND"
"""What the usage text calls the first argument."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except KeyboardInterrupt:
        print(
            "interrupted; written rows and compiled kernels are kept, the same command resumes",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        print(f"tl-megamoe: {_one_line(_reason_of(error))}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"tl-megamoe: {_one_line(str(error))}", file=sys.stderr)
        return 2


def _one_line(text: str) -> str:
    """A message in one line, without the numbers of the system's errors."""
    return " ".join(re.sub(r"\[Errno \d+\] ", "", text).split())


def _reason_of(error: OSError) -> str:
    """What the system says, with the file first."""
    if error.filename is None:
        return error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename}"
    return f"{error.filename}: {error.strerror}"


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, with the command that explains the flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but a command refuses arguments that it does not know itself."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line."""
        choice = re.fullmatch(r"(.*): invalid choice: ('.*') \(choose from (.*)\)", message)
        if choice is not None:
            subject, value, there = choice.groups()
            words = re.findall(r"[\w.-]+", there)
            if subject == f"argument {COMMAND}":
                message = f"there is no command {value} ({', '.join(words)})"
            near = difflib.get_close_matches(value.strip("'"), words, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {_one_line(message)}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    parser = Parser(
        prog="tl-megamoe", description="Search, record and freeze schedules of the fused MoE layer."
    )
    parser.add_argument("--version", action="version", version=tl_megamoe.__version__)
    commands = parser.add_subparsers(required=True, metavar=COMMAND, parser_class=Parser)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run)
        return sub

    doctor = add("doctor", run_doctor, "Say what this machine can do.")
    doctor.add_argument("--schedules", type=Path, help="folder of the frozen files")
    listing.add_parser(add)
    bundle.add_parser(add)
    search_command.add_parser(add)
    report.add_parser(add)
    freeze_command.add_parser(add)
    bench.add_parser(add)
    host.add_parser(add)
    trace_command.add_parser(add)
    check.add_parser(add, add_problem)
    model.add_parser(add)
    export_command.add_parser(add)
    merge.add_parser(add)
    t4.add_parser(add)
    return parser


def run_doctor(args: argparse.Namespace) -> int:
    """The command `doctor`."""
    compiles, found = diagnose(args.schedules)
    for subject, text in found:
        print(f"{subject:<24} {text}")
    return 0 if compiles else 1


if __name__ == "__main__":
    sys.exit(main())
