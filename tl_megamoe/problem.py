"""The sizes of one expert-parallel MoE layer, and the published models this is tuned for."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - exercised on Python 3.10 only
    import tomli as tomllib

SCALE_BLOCK = 128
"""Columns that share one activation scale, and rows and columns that share one weight scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One MoE layer over `num_ranks` expert-parallel ranks.

    Attributes:
        name: key of the results table and of the frozen schedules.
        hidden: model width in elements, a multiple of 128.
        intermediate: width after SwiGLU in elements, a multiple of 128; W1 has twice as many rows.
        num_experts: experts over all ranks.
        num_topk: routes of one token.
        num_ranks: expert-parallel ranks; divides `num_experts`.
        from_num_ranks: ranks of the layer that this one-rank view was taken from (see `one_rank`);
            None when the problem is not such a view.

    Raises:
        ValueError: a size breaks one of the rules above.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_ranks: int = 8
    from_num_ranks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name):
            raise ValueError(
                f"name={self.name!r} of a problem must be letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit: it names files"
            )
        for field in ("hidden", "intermediate", "num_experts", "num_topk", "num_ranks"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{field}={value!r} of problem {self.name!r} must be a positive integer"
                )
        for field in ("hidden", "intermediate"):
            value = getattr(self, field)
            if value % SCALE_BLOCK:
                below = value // SCALE_BLOCK * SCALE_BLOCK
                raise ValueError(
                    f"{field}={value} of problem {self.name!r} is not a multiple of {SCALE_BLOCK}, "
                    f"the columns of one FP8 scale. Pad the layer to "
                    f"{below + SCALE_BLOCK}{f' or use {below}' if below else ''}."
                )
        if self.num_experts % self.num_ranks:
            divisors = ", ".join(str(d) for d in range(1, 129) if self.num_experts % d == 0)
            raise ValueError(
                f"num_ranks={self.num_ranks} does not divide num_experts={self.num_experts} of "
                f"problem {self.name!r}. Divisors: {divisors}."
            )

    @property
    def num_local_experts(self) -> int:
        """Experts that one rank owns."""
        return self.num_experts // self.num_ranks

    @property
    def rank_mode(self) -> str:
        """How rows of this problem are marked in the tables: `one` for a one-rank view."""
        return "one" if self.num_ranks == 1 else "real"

    @property
    def table_num_ranks(self) -> int:
        """`num_ranks` as the tables and frozen files record it: 8 for one rank of eight."""
        return self.from_num_ranks or self.num_ranks

    def one_rank(self) -> Problem:
        """The problem as one of its ranks sees it: its experts alone, all source tokens on it.

        One GPU stands for one of `num_ranks` this way: with uniform routing every rank receives
        `tokens * num_topk` routes, which is what the view routes to its `num_local_experts`.
        """
        if self.num_ranks == 1:
            return self
        return replace(
            self,
            num_experts=self.num_local_experts,
            num_ranks=1,
            from_num_ranks=self.num_ranks,
        )

    def flags(self) -> str:
        """The command-line flags that name this problem: a preset, or its sizes over all ranks."""
        ranks = self.table_num_ranks
        whole = replace(
            self,
            num_experts=self.num_local_experts * ranks,
            num_ranks=ranks,
            from_num_ranks=None,
        )
        preset = PRESETS.get(self.name)
        if preset is not None and replace(preset, num_ranks=ranks) == whole:
            changed = f" --num-ranks {ranks}" if ranks != preset.num_ranks else ""
            return f"--problem {self.name}{changed}"
        return (
            f"--hidden {whole.hidden} --intermediate {whole.intermediate} "
            f"--num-experts {whole.num_experts} --num-topk {whole.num_topk} --num-ranks {ranks}"
        )

    def key(self) -> dict[str, int]:
        """The sizes that decide which kernel runs, without the name."""
        sizes = asdict(self)
        del sizes["name"], sizes["from_num_ranks"]
        return sizes


PRESETS: dict[str, Problem] = {
    p.name: p
    for p in (
        Problem(
            name="deepseek-v4-flash", hidden=4096, intermediate=2048, num_experts=256, num_topk=6
        ),
        Problem(
            name="deepseek-v4-pro", hidden=7168, intermediate=3072, num_experts=384, num_topk=6
        ),
        Problem(name="mimo-v2.5", hidden=4096, intermediate=2048, num_experts=256, num_topk=8),
        Problem(name="mimo-v2.5-pro", hidden=6144, intermediate=2048, num_experts=384, num_topk=8),
    )
}
"""Published models, each on eight ranks."""


def divisors_of(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def load_problem(source: str | Path, **overrides: int) -> Problem:
    """A preset by name, or a problem from a TOML file.

    A TOML file holds `name` (default: the file's stem), `hidden`, `intermediate`, `num_experts`,
    `num_topk` and optionally `num_ranks`, at top level or in a `[problem]` table.

    Args:
        source: a preset's name or the path of a TOML file.
        **overrides: sizes that replace those of the source, for example `num_ranks=4`. A preset
            with another size than its own gets a name that says so.

    Raises:
        ValueError: unknown preset, unreadable file, unknown or missing field, or a broken rule.
    """
    path = Path(source)
    if str(source) in PRESETS:
        problem = PRESETS[str(source)]
        changed = {k: v for k, v in overrides.items() if v != getattr(problem, k)}
        shape = {k: v for k, v in changed.items() if k != "num_ranks"}
        suffix = "".join(f"-{k.replace('_', '')}{v}" for k, v in sorted(shape.items()))
        return replace(problem, name=problem.name + suffix, **changed)
    if path.suffix != ".toml":
        raise ValueError(
            f"problem {str(source)!r} is neither a preset ({', '.join(PRESETS)}) nor a .toml file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"problem file {path}: {error}") from error
    table = data.get("problem", data)
    if not isinstance(table, dict):
        raise ValueError(f"problem file {path}: [problem] must be a table, found {table!r}")
    fields = {"name", "hidden", "intermediate", "num_experts", "num_topk", "num_ranks"}
    unknown = sorted(set(table) - fields)
    missing = sorted(fields - {"name", "num_ranks"} - set(table) - set(overrides))
    if unknown or missing:
        raise ValueError(
            f"problem file {path}: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("unknown field", unknown), ("missing field", missing))
                if names
            )
            + f". Fields: {', '.join(sorted(fields))}."
        )
    return Problem(**{"name": path.stem, **table, **overrides})
