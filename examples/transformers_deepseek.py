"""A Hugging Face model whose experts run in MegaMoE, beside the same model in transformers alone.

A small DeepSeek-V3 or Qwen3-MoE with random weights is written as an FP8 checkpoint, in the names
and formats of the published ones (e4m3 codes, a float32 scale per 128 x 128, shards and an index).
It is loaded twice. By transformers, with the weights made wide again; and as a model of real size
is loaded: without memory at first (`empty_model`), then the experts of every layer replaced by
`MegaMoE`, which reads the FP8 files itself (`use_mega_moe`), then all the rest (`load_rest`). Both
see the same tokens; the table shows how far their logits are apart, `expected_error` why that far.

    python examples/transformers_deepseek.py --family deepseek --shared inside
    python examples/transformers_deepseek.py --family qwen3 --backend reference

Needs transformers 5, whose MoE blocks call `self.experts(hidden_states, indices, weights)`;
transformers 4 runs its experts in a loop of modules, which has no such place.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tl_megamoe import MegaMoE
from tl_megamoe.scaling import dequantize_blocks, quantize_blocks

CAPACITY = 512
"""Tokens of the largest forward: MegaMoE's buffer holds so many."""
SEED = 1
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    # 1/sqrt(hidden): a layer adds as much as it gets, so that an error of the experts shows.
    "initializer_range": 1 / 16,
}
FAMILIES = ("deepseek", "qwen3")

# ---- the swap


