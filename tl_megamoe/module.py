"""The layer as a `torch.nn.Module` for model code: weights in the kernel's form, one op a forward.

Modules of one shape share one symmetric buffer, so a model of sixty such layers needs the memory of
one, and one of them runs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import calls
from . import library as library  # registers the op
from .arguments import check_clamp, weight_shapes
from .calls import Buffer
from .checkpoint import SHARED_WORDS, TiledTarget, place, plan_experts, plan_shared
from .problem import Problem
from .recipe import RecipeLike
from .scaling import E4M3
from .shared_experts import with_shared
from .sharing import (
    BufferOptions,
    backend_of,
    check_buffer,
    find_buffer,
    rank_in,
    rank_of,
    tell_ranks,
)
from .sources import Source, open_source
from .stacked import check_activation, module_tensors, num_shared, stacked_sizes
from .state import load_state
from .weights import MoEWeights

logger = logging.getLogger(__name__)

WEIGHT_NAMES = ("l1", "l1_sf", "l2", "l2_sf")


class MegaMoE(nn.Module):
    """A MoE layer's experts: routed tokens in, their weighted sum out.

    The router stays outside: `forward` takes what it chose. Inference only: the op has no backward,
    and refuses inputs that require a gradient. Weights are buffers in the form that the kernel
    reads (`transform_weights`), zero until they are loaded, of which the first forward warns, and
    loaded where they are: CUDA graphs and compiled code stay valid. They stay on the device and in
    the dtypes they were made with: `.to(dtype)` and `.half()` leave them alone, and a move to
    another device is refused.

    `load_state_dict` reads, under the module's prefix, its own four tensors (this rank's), or those
    of a model: `[experts.]<n>.gate_proj.weight` and the other names of `load_experts`, n counting
    the experts of all ranks, and `shared_experts.gate_proj.weight` and so on. BF16 weights are
    quantised. An FP8 weight and its scales must be in one state dict. `load_checkpoint` reads
    files.

    With several ranks every rank makes its modules in the same order, and calls them alike: to make
    the first of a shape is collective, and so is each launch.

    Attributes:
        l1: (local experts, 2*intermediate/128, hidden/128, 128, 128) e4m3.
        l1_sf: (local experts, 2*intermediate/128, hidden/128) float32.
        l2: (local experts, hidden/128, intermediate/128, 128, 128) e4m3.
        l2_sf: (local experts, hidden/128, intermediate/128) float32. Local experts are those of
            this rank, then its copies of the shared ones.
        problem: the layer that the kernel runs: a shared expert is one more expert of every rank
            and one more route of every token.
        routed: the layer without shared experts, as the router knows it.
        buffer: `SymmBuffer`, or `ReferenceBuffer` of the reference.
        backend: `kernel` or `reference`.
        rank: this rank, whose experts are `rank*L` to `rank*L + L - 1` of L = experts over ranks.

    Args:
        hidden: width of the model, a multiple of 128.
        intermediate: width of an expert after SwiGLU, a multiple of 128.
        num_experts: routed experts of all ranks together.
        top_k: routes of a token.
        group: process group of the expert-parallel ranks, a GPU each; None: one rank.
        capacity: the most tokens of a call on any rank; that of `buffer` if it is given, else 8192
            when None.
        num_shared_experts: experts that every token visits, each of the routed experts' size,
            added with weight 1.
        recipe: how activations are scaled to FP8; that of `buffer` if it is given, else `Recipe()`
            when None.
        activation_clamp: if given, gate is cut at +clamp and up at +-clamp before SwiGLU.
        fast_math: approximate exponential and reciprocal in SwiGLU (a last-bit matter).
        buffer: run on this buffer; None: shared with the other modules of this shape.
        backend: `kernel`, `reference` (float32 torch, slow, one rank), or `auto`: the kernel on an
            SM90 GPU, elsewhere the reference with a warning.
        device: of weights and buffer; None: that of `buffer`, else the current GPU if it is an SM90
            one, else the CPU.
        timeout_s: bound of every wait of a launch, in seconds; that of the buffer if there is one,
            else 60 when None.
        kernels: folder of exported kernels (`tl-megamoe export`) for a buffer that is made here;
            then nothing is compiled.
        name: of the layer in messages and logs; made of the sizes when None.

    Raises:
        ValueError: a size breaks a rule of `Problem`, a choice is none of those above, or `buffer`
            does not fit.
        RuntimeError: a process group is given and torch.distributed is not initialised.
    """

    # Layout of the weights in a state dict, beside which torch saves it: 2 since they are swizzled.
    _version = 2

    l1: Tensor
    l1_sf: Tensor
    l2: Tensor
    l2_sf: Tensor

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        group: Any = None,
        *,
        capacity: int | None = None,
        num_shared_experts: int = 0,
        recipe: RecipeLike = None,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        buffer: Buffer | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        kernels: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        asked = BufferOptions(
            group=group,
            capacity=capacity,
            recipe=recipe,
            backend=backend,
            device=device,
            timeout_s=timeout_s,
            kernels=kernels,
        )
        try:
            check_clamp(activation_clamp)
            num_ranks, self.rank = rank_in(group) if buffer is None else rank_of(buffer)
            self.routed = Problem(
                name=name or f"moe-{hidden}-{intermediate}-{num_experts}-{top_k}",
                hidden=hidden,
                intermediate=intermediate,
                num_experts=num_experts,
                num_topk=top_k,
                num_ranks=num_ranks,
            )
            self.problem = with_shared(self.routed, num_shared_experts)
            if buffer is not None:
                check_buffer(buffer, self.problem, asked)
        except Exception as error:
            tell_ranks(error, group, buffer)
            raise
        self.num_shared_experts = num_shared_experts
        self.activation_clamp = None if activation_clamp is None else float(activation_clamp)
        self.fast_math = bool(fast_math)
        if buffer is None:
            buffer = find_buffer(self.problem, asked)
        self.buffer, self.backend = buffer, backend_of(buffer)
        buffer.warmup(
            activation_clamp=activation_clamp is not None,
            fast_math=self.fast_math,
            num_shared=num_shared_experts,
        )
        self._key = str(self.buffer.key)  # a constant of compiled code
        self._loaded = False
        shapes = weight_shapes(self.problem)
        for word in ("l1", "l2"):
            codes, scales = shapes[f"{word}_weights"]
            zeros = torch.zeros(codes, dtype=torch.uint8, device=self.device).view(E4M3)
            self.register_buffer(word, zeros)
            zeros = torch.zeros(scales, dtype=torch.float32, device=self.device)
            self.register_buffer(f"{word}_sf", zeros)

    def forward(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, token_bound: int | None = None
    ) -> Tensor:
        """The experts' output for routed tokens, on torch's current stream.

        Args:
            x: (..., hidden) bfloat16.
            topk_idx: (tokens, top_k) int64 or int32, tokens being the product of the leading
                dimensions of x, or with the same leading dimensions: global expert of each route;
                a route to no expert of the layer, as -1, is dropped.
            topk_weights: like `topk_idx`, float32 or bfloat16.
            token_bound: the most tokens of any rank in this call, the same on all ranks; the
                schedule is chosen for it. None: the capacity, with one rank the number of tokens.

        Returns:
            bfloat16 of the shape of x.

        Raises:
            ValueError: a shape, dtype or device that breaks these rules, or more tokens than the
                capacity.
        """
        if x.dim() == topk_idx.dim() == topk_weights.dim() == 2:
            return self._experts(x, topk_idx, topk_weights, token_bound)
        for word, routes in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if routes.dim() != 2 and routes.shape[:-1] != x.shape[:-1]:
                raise ValueError(
                    f"{word} of shape {tuple(routes.shape)} must be (tokens, top_k), or have the "
                    f"leading dimensions of x, {tuple(x.shape[:-1])}"
                )
        y = self._experts(
            x.reshape(-1, x.shape[-1]),
            topk_idx.reshape(-1, topk_idx.shape[-1]),
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            token_bound,
        )
        out: Tensor = y.reshape(x.shape)
        return out

    def _experts(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, token_bound: int | None
    ) -> Tensor:
        """`forward` of flat tokens: the operator where it is traced, else what it calls."""
        if not calls.is_traced(x):
            if not self._loaded:
                self._say_unloaded()
            options = (None, self.activation_clamp, self.fast_math, token_bound, None, None)
            return calls.forward(
                x,
                None,
                topk_idx,
                topk_weights,
                self.weights,
                self.buffer,
                self.num_shared_experts,
                options,
            )
        y: Tensor = torch.ops.tl_megamoe.mega_moe(
            x,
            None,
            topk_idx,
            topk_weights,
            self.l1,
            self.l1_sf,
            self.l2,
            self.l2_sf,
            self._key,
            self.num_shared_experts,
            token_bound,
            self.activation_clamp,
            self.fast_math,
        )
        return y

    def _say_unloaded(self) -> None:
        """Warn, once: zeros look like a layer whose tokens have no routes."""
        self._loaded = True
        logger.warning(
            "MegaMoE %s computes zeros: its weights were never loaded. Call load_checkpoint or "
            "load_state_dict before the first forward.",
            self.routed.name,
        )

    @property
    def weights(self) -> MoEWeights:
        """The weights as `fp8_mega_moe` takes them; the same tensors, not copies."""
        held = self._buffers  # a fraction of the time of attributes
        return MoEWeights((held["l1"], held["l1_sf"]), (held["l2"], held["l2_sf"]))  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Of the weights and the buffer."""
        return self.buffer.device

    @property
    def capacity(self) -> int:
        """The most tokens of a call."""
        return self.buffer.capacity

    def extra_repr(self) -> str:
        p, ranks = self.routed, f", rank={self.rank} of {self.routed.num_ranks}"
        shared = f", num_shared_experts={self.num_shared_experts}"
        clamp = f", activation_clamp={self.activation_clamp}"
        return (
            f"{p.hidden}, {p.intermediate}, num_experts={p.num_experts}, top_k={p.num_topk}"
            f"{ranks if p.num_ranks > 1 else ''}{shared if self.num_shared_experts else ''}"
            f"{clamp if self.activation_clamp is not None else ''}, capacity={self.capacity}, "
            f"recipe={self.buffer.recipe}, backend={self.backend}, device={self.device}"
        )

    # ---- weights

    def load_checkpoint(
        self,
        checkpoint: Path | str | Mapping[str, Tensor],
        prefix: str,
        shared_prefix: str | None = None,
    ) -> MegaMoE:
        """Read this rank's experts from a checkpoint that holds the whole layer.

        Args:
            checkpoint: as for `load_experts`; of files only the rank's tensors are read.
            prefix: of the layer's experts, for example `model.layers.3.mlp.experts`.
            shared_prefix: of the shared experts; None: `shared_experts` or `shared_expert` beside
                the experts. Not without shared experts.

        Returns:
            The module.

        Raises:
            ValueError: as `load_experts`, also of the shared experts. Weights read before the
                error stay changed.
        """
        if shared_prefix is not None and not self.num_shared_experts:
            raise ValueError(
                f"shared_prefix={shared_prefix!r} of a layer with num_shared_experts=0: make it "
                "with num_shared_experts, or leave the shared experts to the model"
            )
        with open_source(checkpoint) as source:
            pieces = plan_experts(source, prefix, self.routed, self.rank)
            if self.num_shared_experts:
                shared = shared_prefix or _find_shared(source, prefix)
                pieces += plan_shared(source, shared, self.routed, self.num_shared_experts)
            target = TiledTarget(self.weights)
            with torch.no_grad():
                for piece in pieces:
                    place(source, piece, target)
        self._loaded = True
        return self

    @classmethod
    def from_experts(
        cls,
        experts: nn.Module,
        top_k: int,
        *,
        checkpoint: Path | str | Mapping[str, Tensor] | None = None,
        prefix: str | None = None,
        shared_experts: nn.Module | None = None,
        shared_prefix: str | None = None,
        **options: Any,
    ) -> MegaMoE:
        """A layer in place of a stacked experts module of transformers 5.

        Sizes and activation are those of the module, which is refused where the layer computes
        something else. So are the weights, unless a checkpoint is given: then of the module only
        shapes are read, and it may be on the meta device.

        Args:
            experts: has `gate_up_proj` (num_experts, 2*intermediate, hidden), gate rows first, and
                `down_proj` (num_experts, hidden, intermediate), of all ranks' experts; FP8 with
                `_scale_inv` tensors, or wider and then quantised.
            top_k: routes of a token.
            checkpoint, prefix: of the weights, as for `load_checkpoint`; both or neither.
            shared_experts: has `gate_proj`, `up_proj` and `down_proj` linears, whose intermediate
                is a multiple of the experts': so many shared experts it is.
            shared_prefix: theirs in the checkpoint, as for `load_checkpoint`.
            **options: those of `MegaMoE` but the sizes and `num_shared_experts`.

        Raises:
            ValueError: the module is of another kind: other tensors, transposed ones, biases,
                another activation; it holds no values and no checkpoint is given; or as `MegaMoE`
                and `load_checkpoint`.
        """
        if (checkpoint is None) != (prefix is None) or (prefix is None and shared_prefix):
            raise ValueError(
                f"checkpoint={checkpoint!r}, prefix={prefix!r} and shared_prefix={shared_prefix!r}"
                ": a prefix says where in a checkpoint the experts are. Pass both, or neither to "
                "take the weights of the module."
            )
        clamp = options.get("activation_clamp")
        check_clamp(clamp)
        hidden, intermediate, num_experts = stacked_sizes(experts, clamp)
        tensors = {f"experts.{k}": v for k, v in module_tensors(experts).items()}
        shared = 0
        if shared_experts is not None:
            shared = num_shared(shared_experts, hidden, intermediate)
            check_activation(shared_experts, clamp)
            held = module_tensors(shared_experts)
            tensors |= {f"{SHARED_WORDS[0]}.{k}": v for k, v in held.items()}
        if checkpoint is None and any(t.is_meta for t in tensors.values()):
            raise ValueError(
                f"{type(experts).__name__} is on the meta device and holds no values: pass the "
                "checkpoint and prefix that do, or load the model first"
            )
        layer = cls(hidden, intermediate, num_experts, top_k, num_shared_experts=shared, **options)
        if checkpoint is None or prefix is None:
            return layer.load_checkpoint(tensors, "experts")
        return layer.load_checkpoint(checkpoint, prefix, shared_prefix)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch's own loading runs the hooks and copies the module's own names; assign=True would
        # give the weights new addresses.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, own_missing, [], error_msgs
        )
        known = {f"{prefix}{word}" for word in WEIGHT_NAMES} & state_dict.keys()
        version = local_metadata.get("version", self._version)
        if known and version != self._version:
            error_msgs.append(
                f"the weights of {prefix or 'this module'!r} were saved in layout {version}, and "
                f"this one reads layout {self._version}: load the checkpoint and save them again"
            )
        for name in sorted(known):
            wanted = getattr(self, name.removeprefix(prefix)).dtype
            if state_dict[name].dtype != wanted:
                error_msgs.append(f"{name} is {state_dict[name].dtype}, and must be {wanted}")
        report = None
        if not known:
            target = TiledTarget(self.weights)
            with torch.no_grad():
                report = load_state(
                    state_dict, prefix, self.routed, self.rank, self.num_shared_experts, target
                )
        if report is None:
            missing_keys += own_missing
        else:
            known = report.known
            missing_keys += report.missing
            error_msgs += report.errors
        self._loaded = self._loaded or bool(known)
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]

    # ---- what a module can do that this one cannot, or does in its own way

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MegaMoE:
        # The weights stay as they are: to(dtype) would make other numbers of their codes, to_empty
        # lose them, a memory format move them from under the kernel. A move cannot be left undone.
        probe = fn(torch.empty(0, dtype=torch.float32, device=self.device))
        if probe.device != self.l1.device:
            advice = (
                f"Make the module with device={str(probe.device)!r}."
                if probe.device.type in ("cuda", "cpu")
                else "It lives on a CUDA device or the CPU: put it into the model after the move."
            )
            raise ValueError(
                f"MegaMoE on {self.device} cannot move to {probe.device}: its buffer and its "
                f"kernels are on {self.device}. {advice}"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoE:
        """Weights are copied; the buffer, memory that peers and kernels hold on to, is shared."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        memo[id(self.buffer)] = self.buffer
        for name, value in vars(self).items():
            copied.__dict__[name] = deepcopy(value, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a MegaMoE cannot be pickled: its buffer is GPU memory that kernels and other ranks "
            "hold addresses of. Save state_dict(), make the module anew and load that; "
            "copy.deepcopy copies the weights and shares the buffer."
        )


def _find_shared(source: Source, prefix: str) -> str:
    """The prefix of the shared experts beside the experts."""
    parent = prefix.rpartition(".")[0]
    words = [f"{parent}.{word}" if parent else word for word in SHARED_WORDS]
    for word in words:
        if any(name.startswith(f"{word}.") for name in source.names):
            return word
    raise ValueError(
        f"the checkpoint has no shared experts under {' or '.join(map(repr, words))}: pass "
        "shared_prefix, or num_shared_experts=0 to the module"
    )
