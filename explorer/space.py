"""The search space: which schedules are candidates for a problem and a token count.

A space is a TOML file. `[product]` gives a range for each field and means their product; `[[base]]`
points with `[vary]` ranges mean one changed field at a time around each base. A file may hold both.
`extends` names a space, or a file beside this one, to start from: a range of this file replaces
those that hold one of its fields, in the same table; its bases replace the bases.

A key may tie fields that change together. `experts_per_wave` also takes the words "all" (of the
local experts), "divisors" and "divisors>=N" (at least N of them). Validity is `Schedule.violations`
alone: nothing here knows a rule. `num_sms` of a file is meant for the whole GPU: virtual ranks,
which share one, each get their part of it.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tl_megamoe.schedules as schedules_package
from tl_megamoe.problem import Problem, divisors_of
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

from .constants import Constants
from .cost import predict

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - exercised on Python 3.10 only
    import tomli as tomllib

NAMED_SPACES = ("screen", "full", "walk", "demo")
MAX_POINTS = 2_000_000
"""Of a space: minutes of checking rules, and a gigabyte of schedules."""
_FIELDS = {f.name for f in fields(Schedule)}
_DEFAULTS = Schedule().to_dict()
_WORDS = {name: get_args(hint) for name, hint in get_type_hints(Schedule).items() if get_args(hint)}
"""The words that a field takes, of fields that take words."""

_DIVISORS = re.compile(r"divisors(?:>=(\d+))?")

Point = dict[str, Any]
Range = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]
"""Fields that change together, and their values."""


@dataclass(frozen=True, slots=True)
class Space:
    """A parsed space file. `experts_per_wave` may still be a word.

    Attributes:
        name: how it was asked for.
        product: ranges whose product is searched.
        bases: points of the one-factor screen.
        vary: ranges that the screen changes one at a time.
    """

    name: str
    product: tuple[Range, ...]
    bases: tuple[Point, ...]
    vary: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of one problem and token count.

    Attributes:
        schedules: all valid ones, each once, those of `pinned` first.
        pinned: candidates that no limit removes: `default`, `classic` and, if given, `frozen`.
        num_points: distinct points of the space before the rules.
        num_rejected: points that broke at least one rule.
        rejections: rule (`rules.RULES`) -> points that break it, the most first.
        sole: rule -> points that break no other one: what the space would gain without it.
        examples: rule -> what it says of one of those points, or of one that breaks others too.
    """

    schedules: tuple[Schedule, ...]
    pinned: dict[str, Schedule]
    num_points: int
    num_rejected: int
    rejections: dict[str, int]
    sole: dict[str, int]
    examples: dict[str, str]


def load_space(source: str) -> Space:
    """A named space (`screen`, `full`, `walk`, `demo`) or a TOML file.

    Raises:
        ValueError: unknown name, unreadable file, unknown field, a value of the wrong type or a
            word that its field does not know, or files that extend each other in a circle.
    """
    return _load(source, source, None, ())


def _load(name: str, source: str, folder: Path | None, chain: tuple[Path, ...]) -> Space:
    path = _path_of(source, folder)
    if path.resolve() in chain:
        circle = " -> ".join(p.name for p in (*chain, path))
        raise ValueError(f"space file {chain[0]}: extends in a circle: {circle}")
    chain = (*chain, path.resolve())
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"space file {path}: {error}") from error
    unknown = sorted(set(data) - {"extends", "product", "base", "vary"})
    if unknown:
        raise ValueError(
            f"space file {path}: unknown {', '.join(unknown)}. "
            "Known: extends, [product], and [[base]] with [vary]."
        )
    parent = Space(name, (), (), ())
    if "extends" in data:
        if not isinstance(data["extends"], str):
            raise ValueError(f"space file {path}: extends={data['extends']!r} must be one name")
        try:
            parent = _load(name, data["extends"], path.parent, chain)
        except ValueError as error:
            raise ValueError(f"space file {path}, extends: {error}") from error
    bases = data.get("base", [])
    if not isinstance(bases, list):
        raise ValueError(f"space file {path}: write base points as [[base]] tables")
    space = Space(
        name=name,
        product=_ranges(path, data, "product", parent.product),
        bases=tuple(_base(path, base) for base in bases) or parent.bases,
        vary=_ranges(path, data, "vary", parent.vary),
    )
    if not space.product and not space.bases:
        raise ValueError(f"space file {path} holds neither [product] nor [[base]]")
    return space


