"""Damaged, foreign and absurd files: each ends in one error that names it and says what to do."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_rows import BASE, DEVICE, VIEW, confirm_rows

from tl_megamoe.explorer import bundle, cli
from tl_megamoe.explorer.constants import constants_path, load_constants
from tl_megamoe.explorer.freeze import plan_freeze, write_freeze
from tl_megamoe.explorer.kernel_store import listed_files
from tl_megamoe.explorer.space import MAX_POINTS, enumerate_candidates, load_space, num_points
from tl_megamoe.explorer.strategy import OptunaSearch
from tl_megamoe.explorer.table import append_rows, table_path
from tl_megamoe.frozen import MAX_FILE_BYTES, frozen_paths, read_frozen, resolve
from tl_megamoe.manifest import FORMAT, MANIFEST, SCHEMA, made_with, read_manifest
from tl_megamoe.problem import PRESETS
from tl_megamoe.sources import Files

DEEP = "[" * 100_000
ABSURD = (10**30, -1, 1.5, True, "8", None, [], 1 << 31)


def frozen_in(tmp_path: Path) -> Path:
    append_rows(
        table_path(tmp_path / "results", DEVICE, VIEW.name), confirm_rows(16, {BASE: 200.0})
    )
    plan = plan_freeze(VIEW, DEVICE, tmp_path / "results", tmp_path / "schedules")
    write_freeze(plan)
    return plan.path


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, held in list(items):
        yield value, key
        if isinstance(held, (dict, list)):
            yield from places(held)


def test_absurd_values_in_a_frozen_file(tmp_path: Path) -> None:
    """Each is refused in one short line that names the file, or does not matter."""
    path = frozen_in(tmp_path)
    good = path.read_text()
    refused = 0
    count = sum(1 for _ in places(json.loads(good)))
    for index in range(count):
        for value in ABSURD:
            data = json.loads(good)
            container, key = list(places(data))[index]
            if type(container[key]) is type(value) and container[key] == value:
                continue
            container[key] = value
            path.write_text(json.dumps(data))
            said = ""
            try:
                for entry in read_frozen(path).entries:
                    read_frozen(path).problem_of(entry)
                found = resolve(VIEW, DEVICE, 64, 16, root=tmp_path / "schedules", quiet=True)
                assert not found.schedule.violations(VIEW)
            except ValueError as error:
                refused, said = refused + 1, str(error)
            assert not said or (str(path) in said and "tl-megamoe freeze" in said), said
            assert len(said) < 3000
    assert refused > 120


@pytest.mark.parametrize(
    "cells",
    [
        *(5, "x", [3], [{}], [{"num_tokens": "64"}]),
        [{"num_tokens": 64, "num_observations": 2}],
        [{"num_tokens": 64, "median_us": "fast"}],
        [{"num_tokens": 64, "margin": 0.1, "margin_spread": 0.1}],
    ],
)
def test_evidence_that_cannot_be_read(tmp_path: Path, cells: object) -> None:
    path = frozen_in(tmp_path)
    data = json.loads(path.read_text())
    data["entries"][0]["cells"] = cells
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"entries\[0\]\.cells=.* must (be|have) ") as caught:
        read_frozen(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[1]", DEEP, '{"schema": 1' + DEEP, "\udcff", '{"schema": ' + "9" * 5000 + "}"],
    ids=["empty", "null", "list", "deep", "deep value", "no UTF-8", "a long number"],
)
@pytest.mark.parametrize("kind", ["frozen", "export", "index", "model", "report"])
def test_texts_that_are_not_such_files(tmp_path: Path, kind: str, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    name, read = {
        "frozen": (f"{DEVICE}/p.json", lambda path: read_frozen(path)),
        "export": (MANIFEST, lambda path: read_manifest(path.parent)),
        "index": ("model.safetensors.index.json", lambda path: Files(path)),
        "model": (
            constants_path(DEVICE, tmp_path).relative_to(tmp_path).as_posix(),
            lambda path: load_constants(DEVICE, tmp_path),
        ),
        "report": ("manifest.json", lambda path: listed_files(path.parent)),
    }[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if kind == "report":
        assert read(path) == {}
        return
    with pytest.raises(ValueError, match=re.escape(path.name)) as caught:
        read(path)
    assert len(str(caught.value)) < 2000


def test_a_frozen_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / DEVICE / "p.json"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 33)  # takes no space
    with pytest.raises(ValueError, match=rf"8589934592 bytes, and no .* {MAX_FILE_BYTES}\. Rest"):
        read_frozen(path)
    assert max(p.stat().st_size for p in frozen_paths()) < MAX_FILE_BYTES / 100


def test_absurd_values_in_the_manifest_of_an_export(tmp_path: Path) -> None:
    kernel = {"kind": "fused", "spec": {}, "function": "f", "file": "fused-0123456789ab.so"}
    helper = {"file": "native-0123456789ab.so", "sha256": "00", "size": 4}
    data = {"format": FORMAT, "schema": SCHEMA, **made_with(), "notes": {}, "native": helper}
    data["kernels"] = [{**kernel, "sha256": "00", "size": 4}]
    good = json.dumps(data)
    (tmp_path / MANIFEST).write_text(good)
    assert len(read_manifest(tmp_path).kernels) == 1
    for index in range(sum(1 for _ in places(data))):
        for value in (5, None, [], "../../x.so", 10**30, {"a": 1}):
            changed = json.loads(good)
            container, key = list(places(changed))[index]
            container[key] = value
            (tmp_path / MANIFEST).write_text(json.dumps(changed))
            kernels, said = (), ""
            try:
                kernels = read_manifest(tmp_path).kernels
            except ValueError as error:
                said = str(error)
            assert not said or MANIFEST in said
            assert all("/" not in k.file and isinstance(k.sha256, str) for k in kernels)


@pytest.mark.parametrize("file", ["/etc/passwd", "../x.safetensors", "a/../../x", 5, None])
def test_an_index_names_files_of_its_folder(tmp_path: Path, file: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    message = rf"index.json: 'w' lies in {re.escape(repr(file))}, which must be the name of a file"
    with pytest.raises(ValueError, match=message):
        Files(tmp_path)


def test_a_space_of_absurd_size(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    ranges = "\n".join(
        f"{name} = [{', '.join(map(str, range(1, 60)))}]"
        for name in ("stages", "rows_in_flight", "prefetch", "num_sms")
    )
    path.write_text(f"[product]\n{ranges}\n")
    message = rf"{59**4} points for 32 local experts: at most {MAX_POINTS} are enumerated\. Take"
    with pytest.raises(ValueError, match=message):
        enumerate_candidates(VIEW, 16, load_space(str(path)))
    for name in ("screen", "full", "walk"):
        for preset in PRESETS.values():
            assert 0 < num_points(load_space(name), preset) < MAX_POINTS / 4


def test_a_member_of_absurd_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_MEMBER_BYTES", 1 << 20)
    path = tmp_path / "k.tar.xz"
    with tarfile.open(path, "w:xz", preset=0) as tar:
        member = tarfile.TarInfo(bundle.MANIFEST)
        member.size = bundle.MAX_MEMBER_BYTES + 512
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(ValueError, match=rf"has {member.size} bytes, and none has more than"):
        bundle.unpack(path, tmp_path / "cache")


# ---- a search that was killed


def test_a_torn_line_of_the_journal_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("optuna")
    journal = tmp_path / "s.optuna.log"

    def strategy() -> OptunaSearch:
        return OptunaSearch(
            [],
            lambda choice: BASE,
            {"a": 3},
            lambda schedule: None,
            trials=2,
            storage=journal,
            study="s",
            seed=0,
        )

    strategy().ask()
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"worker')
    strategy().ask()
    assert "its last line was cut short and is removed" in caplog.text
    assert journal.read_bytes().startswith(whole)
    strategy().ask()  # reads every line
    assert all(json.loads(line) for line in journal.read_text().splitlines())


# ---- one line, and the exit code


@pytest.mark.parametrize("command", ["freeze", "search", "build", "merge"])
def test_a_place_where_nothing_can_be_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a file no folder can be made, by root neither."""
    frozen_in(tmp_path)
    table = str(table_path(tmp_path / "results", DEVICE, VIEW.name))
    (tmp_path / "file").write_text("")
    bad = str(tmp_path / "file" / "x")
    problem = ["--problem", VIEW.name]
    on_device = [*problem, "--device", DEVICE]
    argv = {
        "freeze": [*on_device, "--out", str(tmp_path / "results"), "--schedules", bad],
        "search": [*problem, "--tokens", "16", "--out", bad],
        "build": [*problem, "--tokens", "16", "--out", f"{bad}/k.tar.xz"],
        "merge": [table, table, "--out", f"{bad}.csv"],
    }[command]
    before = sorted(p for p in tmp_path.rglob("*"))
    assert cli.main([command, *argv]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("tl-megamoe")
    assert len(said) == 1
    assert sorted(p for p in tmp_path.rglob("*")) == before
