"""The compile farm with compilers that work, fail, spill, hang and crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tl_megamoe.device.walk import first_blocks
from tl_megamoe.explorer import farm as farm_module
from tl_megamoe.explorer.duplicates import launch_key
from tl_megamoe.explorer.farm import (
    NOT_BUILT,
    BuildResult,
    Farm,
    ReportCache,
    classify,
    code_of,
    kernel_digest,
)
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

SMALL = Problem(name="s", hidden=512, intermediate=512, num_experts=4, num_topk=2, num_ranks=1)
PINGPONG = Schedule(
    math_mode="pingpong", block_m=64, stages=2, prefetch=2, rows_in_flight=1, experts_per_wave=1
)
GOOD = KernelReport(168, 0, 200_000, 8, (), "0123456789abcdef")

# What the fake compiler does, by rows_in_flight.
WORKS, FAILS, SPILLS, HANGS, CRASHES, SERIALISES, RECOVERS = 1, 2, 3, 4, 5, 6, 7


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
    if behaviour == RECOVERS and not os.path.exists(log + ".failed"):  # type: ignore[operator]
        Path(f"{log}.failed").touch()
        how = os.environ["FAKE_BUILD_FIRST"]
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(600)
        raise RuntimeError(how)
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
    results = make_farm(tmp_path, timeout_s=3.0).run(specs, lambda s, r: seen.append(s))
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
    assert "second time" not in got[FAILS].reason  # nvcc's own word counts at once
    again = "compiled a second time, alone; the first time: "
    assert got[HANGS].reason == f"compiling took over 3 s; {again}compiling took over 3 s"
    assert f"exit code 11; {again}the compiler crashed" in got[CRASHES].reason
    assert "812 bytes" in got[SPILLS].reason
    assert "C7510" in got[SERIALISES].reason
    assert sorted(map(hash, seen)) == sorted(map(hash, results))
    assert wait_until_gone(int(pid.read_text()))  # its subprocess died with it
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


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", "exit code -9 (killed, as a machine out of memory does)"),
        ("slow", "compiling took over 4 s"),
        ("nvcc error: 'ptxas' died due to signal 9 (Kill signal)", "died due to signal 9"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "Killed signal"),
        ("[Errno 12] Cannot allocate memory", "Cannot allocate memory"),
    ],
)
def test_what_the_machine_spoilt_is_tried_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_BUILD_LOG", str(log))
    monkeypatch.setenv("FAKE_BUILD_FIRST", how)
    seen: list[str] = []
    specs = [spec(RECOVERS), spec(WORKS), spec(SPILLS)]
    farm = make_farm(tmp_path, timeout_s=4.0 if how == "slow" else 60.0)
    found = farm.run(specs, lambda key, result: seen.append(result.status))
    result = found[spec(RECOVERS).key()]
    assert (result.status, result.report) == ("ok", GOOD)
    assert result.reason.startswith("compiled a second time, alone; the first time: ")
    assert reason in result.reason
    assert log.read_text().split()[-1] == str(RECOVERS)  # after all others
    assert sorted(log.read_text().split()) == ["1", "3", "7", "7"]
    assert seen[-1] == "ok"
    assert len(seen) == 3  # the first try is no outcome
    assert farm.results == found
    assert make_farm(tmp_path, prebuilt=True).run(specs[:1])[spec(RECOVERS).key()].report == GOOD


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)
    return int(path.read_text())


SEARCH = """
    import signal
    import sys
    from pathlib import Path

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background
    sys.path.insert(0, {tests!r})
    from test_farm import HANGS, make_farm, spec

    try:
        make_farm(Path({folder!r}), timeout_s=600.0).run([spec(HANGS)])
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_a_search_that_ends_leaves_no_compiler(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    pid = tmp_path / "pid"
    text = SEARCH.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    script = tmp_path / "search.py"
    # A spawned process imports the script again.
    body = textwrap.indent(textwrap.dedent(text), "    ")
    script.write_text(f"if __name__ == '__main__':\n{body}")
    environment = {**os.environ, "FAKE_BUILD_PID": str(pid)}
    search = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        compiler = wait_for_pid(pid)
        search.send_signal(number)
        assert search.wait(30) == code
        assert wait_until_gone(compiler)
    finally:
        search.kill()


def test_an_exception_leaves_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setenv("FAKE_BUILD_PID", str(pid))

    def fail(key: KernelSpec, result: BuildResult) -> None:
        wait_for_pid(pid)
        raise OSError("the disk is full")

    farm = make_farm(tmp_path, timeout_s=600.0)
    with pytest.raises(OSError, match="disk is full") as kept:  # the traceback keeps every frame
        farm.run([spec(HANGS), spec(WORKS)], fail)
    assert wait_until_gone(int(pid.read_text()))
    assert kept.value is not None


def test_a_compiler_that_crashed_leaves_no_subprocess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setenv("FAKE_BUILD_PID", str(pid))
    child = farm_module.Child(farm_module._Builder, (start_and_crash,))
    with pytest.raises(farm_module.ChildDied, match="exit code 12"):
        child.call("run", spec(WORKS), timeout_s=60.0)
    assert wait_until_gone(int(pid.read_text()))


def start_and_crash(wanted: KernelSpec) -> KernelReport:
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["FAKE_BUILD_PID"]).write_text(str(child.pid))
    os._exit(12)


