"""Arguments that commands share, and what they mean: problem, ranks, recipe, space, device."""

from __future__ import annotations

import argparse
import difflib
import subprocess
from pathlib import Path

from tl_megamoe.frozen import RANK_MODES, device_key
from tl_megamoe.layout import MAX_RANKS
from tl_megamoe.problem import PRESETS, Problem, load_problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe

from . import doctor

SIZES = ("hidden", "intermediate", "num_experts", "num_topk", "num_ranks")
DEFAULT_RESULTS = Path("results")


def add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problem", "a preset, a TOML file, or sizes")
    group.add_argument("--problem", help=f"{', '.join(PRESETS)}, or a .toml file")
    for name in SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=one_count)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks", "how the layer runs; one rank of --num-ranks if not")
    group.add_argument(
        "--ranks", type=one_count, help="ranks that run; sets --num-ranks unless the mode is one"
    )
    group.add_argument(
        "--rank-mode",
        choices=RANK_MODES,
        default="one",
        help="one: a rank alone, which gets all routes; virtual: all ranks share this GPU; real: a "
        "GPU a rank (one)",
    )


def add_recipe(
    parser: argparse.ArgumentParser, text: str, default: str | None = str(Recipe())
) -> None:
    parser.add_argument(
        "--recipe",
        choices=[str(recipe) for recipe in ALL_RECIPES],
        default=default,
        help=f"{text} ({default or 'all'})",
    )


def add_space(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--space", default="screen", help="screen, full, walk, demo, or a .toml file (screen)"
    )
    parser.add_argument(
        "--limit",
        type=one_count,
        help="best candidates by the model; default, classic and frozen always stay (all)",
    )


def one_count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return value


def seconds(text: str) -> float:
    """An argument that is a time limit: a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds")
    return value


def non_negative(text: str) -> int:
    """An argument that is a count and may be 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 or a positive integer")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({one_count(part) for part in text.split(",")}))


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem as one of its ranks runs it, alone.

    Raises:
        ValueError: neither a problem nor all its sizes.
    """
    return whole_problem(args).one_rank()


def running_problem(args: argparse.Namespace) -> tuple[Problem, str]:
    """The problem as it runs, and the rank mode.

    Raises:
        ValueError: as `problem_of`, or --ranks does not agree with --rank-mode or --num-ranks.
    """
    ranks, mode = args.ranks, str(args.rank_mode)
    if mode == "one":
        if ranks not in (None, 1):
            raise ValueError(
                f"--ranks {ranks} with --rank-mode one: one rank runs alone. To run {ranks} on "
                f"this GPU add --rank-mode virtual; for one of {ranks} ranks write --num-ranks "
                f"{ranks}"
            )
        return problem_of(args), mode
    if ranks is None:
        raise ValueError(f"--rank-mode {mode} needs the number of ranks that run, as --ranks 4")
    if args.num_ranks not in (None, ranks):
        raise ValueError(
            f"--num-ranks {args.num_ranks} and --ranks {ranks}: with --rank-mode {mode} all ranks "
            "of the layer run; give --ranks alone"
        )
    if ranks > MAX_RANKS:
        raise ValueError(f"--ranks {ranks} exceeds {MAX_RANKS}, the most ranks of one launch")
    return whole_problem(argparse.Namespace(**{**vars(args), "num_ranks": ranks})), mode


def whole_problem(args: argparse.Namespace) -> Problem:
    """The problem over all its ranks.

    Raises:
        ValueError: neither a problem nor all its sizes, or a problem that is neither a preset nor a
            file that can be read.
    """
    sizes = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if args.problem is not None:
        _check_problem(args.problem)
        return load_problem(args.problem, **sizes)
    missing = [name for name in SIZES if name not in sizes and name != "num_ranks"]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"no --problem given (a preset or a .toml file), and no {flags} either")
    name = "h{hidden}-i{intermediate}-e{num_experts}-k{num_topk}".format(**sizes)
    return Problem(name=name, **sizes)


def _check_problem(source: str) -> None:
    """Say of a mistyped preset which one is near, and of a file that it is not there."""
    if source in PRESETS:
        return
    if Path(source).suffix == ".toml":
        check_file("--problem", Path(source))
    elif near := difflib.get_close_matches(source, PRESETS, 1):
        raise ValueError(
            f"problem {source!r} is neither a preset ({', '.join(PRESETS)}) nor a .toml file; did "
            f"you mean {near[0]}?"
        )


def check_file(flag: str, path: Path) -> None:
    """Refuse a file that cannot be read.

    Args:
        flag: the argument that names it.
        path: the file.

    Raises:
        ValueError: there is no such file, or it cannot be read.
    """
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise ValueError(f"{flag} {path}: there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"{flag} {path}: it cannot be read: {error.strerror}") from error


def check_gpus(num_ranks: int, instead: str) -> None:
    """Refuse ranks with a GPU each where there are fewer GPUs.

    Args:
        num_ranks: how many.
        instead: what to do, a sentence.

    Raises:
        ValueError: there are fewer.
    """
    found = doctor.count_gpus()
    if found < num_ranks:
        raise ValueError(
            f"--rank-mode real needs {num_ranks} SM90 GPUs, one for each rank; this machine has "
            f"{found}. {instead}"
        )


def recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe.parse(args.recipe)


def device_of(args: argparse.Namespace) -> str:
    name = args.device or doctor.find_gpu()
    if name is None:
        raise ValueError(
            "no SM90 GPU here: name a device, as --device nvidia-h200. Rows of a machine without a "
            "GPU are model rows, which are never frozen: run tl-megamoe search on an SM90 machine; "
            "its kernels can be built here with tl-megamoe build --out"
        )
    return device_key(name)


def current_commit() -> str:
    """The commit of the working tree that this package runs from, empty outside git."""
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def mix_of(text: str) -> dict[str, float]:
    """Routing profiles and their weights, from `uniform` or `uniform=0.7,zipf:1.2=0.3`.

    Raises:
        ValueError: a weight that is no positive number, weights for some profiles only, or a
            profile named twice.
    """
    mix: dict[str, float] = {}
    weighted = set()
    for part in text.split(","):
        routing, equals, number = part.strip().rpartition("=")
        if not equals:
            routing, number = number, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not routing or not 0.0 < weight < float("inf") or routing in mix:
            raise ValueError(
                f"--routing {text!r}: {part!r} must be a profile of its own, alone or with a "
                "positive weight, as uniform=0.7,zipf:1.2=0.3"
            )
        mix[routing] = weight
        weighted.add(bool(equals))
    if len(weighted) > 1:
        raise ValueError(
            f"--routing {text!r}: give every profile a weight or none, as uniform=0.7,zipf:1.2=0.3"
        )
    return mix
