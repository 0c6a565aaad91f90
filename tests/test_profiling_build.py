"""The profiling build: what it adds to a kernel, and that the shipped one has nothing of it."""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import MODES, ON_RANKS, SMALL, SMALL_CAPACITY, fit, variants
from machine_code import check_code

import tl_megamoe
from tl_megamoe.device.trace import EVENT_WORDS, LANE_EVENTS, MAX_POOL_BLOCKS, trace_shape
from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.kernel import _program as program_of
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.schedule import Schedule, default_schedule

ROOT = Path(str(tl_megamoe.__file__)).parent
STAMPED = (
    "program.py",
    *(f"phases/{name}.py" for name in ("combine", "dispatch", "linear1", "linear1_swapped")),
    "phases/linear2.py",
)
"""Files with lines of the profiling build."""
PARAMETERS = 24
CASES = {
    **{f"small-{name}": (SMALL, variants(SMALL)[name]) for name in ("wide128", "rows1")},
    **{f"small-{name}": (SMALL, variants(SMALL)[name]) for name in ("pingpong", "swapped")},
    "ranks": (ON_RANKS[2], fit(ON_RANKS[2])),
}


def spec(problem: Problem, schedule: Schedule, **options: Any) -> KernelSpec:
    return KernelSpec(problem=problem, schedule=schedule, capacity=SMALL_CAPACITY, **options)


def digests() -> dict[str, str]:
    """The shipped programs of CASES, before anything lowers them."""
    programs = {name: program_of(spec(*case)) for name, case in CASES.items()}
    return {
        name: hashlib.sha256(program.script(show_meta=True).encode()).hexdigest()
        for name, program in programs.items()
    }


class WithoutProfiling(ast.NodeTransformer):
    """Takes out what only the profiling build runs."""

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802 - ast's name
        if ast.unparse(node.test) == "plan.profile":
            return None
        self.generic_visit(node)
        return node if node.body else None

    def visit_Expr(self, node: ast.Expr) -> Any:  # noqa: N802
        return None if ast.unparse(node).startswith(("trace.", "wait_for_stage(")) else node


def test_the_shipped_programs_are_those_without_the_stamps(tmp_path: Path) -> None:
    """Built from the same sources with every line of the profiling build taken out."""
    shutil.copytree(ROOT, tmp_path / "tl_megamoe", ignore=shutil.ignore_patterns("__pycache__"))
    removed = 0
    for name in STAMPED:
        path = tmp_path / "tl_megamoe" / name
        text = ast.unparse(WithoutProfiling().visit(ast.parse(path.read_text())))
        removed += path.read_text().count("trace.mark") - text.count("trace.mark")
        path.write_text(text)
    assert removed >= 20
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(here)!r}]\n"
        "import test_profiling_build as tests\n"
        f"assert str(tests.ROOT).startswith({str(tmp_path)!r}), tests.ROOT\n"
        "print(tests.digests())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == digests()


@pytest.mark.parametrize("name", CASES)
def test_it_takes_one_parameter_more(name: str) -> None:
    assert len(program_of(spec(*CASES[name])).params) == PARAMETERS
    program = program_of(spec(*CASES[name], profile=True))
    assert len(program.params) == PARAMETERS + 1
    assert str(program.params[-1].name) == "trace_address"
    assert str(program.params[-1].dtype) == "int64"


@pytest.mark.parametrize("mode", MODES)
def test_text_has_stamps_and_the_same_barriers(mode: str) -> None:
    schedule = variants(SMALL)["wide128" if mode == "cooperative" else mode]
    shipped, profiling = (spec(SMALL, schedule, profile=p) for p in (False, True))
    assert shipped.key() != profiling.key()
    plain, stamped = compile_kernel(shipped).source(), compile_kernel(profiling).source()
    assert "tlmm_stamp" not in plain
    counts = [text.count("tlmm_count_few<384, 2>(") for text in (plain, stamped)]
    assert counts == [1, 0 if mode == "pingpong" else 1]  # with both pingpong would spill
    assert "trace_address" not in plain
    pattern = r"tlmm_stamp\(trace_address, (\d+), (\d), "
    calls = re.findall(pattern, stamped)
    math = ("7", "8", "9", "10", "11") if mode == "pingpong" else ("8", "9", "11")
    expected = {
        **{("0", "0"): 1, ("1", "0"): 1, ("2", "0"): 1, ("3", "0"): 3, ("4", "0"): 1},
        # Load A and B; both math warpgroups run one text.
        **{("5", linear): 1 for linear in "12"},
        # Of swapped linear1, gathered or from the pool.
        **({("5", "1"): 2} if mode == "swapped" else {}),
        **{("6", linear): 2 for linear in "12"},
        **{(kind, linear): 1 for kind in math for linear in "12"},
        # All warps wait for all tiles, and some combine, the others reset.
        **{("12", "0"): 2, ("13", "0"): 1, ("14", "0"): 1},
    }
    assert {call: calls.count(call) for call in set(calls)} == expected
    for barrier in ("tlmm_bar(", "tlmm_bar_arrive(", "tlmm_grid_sync((", "tlmm_wait_equal(("):
        assert stamped.count(barrier) == plain.count(barrier), barrier
    # What the wait for a tile's first stage may wait for is this warpgroup's own report.
    found = re.findall(r"if \((tlmm_is_full)\(|tlmm_stamp\(trace_address, (\d+)", stamped)
    order = [full or kind for full, kind in found if kind != "7"]
    stages = [i for i, kind in enumerate(order) if kind == "8"]
    assert len(stages) == 2
    if mode == "pingpong":  # reports come with their tiles
        assert "tlmm_is_full" not in order
    else:
        assert all(order[i - 1] == "tlmm_is_full" for i in stages)
    assert "printf" not in stamped


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", PRESETS)
def test_defaults_compile_well(preset: str, mode: str) -> None:
    problem = PRESETS[preset].one_rank()
    schedule = default_schedule(problem, 512, mode)
    check_code(KernelSpec(problem=problem, schedule=schedule, capacity=8192, profile=True))


def test_many_ranks_compile_well() -> None:
    problem, schedule = CASES["ranks"]
    check_code(spec(problem, schedule, profile=True))


def test_memory_of_a_launch() -> None:
    shape = trace_shape(132)
    assert shape == (132, 6, LANE_EVENTS + 1, EVENT_WORDS)
    assert 4 * 132 * 6 * (LANE_EVENTS + 1) * EVENT_WORDS < 64 * 2**20
    assert 132 * 6 * (LANE_EVENTS + 1) < 2**31  # indexed by 32 bits


def test_a_spec_refuses_what_has_no_such_build() -> None:
    with pytest.raises(ValueError, match="profile=True with phase='linear1': only the fused ker"):
        spec(SMALL, fit(SMALL), phase="linear1", profile=True)
    many = replace(SMALL, num_ranks=8)
    schedule = fit(many, block_m=64)
    capacity = 64 * MAX_POOL_BLOCKS // (many.num_ranks * many.num_topk)
    KernelSpec(problem=many, schedule=schedule, capacity=capacity // 2, profile=True)
    with pytest.raises(ValueError, match=f"pool blocks, and a stamp names {MAX_POOL_BLOCKS}"):
        KernelSpec(problem=many, schedule=schedule, capacity=capacity, profile=True)
