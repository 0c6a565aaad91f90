"""The examples on a CPU: the swap into transformers' models."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from example_modules import CPU, run_main, serving, swap
from example_modules import one_thread as one_thread
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tl_megamoe import MegaMoE
from tl_megamoe.scaling import dequantize_blocks

MOE_LAYERS = 2


CASES = {
    "deepseek": ("deepseek", 1, "outside"),
    "deepseek-shared-inside": ("deepseek", 1, "inside"),
    "deepseek-two-shared-inside": ("deepseek", 2, "inside"),
    "qwen3": ("qwen3", 1, "outside"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of the checkpoint of a family with so many shared experts; each written once."""
    made: dict[tuple[str, int], Path] = {}

    def get(family: str, num_shared: int = 1) -> Path:
        key = (family, num_shared)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint") / family
            swap.write_checkpoint(swap.make_config(*key), made[key])
        return made[key]

    return get


@pytest.fixture(scope="module")
def both(checkpoint: Any) -> Any:
    """The two models of a case, each loaded once."""
    made: dict[str, tuple[Any, Any]] = {}

    def get(case: str) -> tuple[Any, Any]:
        if case not in made:
            family, num_shared, shared = CASES[case]
            folder = checkpoint(family, num_shared)
            made[case] = swap.load_both(folder, CPU, shared, backend="reference")
        return made[case]

    return get


def test_checkpoint_is_in_the_published_form(checkpoint: Any) -> None:
    folder = checkpoint("deepseek")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    held = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            held |= {name: (file, opened.get_tensor(name)) for name in opened.keys()}
    assert {name: file for name, (file, _) in held.items()} == index
    for word, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
        weight = held[f"model.layers.2.mlp.experts.15.{word}_proj.weight"][1]
        sf = held[f"model.layers.2.mlp.experts.15.{word}_proj.weight_scale_inv"][1]
        assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, shape)
        assert (sf.dtype, tuple(sf.shape)) == (torch.float32, (shape[0] // 128, shape[1] // 128))
        spread = dequantize_blocks(weight, sf).std()  # as the model was initialised
        assert abs(spread - 1 / 16) < 0.002
    assert held["model.layers.2.mlp.shared_experts.up_proj.weight"][1].dtype == torch.float8_e4m3fn
    # transformers has kept the router in float32 since some version of 5
    assert held["model.layers.2.mlp.gate.weight"][1].dtype in (torch.bfloat16, torch.float32)
    bias = held["model.layers.2.mlp.gate.e_score_correction_bias"][1]
    assert bias.dtype == torch.float32
    assert bias.std() > 0.01
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["weight_block_size"]) == ("fp8", [128, 128])


@pytest.mark.parametrize("family", ["deepseek", "qwen3"])
def test_transformers_own_fp8_loader_reads_the_same(checkpoint: Any, family: str) -> None:
    pytest.importorskip("accelerate", reason="transformers' FP8 loader needs accelerate")
    import transformers

    folder = checkpoint(family)
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
    ours = swap.load_wide(folder, CPU).state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    assert own.state_dict().keys() == ours.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_within_the_stated_bound(both: Any, case: str, seed: int) -> None:
    ours, theirs = both(case)
    assert sum(isinstance(m, MegaMoE) for m in ours.modules()) == MOE_LAYERS
    bound = swap.expected_error(MOE_LAYERS)
    rows = swap.compare(ours, theirs, CPU, seed)
    assert [row.num_tokens for row in rows] == [320, 8, 12, 32]
    for row in rows:
        assert 0 < row.rel_error < bound, row
        assert row.worst_error < 2 * bound, row
        assert row.same_routes >= 0.6, row
    # A logit is off by `bound` of their spread at most, the first two of 512 normals are 0.28 of
    # it apart: of two such errors 2 * bound tip the order, and those routed otherwise may.
    assert rows[0].top1 >= rows[0].same_routes - 2 * bound


def test_the_comparison_sees_a_wrong_weight(both: Any, seed: int) -> None:
    ours, theirs = both("deepseek")
    tokens = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(seed))
    scales = ours.get_submodule("model.layers.2.mlp.experts").l2_sf
    right = scales.clone()
    scales.mul_(1.25)
    row = swap.Row.of("wrong", *(swap.run_prefill(model, tokens) for model in (ours, theirs)))
    scales.copy_(right)
    assert row.rel_error > 1.2 * swap.expected_error(MOE_LAYERS)


