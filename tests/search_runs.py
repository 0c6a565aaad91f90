"""Searches with a fake compiler and GPU, and the rows that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_search import SPACE, VIEW, FakeGpu, InlineFarm

from tl_megamoe.explorer import search as search_module
from tl_megamoe.explorer.search import SearchOptions, run_search
from tl_megamoe.explorer.space import load_space
from tl_megamoe.explorer.table import read_table

ROUND = ["routing", "seed", "observation"]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchOptions:
    monkeypatch.setattr(search_module.frozen, "lookup", lambda *a, **k: None)
    return make_options(tmp_path)


def make_options(folder: Path) -> SearchOptions:
    space = folder / "space.toml"
    space.write_text(SPACE)
    return SearchOptions(
        problem=VIEW,
        tokens=(512,),
        space=load_space(str(space)),
        results=folder / "results",
        capacity=1024,
        commit="abc",
    )


def run(options: SearchOptions, gpu: FakeGpu | None, tmp_path: Path, **fields: Any) -> Any:
    name = None if gpu is None else "NVIDIA H200"
    make = None if gpu is None else (lambda config, control: gpu)
    return run_search(options, InlineFarm(tmp_path / "reports"), make, name, **fields)


def rows_of(options: SearchOptions, device: str = "nvidia-h200") -> pd.DataFrame:
    return read_table(options.results / device / f"{VIEW.name}.csv")


def screened(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["stage"] == "screen"]
