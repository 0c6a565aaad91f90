"""The rule on skipped sm90 tests, and seeds, in a pytest inside pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_megamoe.frozen import MATH_MODES

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
INNER = """
import pytest
@pytest.mark.sm90
def test_runs(): pass
@pytest.mark.sm90
def test_skips_itself(): pytest.skip("no reason")
@pytest.mark.sm90
@pytest.mark.multi_gpu(4)
def test_four(): pytest.skip("no reason")
def test_plain_skip(): pytest.skip("fine")
"""


def make_inner(pytester: pytest.Pytester, job: str, **files: str) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  sm90\n  multi_gpu\n")
    pytester.makeconftest(f"{CONFTEST}\n{job}")
    pytester.makepyfile(**files)


def run_inner(pytester: pytest.Pytester, gpus: int, ranks: int = 1, **files: str) -> dict[str, int]:
    make_inner(pytester, f"WORLD_SIZE = {ranks}\ndef num_sm90_gpus(): return {gpus}\n", **files)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()


@pytest.mark.parametrize(
    ("gpus", "outcome"),
    [
        (0, {"skipped": 4}),
        (1, {"passed": 1, "failed": 1, "skipped": 2}),
        (4, {"passed": 1, "failed": 2, "skipped": 1}),
    ],
)
def test_sm90_skips(pytester: pytest.Pytester, gpus: int, outcome: dict[str, int]) -> None:
    assert run_inner(pytester, gpus, test_inner=INNER) == outcome


@pytest.mark.parametrize(
    ("ranks", "gpus", "outcome"),
    [
        (4, 4, {"failed": 1, "deselected": 3}),
        (4, 1, {"skipped": 1, "deselected": 3}),
        (2, 2, {"deselected": 4}),
    ],
)
def test_torchrun_runs_the_tests_of_its_size(
    pytester: pytest.Pytester, ranks: int, gpus: int, outcome: dict[str, int]
) -> None:
    assert run_inner(pytester, gpus, ranks, test_inner=INNER) == outcome


HANGS = """
import time
import pytest
pytestmark = pytest.mark.multi_gpu(2)
def test_ends(): time.sleep(1.2)
def test_ends_too(): time.sleep(1.2)
def test_hangs(): time.sleep(60)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_test_that_hangs_ends_a_torchrun_process(pytester: pytest.Pytester, ranks: int) -> None:
    """The limit is of one test; the process says where it was. Without torchrun there is none."""
    job = "TEST_LIMIT_S = 2.0\ndef num_sm90_gpus(): return 2\n"
    text = HANGS if ranks > 1 else HANGS.replace("60", "2.2")
    make_inner(pytester, job, test_inner=text)
    pytester._monkeypatch.setenv("WORLD_SIZE", str(ranks))
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", timeout=50)
    if ranks == 1:
        assert found.parseoutcomes() == {"passed": 3}
        return
    assert found.ret == 1
    found.stderr.fnmatch_lines(["Timeout (*", "*in test_hangs"])
    assert "PASSED" in found.stdout.str()


@pytest.mark.parametrize(("gpus", "outcome"), [(0, {"skipped": 1}), (1, {"errors": 1})])
def test_skipped_module(pytester: pytest.Pytester, gpus: int, outcome: dict[str, int]) -> None:
    text = "import pytest\npytest.importorskip('no_such_module')\ndef test_x(): pass\n"
    assert run_inner(pytester, gpus, test_inner=text) == outcome


@pytest.mark.parametrize("parameter", [1, 2])
def test_seed_follows_the_id(seed: int, parameter: int) -> None:
    expected = {1: 0, 2: 0}
    import zlib

    for p in expected:
        name = f"tests/test_conftest.py::test_seed_follows_the_id[{p}]"
        expected[p] = zlib.crc32(name.encode()) & 0x7FFFFFFF
    assert expected[1] != expected[2]
    assert seed == expected[parameter]


SHARED: dict[str, int] = {}


@pytest.mark.parametrize("mode", MATH_MODES)
@pytest.mark.parametrize("parameter", [1, 2])
def test_modes_share_a_seed(shared_seed: int, parameter: int, mode: str) -> None:
    SHARED.setdefault(str(parameter), shared_seed)
    assert SHARED[str(parameter)] == shared_seed
    assert len(set(SHARED.values())) == len(SHARED)