def _path_of(source: str, folder: Path | None) -> Path:
    """A space's file; `folder` is that of the file that extends it."""
    if source in NAMED_SPACES:
        return Path(str(schedules_package.__file__)).parent / "space" / f"{source}.toml"
    if Path(source).suffix != ".toml":
        raise ValueError(
            f"space {source!r} is neither one of {', '.join(NAMED_SPACES)} nor a .toml file"
        )
    return (folder or Path()) / source


def _ranges(
    path: Path, data: dict[str, Any], table: str, inherited: tuple[Range, ...]
) -> tuple[Range, ...]:
    """A table's ranges behind those it inherits, less those that share a field with its own."""
    found = data.get(table, {})
    if not isinstance(found, dict):
        raise ValueError(f"space file {path}: write {table} as a [{table}] table")
    own = tuple(_range(path, key, values) for key, values in found.items())
    taken = [name for names, _ in own for name in names]
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice:
        raise ValueError(f"space file {path}: [{table}] has two ranges of {', '.join(twice)}")
    return (*(r for r in inherited if not set(r[0]) & set(taken)), *own)


def _range(path: Path, key: str, values: Any) -> Range:
    names = tuple(name.strip() for name in key.split(","))
    _check_names(path, names)
    if names == ("experts_per_wave",) and isinstance(values, str):
        if _DIVISORS.fullmatch(values):
            return names, ((values,),)
        raise ValueError(
            f"space file {path}: experts_per_wave={values!r} must be a list of values, "
            '"divisors" or "divisors>=N"'
        )
    if not isinstance(values, list) or not values:
        raise ValueError(f"space file {path}: {key}={values!r} must be a list of values")
    rows = []
    for value in values:
        row = tuple(value) if len(names) > 1 and isinstance(value, list) else (value,)
        if len(row) != len(names):
            raise ValueError(
                f"space file {path}: {value!r} of {key!r} must hold {len(names)} values"
            )
        for name, item in zip(names, row, strict=True):
            _check_value(path, name, item)
        rows.append(row)
    return names, tuple(rows)


def _base(path: Path, base: Any) -> Point:
    if not isinstance(base, dict):
        raise ValueError(f"space file {path}: base {base!r} must be a table")
    _check_names(path, tuple(base))
    for name, value in base.items():
        _check_value(path, name, value)
    return dict(base)


def _check_names(path: Path, names: tuple[str, ...]) -> None:
    unknown = sorted(set(names) - _FIELDS)
    if unknown:
        raise ValueError(
            f"space file {path}: unknown field {', '.join(unknown)}. "
            f"Fields: {', '.join(sorted(_FIELDS))}."
        )


def _check_value(path: Path, name: str, value: Any) -> None:
    if name == "experts_per_wave" and value == "all":
        return
    wanted = type(_DEFAULTS[name])
    if type(value) is not wanted:
        raise ValueError(
            f"space file {path}: {name}={value!r} must be {wanted.__name__}, "
            f"found {type(value).__name__}"
        )
    words = _WORDS.get(name, (value,))
    if value not in words:
        raise ValueError(f"space file {path}: {name}={value!r} must be one of {', '.join(words)}")


def choices(ranges: tuple[Range, ...], problem: Problem) -> list[list[Point]]:
    """Every range as a list of field updates, divisors as numbers; `all` stays a word."""
    local = problem.num_local_experts
    out = []
    for names, rows in ranges:
        updates: list[Point] = []
        for row in rows:
            word = _DIVISORS.fullmatch(str(row[0])) if names == ("experts_per_wave",) else None
            if word is not None:
                least = int(word[1] or 1)
                updates += [{"experts_per_wave": d} for d in divisors_of(local) if d >= least]
            else:
                updates.append(dict(zip(names, row, strict=True)))
        out.append(updates)
    return out


def _points(space: Space, problem: Problem) -> Iterator[Point]:
    if space.product:
        for combination in product(*choices(space.product, problem)):
            point = dict(_DEFAULTS)
            for update in combination:
                point.update(update)
            yield point
    for base in space.bases:
        start = {**_DEFAULTS, "experts_per_wave": "all", **base}
        yield start
        for updates in choices(space.vary, problem):
            for update in updates:
                yield {**start, **update}


def num_points(space: Space, problem: Problem) -> int:
    """Points of a space before the rules, those that it names twice included."""
    found = math.prod(map(len, choices(space.product, problem))) if space.product else 0
    return found + len(space.bases) * (1 + sum(map(len, choices(space.vary, problem))))


