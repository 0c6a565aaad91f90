"""Archives of kernels: what they hold, where they can be used, and what is refused."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cache import FAILS, SMALL, SPILLS, WORKS, build, spec, text_of, write_entry

from tl_megamoe.explorer import bundle, kernel_store
from tl_megamoe.explorer.bundle import add_kernels, pack_kernels, unpack, use_cache, write_bundle
from tl_megamoe.explorer.farm import NOT_BUILT, REPORTS, Farm, kernel_digest, package_version
from tl_megamoe.explorer.kernel_store import KernelStore, host_platform, namespace
from tl_megamoe.kernel import KernelSpec

GOOD = [spec(WORKS, stages=stages) for stages in (2, 3)]
EVERY = [*GOOD, spec(SPILLS)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The active cache, with the kernels of EVERY and one of no search."""
    root = tmp_path / "cache"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(root))
    reports = KernelStore().reports
    for wanted in EVERY:
        reports.put(wanted, build(wanted))
    write_entry(root, "// of another search")
    (root / "0.1.15" / "cuda-binaries" / "ab").mkdir(parents=True)
    (root / "0.1.15" / "cuda-binaries" / "ab" / "kernel.cubin").write_text("cubin")
    return root


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "kernels.tar.xz"
    write_bundle(path, EVERY, SMALL)
    return path


def files_under(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def rewrite(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """Write an archive again with other members."""
    entries = []
    for name, data in members(path).items():
        entries.append((tarfile.TarInfo(name), data))
    change(entries)
    with tarfile.open(path, "w:xz") as tar:
        for member, data in entries:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))


def change_manifest(**values: object) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        member, data = entries[0]
        entries[0] = member, json.dumps({**json.loads(data), **values}).encode()

    return change


# ---- what travels


def test_a_machine_with_the_archive_compiles_nothing(
    archive: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Farm(build, prebuilt=True).run(EVERY)
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(elsewhere))
    farm = Farm(build, prebuilt=True)
    assert {r.status for r in farm.run(EVERY).values()} == {NOT_BUILT}
    manifest = use_cache(archive)
    assert farm.run(EVERY) == before
    assert manifest.num_kernels == 3
    assert manifest.problem == {"name": "s", **SMALL.key()}
    for wanted in GOOD:
        (theirs,) = KernelStore(cache).entries_of(before[wanted.key()].report.source_hash)  # type: ignore[union-attr]
        ours = elsewhere / theirs.relative_to(cache)
        assert files_under(ours) == files_under(theirs)
        assert (ours / "executable.so").stat().st_mode & 0o111


def test_only_what_a_search_launches_is_packed(archive: Path, cache: Path) -> None:
    found = members(archive)
    assert next(iter(found)) == "manifest.json"
    texts = [data.decode() for name, data in found.items() if name.endswith("device_kernel.cu")]
    assert sorted(texts) == sorted(text_of(wanted) for wanted in GOOD)
    assert sum(name.startswith("reports/") for name in found) == 3  # a spill is known too
    assert not any("cubin" in name or "staging" in name for name in found)
    assert set(json.loads(found["manifest.json"])["files"]) == set(found) - {"manifest.json"}


def test_kernels_that_differ_on_the_host_alone_all_travel(cache: Path, tmp_path: Path) -> None:
    write_entry(cache, text_of(GOOD[0]), host="another grid")
    other = tmp_path / "other"
    add_kernels(pack_kernels(GOOD[:1]), other)
    assert len(list((other / namespace() / "kernels").iterdir())) == 2


def test_equal_caches_give_equal_bytes(archive: Path, cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)  # other times, other order on disk
    again = tmp_path / "again.tar.xz"
    write_bundle(again, list(reversed(EVERY)), SMALL, KernelStore(copy))
    assert again.read_bytes() == archive.read_bytes()
    with tarfile.open(archive) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname) for m in tar} == {(0, 0, 0, "")}