# ---- the digest


CODE = '''"""What the module is."""
import os

CUDA = r"""
// What the text says stays.

int f() { return 1; }  # not Python
"""


def f(a, b="# no comment"):
    """What it does.

    Args:
        a: one.
    """
    x = f"{a!r:#>4}"
    return a + b  # why
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# why", "# another reason"),
        ("  # why", ""),
        ('    x = f"', '    # a whole line\n\n    x = f"'),
        ("import os\n", "\n\nimport os\n\n"),
        ('"""What the module is."""\n', ""),
        ("What it does.", "What it does not: é."),
        ("        a: one.\n", "        a: one.\n\n        b: two.\n"),
        ("import os\n", "import os   \n"),
    ],
)
def test_the_digest_ignores_what_makes_the_same_kernel(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert code_of(CODE.replace(old, new)) == code_of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + b", "a - b"),
        ("# no comment", "# another"),
        ("return 1;", "return 2;"),
        ("// What the text says stays.", "// What the text says changes."),
        ("stays.\n\n", "stays.\n"),
        ("}  # not Python", "}"),
        ("#>4", "#>5"),
        ("    x = f", "    if a: x = f"),
    ],
)
def test_the_digest_sees_what_may_change_a_kernel(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert code_of(CODE.replace(old, new)) != code_of(CODE)


def test_code_beside_a_docstring_counts() -> None:
    assert code_of('def f(a): "é"; return a  # x\n') == "def f(a): ; return a"
    assert code_of('def f():\n    """A\n    b."""; x = 1\n') == "def f():\n; x = 1"
    assert code_of('y = ("a"  # one\n     "b")\n') == code_of('y = ("a"\n     "b")\n')


def test_code_is_cut_and_never_written_anew() -> None:
    """Every line is one of the file, or what is left of it: no Python version has a say in it."""
    root = Path(str(farm_module.tl_megamoe.__file__)).parent
    paths = [path for pattern in farm_module.KERNEL_SOURCES for path in root.glob(pattern)]
    assert len(paths) > 15
    for path in paths:
        text = path.read_text(encoding="utf-8")
        rest = iter(text.split("\n"))
        for line in code_of(text).split("\n"):
            assert any(whole.startswith(line) for whole in rest), (path, line)


def test_digest_follows_the_sources() -> None:
    digest = kernel_digest()
    assert len(digest) == 12
    kernel_digest.cache_clear()
    assert kernel_digest() == digest
    root = Path(str(farm_module.tl_megamoe.__file__)).parent
    for pattern in farm_module.KERNEL_SOURCES:
        assert list(root.glob(pattern)), pattern
    named = {Path(pattern).stem for pattern in farm_module.KERNEL_SOURCES if "phases/" in pattern}
    phases = {path.stem for path in (root / "phases").glob("*.py")}
    assert named == phases - {"quantize"}  # not part of the fused kernel


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


# ---- which launches are the same

RANKS = Problem(name="r", hidden=512, intermediate=512, num_experts=16, num_topk=4, num_ranks=4)
CAPACITY = 512
MANY, FEW = (300,) * 4, (1, 0, 2, 0)


def key(
    problem: Problem = RANKS,
    counts: list[tuple[int, ...]] | None = None,
    report: KernelReport = GOOD,
    phase: str = "fused",
    **fields: object,
) -> tuple[object, ...]:
    wave = {"experts_per_wave": 4} if fields.get("order") == "lag" else {}
    base = Schedule(stages=2, prefetch=2)
    schedule = replace(base, **{**wave, **fields})  # type: ignore[arg-type]
    schedule.check(problem)
    return launch_key(report, problem, schedule, CAPACITY, counts, phase=phase)


def ring(block_m: int = 128) -> int:
    return make_layout(RANKS, CAPACITY).ring_blocks(block_m)


def test_the_counts_do_what_the_tests_say() -> None:
    assert (ring(128), ring(64)) == (11, 22)
    assert [first_blocks(MANY, block_m)[-1] for block_m in (128, 64)] == [12, 20]
    assert first_blocks(FEW, 128)[-1] == 2


def test_without_counts_the_fields_decide() -> None:
    assert key(experts_per_wave=1) != key(experts_per_wave=2)
    assert key(order="lag", lag=2) != key(order="lag", lag=3)
    assert key(order="lag", lag=2) != key(experts_per_wave=2)
    assert key(prefetch=1) != key(prefetch=2)
    other = replace(GOOD, source_hash="f" * 16)
    assert key(report=other) != key()


def test_where_the_ring_wraps_every_wave_order_is_one_lag() -> None:
    wraps = [MANY] * 4
    waves = {key(counts=wraps, experts_per_wave=n) for n in (1, 2, 4)}
    assert waves == {key(counts=wraps, order="lag", lag=ring() // 4)}
    assert key(counts=wraps, order="lag", lag=3) not in waves
    # A lag is cut to half the ring.
    assert key(counts=wraps, order="lag", lag=5) == key(counts=wraps, order="lag", lag=64)
    assert key(counts=wraps, order="lag", lag=4) != key(counts=wraps, order="lag", lag=5)
    # With blocks of 64 rows the same routing fits, and the orders differ again.
    assert key(counts=wraps, block_m=64, experts_per_wave=1) != key(
        counts=wraps, block_m=64, experts_per_wave=2
    )


def test_a_rank_that_does_not_wrap_keeps_candidates_apart() -> None:
    mixed = [MANY, MANY, FEW, MANY]
    assert key(counts=mixed, experts_per_wave=1) != key(counts=mixed, experts_per_wave=2)
    assert key(counts=mixed, experts_per_wave=1) != key(counts=mixed, order="lag", lag=2)


def test_a_lag_past_the_last_block_is_no_other() -> None:
    few = [FEW] * 4
    assert key(counts=few, order="lag", lag=2) == key(counts=few, order="lag", lag=8)
    assert key(counts=few, order="lag", lag=1) != key(counts=few, order="lag", lag=2)
    assert key(counts=few, order="lag", lag=2) != key(counts=few, experts_per_wave=4)


def test_one_rank_never_wraps() -> None:
    view = RANKS.one_rank()
    counts = [(CAPACITY * 4, 0, 0, 0)]
    assert key(view, counts, experts_per_wave=1) != key(view, counts, experts_per_wave=2)


def test_the_grid_and_shared_memory_are_no_part_of_the_text() -> None:
    assert key(num_sms=66) != key(num_sms=132)
    assert key(report=replace(GOOD, smem_bytes=1)) != key()


def test_a_phase_alone_reads_fewer_fields() -> None:
    assert key(phase="linear1", experts_per_wave=1) == key(phase="linear1", order="lag", lag=3)
    assert key(phase="linear2", prefetch=1) == key(phase="linear2", prefetch=2)
    assert key(evict_first=0) != key(evict_first=1)
    assert key(phase="linear2", evict_first=0) != key(phase="linear2", evict_first=1)
    assert key(phase="combine", evict_first=0) == key(phase="combine", evict_first=1)
    assert key(phase="dispatch", prefetch=1) != key(phase="dispatch", prefetch=2)
