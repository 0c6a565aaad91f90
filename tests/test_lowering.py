"""Kernels compile for sm_90a without a GPU, and what the compiler says of them is good."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fuzz_cases import Case
from fuzz_checks import check_lowers, wrong_strides
from gpu_cases import MODES, RECIPE_SPLITS, SMALL, SMALL_CAPACITY, fit, schedules, variants
from machine_code import check_code, check_report

from tl_megamoe.frozen import frozen_paths, read_frozen
from tl_megamoe.kernel import KernelSpec, compile_kernel, inspect_kernel, nvcc_of, parse_report
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.program import device_cuda
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule

FROZEN = frozen_paths()
FLASH = PRESETS["deepseek-v4-flash"]
DEFAULTS = [
    pytest.param(FLASH, default_schedule(FLASH, 512, mode), id=f"default-{mode}-{FLASH.num_ranks}")
    for mode in MODES
]
"""What runs on many ranks where no frozen file covers a problem, in all math modes."""


def test_clocks_have_32_bits() -> None:
    """clock() has 64: a start kept in 32 subtracted from it, no pause would end, or none begin."""
    assert not re.search(r"(?<!tlmm_)clock\(\)", re.sub("//.*", "", device_cuda(True)))


def frozen_kernels() -> list[pytest.param]:
    """One case for each kernel that a frozen file needs."""
    cases = {}
    for path in FROZEN:
        file = read_frozen(path)
        for entry in file.entries:
            problem = file.problem_of(entry)
            key = (path.parent.name, path.stem, problem.num_ranks, entry.schedule.kernel_key())
            cases.setdefault(key, (problem, entry.schedule))
    return [
        pytest.param(problem, schedule, id=f"{device}-{name}-{ranks}ranks-{key.name}")
        for (device, name, ranks, key), (problem, schedule) in cases.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "schedule"), [*frozen_kernels(), *DEFAULTS])
def test_kernels_compile_well(problem: Problem, schedule: Schedule) -> None:
    """All warps of a warpgroup reach the same setmaxnreg, too: the SASS shows it."""
    assert not schedule.violations(problem, Recipe())
    check_code(KernelSpec(problem=problem, schedule=schedule, capacity=8192))


def test_fused_text_has_its_barriers() -> None:
    schedule = variants(SMALL)["wide128"]
    spec = KernelSpec(problem=SMALL, schedule=schedule, capacity=SMALL_CAPACITY)
    text = compile_kernel(spec).source()
    assert text.count("tlmm_grid_sync((") == 2  # counts known, rows scattered
    assert "tlmm_rank_sync((" not in text
    assert text.count("tlmm_wait_equal((") == 2  # tokens, linear1
    for barrier in ("tlmm_bar(2, 384)", "tlmm_bar(5, 256)", "tlmm_bar(10, 256)"):
        assert barrier in text
    assert re.search(r"tlmm_bar\(\(wg\w* \+ 11\), 128\)", text)
    # Each linear: a report is paid before the wait for an empty stage; and each K loop, of tiles of
    # 64 and of 128 rows, looks at the next stage. Both warpgroups run the same text.
    assert len(re.findall(r"if \(tlmm_is_full\(", text)) == 2
    assert len(re.findall(r"= tlmm_is_full\(", text)) == 4
    # TileLang's own barriers would deadlock inside a role.
    assert "__sync_thread_partial" not in text
    assert "printf" not in text
    assert "__trap" not in text


def test_a_binary_names_its_nvcc() -> None:
    said = b"\x7fELF\0Cuda compilation tools, release 13.0, V13.0.88\0Build cuda_13.0.r13.0\0"
    assert nvcc_of(said) == "13.0.88"
    assert nvcc_of(b"\x7fELF") == ""


def test_pingpong_text_hands_over_turns() -> None:
    schedule = variants(SMALL)["pingpong"]
    report_spec = KernelSpec(problem=SMALL, schedule=schedule, capacity=SMALL_CAPACITY)
    report = inspect_kernel(report_spec)
    check_report(report, schedule, SMALL)
    assert re.fullmatch(r"\d+\.\d+\.\d+", report.nvcc)
    text = compile_kernel(report_spec).source()
    for barrier in (6, 8):  # products, epilogue: wait for one's own turn, give the other's
        assert re.search(rf"tlmm_bar\(\(wg\w* \+ {barrier}\), 256\)", text)
        assert re.search(rf"tlmm_bar_arrive\(\({barrier + 1} - wg\w*\), 256\)", text)
        assert f"tlmm_bar_arrive({barrier}, 256)" in text  # warpgroup 0 begins
    assert "tlmm_bar(10, 256)" not in text  # nothing is exchanged between the warpgroups


def test_many_ranks_text_meets_its_peers() -> None:
    problem = replace(SMALL, num_ranks=2)
    schedule = replace(fit(problem), num_sms=66)
    spec = KernelSpec(problem=problem, schedule=schedule, capacity=SMALL_CAPACITY)
    check_code(spec)
    text = compile_kernel(spec).source()
    assert text.count("tlmm_rank_sync((") == 2
    assert "tlmm_grid_sync((" not in text
    assert text.count("tlmm_wait_equal((") == 4  # tokens, linear1, and both rings


@pytest.mark.parametrize("recipe", ["exact-128", "exact-64"])
@pytest.mark.parametrize("split", RECIPE_SPLITS)
def test_stages_lie_as_the_ring_says(recipe: str, split: str) -> None:
    """With 64 columns a scale, linear1's rows have one a K block and its stages room for two."""
    schedule = schedules(SMALL, RECIPE_SPLITS, Recipe.parse(recipe))[split]
    assert check_lowers(Case.of(SMALL, schedule, SMALL_CAPACITY, recipe=recipe)) == ""