def default_of(
    problem: Problem, num_tokens: int, recipe: Recipe | None = None, gpu_ranks: int = 1
) -> Schedule:
    """The built-in default as it runs here: of ranks that share a GPU each has its part of it."""
    default = default_schedule(problem, num_tokens, recipe=recipe)
    return replace(default, num_sms=default.num_sms // gpu_ranks)


def frozen_as_run(frozen: Schedule, default: Schedule, gpu_ranks: int = 1) -> Schedule:
    """A frozen schedule as it runs here: that of a rank alone on a GPU has its grid cut too."""
    most = default.num_sms if gpu_ranks > 1 else frozen.num_sms
    return frozen.on_sms(most)


def enumerate_candidates(
    problem: Problem,
    num_tokens: int,
    space: Space,
    recipe: Recipe | None = None,
    frozen: Schedule | None = None,
    *,
    gpu_ranks: int = 1,
) -> Candidates:
    """All valid schedules of a space, and the pinned ones.

    Args:
        problem: the layer that runs (a one-rank view for one rank).
        num_tokens: tokens a rank contributes; decides the default schedule.
        space: where to look.
        recipe: checked with every schedule; decides the default schedule.
        frozen: the schedule that is frozen today, if any.
        gpu_ranks: virtual ranks that share the GPU; each gets `num_sms // gpu_ranks` of a point.

    Raises:
        ValueError: the space has more than `MAX_POINTS` points.
    """
    points = num_points(space, problem)
    if points > MAX_POINTS:
        raise ValueError(
            f"space {space.name} has {points} points for {problem.num_local_experts} local "
            f"experts: at most {MAX_POINTS} are enumerated. Take values out of the ranges of its "
            "[product], or move some to [vary], which changes one at a time"
        )
    local = problem.num_local_experts
    default = default_of(problem, num_tokens, recipe, gpu_ranks)
    classic = replace(
        default, dispatch_warps=2, load_warps=2, load_registers=48, math_registers=224
    )
    pinned = {"default": default, "classic": classic}
    if frozen is not None:
        pinned["frozen"] = frozen_as_run(frozen, default, gpu_ranks)
    pinned = {k: s for k, s in pinned.items() if not s.violations(problem, recipe)}
    valid = dict.fromkeys(pinned.values())
    seen: set[Schedule] = set()
    rejected: Counter[str] = Counter()
    sole: Counter[str] = Counter()
    examples: dict[str, str] = {}
    num_rejected = 0
    for point in _points(space, problem):
        if point["order"] == "lag" or point["experts_per_wave"] == "all":
            point = {**point, "experts_per_wave": local}
        schedule = Schedule(**point).on_sms(point["num_sms"] // gpu_ranks)
        if schedule in seen:
            continue
        seen.add(schedule)
        violations = schedule.violations(problem, recipe)
        if violations:
            num_rejected += 1
            rules = {v.rule: v for v in violations}
            rejected.update(rules.keys())
            for rule, text in rules.items():
                if len(rules) == 1:
                    if not sole[rule]:
                        examples[rule] = str(text)
                    sole[rule] += 1
                examples.setdefault(rule, str(text))
        else:
            valid[schedule] = None
    return Candidates(
        schedules=tuple(valid),
        pinned=pinned,
        num_points=len(seen),
        num_rejected=num_rejected,
        rejections=dict(rejected.most_common()),
        sole={rule: sole[rule] for rule in rejected},
        examples=examples,
    )


def best_by_model(
    candidates: Candidates,
    problem: Problem,
    num_tokens: int,
    limit: int | None,
    *,
    recipe: Recipe | None = None,
    gpu_ranks: int = 1,
    constants: Constants | None = None,
) -> list[Schedule]:
    """Candidates by predicted time, the best first; with a limit the pinned ones always stay.

    Args:
        candidates: from `enumerate_candidates`.
        problem, num_tokens, recipe, gpu_ranks, constants: as for `cost.predict`.
        limit: most candidates; None for all.

    Raises:
        ValueError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 candidate")

    def key(schedule: Schedule) -> tuple[float, str]:
        found = predict(
            problem,
            schedule,
            num_tokens,
            recipe=recipe,
            gpu_ranks=gpu_ranks,
            constants=constants,
        )
        return found.total_us, schedule.name

    ranked = sorted(candidates.schedules, key=key)
    if limit is None or limit >= len(ranked):
        return ranked
    pinned = set(candidates.pinned.values())
    room = max(0, limit - len(pinned))
    others = [s for s in ranked if s not in pinned][:room]
    return sorted(pinned | set(others), key=key)
