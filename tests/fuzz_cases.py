"""Cases of the fuzzer: drawn from a seed, written as one line, read back.

A case holds everything that decides its outcome. Two thirds of its fields make a kernel (sizes,
capacity, recipe, most of the schedule), the rest belongs to a launch: on a GPU few kernels are
drawn and many launches of each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import SCALE_BLOCK, Problem, divisors_of
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule

NUM_SMS = 132
MAX_WEIGHT_BYTES = 2**30
"""Of all experts of a layer on a GPU; what is held are the codes, twice."""
MAX_LAUNCH_S = 0.01
"""Of a launch (`launch_seconds`), so that a minute has thousands of cases."""
WEIGHT_LAWS = ("softmax", "zero", "some-zero", "negative", "signed", "wide")
ROUTINGS = ("uniform", "uniform", "zipf:0.7", "zipf:1.5", "skew", "hot1")
MASKS = (0.0, 0.0, 0.0, 0.2, 0.8, 1.0)
ENDS = ("", "hidden", "wraps", "intermediate", "", "num_experts", "wraps", "num_topk")
"""Sizes that are the largest in one kernel of these; `wraps`: rings smaller than what may come."""
ODD_VALUES = (-1, 0, 1, 2, 3, 4, 5, 8, 24, 31, 32, 33, 40, 64, 128, 168, 176, 256, 2**24)
"""What a field of a schedule becomes where an invalid one is wanted."""


class Most(NamedTuple):
    """The largest sizes that a check draws; hidden and intermediate in blocks of 128."""

    hidden: int = 64
    intermediate: int = 36
    num_experts: int = 512
    num_topk: int = 16
    num_ranks: int = 8
    capacity: int = 4096
    num_sms: int = NUM_SMS


MOST = {
    "layer": Most(),
    "schedule": Most(),
    "layout": Most(capacity=2**22),
    "walk": Most(hidden=16, intermediate=16, capacity=1024),
    "launches": Most(4, 3, 24, 4, 4, 192, 3),
    "scaling": Most(8, 1, 1, 1, 1, 16),
    "reference": Most(2, 2, 4, 4, 4, 4),
    "lowers": Most(),
}
"""By check (`fuzz_layer.CHECKS`, and `layer`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one check runs on.

    Attributes:
        check: its name, a key of `MOST`.
        hidden, intermediate, num_experts, num_topk, num_ranks: of the problem.
        capacity: tokens of a rank's buffer.
        schedule: valid for the problem, except where `schedule` is the check.
        tokens: of every rank.
        routing, mask: as for `random_inputs`.
        weights: law of the routing weights, one of `WEIGHT_LAWS`.
        x_scale, w_scale: what the scales of activations and weights are multiplied by.
        recipe: its name.
        clamp: of the activation, or None.
        fast_math: of the kernel.
        seed: of all that is random in the check.
    """

    check: str
    hidden: int = 128
    intermediate: int = 128
    num_experts: int = 1
    num_topk: int = 1
    num_ranks: int = 1
    capacity: int = 1
    schedule: Schedule = Schedule()
    tokens: tuple[int, ...] = (1,)
    routing: str = "uniform"
    mask: float = 0.0
    weights: str = "softmax"
    x_scale: float = 1.0
    w_scale: float = 1.0
    recipe: str = "exact-128"
    clamp: float | None = None
    fast_math: bool = True
    seed: int = 0

    @property
    def line(self) -> str:
        """The case as one line of JSON, which `parse` reads back."""
        return json.dumps({**asdict(self), "schedule": self.schedule.to_dict()})

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case of a line.

        Raises:
            ValueError: no JSON object, a field too many or too few, an unknown check.
        """
        values = json.loads(line)
        names = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"a case has exactly the fields {sorted(names)}, found: {line}")
        if values["check"] not in MOST:
            raise ValueError(f"check={values['check']!r} must be one of {', '.join(MOST)}")
        values["schedule"] = Schedule.from_dict(values["schedule"])
        values["tokens"] = tuple(values["tokens"])
        return cls(**values)

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, capacity: int, **options: Any) -> Case:
        """A `layer` case of a problem, without tokens."""
        sizes = problem.key()
        tokens = (0,) * problem.num_ranks
        return cls(
            check="layer", schedule=schedule, capacity=capacity, tokens=tokens, **sizes, **options
        )

    @property
    def problem(self) -> Problem:
        return Problem(
            name="fuzz",
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            num_ranks=self.num_ranks,
        )

    @property
    def numeric(self) -> Recipe:
        """The recipe itself."""
        return Recipe.parse(self.recipe)

    @property
    def weight_bytes(self) -> int:
        """Of the codes of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def spec(self) -> KernelSpec:
        """The kernel of the case."""
        return KernelSpec(
            problem=self.problem,
            schedule=self.schedule,
            capacity=self.capacity,
            recipe=self.numeric,
            clamp=self.clamp is not None,
            fast_math=self.fast_math,
        )

    @property
    def is_valid(self) -> bool:
        """Whether the library accepts it; a check of what is refused accepts any schedule."""
        if len(self.tokens) != self.num_ranks or max(self.tokens) > self.capacity:
            return False
        if min(self.hidden, self.intermediate, self.num_topk, self.capacity) < 1:
            return False
        if self.num_experts < self.num_ranks or self.num_experts % self.num_ranks:
            return False
        if self.check in ("schedule", "layout"):
            return True
        return not self.schedule.violations(self.problem, self.numeric) and affordable(self)


def launch_seconds(case: Case) -> float:
    """What a launch takes on an H200 at most, roughly: all routes on one rank, few rows a block.

    A multiprocessor reads some 30 GB/s and multiplies 4 TFLOP/s, both a sixteen-trillionth of a
    second a byte of a block's weights.
    """
    rows = sum(case.tokens) * case.num_topk
    blocks = rows / case.schedule.block_m + min(case.num_experts, rows)
    return blocks * case.weight_bytes * 6e-11 / case.schedule.num_sms


def reference_is_quick(case: Case) -> bool:
    """Whether the float32 reference takes milliseconds, and half a gigabyte at most."""
    rows = sum(case.tokens) * case.num_topk
    wide = rows * (2 * case.intermediate + case.hidden)
    return rows * case.weight_bytes < 2**35 and wide < 2**26


def affordable(case: Case) -> bool:
    """Whether the check is quick, and the layer fits a share of a GPU."""
    p, s = case.problem, case.schedule
    rows = sum(case.tokens) * p.num_topk
    if case.check == "walk":
        blocks = rows / s.block_m + p.num_local_experts
        return blocks * (s.linear1_tiles(p) + s.linear2_tiles(p)) < 20_000
    if case.check != "layer":
        return True
    if s.num_sms * p.num_ranks > NUM_SMS or case.capacity * p.num_topk >= 1 << 24:
        return False
    buffers = make_layout(p, case.capacity, case.numeric).num_bytes * p.num_ranks
    fits = p.num_experts * case.weight_bytes <= MAX_WEIGHT_BYTES and buffers < 2**31
    return fits and launch_seconds(case) < MAX_LAUNCH_S and reference_is_quick(case)


# ---- drawing


def small_first(rng: random.Random, most: int) -> int:
    """A number in 1..most, each power of two as likely as the next."""
    return max(1, min(most, round(most ** rng.random())))


def draw_schedule(
    rng: random.Random, problem: Problem, recipe: Recipe, num_sms: int = NUM_SMS
) -> Schedule:
    """A valid schedule; which one decides `Schedule.violations` alone."""
    modes = (
        ("pingpong", "swapped", "cooperative") if problem.hidden % 256 == 0 else ("cooperative",)
    )
    mode = rng.choice(modes)
    one_shape = mode != "cooperative"
    while True:
        schedule = Schedule(
            math_mode=mode,  # type: ignore[arg-type]
            block_m=64 if one_shape else rng.choice((64, 128)),
            linear1_block_n=256 if one_shape else rng.choice((128, 256, 256)),
            linear2_block_n=256 if one_shape else rng.choice((128, 256, 256)),
            stages=rng.randint(2, 8),
            experts_per_wave=problem.num_local_experts,
            dispatch_warps=rng.randint(1, 3),
            load_warps=rng.randint(1, 2),
            load_registers=rng.choice((40, rng.randrange(24, 169, 8))),
            math_registers=rng.choice((232, rng.randrange(168, 257, 8))),
            rows_in_flight=small_first(rng, 32),
            num_sms=rng.choice((num_sms, rng.randint(1, num_sms))),
            prefetch=0,
        )
        if rng.random() < 0.2 and schedule.block_m == 128:
            schedule = replace(schedule, cluster_size=2, dispatch_warps=1, load_warps=2)
        if not schedule.violations(problem, recipe):
            return draw_walk(rng, problem, schedule)


def draw_walk(rng: random.Random, problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with other runtime fields: one kernel serves them all."""
    local, most = problem.num_local_experts, problem.hidden // SCALE_BLOCK
    lag = rng.choice((0, 0, 1, 2, 3, small_first(rng, 10**6)))
    return replace(
        schedule,
        order="lag" if lag else "wave",
        lag=lag,
        experts_per_wave=local if lag else rng.choice(divisors_of(local)),
        prefetch=rng.choice((0, rng.randint(0, most))),
    )