def test_a_precise_build_keeps_subnormal_numbers() -> None:
    """nvcc's own code flushes them with fast math alone, and so do promotions."""
    assert "fma.rn.ftz.f32" in device_cuda(True)
    assert ".ftz" not in device_cuda(False)
    assert ".ftz" not in device_cuda(False, swapped=True)
    assert device_cuda(False).count("fma.rn.f32") == device_cuda(True).count("fma.rn.ftz.f32")
    spec = KernelSpec(problem=SMALL, schedule=fit(SMALL), capacity=SMALL_CAPACITY, fast_math=False)
    assert ".ftz" not in compile_kernel(spec).source()


def test_a_stage_of_another_size_is_seen() -> None:
    case = Case.of(SMALL, fit(SMALL), SMALL_CAPACITY, recipe="exact-64")
    size = 2 * case.schedule.block_m * 4
    right = f"x[0] = tlmm_load_shared(((v_5 + (((uint)v_3) * (uint){size})) + (uint)32));"
    assert wrong_strides(case, right) == ""
    assert "are read" in wrong_strides(case, "")
    assert "scales of a stage are" in wrong_strides(case, right.replace(f"{size}", f"{size // 2}"))
    assert "bytes apart" in wrong_strides(case, right.replace("(uint)32)", f"(uint){size})"))
    assert "[48]" in wrong_strides(case, right + "\nv_4 = (v_5 + (((uint)v_3) * (uint)48));")


def test_runtime_fields_share_a_kernel() -> None:
    base = fit(SMALL)
    other = replace(base, order="lag", lag=3, prefetch=0, evict_first=1)
    specs = [KernelSpec(problem=SMALL, schedule=s, capacity=SMALL_CAPACITY) for s in (base, other)]
    assert specs[0].key() == specs[1].key()
    assert compile_kernel(specs[0]).kernel is compile_kernel(specs[1]).kernel


def test_spec_refuses_what_no_kernel_runs() -> None:
    schedule = fit(SMALL)
    with pytest.raises(ValueError, match="phase='gate' must be one of fused"):
        KernelSpec(problem=SMALL, schedule=schedule, capacity=64, phase="gate")
    with pytest.raises(ValueError, match="debug=True with phase='fused'"):
        KernelSpec(problem=SMALL, schedule=schedule, capacity=64, debug=True)
    with pytest.raises(ScheduleError, match="block_m=32 is below the 64 rows"):
        KernelSpec(problem=SMALL, schedule=replace(schedule, block_m=32), capacity=64)
    with pytest.raises(ScheduleError, match="experts_per_wave=3 does not divide"):
        KernelSpec(problem=SMALL, schedule=replace(schedule, experts_per_wave=3), capacity=64)


def test_report_is_read_from_ptxas() -> None:
    output = """
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are
        ptxas info    : Function properties for mega_moe_kernel
            0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
        ptxas info    : Used 168 registers, used 13 barriers, 1024 bytes smem
    """
    source = """
        template <int FIRST, int COUNT, bool NARROW>
        TLMM_DEV void tlmm_product(float* raw, unsigned a, unsigned b) {}
        tlmm_product<0, 4, false>(raw, a, b); tlmm_product_columns<16, 2, 2, 256>(raw, a, b);
    """
    report = parse_report(output, source, "v_int64) = ((int64_t)229904);")
    assert (report.registers, report.spill_bytes, report.smem_bytes) == (168, 28, 230928)
    assert report.num_wgmma == 2
    assert report.warnings == ("C7510",)
    assert report.serialised
