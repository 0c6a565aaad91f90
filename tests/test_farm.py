"""The compile farm with compilers that work, fail, spill, hang and crash."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tl_megamoe.explorer import farm as farm_module
from tl_megamoe.explorer.farm import (
    NOT_BUILT,
    BuildResult,
    Farm,
    ReportCache,
    classify,
    kernel_digest,
)
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

SMALL = Problem(name="s", hidden=512, intermediate=512, num_experts=4, num_topk=2, num_ranks=1)
PINGPONG = Schedule(
    math_mode="pingpong", block_m=64, stages=2, prefetch=2, rows_in_flight=1, experts_per_wave=1
)
GOOD = KernelReport(168, 0, 200_000, 8, (), "0123456789abcdef")

# What the fake compiler does, by rows_in_flight.
WORKS, FAILS, SPILLS, HANGS, CRASHES, SERIALISES = 1, 2, 3, 4, 5, 6


def spec(behaviour: int, experts_per_wave: int = 1, phase: str = "fused") -> KernelSpec:
    schedule = Schedule(
        stages=2, prefetch=2, rows_in_flight=behaviour, experts_per_wave=experts_per_wave
    )
    return KernelSpec(problem=SMALL, schedule=schedule, capacity=64, phase=phase)


def fake_build(wanted: KernelSpec) -> KernelReport:
    behaviour = wanted.schedule.rows_in_flight
    log = os.environ.get("FAKE_BUILD_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{behaviour}\n")
    print("compilers print")
    if behaviour == FAILS:
        raise RuntimeError("nvcc failed with exit code 1: no such thing")
    if behaviour == HANGS:
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["FAKE_BUILD_PID"]).write_text(str(child.pid))
        child.wait()
    if behaviour == CRASHES:
        os._exit(11)
    if behaviour == SPILLS:
        return KernelReport(168, 812, 200_000, 8, (), "f")
    if behaviour == SERIALISES:
        return KernelReport(168, 0, 200_000, 8, ("C7510",), "f")
    return GOOD


def make_farm(tmp_path: Path, **options: object) -> Farm:
    cache = ReportCache(tmp_path / "reports")
    return Farm(fake_build, jobs=2, cache=cache, **options)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_every_outcome_has_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setenv("FAKE_BUILD_PID", str(pid))
    specs = [spec(b) for b in (WORKS, FAILS, SPILLS, HANGS, CRASHES, SERIALISES)]
    seen: list[KernelSpec] = []
    start = time.monotonic()
    results = make_farm(tmp_path, timeout_s=6.0).run(specs, lambda s, r: seen.append(s))
    assert time.monotonic() - start < 60
    got = {s.schedule.rows_in_flight: r for s, r in results.items()}
    assert {b: r.status for b, r in got.items()} == {
        WORKS: "ok",
        FAILS: "compile_error",
        SPILLS: "spilled",
        HANGS: "timeout",
        CRASHES: "compile_error",
        SERIALISES: "serialized_wgmma",
    }
    assert got[WORKS].report == GOOD
    assert "no such thing" in got[FAILS].reason
    assert "812 bytes" in got[SPILLS].reason
    assert "C7510" in got[SERIALISES].reason
    assert sorted(map(hash, seen)) == sorted(map(hash, results))
    assert not is_running(int(pid.read_text()))  # its subprocess died with it
    assert capfd.readouterr().out == ""  # what compilers print stays off stdout


def test_one_compile_serves_a_kernel_key_and_reports_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_BUILD_LOG", str(log))
    specs = [spec(WORKS, 1), spec(WORKS, 2), spec(WORKS, 4), spec(SPILLS)]
    first = make_farm(tmp_path).run(specs)
    assert sorted(log.read_text().split()) == ["1", "3"]
    assert set(first) == {s.key() for s in specs}
    # A second farm finds the reports, bad ones too, and starts no process.
    monkeypatch.setattr(farm_module, "Child", None)
    assert make_farm(tmp_path).run(specs) == first
    assert make_farm(tmp_path, prebuilt=True).run(specs) == first


def test_prebuilt_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm_module, "Child", None)
    results = make_farm(tmp_path, prebuilt=True).run([spec(WORKS)])
    assert [r.status for r in results.values()] == [NOT_BUILT]


def test_cache_key_is_the_kernel_and_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReportCache(tmp_path)
    cache.put(spec(WORKS), GOOD)
    assert cache.get(spec(WORKS, 4)) == GOOD
    assert cache.get(spec(FAILS)) is None
    assert cache.get(spec(WORKS, phase="linear1")) is None
    cache.put(spec(WORKS, phase="linear1"), GOOD)
    shows = replace(spec(WORKS, phase="linear1"), debug=True)
    assert cache.get(shows) is None
    assert cache.get(replace(shows, debug=False)) == GOOD
    for other in (
        replace(spec(WORKS), recipe=Recipe.parse("pow2-64")),
        replace(spec(WORKS), problem=replace(SMALL, num_ranks=2)),
        replace(spec(WORKS), schedule=PINGPONG),
    ):
        assert cache.get(other) is None
    monkeypatch.setattr(farm_module, "kernel_digest", lambda: "other sources")
    assert cache.get(spec(WORKS)) is None


def test_a_broken_report_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ReportCache(tmp_path)
    cache.put(spec(WORKS), GOOD)
    next(tmp_path.glob("*.json")).write_text('{"report": {"registers": 1')
    assert cache.get(spec(WORKS)) is None
    assert "the kernel is compiled again" in caplog.text


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    assert ReportCache().root == tmp_path / "tl_megamoe" / "reports"
    monkeypatch.delenv("TILELANG_CACHE_DIR")
    assert ReportCache().root == Path.home() / ".tilelang/cache/tl_megamoe/reports"


def test_only_phases_that_multiply_need_wgmma() -> None:
    without = KernelReport(60, 0, 1024, 0, (), "f")
    assert classify(spec(WORKS), without).status == "no_wgmma"
    assert classify(spec(WORKS, phase="linear2"), without).status == "no_wgmma"
    assert classify(spec(WORKS, phase="combine"), without) == BuildResult("ok", without)


def test_digest_follows_the_sources() -> None:
    digest = kernel_digest()
    assert len(digest) == 12
    kernel_digest.cache_clear()
    assert kernel_digest() == digest
    root = Path(str(farm_module.tl_megamoe.__file__)).parent
    for pattern in farm_module.KERNEL_SOURCES:
        assert list(root.glob(pattern)), pattern


def test_a_process_that_cannot_start_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("out of processes")

    monkeypatch.setattr("tl_megamoe.explorer.farm.Child", refuse)
    wanted = [spec(WORKS), spec(SPILLS)]
    found = make_farm(tmp_path).run(wanted)
    assert {r.status for r in found.values()} == {"compile_error"}
    assert len(found) == 2
    assert all("out of processes" in r.reason for r in found.values())