def test_packed_bytes_are_unpacked_on_another_machine(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    manifest = add_kernels(pack_kernels(GOOD[:1]), other)
    assert manifest.num_kernels == 1
    store = KernelStore(other)
    assert store.reports.get(GOOD[0]) == KernelStore(cache).reports.get(GOOD[0])
    assert store.reports.get(GOOD[1]) is None
    assert not list((other / namespace() / ".staging").iterdir())


def test_an_index_sees_kernels_that_come_later(cache: Path) -> None:
    store = KernelStore()
    late = spec(WORKS, stages=4)
    digest = hashlib.sha256(text_of(late).encode()).hexdigest()[:16]
    assert store.entries_of(digest) == []
    entry = write_entry(cache, text_of(late))
    assert store.entries_of(digest) == [entry]
    shutil.rmtree(entry)
    assert store.entries_of(digest) == []


# ---- merging


def test_what_is_there_and_whole_stays(archive: Path, cache: Path) -> None:
    before = files_under(cache)
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    unpack(archive, cache)
    assert files_under(cache) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_damaged_entry_is_replaced(
    archive: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files_under(cache)
    entry = next(p for p in (cache / namespace() / "kernels").iterdir() if _is_good(p))
    (entry / "executable.so").write_bytes(b"half")
    unpack(archive, cache)
    assert files_under(cache) == before
    assert "is damaged and is replaced" in caplog.text


def _is_good(entry: Path) -> bool:
    return (entry / "device_kernel.cu").read_text() in [text_of(wanted) for wanted in GOOD]


def test_a_report_without_its_kernel_is_replaced_with_it(archive: Path, cache: Path) -> None:
    store = KernelStore()
    good = store.reports.get(GOOD[0])
    assert good is not None
    shutil.rmtree(store.entries_of(good.source_hash)[0])
    store.reports.put(GOOD[0], replace(good, registers=1))
    unpack(archive, cache)
    assert store.reports.get(GOOD[0]) == good


# ---- refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tilelang": "0.1.14"}, r"holds kernels of tilelang 0.1.14.*tilelang==0.1.14.*build"),
        ({"platform": "linux-aarch64"}, f"linux-aarch64, this machine is {host_platform()}"),
        ({"kernel": "0123456789ab"}, f"code 0123456789ab, and {kernel_digest()} is installed"),
        ({"schema": 2}, "has schema 2, this tl_megamoe reads 1"),
        ({"other": 2}, "is not one of schema 1"),
        ({"files": {}}, "is not one that it may hold"),
    ],
)
def test_another_installation_is_refused(
    archive: Path, tmp_path: Path, values: dict[str, object], message: str
) -> None:
    rewrite(archive, change_manifest(**values))
    root = tmp_path / "other"
    with pytest.raises(ValueError, match=message) as error:
        unpack(archive, root)
    assert str(archive) in str(error.value)
    assert files_under(root) == {}


