"""Which schedule a launch runs: the frozen table of the device, or the built-in default.

A file is schedules/<device>/<problem>.json. Its entries are sorted by `max_tokens` within one
(num_ranks, rank_mode); an entry serves the token counts above the one before it up to its own, the
last one everything above too. The device and the sizes must match exactly. Ranks that have no
entries of their own mode take those of a one-rank view, which stands for exactly one of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .problem import Problem
from .recipe import Recipe
from .schedule import COOPERATIVE_THRESHOLD, Schedule, ScheduleError, default_schedule

logger = logging.getLogger(__name__)

SCHEMA = 1
MATH_MODES = ("cooperative", "pingpong", "swapped")
RANK_MODES = ("one", "virtual", "real")
MAX_SIZE, MAX_TOKENS = 1 << 20, (1 << 31) - 1
"""What a file may say of a layer's sizes and of token counts: more is damage."""
MAX_FILE_BYTES = 16 << 20
"""Of a file: a thousand times what those that ship have."""
MAX_SHOWN = 600
"""Characters of a wrong value that an error repeats."""
NOT_DEVICES = ("model", "space")
"""Folders beside those of the devices: fitted constants of the cost model, search spaces."""
_PROBLEM_FIELDS = ("hidden", "intermediate", "num_experts", "num_topk")
_CELL_NUMBERS = (
    *("median_us", "ratio_to_floor", "num_observations", "num_seeds"),
    *("spread", "margin", "margin_spread"),
)
_CELL_TOGETHER = {"num_observations": ("num_seeds",), "margin": ("margin_spread", "runner_up")}
"""Of the evidence of one token count: what is a number or null, and what needs what."""
_said: set[tuple[Any, ...]] = set()


