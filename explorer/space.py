"""The search space: which schedules are candidates for a problem and a token count.

A space is a TOML file. `[product]` gives a range for each field and means their product; `[[base]]`
points with `[vary]` ranges mean one changed field at a time around each base. A file may hold both.
Validity is `Schedule.violations` alone: nothing here knows a rule. `num_sms` of a file is meant for
the whole GPU: virtual ranks, which share one, each get their part of it.
"""

from __future__ import annotations

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

from .cost import predict

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - exercised on Python 3.10 only
    import tomli as tomllib

NAMED_SPACES = ("screen", "full", "demo")
_FIELDS = {f.name for f in fields(Schedule)}
_DEFAULTS = Schedule().to_dict()
_WORDS = {name: get_args(hint) for name, hint in get_type_hints(Schedule).items() if get_args(hint)}
"""The words that a field takes, of fields that take words."""

Point = dict[str, Any]
Range = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]
"""Fields that change together, and their values."""


@dataclass(frozen=True, slots=True)
class Space:
    """A parsed space file. `experts_per_wave` may still be the word `divisors` or `all`.

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
        rejections: field named by the broken rule -> points it rejected.
    """

    schedules: tuple[Schedule, ...]
    pinned: dict[str, Schedule]
    num_points: int
    num_rejected: int
    rejections: dict[str, int]


def load_space(source: str) -> Space:
    """A named space (`screen`, `full`, `demo`) or a TOML file.

    Raises:
        ValueError: unknown name, unreadable file, unknown field, a value of the wrong type or a
            word that its field does not know.
    """
    path = Path(source)
    if source in NAMED_SPACES:
        path = Path(str(schedules_package.__file__)).parent / "space" / f"{source}.toml"
    elif path.suffix != ".toml":
        raise ValueError(
            f"space {source!r} is neither one of {', '.join(NAMED_SPACES)} nor a .toml file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"space file {path}: {error}") from error
    unknown = sorted(set(data) - {"product", "base", "vary"})
    if unknown:
        raise ValueError(
            f"space file {path}: unknown {', '.join(unknown)}. "
            "Tables: [product], and [[base]] with [vary]."
        )
    bases = data.get("base", [])
    if not isinstance(bases, list):
        raise ValueError(f"space file {path}: write base points as [[base]] tables")
    if not data.get("product") and not bases:
        raise ValueError(f"space file {path} holds neither [product] nor [[base]]")
    return Space(
        name=source,
        product=tuple(_range(path, k, v) for k, v in data.get("product", {}).items()),
        bases=tuple(_base(path, base) for base in bases),
        vary=tuple(_range(path, k, v) for k, v in data.get("vary", {}).items()),
    )


def _range(path: Path, key: str, values: Any) -> Range:
    names = tuple(name.strip() for name in key.split(","))
    _check_names(path, names)
    if names == ("experts_per_wave",) and values == "divisors":
        return names, (("divisors",),)
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


def _choices(ranges: tuple[Range, ...], problem: Problem) -> list[list[Point]]:
    """Every range as a list of field updates, words replaced by numbers."""
    local = problem.num_local_experts
    out = []
    for names, rows in ranges:
        updates: list[Point] = []
        for row in rows:
            if row == ("divisors",):
                updates += [{"experts_per_wave": d} for d in divisors_of(local)]
            else:
                updates.append(dict(zip(names, row, strict=True)))
        out.append(updates)
    return out


def _points(space: Space, problem: Problem) -> Iterator[Point]:
    if space.product:
        for combination in product(*_choices(space.product, problem)):
            point = dict(_DEFAULTS)
            for update in combination:
                point.update(update)
            yield point
    for base in space.bases:
        start = {**_DEFAULTS, "experts_per_wave": "all", **base}
        yield start
        for updates in _choices(space.vary, problem):
            for update in updates:
                yield {**start, **update}


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
    """
    local = problem.num_local_experts
    default = default_schedule(problem, num_tokens, recipe=recipe)
    default = replace(default, num_sms=default.num_sms // gpu_ranks)
    classic = replace(
        default, dispatch_warps=2, load_warps=2, load_registers=48, math_registers=224
    )
    pinned = {"default": default, "classic": classic}
    if frozen is not None:  # it may be that of a rank alone on a GPU: the op cuts its grid too
        most = default.num_sms if gpu_ranks > 1 else frozen.num_sms
        pinned["frozen"] = replace(frozen, num_sms=min(frozen.num_sms, most))
    pinned = {k: s for k, s in pinned.items() if not s.violations(problem, recipe)}
    valid = dict.fromkeys(pinned.values())
    seen: set[Schedule] = set()
    rejected: Counter[str] = Counter()
    num_rejected = 0
    for point in _points(space, problem):
        if point["order"] == "lag" or point["experts_per_wave"] == "all":
            point = {**point, "experts_per_wave": local}
        schedule = Schedule(**{**point, "num_sms": point["num_sms"] // gpu_ranks})
        if schedule in seen:
            continue
        seen.add(schedule)
        violations = schedule.violations(problem, recipe)
        if violations:
            num_rejected += 1
            rejected.update({rule_of(v) for v in violations})
        else:
            valid[schedule] = None
    return Candidates(tuple(valid), pinned, len(seen), num_rejected, dict(rejected.most_common()))


def rule_of(violation: str) -> str:
    """The field that a violation is about: its first word."""
    return violation.split("=")[0].split()[0]


def best_by_model(
    candidates: Candidates,
    problem: Problem,
    num_tokens: int,
    limit: int | None,
    *,
    recipe: Recipe | None = None,
    gpu_ranks: int = 1,
) -> list[Schedule]:
    """Candidates by predicted time, the best first; with a limit the pinned ones always stay.

    Raises:
        ValueError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 candidate")

    def key(schedule: Schedule) -> tuple[float, str]:
        found = predict(problem, schedule, num_tokens, recipe=recipe, gpu_ranks=gpu_ranks)
        return found.total_us, schedule.name

    ranked = sorted(candidates.schedules, key=key)
    if limit is None or limit >= len(ranked):
        return ranked
    pinned = set(candidates.pinned.values())
    room = max(0, limit - len(pinned))
    others = [s for s in ranked if s not in pinned][:room]
    return sorted(pinned | set(others), key=key)
