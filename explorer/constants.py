"""What the cost model takes from measurements: built in, or fitted to a device's results.

`tl-megamoe model --fit --write` writes schedules/model/<device>.json; `load_constants` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tl_megamoe.frozen import device_key, schedules_root
from tl_megamoe.metrics import HBM_READ_TBS

HOME_DEVICE = "nvidia-h200"
"""The device that the built-in constants are for."""
MODEL_SCHEMA = 1
"""Of schedules/model/<device>.json."""


def _constant(value: float, unit: str, text: str, low: float = 0.0, high: float = 0.0) -> Any:
    """A constant with its meaning; with bounds, `tl-megamoe model --fit` may move it."""
    return field(default=value, metadata={"unit": unit, "text": text, "bounds": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the model takes from measurements; `Constants()` are the built-in ones.

    Every field says its unit and where its built-in value comes from (`describe`). Those were
    measured on cooperative prototypes on an H200 unless it says otherwise.
    """

    max_clock_ghz: float = _constant(1.98, "GHz", "SM clock without a power limit (nvidia-smi)")
    clock_drop_ghz: float = _constant(
        0.85,
        "GHz",
        "what tensor cores that are always busy take from it at 700 W: 1.43 GHz at a share of "
        "0.62, 1.57 at 0.45 (column sm_clock_mhz, deepseek-v4-flash, 8192 tokens)",
    )
    promote_clocks: float = _constant(
        130.0,
        "clocks",
        "to add a 64 x 128 unit of raw products, scaled, to its accumulators; from stand-alone "
        "linear1 and linear2 at 8192 tokens",
        65.0,
        260.0,
    )
    k_block_clocks: float = _constant(
        90.0, "clocks", "a K block takes besides: barrier waits, WGMMA's start", 30.0, 250.0
    )
    ring_clocks: float = _constant(
        120.0,
        "clocks",
        "of a fill's latency that a K block would see with a ring of one stage; the ring hides it "
        "in proportion to its depth",
        20.0,
        600.0,
    )
    epilogue1_clocks: float = _constant(
        1700.0,
        "clocks",
        "a linear1 tile's epilogue a 64 x 128 unit: 7 % of its K loop",
        850.0,
        3400.0,
    )
    epilogue2_clocks: float = _constant(
        1450.0,
        "clocks",
        "a linear2 tile's epilogue a 64 x 128 unit: 12 % of its K loop",
        725.0,
        2900.0,
    )
    hbm_tbs: float = _constant(
        HBM_READ_TBS, "TB/s", "bandwidth of HBM (metrics.HBM_READ_TBS, a plain read)", 3.5, 4.65
    )
    l2_tbs: float = _constant(
        7.0,
        "TB/s",
        "what L2 feeds all SMs; a guess above the 6.2 TB/s that 128 x 256 tiles take of it",
        4.0,
        14.0,
    )
    overlap: float = _constant(
        4.0,
        "",
        "exponent of the norm: 1 adds the times up, a large one takes the longest; a guess",
        1.5,
        12.0,
    )
    start_us: float = _constant(
        7.0, "us", "until the counts are known and the first tile starts (stamps)", 3.0, 15.0
    )
    tail_us: float = _constant(
        12.0,
        "us",
        "the last grid barrier and what the tiles' spread adds (stamps: 12 to 18)",
        4.0,
        30.0,
    )
    l2_fill_us: float = _constant(
        4.0, "us", "the part of the start in which a prefetch of weights can run", 0.05, 7.0
    )
    pull_latency_us: float = _constant(
        5.0,
        "us",
        "a bulk copy of a row chunk under load: 690 us for 49,152 rows of 4 KiB",
        2.0,
        10.0,
    )
    pull_exposed: float = _constant(
        0.1, "", "the part of the pull by which dispatch slows the tiles beside it", 0.02, 0.4
    )
    combine_tbs: float = _constant(
        3.8, "TB/s", "mixed read and write of the combine: 124 us for 470 MB", 2.5, 4.6
    )

    @classmethod
    def describe(cls) -> dict[str, tuple[str, str]]:
        """Field -> its unit and its meaning."""
        return {f.name: (f.metadata["unit"], f.metadata["text"]) for f in fields(cls)}

    @classmethod
    def bounds(cls) -> dict[str, tuple[float, float]]:
        """Field -> the least and the largest value that a fit may give it; fixed ones left out."""
        found = {f.name: f.metadata["bounds"] for f in fields(cls)}
        return {name: pair for name, pair in found.items() if pair[1] > pair[0]}


BUILT_IN = Constants()


def constants_path(device: str, root: Path | None = None) -> Path:
    """Where the fitted constants of a device are: schedules/model/<device>.json.

    Args:
        device: a GPU's name or its `device_key`.
        root: folder of the frozen schedules; the package's when None.
    """
    return (root or schedules_root()) / "model" / f"{device_key(device)}.json"


def load_constants(device: str | None = None, root: Path | None = None) -> Constants:
    """The fitted constants of a device, the built-in ones where none were fitted.

    Args:
        device: a GPU's name or its `device_key`; the H200 that the built-in ones are for when None.
        root: folder of the frozen schedules; the package's when None.

    Raises:
        ValueError: the file is corrupt, of another schema or device, or does not hold exactly the
            constants of this version.
    """
    path = constants_path(device or HOME_DEVICE, root)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return BUILT_IN
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model constants {path}: not readable JSON: {error}") from error

    def wrong(name: str, found: Any, rule: str) -> ValueError:
        return ValueError(
            f"model constants {path}: {name}={found!r} {rule}. "
            "Write the file anew with: tl-megamoe model --fit --write"
        )

    if not isinstance(data, dict) or data.get("schema") != MODEL_SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise wrong("schema", found, f"must be {MODEL_SCHEMA}")
    if data.get("device") != path.stem:
        raise wrong("device", data.get("device"), f"must be that of its name, {path.stem!r}")
    values = data.get("constants")
    names = {f.name for f in fields(Constants)}
    if not isinstance(values, dict) or set(values) != names:
        differing = sorted(names ^ set(values)) if isinstance(values, dict) else values
        raise wrong("constants", differing, "must hold exactly the constants of this version")
    for name, value in values.items():
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise wrong(f"constants.{name}", value, "must be a positive number")
    return Constants(**{name: float(value) for name, value in values.items()})