@pytest.mark.parametrize("case", ["deepseek-shared-inside", "qwen3"])
def test_generate_takes_the_most_likely_token_of_the_whole_text(both: Any, case: str) -> None:
    ours, _ = both(case)
    new = swap.generate(ours, CPU, num_new=6)
    assert tuple(new.shape) == (2, 6)
    whole = torch.cat([torch.arange(16).view(2, 8), new], 1)
    logits = swap.run_prefill(ours, whole).logits.view(2, 14, -1)[:, 7:13]
    chosen = logits.gather(2, new.unsqueeze(2)).squeeze(2)
    # With a cache and without, BF16 rounds otherwise; logits have a spread of 1.
    assert (logits.amax(2) - chosen).max() < 0.15


def test_the_experts_come_from_the_files(both: Any) -> None:
    ours, theirs = both("qwen3")
    wide = theirs.get_submodule("model.layers.1.mlp.experts")
    layer = MegaMoE.from_experts(wide, 4, capacity=8, backend="reference")
    for word in ("l1_sf", "l2_sf"):  # quantised again: the same, but for BF16's rounding
        held = getattr(ours.get_submodule("model.layers.1.mlp.experts"), word)
        torch.testing.assert_close(held, getattr(layer, word), rtol=2**-8, atol=0)
    first, second = (ours.get_submodule(f"model.layers.{i}.mlp.experts") for i in (1, 2))
    assert not torch.equal(first.l1.view(torch.uint8), second.l1.view(torch.uint8))
    assert first.buffer is second.buffer


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_what_transformers_loads(both: Any, case: str) -> None:
    """All that is no expert, also what is in no file; nothing stays on the meta device."""
    ours, theirs = both(case)
    for held, wanted in (
        (dict(ours.named_parameters()), dict(theirs.named_parameters())),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        own = {n for n in held if n.rpartition(".")[2] in ("l1", "l1_sf", "l2", "l2_sf")}
        gone = {n for n in wanted if ".experts." in n or (".shared_" in n and n not in held)}
        assert held.keys() - own == wanted.keys() - gone
        for name in held.keys() - own:
            assert held[name].dtype == wanted[name].dtype, name
            assert torch.equal(held[name], wanted[name]), name
    assert not ours.training


def test_a_tensor_that_no_file_has_is_named(checkpoint: Any, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    model = swap.empty_model(folder)
    swap.use_mega_moe(model, folder, capacity=8, backend="reference")
    held = dict(swap.read_tensors(folder))
    del held["model.norm.weight"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no model.norm.weight, one of 1 that are missing"):
        swap.load_rest(model, tmp_path, CPU)


def test_the_swap_is_as_short_as_it_looks() -> None:
    for function in (swap.use_mega_moe, swap.use_mega_moe_with_shared):
        assert len(inspect.getsource(function).splitlines()) < 15


class Block(nn.Module):
    """A MoE block that calls its experts what its model does."""

    def __init__(self, name: str, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(2, 2)  # a dense MLP's, not stacked
        self.add_module(name, experts)


class Experts(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(16, 256, 256))
        self.down_proj = nn.Parameter(torch.zeros(16, 256, 128))
        self.act_fn = act


class Model(nn.Module):
    def __init__(self, place: str, act: nn.Module) -> None:
        super().__init__()
        self.config = swap.make_config("qwen3")
        *parents, block, name = place.split(".")
        self.add_module("layer", nn.ModuleDict({block: Block(name, Experts(act))}))


PLACES = ("feed_forward.experts", "block_sparse_moe.experts", "mlp.experts", "0.experts")


@pytest.mark.parametrize("place", PLACES)
def test_the_swap_finds_experts_by_what_they_are(place: str) -> None:
    name = f"layer.{place}"
    state = {
        f"{name}.gate_up_proj": torch.ones(16, 256, 256),
        f"{name}.down_proj": torch.ones(16, 256, 128),
    }
    model = Model(place, nn.SiLU())
    swap.use_mega_moe(model, state, capacity=8, backend="reference")
    layer = model.get_submodule(name)
    assert isinstance(layer, MegaMoE)
    assert layer.routed.num_topk == 4
    assert layer.l2_sf.min() > 0
    with pytest.raises(ValueError, match="Experts does not compute silu"):
        swap.use_mega_moe(Model(place, nn.GELU()), state, capacity=8, backend="reference")


def test_a_swap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no stacked experts: nothing was replaced"):
        swap.use_mega_moe(nn.Linear(2, 2), {})
    with pytest.raises(ValueError, match="Model has no shared experts: nothing was replaced"):
        swap.use_mega_moe_with_shared(Model("mlp.experts", nn.SiLU()), {})


def test_example_prints_its_table(
    both: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What it compares is the business of other tests."""
    out = tmp_path / "new" / "checkpoint"
    loaded: list[tuple[Any, ...]] = []

    def load_both(folder: Path, *arguments: Any, **options: Any) -> Any:
        assert (folder / "model.safetensors.index.json").is_file()
        loaded.append((folder, *arguments, options))
        return both("qwen3")

    row = swap.Row("prefill", 320, 0.0371, 0.05, 0.9, 1.0)
    monkeypatch.setattr(swap, "load_both", load_both)
    monkeypatch.setattr(swap, "compare", lambda *_: [row])
    monkeypatch.setattr(swap, "generate", lambda *_: torch.arange(16).view(2, 8))
    arguments = ("--family", "qwen3", "--backend", "reference", "--out", str(out))
    run_main(swap, monkeypatch, *arguments)
    assert loaded == [(out, CPU, "outside", {"backend": "reference"})]
    printed = capsys.readouterr().out
    assert "every MoE layer: MegaMoE(256, 128, num_experts=16, top_k=4" in printed
    assert re.search(r"^prefill +320 +3.71% +5.00% +90.0% +100.0%$", printed, re.M)
    assert f"bound of the error: {swap.expected_error(2):.2%}" in printed
    assert "the same for 8 and 8 of 8 tokens" in printed


def test_a_folder_with_files_is_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "mine.safetensors"
    own.write_text("mine")
    for out in (tmp_path, own):
        with pytest.raises(SystemExit):
            run_main(swap, monkeypatch, "--out", str(out))
        assert "exists: a checkpoint is written into a new or an empty folder" in (
            capsys.readouterr().err
        )
        with pytest.raises(ValueError, match="exists: a checkpoint is written into a new or"):
            swap.write_checkpoint(swap.make_config("qwen3"), out)
    assert own.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("swap", "--family qwen3 --shared inside", "Qwen3-MoE has no shared experts"),
        ("swap", "--num-shared 0 --shared inside", "--num-shared 0 must be at least 1"),
        ("serving", "--layers 0", "--layers 0 must be at least 1"),
        ("serving", "--new 0", "--new 0 must be at least 1"),
        ("serving", "--longest -1", "--longest -1 must be at least 1"),
        ("serving", "--requests 0", "--requests 0 must be at least 1"),
        ("serving", "--capacity 0", "--capacity 0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(
    name: str,
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit):
        run_main({"swap": swap, "serving": serving}[name], monkeypatch, *arguments.split())
    assert message in capsys.readouterr().err