@pytest.mark.parametrize(
    "name",
    ["../../evil", "/tmp/evil", "kernels/../../evil", "reports/../evil.json", "kernels/ab/evil"],
)
def test_members_outside_are_refused(archive: Path, tmp_path: Path, name: str) -> None:
    digest = hashlib.sha256(b"evil").hexdigest()

    def change(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        files = json.loads(entries[0][1])["files"]
        change_manifest(files={**files, name: digest})(entries)
        entries.insert(1, (tarfile.TarInfo(name), b"evil"))

    rewrite(archive, change)
    root = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="is not one that it may hold"):
        unpack(archive, root)
    assert not list(tmp_path.rglob("evil*"))
    assert files_under(root) == {}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(archive: Path, tmp_path: Path, kind: bytes) -> None:
    def change(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        entries[1][0].type = kind
        entries[1][0].linkname = "/etc/passwd"

    rewrite(archive, change)
    with pytest.raises(ValueError, match="is not a plain file"):
        unpack(archive, tmp_path / "other")
    assert files_under(tmp_path / "other") == {}


def test_damage_is_found(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()

    def flip(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        entries[2] = entries[2][0], entries[2][1] + b" "

    rewrite(archive, flip)
    with pytest.raises(ValueError, match="is damaged"):
        unpack(archive, tmp_path / "other")
    archive.write_bytes(whole)
    rewrite(archive, lambda entries: entries.pop())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="1 files are missing"):
        unpack(archive, tmp_path / "other")
    for broken in (whole[: len(whole) // 2], b"", b"not an archive"):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match="is not a whole kernel archive|is not whole"):
            unpack(archive, tmp_path / "other")
    assert files_under(tmp_path / "other") == {}


def test_a_kernel_that_is_not_there_is_not_packed(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be compiled before"):
        pack_kernels([spec(WORKS, stages=4)])
    store = KernelStore()
    report = store.reports.get(GOOD[0])
    assert report is not None
    (entry,) = store.entries_of(report.source_hash)
    (entry / "params.json").write_text("[1]")
    with pytest.raises(ValueError, match="is damaged. Delete it and .*json"):
        pack_kernels(GOOD)
    shutil.rmtree(entry)
    out = tmp_path / "out" / "x.tar.xz"
    out.parent.mkdir()
    with pytest.raises(ValueError, match="has a report in .* and no entry in"):
        write_bundle(out, GOOD, SMALL)
    assert list(out.parent.iterdir()) == []


def test_a_cache_that_is_off_is_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    with pytest.raises(ValueError, match="TILELANG_DISABLE_CACHE=1: .* Unset it"):
        use_cache(archive)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nope.tar.xz"
    with pytest.raises(ValueError, match="--cache .*nope.tar.xz: there is no file .*nope.tar.xz$"):
        use_cache(missing)
    with pytest.raises(ValueError, match="--cache .*: it cannot be read: Is a directory$"):
        use_cache(tmp_path)


@pytest.mark.parametrize(
    ("version", "folder"),
    [("0.1.15", "0.1.15"), ("0.1.15+cu.d12", "0.1.15_cu_d12"), ("", "unknown")],
)
def test_the_folder_is_the_one_of_tilelang(
    version: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_store, "package_version", lambda name: version)
    assert namespace().as_posix() == f"{folder}/{host_platform()}"


def test_tilelang_looks_where_the_archive_puts_kernels() -> None:
    if package_version("tilelang"):
        tilelang = pytest.importorskip("tilelang.cache.kernel_cache")
        assert tilelang.KernelCache._get_cache_namespace() == str(namespace())
        files = tilelang.KernelCache  # not an instance, which makes its folders
        assert files.manifest_path == kernel_store.MANIFEST
        assert files.device_kernel_path == kernel_store.DEVICE_TEXT
        assert files.cache_root_dir == "kernels"


# ---- the command


def run_command(*flags: str) -> int:
    parser = argparse.ArgumentParser()

    def add(name: str, run: Callable[..., int], text: str) -> object:
        parser.set_defaults(command=run)
        return parser

    bundle.add_parser(add)
    args = parser.parse_args(flags)
    return int(args.command(args))


SIZES = "--hidden 512 --intermediate 512 --num-experts 4 --num-topk 2 --num-ranks 1".split()


def build_all_but_one(wanted: KernelSpec) -> object:
    return build(replace(wanted, schedule=replace(wanted.schedule, rows_in_flight=WORKS)))


def build_none(wanted: KernelSpec) -> object:
    return build(replace(wanted, schedule=replace(wanted.schedule, rows_in_flight=FAILS)))


def test_build_packs_what_a_search_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle, "build_kernel", build_all_but_one)
    out = tmp_path / "kernels.tar.xz"
    flags = [*SIZES, "--tokens", "8,64", "--space", "demo", "--limit", "2", "--jobs", "2"]
    assert run_command(*flags, "--out", str(out)) == 0
    said = capsys.readouterr().out
    reports = list((tmp_path / "cache" / REPORTS).iterdir())
    assert f"{out}: {len(reports)} kernels ({len(reports)} ok), 0.0 MiB" in said
    manifest = unpack(out, tmp_path / "other")
    assert manifest.num_kernels == len(reports)
    assert {s["capacity"] for s in manifest.specs} == {64}
    assert manifest.problem["hidden"] == 512


def test_build_says_why_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle, "build_kernel", build_none)
    out = tmp_path / "kernels.tar.xz"
    flags = [*SIZES, "--tokens", "8", "--space", "demo", "--limit", "1", "--out", str(out)]
    assert run_command(*flags) == 1
    assert "no kernel was built" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "kernels.zip"], r"--out kernels.zip must end in .tar.xz"),
        (["--out", "/nowhere/k.tar.xz"], r"its folder must be one that can be written"),
        (["--out", "k.tar.xz", "--capacity", "4"], "capacity=4 is below the 8 of --tokens"),
    ],
)
def test_build_refuses_before_it_compiles(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_command(*SIZES, "--tokens", "8", *flags)
