"""`tl-megamoe export`: which kernels it writes, for whom, and what it refuses."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from export_cases import DEVICE, FLASH, spec
from export_cases import compiler as compiler
from export_cases import module as module
from fake_modules import FakeCompiler

from tl_megamoe.explorer import cli
from tl_megamoe.exported import ExportedKernels, export_kernels
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.quantize import QuantizeSpec
from tl_megamoe.recipe import Recipe
from tl_megamoe.selection import choose_schedule
from tl_megamoe.shared_experts import with_shared


def folder_of(tmp_path: Path, *words: str) -> tuple[ExportedKernels, dict[str, Any]]:
    out = tmp_path / "out"
    assert cli.main(["export", *words, "--device", DEVICE, "--out", str(out)]) == 0
    kernels = ExportedKernels.open(out)
    return kernels, kernels.manifest.notes


def chosen(problem: Problem, capacity: int, mode: str, bound: int, **options: Any) -> KernelSpec:
    """The kernel that a launch of a token bound takes on 132 multiprocessors."""
    recipe = options.pop("recipe", Recipe())
    most = options.pop("most", 132)
    found = choose_schedule(
        problem, DEVICE, capacity, bound, rank_mode=mode, recipe=recipe, quiet=True
    ).schedule
    schedule = replace(found, num_sms=min(found.num_sms, most))
    return KernelSpec(
        problem=problem, schedule=schedule, capacity=capacity, recipe=recipe, **options
    )


def test_export_has_the_kernel_of_every_token_count(
    compiler: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels, notes = folder_of(tmp_path, *FLASH, "--capacity", "700")
    problem = PRESETS["deepseek-v4-flash"].one_rank()
    wanted = {chosen(problem, 700, "one", bound).key() for bound in range(701)}
    assert {s.key() for s in compiler.made if isinstance(s, KernelSpec)} == wanted
    assert len(wanted) == 3
    for key in wanted:
        assert kernels.fused(key).kernel() == 0
    sizes = {"hidden": 4096, "num_topk": 6, "num_local_experts": 32, "num_experts": 32}
    kernels.quantize(QuantizeSpec(**sizes, num_shared=0, capacity=700, scale="exact"))
    ends = {entry["max_tokens"]: entry["schedule"] for entry in notes["schedules"]}
    assert max(ends) == 700
    for bound in range(0, 701, 7):
        name = ends[min(end for end in ends if end >= bound)]
        assert name == chosen(problem, 700, "one", bound).schedule.name
    out, err = capsys.readouterr()
    assert "4 kernels, " in out.splitlines()[-1]
    assert out.startswith("up to    ")
    assert err.startswith("[1/4] fused-")


def test_export_of_shared_experts(compiler: FakeCompiler, tmp_path: Path) -> None:
    words = ["--num-shared", "2", "--capacity", "300", "--clamp", "--precise"]
    kernels, notes = folder_of(tmp_path, *FLASH, *words, "--recipe", "pow2-64")
    problem = with_shared(PRESETS["deepseek-v4-flash"].one_rank(), 2)
    options = {"recipe": Recipe(scale="pow2", intermediate_group=64)}
    for bound in (0, 255, 256, 300):
        own = chosen(problem, 300, "one", bound, clamp=True, fast_math=False, **options)
        assert kernels.fused(own).spec == own
    sizes = {"hidden": 4096, "num_topk": 8, "num_local_experts": 34, "num_experts": 34}
    kernels.quantize(QuantizeSpec(**sizes, num_shared=2, capacity=300, scale="pow2"))
    assert notes["problem"]["num_experts"] == 32
    with pytest.raises(ValueError, match="capacity=300") as caught:
        kernels.fused(chosen(problem, 301, "one", 300, clamp=True, **options))
    again = str(caught.value).partition("with: ")[2]
    assert "--problem deepseek-v4-flash --capacity 301 --recipe pow2-64" in again
    assert "--num-shared 2 --clamp --out" in again


@pytest.mark.parametrize("words", [(), ("--num-ranks", "8"), ("--ranks", "8")])
def test_export_of_all_ranks(
    compiler: FakeCompiler, tmp_path: Path, words: tuple[str, ...]
) -> None:
    kernels, notes = folder_of(tmp_path, *FLASH, *words, "--rank-mode", "real")
    problem = PRESETS["deepseek-v4-flash"]
    for bound in (0, 16, 500, 8192):
        kernels.fused(chosen(problem, 8192, "real", bound))
    sizes = {"hidden": 4096, "num_topk": 6, "num_local_experts": 32, "num_experts": 256}
    kernels.quantize(QuantizeSpec(**sizes, num_shared=0, capacity=8192, scale="exact"))
    assert notes["rank_mode"] == "real"


def test_export_for_a_part_of_a_gpu(compiler: FakeCompiler, tmp_path: Path) -> None:
    words = ["--ranks", "4", "--rank-mode", "virtual", "--capacity", "256"]
    kernels, _ = folder_of(tmp_path, *FLASH, *words)
    problem = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    kernels.fused(chosen(problem, 256, "virtual", 256, most=33))
    kernels, _ = folder_of(tmp_path, *FLASH, "--num-sms", "114")
    view = PRESETS["deepseek-v4-flash"].one_rank()
    kernels.fused(chosen(view, 8192, "one", 8192, most=114))
    with pytest.raises(ValueError, match=r"num_sms=114 \(asked for 132\)"):
        kernels.fused(chosen(view, 8192, "one", 8192))


@pytest.mark.parametrize(
    "words",
    [
        [*FLASH],
        [*FLASH, "--num-ranks", "4", "--num-shared", "1", "--clamp", "--precise"],
        [*FLASH, "--rank-mode", "real", "--recipe", "pow2-128"],
        [*FLASH, "--ranks", "4", "--rank-mode", "virtual", "--num-sms", "100"],
        "--hidden 512 --intermediate 256 --num-experts 8 --num-topk 2 --num-ranks 1".split(),
    ],
)
def test_the_command_in_the_notes_makes_the_same_kernels(
    compiler: FakeCompiler, tmp_path: Path, words: list[str]
) -> None:
    kernels, notes = folder_of(tmp_path, *words, "--capacity", "512")
    again = shlex.split(notes["command"])
    assert again[:2] == ["tl-megamoe", "export"]
    assert cli.main(again[1:]) == 0
    second = ExportedKernels.open(tmp_path / "out").manifest
    assert second.kernels == kernels.manifest.kernels
    assert second.notes == notes


def test_the_command_of_an_error_makes_the_missing_kernel(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    kernels, _ = folder_of(tmp_path, *FLASH, "--num-shared", "1", "--rank-mode", "real")
    problem = replace(PRESETS["deepseek-v4-flash"], num_experts=264, num_topk=7)
    wanted = chosen(problem, 1000, "real", 900, clamp=True)
    quantizer = replace(kernels_quantize(kernels), capacity=1000)
    with pytest.raises(ValueError, match="has no fused kernel") as caught:
        kernels.fused(wanted)
    with pytest.raises(ValueError, match="has no quantize kernel") as other:
        kernels.quantize(quantizer)
    for error, load in ((caught, wanted), (other, quantizer)):
        command = shlex.split(str(error.value).partition("with: ")[2])
        assert cli.main(command[1:]) == 0
        again = ExportedKernels.open(tmp_path / "out")
        if isinstance(load, KernelSpec):
            again.fused(load)
        else:
            again.quantize(load)


def kernels_quantize(kernels: ExportedKernels) -> QuantizeSpec:
    [found] = [kernel for kernel in kernels.manifest.kernels if kernel.kind == "quantize"]
    return QuantizeSpec(**found.spec)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*FLASH], "no SM90 GPU here: name the one that will run the kernels, as --device nvidia"),
        ([*FLASH, "--device", DEVICE, "--capacity", "9999999"], "capacity="),
        ([*FLASH, "--device", DEVICE, "--rank-mode", "one", "--ranks", "4"], "one rank runs alone"),
        (["--device", DEVICE], "no --problem given"),
    ],
)
def test_wrong_arguments(
    compiler: FakeCompiler,
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["export", *words, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not compiler.made


def test_nothing_is_compiled_for_a_folder_that_is_in_use(
    compiler: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("")
    assert cli.main(["export", *FLASH, "--device", DEVICE, "--out", str(tmp_path)]) == 2
    assert "holds mine.txt and is not a folder of exported kernels" in capsys.readouterr().err
    assert not compiler.made


def test_an_export_is_replaced_under_its_readers(compiler: FakeCompiler, tmp_path: Path) -> None:
    """Two writers and a reader: nobody fails, and nothing is left beside the folder."""
    out = tmp_path / "k"
    export_kernels(out, [spec()])
    failed: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    def write() -> None:
        for _ in range(15):
            export_kernels(out, [spec()])

    def read() -> None:
        while not done.is_set():
            assert ExportedKernels.open(out).manifest.kernels

    reader = threading.Thread(target=guarded, args=(read,))
    writers = [threading.Thread(target=guarded, args=(write,)) for _ in range(2)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not failed
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".k")] == []
