"""Exported kernels: what is written, what is refused, and that a launch finds what it needs."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import DEVICE, change, quantize_spec, spec
from export_cases import compiler as compiler
from export_cases import module as module
from fake_modules import FakeCompiler
from gpu_cases import SMALL, fit, variants

import tl_megamoe
from tl_megamoe import exported, manifest
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.explorer.farm import KERNEL_SOURCES, describe_spec
from tl_megamoe.exported import ExportedKernels, export_kernels
from tl_megamoe.kernel import CompiledKernel, KernelSpec
from tl_megamoe.manifest import CODE, MANIFEST, SCHEMA, spec_values
from tl_megamoe.recipe import Recipe
from tl_megamoe.weights import MoEWeights

# ---- write and load


def test_a_folder_holds_each_kernel_once(compiler: FakeCompiler, tmp_path: Path) -> None:
    base, pingpong = spec(), spec(schedule=variants(SMALL)["pingpong"])
    other = spec(schedule=replace(fit(SMALL), order="lag", lag=3, prefetch=0))  # the same kernel
    said: list[tuple[int, int, str]] = []
    made = export_kernels(
        tmp_path / "deep" / "kernels",
        [base, pingpong, other],
        [quantize_spec()],
        {"device": DEVICE},
        on_kernel=lambda *words: said.append(words),
    )
    folder = tmp_path / "deep" / "kernels"
    assert compiler.made == [base, pingpong, quantize_spec()]
    names = [kernel.file for kernel in made.kernels]
    assert [name.rpartition("-")[0] for name in names] == ["fused", "fused", "quantize"]
    helper = made.native.file
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, helper, MANIFEST])
    assert said == [(n + 1, 3, name) for n, name in enumerate(names)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["kernels"]
    found = json.loads((folder / MANIFEST).read_text())
    assert found["format"] == "tl_megamoe kernels"
    assert (found["schema"], found["package"]) == (SCHEMA, tl_megamoe.__version__)
    assert found["notes"] == {"device": DEVICE}
    first = found["kernels"][0]
    assert first["size"] == (folder / names[0]).stat().st_size
    assert first["spec"] == spec_values(base)
    assert made.num_bytes == sum(path.stat().st_size for path in folder.glob("*.so"))

    kernels = ExportedKernels.open(folder)
    assert kernels.manifest == made
    for wanted in (base, other, pingpong):
        kernel = kernels.fused(wanted)
        assert isinstance(kernel, CompiledKernel)
        assert kernel.spec == wanted
        assert kernel.kernel(1, 2, 3) == 3000
    assert kernels.fused(base).kernel is kernels.fused(other).kernel
    assert kernels.fused(base).kernel is not kernels.fused(pingpong).kernel
    quantizer = kernels.quantize(quantize_spec())
    assert quantizer.spec == quantize_spec()
    assert quantizer.function(*range(5)) == 5000


def test_a_damaged_helper_is_refused(compiler: FakeCompiler, tmp_path: Path) -> None:
    made = export_kernels(tmp_path / "k", [spec()])
    kernels = ExportedKernels.open(tmp_path / "k")
    (tmp_path / "k" / made.native.file).write_bytes(b"cut")
    with pytest.raises(ValueError, match=f"{made.native.file}: the kernel is damaged: its sha"):
        kernels.fused(spec())


def test_a_loaded_kernel_launches_like_a_compiled_one(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    export_kernels(tmp_path / "k", [spec()])
    kernel = ExportedKernels.open(tmp_path / "k").fused(spec())
    buffer = SymmBuffer(SMALL, 64, "cpu")
    pair = (torch.zeros(8), torch.zeros(8))
    y = torch.empty(7, SMALL.hidden, dtype=torch.bfloat16)
    kernel.launch(buffer, MoEWeights(l1=pair, l2=pair), y, 7, spec().schedule)
    import tvm_ffi

    path = tmp_path / "k" / kernel_name(kernel.spec)
    assert tvm_ffi.load_module(str(path)).get_function("seen")() == 24007


def kernel_name(wanted: KernelSpec) -> str:
    return manifest.file_name(manifest.kind_of(wanted), spec_values(wanted))


def test_an_exported_kernel_has_no_text(compiler: FakeCompiler, tmp_path: Path) -> None:
    export_kernels(tmp_path / "k", [spec()])
    kernel = ExportedKernels.open(tmp_path / "k").fused(spec())
    with pytest.raises(RuntimeError, match="was loaded from an export, which holds no CUDA text"):
        kernel.source()


def test_specs_are_told_apart_as_in_the_reports() -> None:
    base = spec()
    changed = [
        spec(capacity=128),
        spec(clamp=True),
        spec(fast_math=False),
        spec(phase="linear1"),
        spec(phase="linear1", debug=True),
        spec(profile=True),
        spec(recipe=Recipe(scale="pow2")),
        spec(schedule=fit(SMALL, num_sms=100)),
        spec(problem=replace(SMALL, num_topk=2)),
    ]
    assert len({kernel_name(s) for s in [base, *changed]}) == 1 + len(changed)
    for s in [base, *changed]:
        assert {"phase": s.phase, **spec_values(s)} == describe_spec(s)
    assert kernel_name(spec(problem=replace(SMALL, name="other"))) == kernel_name(base)


def test_the_digest_covers_all_kernel_code() -> None:
    root = Path(str(tl_megamoe.__file__)).parent
    covered = {path for pattern in CODE for path in root.glob(pattern)}
    assert {path for pattern in KERNEL_SOURCES for path in root.glob(pattern)} <= covered
    assert {root / "quantize.py", root / "swizzle.py", root / "weights.py"} <= covered
    assert all(any(root.glob(pattern)) for pattern in CODE)


# ---- what is in the way


def test_an_export_takes_the_place_of_another(compiler: FakeCompiler, tmp_path: Path) -> None:
    out = tmp_path / "k"
    out.mkdir()
    export_kernels(out, [spec()])
    old = ExportedKernels.open(out)
    loaded = old.fused(spec()).kernel
    change(out, schema=SCHEMA + 1)  # of another version: it may be replaced too
    export_kernels(out, [spec(capacity=128)])
    assert loaded(1) == 1000
    new = ExportedKernels.open(out)
    assert new.fused(spec(capacity=128)).kernel(1, 2) == 2000
    with pytest.raises(ValueError, match="the nearest that it has differs in capacity=128"):
        new.fused(spec())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k"]


def test_a_failure_leaves_what_was_there(
    module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeCompiler(module).use(monkeypatch)
    before = export_kernels(tmp_path / "k", [spec()])
    for out in ("k", "new"):
        FakeCompiler(module, fail_at=2).use(monkeypatch)
        with pytest.raises(RuntimeError, match="nvcc failed"):
            export_kernels(tmp_path / out, [spec(capacity=128), spec(capacity=256)])
    assert ExportedKernels.open(tmp_path / "k").manifest == before
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_other_things_are_not_replaced(compiler: FakeCompiler, tmp_path: Path) -> None:
    folder, file = tmp_path / "mine", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    file.write_text("")
    with pytest.raises(ValueError, match=r"mine holds thesis.txt and is not a folder of exported"):
        export_kernels(folder, [spec()])
    with pytest.raises(ValueError, match="file is a file: kernels are exported to a folder"):
        export_kernels(file, [spec()])
    out = tmp_path / "k"
    export_kernels(out, [spec()])
    (out / "libmine.so").write_text("")
    with pytest.raises(ValueError, match=r"k holds libmine.so and is not"):
        export_kernels(out, [spec()])
    (out / "libmine.so").unlink()
    (out / MANIFEST).write_text("{}")
    with pytest.raises(
        ValueError, match=r"k holds fused-\w+.so, manifest.json, native-\w+.so and is not"
    ):
        export_kernels(out, [spec()])
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert len(compiler.made) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 99}, "schema=99, this tl_megamoe reads 1"),
        ({"package": "0.0.1"}, "made with package='0.0.1', here it is"),
        ({"tilelang": "0.1.14"}, "made with tilelang='0.1.14', here it is"),
        ({"tvm_ffi": "0.1.1"}, "made with tvm_ffi='0.1.1', here it is"),
        ({"platform": "linux-aarch64"}, "made with platform='linux-aarch64', here it is"),
        ({"code": "0123456789ab"}, "made with code='0123456789ab', here it is"),
        ({"kernels": [{"kind": "fused"}]}, "not a manifest of schema 1"),
        ({"kernels": 3}, "not a manifest of schema 1"),
        ({"notes": 3}, "not a manifest of schema 1"),
        ({"surplus": 3}, "not a manifest of schema 1"),
    ],
)
def test_foreign_exports_are_refused(
    compiler: FakeCompiler, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    export_kernels(tmp_path / "k", [spec()], (), {"command": "tl-megamoe export --problem mine"})
    change(tmp_path / "k", **values)
    with pytest.raises(ValueError, match=message) as caught:
        ExportedKernels.open(tmp_path / "k")
    known = isinstance(values.get("notes", {}), dict)
    assert str(caught.value).endswith(
        "tl-megamoe export --problem mine" if known else f"tl-megamoe export --out {tmp_path / 'k'}"
    )


def test_names_outside_the_folder_are_refused(compiler: FakeCompiler, tmp_path: Path) -> None:
    export_kernels(tmp_path / "k", [spec()])
    kernel = json.loads((tmp_path / "k" / MANIFEST).read_text())["kernels"][0]
    change(tmp_path / "k", kernels=[{**kernel, "file": "../fused-0123456789ab.so"}])
    with pytest.raises(ValueError, match=r"'\.\./fused-0123456789ab\.so' is not the name of a mod"):
        ExportedKernels.open(tmp_path / "k")


def test_folders_that_are_no_exports(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kernels='.*' is not a folder of exported kernels: mani"):
        ExportedKernels.open(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match="manifest.json is not that of exported kernels"):
        ExportedKernels.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(
        ValueError, match=r"manifest.json cannot be read: Expecting.*tl-megamoe exp"
    ):
        ExportedKernels.open(tmp_path)


def test_damaged_modules_are_refused(compiler: FakeCompiler, tmp_path: Path) -> None:
    out = tmp_path / "k"
    specs = [spec(), spec(capacity=128), spec(capacity=256)]
    made = export_kernels(out, specs)
    kernels = ExportedKernels.open(out)
    for kernel, data in zip(made.kernels, (b"cut", None, b"no module"), strict=True):
        path = out / kernel.file
        path.unlink()  # a file that is loaded must not be written over
        if data is not None:
            path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged: its sha256 is \w{12}\.\.\., the manifest says"):
        kernels.fused(specs[0])
    with pytest.raises(ValueError, match="the kernel cannot be read: .* Export again: tl-megamoe"):
        kernels.fused(specs[1])
    listed = json.loads((out / MANIFEST).read_text())["kernels"]
    listed[2]["sha256"] = exported.hashlib.sha256(b"no module").hexdigest()
    change(out, kernels=listed)
    with pytest.raises(RuntimeError, match="the kernel cannot be loaded: "):
        ExportedKernels.open(out).fused(specs[2])


def test_a_missing_kernel_is_named(compiler: FakeCompiler, tmp_path: Path) -> None:
    out = tmp_path / "k"
    export_kernels(out, [spec(), spec(fast_math=False)], [quantize_spec()], {"device": DEVICE})
    kernels = ExportedKernels.open(out)
    with pytest.raises(ValueError, match="fused kernel") as caught:
        kernels.fused(spec(capacity=128, fast_math=False))
    assert str(caught.value) == (
        f"{out} has no fused kernel {fit(SMALL).name} for small, capacity 128: the nearest that it "
        "has differs in capacity=64 (asked for 128). Write a folder that has it with: tl-megamoe "
        "export --hidden 512 --intermediate 256 --num-experts 8 --num-topk 3 --num-ranks 1 "
        f"--capacity 128 --recipe exact-128 --device nvidia-h200 --precise --out {out}"
    )
    with pytest.raises(ValueError, match=r"schedule.num_sms=132 \(asked for 66\).* --num-sms 66 "):
        kernels.fused(spec(schedule=fit(SMALL, num_sms=66)))
    with pytest.raises(ValueError, match="it has no linear1 kernel at all"):
        kernels.fused(spec(phase="linear1"))
    with pytest.raises(ValueError, match=r"num_shared=0 \(asked for 1\).* --num-shared 1$"):
        kernels.quantize(quantize_spec(1))
