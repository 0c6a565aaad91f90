"""The `tl-megamoe` command. Data goes to stdout, progress and messages to stderr."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tl_megamoe

from . import (
    bench,
    bundle,
    check,
    freeze_command,
    listing,
    merge,
    model,
    report,
    search_command,
    t4,
)
from .args import add_problem
from .doctor import diagnose


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
    except (ValueError, OSError) as error:
        print(f"tl-megamoe: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tl-megamoe", description="Search, record and freeze schedules of the fused MoE layer."
    )
    parser.add_argument("--version", action="version", version=tl_megamoe.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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
    check.add_parser(add, add_problem)
    model.add_parser(add)
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