@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """One entry of a file.

    Attributes:
        num_ranks: ranks of the layer; 8 for one rank of eight.
        rank_mode: `one` (a one-rank view), `virtual` or `real`.
        max_tokens: the most tokens it serves.
        evidence: the other fields: when and how it was measured.
    """

    num_ranks: int
    rank_mode: str
    max_tokens: int
    schedule: Schedule
    evidence: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """A parsed file; `problem` holds the sizes of the whole layer, over all ranks."""

    path: Path
    name: str
    problem: dict[str, int]
    device: str
    entries: tuple[FrozenEntry, ...]

    def problem_of(self, entry: FrozenEntry) -> Problem:
        """The layer that an entry's schedule runs, as its rank sees it."""
        whole = Problem(name=self.name, num_ranks=entry.num_ranks, **self.problem)
        return whole.one_rank() if entry.rank_mode == "one" else whole

    def entries_for(self, problem: Problem, rank_mode: str | None = None) -> list[FrozenEntry]:
        """Entries for exactly these sizes, by `max_tokens`. Names do not matter, sizes do.

        Args:
            problem: the layer as the rank runs it.
            rank_mode: that of the entries; the problem's own when None. `one` with a problem over
                several ranks: the entries of a view of one of its ranks.
        """
        rank_mode = rank_mode or problem.rank_mode
        sizes = problem.key()
        if any(self.problem[f] != sizes[f] for f in ("hidden", "intermediate", "num_topk")):
            return []
        out = []
        for entry in self.entries:
            viewed = entry.rank_mode == "one" and problem.num_ranks == 1
            ranks = 1 if viewed else entry.num_ranks
            experts = self.problem["num_experts"] // (entry.num_ranks // ranks)
            if entry.rank_mode == rank_mode and (ranks, experts) == (
                problem.num_ranks,
                problem.num_experts,
            ):
                out.append(entry)
        return sorted(out, key=lambda entry: entry.max_tokens)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The schedule of a launch and where it came from.

    Attributes:
        origin: `frozen` or `default`.
        path: the file, for origin `frozen`.
        entry: its entry.
        message: one sentence on why this schedule.
    """

    schedule: Schedule
    origin: str
    path: Path | None
    entry: FrozenEntry | None
    message: str


def device_key(device_name: str) -> str:
    """The folder of a GPU model: `NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def schedules_root() -> Path:
    """The folder of the frozen files that ship with the package."""
    from . import schedules

    return Path(str(schedules.__file__)).parent


def frozen_paths(root: Path | None = None) -> list[Path]:
    """Every frozen file under a folder, the package's when None: <device>/<problem>.json."""
    root = root or schedules_root()
    return sorted(p for p in root.glob("*/*.json") if p.parent.name not in NOT_DEVICES)


def read_frozen(path: Path) -> FrozenFile:
    """Read a frozen file; kept until it changes on disk.

    Raises:
        ValueError: unreadable, of another schema, or a field is wrong; names file and field.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"frozen schedules {path}: {error}") from error
    if stat.st_size > MAX_FILE_BYTES:
        raise ValueError(
            f"frozen schedules {path}: {stat.st_size} bytes, and no such file has more than "
            f"{MAX_FILE_BYTES}. Restore the file, or remove it and write it anew with: tl-megamoe "
            "freeze"
        )
    return _read(path, stat.st_mtime_ns, stat.st_size)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _short(value: Any) -> str:
    """A value of a file as text, which a damaged file can make as long as it likes."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _bad_cell(cells: Any) -> str:
    """What rule the evidence of an entry breaks, as `why` and `freeze` read it; empty if none."""
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return "must be a list of objects"
    for cell in cells:
        if not _is_count(cell.get("num_tokens"), MAX_TOKENS):
            return f"must have num_tokens, a positive integer up to {MAX_TOKENS}, in each object"
        for name in _CELL_NUMBERS:
            number = cell.get(name)
            if type(number) not in (int, float, type(None)):
                return f"must have numbers in {name}"
        for name, others in _CELL_TOGETHER.items():
            if cell.get(name) is not None and any(cell.get(other) is None for other in others):
                return f"must have {' and '.join(others)} beside {name}"
    return ""


@lru_cache(maxsize=64)
def _read(path: Path, mtime_ns: int, size: int) -> FrozenFile:
    def wrong(field: str, found: Any, rule: str) -> ValueError:
        return ValueError(
            f"frozen schedules {path}: {field}={_short(found)} {rule}. "
            "Write the file anew with: tl-megamoe freeze"
        )

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"frozen schedules {path}: not readable JSON: {error}. Restore the file, or remove it "
            "and write it anew with: tl-megamoe freeze"
        ) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise wrong("schema", found, f"must be {SCHEMA}")
    device = data.get("device")
    if device != path.parent.name:
        raise wrong("device", device, f"must be that of its folder, {path.parent.name!r}")
    problem = data.get("problem")
    if not isinstance(problem, dict):
        raise wrong("problem", problem, "must be an object of sizes")
    for key in _PROBLEM_FIELDS:
        if not _is_count(problem.get(key), MAX_SIZE):
            rule = f"must be a positive integer up to {MAX_SIZE}"
            raise wrong(f"problem.{key}", problem.get(key), rule)
    sizes = {key: problem[key] for key in _PROBLEM_FIELDS}
    name = problem.get("name", path.stem)
    try:
        Problem(name=name, num_ranks=1, **sizes)
    except ValueError as error:
        raise wrong("problem", problem, f"is not a layer: {str(error)[:MAX_SHOWN]}") from error
    entries = data.get("entries")
    if not isinstance(entries, list):
        raise wrong("entries", entries, "must be a list")
    parsed = []
    for index, entry in enumerate(entries):
        at = f"entries[{index}]"
        if not isinstance(entry, dict):
            raise wrong(at, entry, "must be an object")
        values = dict(entry)
        for field, limit in (("num_ranks", MAX_SIZE), ("max_tokens", MAX_TOKENS)):
            if not _is_count(values.get(field), limit):
                rule = f"must be a positive integer up to {limit}"
                raise wrong(f"{at}.{field}", values.get(field), rule)
        if problem["num_experts"] % values["num_ranks"]:
            raise wrong(f"{at}.num_ranks", values["num_ranks"], "must divide problem.num_experts")
        if values.get("rank_mode") not in RANK_MODES:
            raise wrong(f"{at}.rank_mode", values.get("rank_mode"), "must be one, virtual or real")
        fields = values.pop("schedule", None)
        if not isinstance(fields, dict):
            raise wrong(f"{at}.schedule", fields, "must be an object of the schedule's fields")
        try:
            schedule = Schedule.from_dict(fields)
        except ScheduleError as error:
            raise wrong(
                f"{at}.schedule", fields, f"is not a schedule: {str(error)[:MAX_SHOWN]}"
            ) from error
        if bad := _bad_cell(values.get("cells", [])):
            raise wrong(f"{at}.cells", values["cells"], bad)
        ranks, mode, most = (values.pop(n) for n in ("num_ranks", "rank_mode", "max_tokens"))
        parsed.append(FrozenEntry(ranks, mode, most, schedule, values))
    return FrozenFile(path, name, sizes, device, tuple(parsed))


def _files(problem: Problem, device: str, root: Path) -> Iterator[FrozenFile]:
    """The device's files, the one that bears the problem's name first."""
    paths = sorted((root / device).glob("*.json"), key=lambda p: (p.stem != problem.name, p.name))
    for path in paths:
        yield read_frozen(path)


def lookup(
    problem: Problem,
    device_name: str,
    num_tokens: int,
    *,
    root: Path | None = None,
    rank_mode: str | None = None,
) -> Resolution | None:
    """The frozen schedule of exactly this device and these sizes, or None. Logs nothing.

    Args:
        problem: the layer as the rank runs it.
        device_name: a GPU's name or its `device_key`.
        num_tokens: tokens a rank contributes.
        root: folder of the frozen files; the package's when None.
        rank_mode: how the ranks run, `one`, `virtual` or `real`; the problem's own when None.
            Without entries for `virtual` or `real`, those of a one-rank view serve.

    Raises:
        ValueError: unknown rank_mode, or a file of the device is corrupt.
    """
    entries = _entries(problem, device_name, root, rank_mode)
    if entries is None:
        return None
    return _pick(*entries, num_tokens, rank_mode or problem.rank_mode)


def token_limits(
    problem: Problem,
    device_name: str,
    *,
    root: Path | None = None,
    rank_mode: str | None = None,
) -> list[int]:
    """The token counts at which one frozen entry ends and the next begins, ascending.

    Args:
        problem, device_name, root, rank_mode: as for `lookup`.

    Raises:
        ValueError: as `lookup`.
    """
    entries = _entries(problem, device_name, root, rank_mode)
    return [] if entries is None else [entry.max_tokens for entry in entries[1]]


def _entries(
    problem: Problem, device_name: str, root: Path | None, rank_mode: str | None
) -> tuple[FrozenFile, list[FrozenEntry]] | None:
    """The entries that serve a layer, and their file."""
    mode = rank_mode or problem.rank_mode
    if mode not in RANK_MODES:
        raise ValueError(f"rank_mode={mode!r} must be one of {', '.join(RANK_MODES)}")
    files = list(_files(problem, device_key(device_name), root or schedules_root()))
    for tried in (mode,) if mode == "one" else (mode, "one"):
        for file in files:
            entries = file.entries_for(problem, tried)
            if entries:
                return file, entries
    return None


def _pick(
    file: FrozenFile, entries: list[FrozenEntry], num_tokens: int, rank_mode: str
) -> Resolution:
    index = next((i for i, e in enumerate(entries) if num_tokens <= e.max_tokens), -1)
    entry = entries[index]
    least = entries[index - 1].max_tokens + 1 if index % len(entries) else 0
    last = entry is entries[-1]
    interval = f"{least} and more" if last else f"{least} to {entry.max_tokens}"
    message = f"frozen in {file.path} for {interval} tokens on {file.device}"
    schedule = entry.schedule
    if entry.rank_mode != rank_mode:
        message += (
            f", measured with rank mode {entry.rank_mode!r} as one of {entry.num_ranks} ranks: "
            f"nothing is frozen for rank mode {rank_mode!r}"
        )
        if rank_mode == "real" and schedule.evict_first:
            # Has run on one GPU only: peers write what the owner drops from its L2 (device/l2.py).
            schedule = replace(schedule, evict_first=0)
            message += "; without its evict_first, which has not run between GPUs"
    return Resolution(schedule, "frozen", file.path, entry, message)


def resolve(
    problem: Problem,
    device_name: str,
    capacity: int,
    num_tokens: int,
    *,
    root: Path | None = None,
    quiet: bool = False,
    rank_mode: str | None = None,
    recipe: Recipe | None = None,
    math_mode: str | None = None,
    cooperative_threshold: int = COOPERATIVE_THRESHOLD,
    tokens_to_tune: Sequence[int] = (),
) -> Resolution:
    """The schedule for a launch. A fallback to the default is logged once a problem and device.

    Args:
        problem: the layer as the rank runs it.
        device_name: the GPU's name, for example `NVIDIA H200`.
        capacity: tokens of the buffer.
        num_tokens: tokens a rank contributes, or a bound that all ranks share.
        root: folder of the frozen files; the package's when None.
        quiet: log nothing.
        rank_mode: as for `lookup`.
        recipe: that of the buffer; `Recipe()` when None.
        math_mode: forced, one of MATH_MODES; free when None. A frozen schedule of another mode is
            passed over for the default of this one.
        cooperative_threshold: tokens from which the default is cooperative.
        tokens_to_tune: token counts in the command that would tune the layer; num_tokens if empty.

    Raises:
        ValueError: num_tokens outside 0..capacity, or a file of the device is corrupt.
        ScheduleError: the forced math mode is not valid for the problem.
    """
    if not 0 <= num_tokens <= capacity:
        raise ValueError(f"num_tokens={num_tokens} must be within 0 and capacity={capacity}")
    if math_mode not in (None, *MATH_MODES):
        raise ValueError(f"math_mode={math_mode!r} must be one of {', '.join(MATH_MODES)}")
    found = lookup(problem, device_name, num_tokens, root=root, rank_mode=rank_mode)
    if found is not None and math_mode not in (None, found.schedule.math_mode):
        message = (
            f"math mode {math_mode!r} is forced, and the schedule {found.message} has "
            f"{found.schedule.math_mode!r}; the built-in default of the forced mode runs"
        )
        schedule = _forced_default(problem, num_tokens, recipe, math_mode)
        return Resolution(schedule, "default", None, None, message)
    violations = [] if found is None else found.schedule.violations(problem, recipe)
    if found is not None and not violations:
        return found
    why = (
        f"no frozen schedule for {_sizes(problem)} on {device_key(device_name)}"
        if found is None
        else f"the schedule {found.message} is not valid any more: {'; '.join(violations)}"
    )
    flags = problem.flags()
    counts = ",".join(map(str, tokens_to_tune or [max(num_tokens, 1)]))
    command = f"tl-megamoe search {flags} --tokens {counts} && tl-megamoe freeze {flags}"
    message = f"{why}; the built-in default runs. To tune it: {command}"
    if math_mode is not None:
        schedule = _forced_default(problem, num_tokens, recipe, math_mode)
    else:
        schedule = default_schedule(problem, num_tokens, None, cooperative_threshold, recipe)
        if schedule.violations(problem, recipe):  # pingpong may fail only where it is forced
            schedule = default_schedule(problem, num_tokens, "cooperative", recipe=recipe)
    key = (device_name, *problem.key().values(), root)
    if not quiet and key not in _said:
        _said.add(key)
        logger.warning("%s", message)
    return Resolution(schedule, "default", None, None, message)


def _forced_default(
    problem: Problem, num_tokens: int, recipe: Recipe | None, math_mode: str | None
) -> Schedule:
    schedule = default_schedule(problem, num_tokens, math_mode, recipe=recipe)
    violations = schedule.violations(problem, recipe)
    if violations:
        raise ScheduleError(
            f"math mode {math_mode!r} is forced and not valid for {_sizes(problem)}: "
            f"{'; '.join(violations)}. Leave the choice free, or force another mode."
        )
    return schedule


def _sizes(problem: Problem) -> str:
    return (
        f"{problem.name} (hidden {problem.hidden}, intermediate {problem.intermediate}, "
        f"{problem.num_experts} experts, top-{problem.num_topk}, {problem.num_ranks} ranks)"
    )