def use_mega_moe(model: nn.Module, checkpoint: Path | str, **options: Any) -> None:
    """Replace every stacked experts module by MegaMoE, with its weights from a checkpoint."""
    modules = model.named_modules()
    found = [n for n, m in modules if isinstance(getattr(m, "gate_up_proj", None), Tensor)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no stacked experts: nothing was replaced")
    options |= {"top_k": model.config.get_text_config().num_experts_per_tok}
    for name in found:
        experts = model.get_submodule(name)
        layer = MegaMoE.from_experts(experts, checkpoint=checkpoint, prefix=name, **options)
        model.set_submodule(name, layer)


class FusedBlock(nn.Module):
    """A MoE block with its shared experts inside MegaMoE: router, then one launch."""

    def __init__(self, gate: nn.Module, experts: MegaMoE):
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, weights, indices = self.gate(hidden_states)
        out: Tensor = self.experts(hidden_states, indices, weights)
        return out


def use_mega_moe_with_shared(model: nn.Module, checkpoint: Path | str, **options: Any) -> None:
    """The same for DeepSeek, and its shared experts run in the same launch."""
    found = [name for name, m in model.named_modules() if hasattr(m, "shared_experts")]
    if not found:
        raise ValueError(f"{type(model).__name__} has no shared experts: nothing was replaced")
    options |= {"top_k": model.config.num_experts_per_tok, "checkpoint": checkpoint}
    for name in found:
        gate, experts = (model.get_submodule(f"{name}.{word}") for word in ("gate", "experts"))
        options |= {"prefix": f"{name}.experts", "shared_prefix": f"{name}.shared_experts"}
        shared = model.get_submodule(f"{name}.shared_experts")
        layer = MegaMoE.from_experts(experts, shared_experts=shared, **options)
        model.set_submodule(name, FusedBlock(gate, layer))


# ---- a checkpoint


def make_config(family: str, num_shared: int = 1) -> Any:
    """A small model of a family: one dense layer, then two with 16 experts, of which 4 run."""
    if family == "qwen3":
        return transformers.Qwen3MoeConfig(
            **SIZES,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=16,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        )
    return transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        n_shared_experts=num_shared,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        q_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
        num_nextn_predict_layers=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_checkpoint(config: Any, folder: Path, seed: int = SEED, num_shards: int = 2) -> None:
    """Write a model with random weights as an FP8 checkpoint.

    transformers names the tensors (it saves stacked experts one by one, as the published
    checkpoints have them). The linear layers of every MLP become e4m3 with a float32 scale per
    128 x 128; routers, attention, embeddings and norms stay BF16, and DeepSeek's correction of
    router scores is float32.

    Args:
        config: of the model.
        folder: made here, or empty; gets config.json, the shards and their index.
        seed: of the weights.
        num_shards: files that the tensors are spread over.

    Raises:
        ValueError: there is something at that path.
    """
    check_new(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.randn(bias.shape) * 0.02)
    tensors: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as temporary:
        wide = Path(temporary)
        model.save_pretrained(wide)
        settings = json.loads((wide / "config.json").read_text())
        for name, tensor in read_tensors(wide):
            if ".mlp." in name and tensor.dim() == 2 and not name.endswith(".gate.weight"):
                tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensor)
            elif name.endswith("e_score_correction_bias"):
                tensors[name] = tensor.float()
            else:
                tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(tensors), {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["self_attn", "gate", "lm_head", "embed_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint's files."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def load_wide(folder: Path, device: torch.device) -> Any:
    """transformers' model from an FP8 checkpoint, in BF16."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config  # transformers' own FP8 kernels would run
    model = getattr(transformers, config.architectures[0]).from_pretrained(
        None,
        config=config,
        state_dict=made_wide(dict(read_tensors(folder))),
        dtype=torch.bfloat16,
    )
    return model.eval().to(device)


def made_wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """FP8 weights made BF16 with the scales beside them, which go; others as they are."""
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        sf, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        tensors[weight] = dequantize_blocks(tensors[weight], sf).bfloat16()
    return tensors


# ---- a model without its experts


def empty_model(folder: Path | str) -> Any:
    """The model of a checkpoint without memory for it: all tensors are on the meta device."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def load_rest(model: nn.Module, folder: Path | str, device: torch.device | str) -> None:
    """Load what is not a routed expert into a model that is on the meta device."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            names = [name for name in opened.keys() if ".experts." not in name]
            tensors |= {name: opened.get_tensor(name) for name in names}
    model.load_state_dict(made_wide(tensors), strict=False, assign=True)
    model.tie_weights()
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):  # computed, not saved
            model.set_submodule(name, type(module)(module.config).to(device))
    held = [*model.named_parameters(), *model.named_buffers()]
    if missing := [name for name, tensor in held if tensor.is_meta]:
        raise ValueError(f"{folder} has no {missing[0]}, one of {len(missing)} that are missing")


# ---- the comparison


def expected_error(num_moe_layers: int) -> float:
    """Bound of the logits' relative error, of tokens that both models route alike.

    Rounding to e4m3 moves a value by 2.7 % of it (root mean square over a binade). An inner
    product of many such values is off by the same 2.7 % of its size, whatever its length. Gate and
    up each are, independently: their product is off by 2.7 % * sqrt(2), and the intermediate is
    rounded to e4m3 once more: sqrt(3) * 2.7 % = 4.7 % of what the experts add to the residual
    stream. The weights are the same numbers in both models, because the checkpoint has them in
    FP8; where one has BF16 weights they are rounded too, and the bound does not hold
    (docs/numerics.md). Layers add their errors in squares, and the stream that passes by them is
    the same in both, so that the logits show less than 4.7 % * sqrt(layers): the less, the smaller
    the experts' part of the stream. BF16, in which both models do the rest, has these two off by
    1.2 % of float32, which adds in squares.
    """
    return float((3 * num_moe_layers * 0.027**2 + 0.012**2) ** 0.5)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison of logits.

    Attributes:
        name: what ran.
        num_tokens: tokens whose logits are compared.
        rel_error: norm of the difference over the norm of transformers' logits, of `same_routes`.
        worst_error: the largest such ratio of one of these tokens.
        same_routes: fraction of the tokens that took the same experts in all layers. An error of
            the first layer can tip the choice of the second, where two experts score alike; the
            logits of such a token differ by what the two experts differ.
        top1: fraction of all tokens with the same most likely next token.
    """

    name: str
    num_tokens: int
    rel_error: float
    worst_error: float
    same_routes: float
    top1: float

    @classmethod
    def of(cls, name: str, ours: Run, theirs: Run) -> Row:
        """Compare two runs of the same tokens."""
        same = (ours.routes == theirs.routes).all(1)
        a, b = ours.logits[same].double(), theirs.logits[same].double()
        worst = ((a - b).norm(dim=1) / b.norm(dim=1)).amax() if same.any() else torch.zeros(())
        return cls(
            name=name,
            num_tokens=len(same),
            rel_error=float((a - b).norm() / b.norm()) if same.any() else 0.0,
            worst_error=float(worst),
            same_routes=float(same.double().mean()),
            top1=float((ours.logits.argmax(1) == theirs.logits.argmax(1)).double().mean()),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Logits (tokens, vocabulary) and sorted experts (tokens, layers * top-k) of some tokens."""

    logits: Tensor
    routes: Tensor


@contextmanager
def recorded_routes(model: nn.Module) -> Iterator[list[Tensor]]:
    """The experts that every router chose inside, a (tokens, top-k) tensor a layer, sorted."""
    routes: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        routes.append(out[2].sort(1).values)

    gates = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run_prefill(model: nn.Module, tokens: Tensor) -> Run:
    """All positions of (batch, length) prompts at once."""
    with recorded_routes(model) as routes:
        logits = model(tokens, use_cache=False).logits
    return Run(logits.flatten(0, 1).float(), torch.cat(routes, 1))


@torch.no_grad()
def run_steps(model: nn.Module, tokens: Tensor, num_steps: int) -> Run:
    """The last `num_steps` positions of (batch, length), one a forward, over a cache of the rest.

    The tokens are given, so that two models see the same ones whatever they would say themselves.
    """
    start = tokens.shape[1] - num_steps
    cache = model(tokens[:, :start], use_cache=True).past_key_values
    logits, routes = [], []
    for position in range(start, tokens.shape[1]):
        with recorded_routes(model) as chosen:
            step = tokens[:, position : position + 1]
            out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
        routes.append(torch.cat(chosen, 1))
    return Run(torch.cat(logits), torch.cat(routes))


def compare(ours: nn.Module, theirs: nn.Module, device: torch.device, seed: int) -> list[Row]:
    """Prefill of 320 tokens, and steps of 1, 3 and 16 sequences."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = theirs.config.vocab_size

    def draw(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator).to(device)

    tokens = draw(2, 160)
    rows = [Row.of("prefill 2 x 160", run_prefill(ours, tokens), run_prefill(theirs, tokens))]
    for batch, num_steps in ((1, 8), (3, 4), (16, 2)):
        tokens = draw(batch, 12 + num_steps)
        runs = [run_steps(model, tokens, num_steps) for model in (ours, theirs)]
        rows.append(Row.of(f"{num_steps} steps of {batch}", *runs))
    return rows


@torch.no_grad()
def generate(model: Any, device: torch.device, num_new: int = 8) -> Tensor:
    """What `generate` says greedily after two prompts of 8 tokens: (2, num_new)."""
    prompt = torch.arange(16, device=device).view(2, 8)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    new: Tensor = out[:, prompt.shape[1] :]
    return new


def load_both(
    folder: Path, device: torch.device, shared: str = "outside", **options: Any
) -> tuple[Any, Any]:
    """The model with MegaMoE, and transformers' own.

    Args:
        folder: of the checkpoint.
        device: of both models.
        shared: `inside` runs DeepSeek's shared experts in MegaMoE's launch.
        **options: of `MegaMoE`.
    """
    ours = empty_model(folder)
    swap = use_mega_moe_with_shared if shared == "inside" else use_mega_moe
    swap(ours, folder, capacity=CAPACITY, device=device, **options)
    load_rest(ours, folder, device)
    return ours, load_wide(folder, device)


def check_new(folder: Path) -> None:
    """Raise ValueError unless a folder can be filled without a file of others in it."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"{str(folder)!r} exists: a checkpoint is written into a new or an empty folder"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="deepseek")
    parser.add_argument("--shared", choices=("outside", "inside"), default="outside")
    parser.add_argument("--num-shared", type=int, default=1, help="shared experts of DeepSeek")
    parser.add_argument("--backend", choices=("reference", "kernel", "auto"), default="auto")
    parser.add_argument("--out", type=Path, help="keep the checkpoint in this folder, new or empty")
    args = parser.parse_args()
    if args.family == "qwen3" and (args.shared == "inside" or args.num_shared != 1):
        parser.error("--shared and --num-shared are DeepSeek's: Qwen3-MoE has no shared experts")
    if args.num_shared < 1:
        parser.error(f"--num-shared {args.num_shared} must be at least 1, as DeepSeek-V3 has")
    if args.out is not None:
        try:
            check_new(args.out)
        except ValueError as error:
            parser.error(f"--out: {error}")
    on_gpu = args.backend != "reference" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    transformers.logging.set_verbosity_error()  # "experts newly initialised": they are replaced
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary) / "checkpoint"
        config = make_config(args.family, args.num_shared)
        write_checkpoint(config, folder)
        ours, theirs = load_both(folder, device, args.shared, backend=args.backend)
    moe = next(module for module in ours.modules() if isinstance(module, MegaMoE))
    print(f"{args.family}, {device}, every MoE layer: {moe}")
    print(f"{'logits of':18} {'tokens':>6} {'error':>8} {'worst':>8} {'routes':>8} {'top-1':>8}")
    for row in compare(ours, theirs, device, SEED):
        print(
            f"{row.name:18} {row.num_tokens:6} {row.rel_error:8.2%} {row.worst_error:8.2%} "
            f"{row.same_routes:8.1%} {row.top1:8.1%}"
        )
    print(f"bound of the error: {expected_error(2):.2%} (of tokens with the same routes)")
    same = (generate(ours, device) == generate(theirs, device)).cumprod(1).sum(1).tolist()
    print(f"generate, greedily: the same for {same[0]} and {same[1]} of 8 tokens")


if __name__ == "__main__":
    main()