def draw_problem(rng: random.Random, most: Most, end: str = "") -> Problem:
    """Random sizes, small ones as likely as large ones.

    Args:
        rng: what is random.
        most: the largest of each.
        end: a size that is the largest, or `wraps`: few experts on each of several ranks.
    """
    ranks = rng.choice([n for n in (*(1,) * 6, *range(2, 9)) if n <= most.num_ranks])
    if end == "wraps":
        ranks = rng.randint(2, 8)
        most = most._replace(hidden=8, intermediate=8, num_experts=4 * ranks)
    least = {} if end in ("", "wraps") else {end: getattr(most, end)}

    def size(name: str, share: int = 1) -> int:
        value = least.get(name, small_first(rng, getattr(most, name) // share))
        return max(1, value // share) if name in least else value

    hidden = size("hidden")
    if hidden < most.hidden and rng.random() < 0.6:
        hidden += hidden % 2  # tiles of 256 columns need an even number
    return Problem(
        name="fuzz",
        hidden=SCALE_BLOCK * hidden,
        intermediate=SCALE_BLOCK * size("intermediate"),
        num_experts=ranks * size("num_experts", ranks),
        num_topk=size("num_topk"),
        num_ranks=ranks,
    )


def draw_kernel(rng: random.Random, check: str, end: str = "") -> Case:
    """Sizes, recipe and schedule; no tokens yet.

    Args:
        rng: what is random.
        check: the kernel is for.
        end: one of `ENDS`.
    """
    most = MOST[check]
    while True:
        problem = draw_problem(rng, most, end)
        ranks = problem.num_ranks
        recipe = rng.choice((Recipe(), *ALL_RECIPES))
        schedule = draw_schedule(rng, problem, recipe, max(1, min(most.num_sms, NUM_SMS // ranks)))
        case = Case.of(
            problem,
            schedule,
            rng.randint(512, 2048) if end == "wraps" else small_first(rng, most.capacity),
            recipe=str(recipe),
            clamp=rng.choice((None, 1.0)),
            fast_math=rng.random() < 0.7,
        )
        case = replace(case, check=check)
        full = replace(case, tokens=(case.capacity,) * ranks)
        if end == "wraps" and not (affordable(full) and can_wrap(full)):
            continue
        if case.is_valid and affordable(full if check == "walk" else few_tokens(case)):
            return case


def few_tokens(case: Case) -> Case:
    """The case with a token a rank."""
    return replace(case, tokens=(1,) * case.num_ranks)


def can_wrap(case: Case) -> bool:
    """Whether its tokens, all on one rank, take more pool blocks than a ring has by far."""
    ring = make_layout(case.problem, case.capacity, case.numeric).ring_rows
    return sum(case.tokens) * case.num_topk > 1.5 * ring


def draw_launch(rng: random.Random, case: Case) -> Case:
    """The case with other tokens, routes, scales and walk; its kernel stays."""
    capacity, all_full = case.capacity, rng.random() < 0.2

    def tokens() -> int:
        near = 64 * rng.randint(1, 4) + rng.randint(-1, 1)
        power = 1 << rng.randrange(capacity.bit_length())
        drawn = rng.choice((0, 1, power, near, rng.randint(0, capacity), capacity))
        return capacity if all_full else min(drawn, capacity)

    def scale(low: float, high: float) -> float:
        return float(f"{10 ** rng.uniform(low, high):.2e}")

    out = replace(
        case,
        schedule=draw_walk(rng, case.problem, case.schedule),
        tokens=tuple(tokens() for _ in range(case.num_ranks)),
        routing=rng.choice(ROUTINGS),
        mask=rng.choice(MASKS),
        weights=rng.choice(("softmax", *WEIGHT_LAWS)),
        x_scale=rng.choice((1.0, scale(-8, 4))),
        w_scale=rng.choice((1.0, scale(-8, 4))),
        clamp=None if case.clamp is None else scale(-2, 2),
        seed=rng.randrange(2**31),
    )
    while case.check == "layer" and not affordable(out):
        out = replace(out, tokens=tuple(n // 2 for n in out.tokens))
    return out


def draw_case(rng: random.Random, check: str) -> Case:
    """A case of a check that needs no GPU."""
    case = draw_launch(rng, draw_kernel(rng, check))
    if check == "launches" and rng.random() < 0.7:  # rings may be smaller, and wrap
        case = replace(case, schedule=replace(case.schedule, rows_in_flight=1))
    if check == "schedule" and rng.random() < 0.7:
        for name in rng.sample([f.name for f in fields(Schedule)], rng.choice((1, 1, 2))):
            values: Mapping[str, tuple[object, ...]] = {
                "math_mode": ("cooperative", "pingpong", "both"),
                "order": ("wave", "lag", "none"),
                "block_m": (32, 64, 128, 256),
            }
            value = rng.choice(values.get(name, ODD_VALUES))
            case = replace(case, schedule=replace(case.schedule, **{name: value}))
    return case
