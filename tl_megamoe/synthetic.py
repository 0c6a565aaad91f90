"""Seeded random layers for tests, search and demo. Never zeros: they draw less power, so lie.

A routing is a word: a random law, or `file:<path>` for one that was recorded from a model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3, quantize_rows, to_e4m3
from .weights import PlainWeights

ROUTINGS = ("uniform", "zipf:<exponent>", "skew", "hot1", "file:<path>")
FILE_ROUTING = "file:"
SKEW_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one rank contributes.

    Attributes:
        x: (tokens, hidden) e4m3.
        x_sf: (tokens, hidden/128) float32.
        topk_idx: (tokens, topk) int64, -1 for a dropped route.
        topk_weights: (tokens, topk) float32.
    """

    x: Tensor
    x_sf: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])


def _generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator on `device`; keys that differ anywhere give unrelated streams."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % (1 << 62)
    return torch.Generator(device).manual_seed(seed)


def random_weights(
    problem: Problem, device: torch.device | str = "cpu", seed: int = 0, rank: int = 0
) -> PlainWeights:
    """Weights of the experts of one rank, made on `device` expert by expert.

    Codes are e4m3 of a standard normal, scales uniform in [0.5, 1.5) / sqrt(columns), so that the
    products of normal inputs stay near 1. An expert's values depend only on the seed and its global
    number.

    Args:
        problem: the layer.
        device: where the weights are made and stay.
        seed: any integer.
        rank: whose experts.
    """
    device = torch.device(device)
    local, hidden, inter = problem.num_local_experts, problem.hidden, problem.intermediate

    def empty(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        blocks = (local, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
        codes = torch.empty((local, rows, columns), dtype=torch.uint8, device=device)
        return codes.view(E4M3), torch.empty(blocks, dtype=torch.float32, device=device)

    layers = (empty(2 * inter, hidden), empty(hidden, inter))
    for e in range(local):
        generator = _generator(device, seed, 1, rank * local + e)
        for codes, sf in layers:
            rows, columns = codes.shape[1:]
            values = torch.randn((rows, columns), generator=generator, device=device)
            codes[e].copy_(to_e4m3(values))
            noise = torch.rand(sf.shape[1:], generator=generator, device=device)
            sf[e].copy_((noise + 0.5) / columns**0.5)
    return PlainWeights(*layers[0], *layers[1])


def _log_popularity(
    problem: Problem, routing: str, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Logarithm of how often each expert is chosen, up to a constant: (num_experts,) float32."""
    experts = problem.num_experts
    order = torch.randperm(experts, generator=generator, device=device)
    log_p = torch.zeros(experts, device=device)
    kind, _, value = routing.partition(":")
    if kind == "zipf":
        try:
            exponent = float(value)
        except ValueError:
            raise ValueError(f"routing={routing!r}: write zipf:<exponent>, as zipf:1.2") from None
        if not 0.0 < exponent < float("inf"):
            raise ValueError(
                f"routing={routing!r}: the exponent must be positive and finite, as zipf:1.2; for "
                "experts that are all as popular write uniform"
            )
        log_p[order] = -exponent * torch.arange(1, experts + 1, device=device).log()
    elif routing == "skew":
        log_p[order[: max(1, experts // 8)]] = torch.tensor(SKEW_FACTOR, device=device).log()
    elif routing == "hot1":
        log_p[order[1:]] = -torch.inf
    elif routing != "uniform":
        raise ValueError(f"routing={routing!r} must be one of {', '.join(ROUTINGS)}")
    return log_p


def random_inputs(
    problem: Problem,
    num_tokens: int,
    routing: str = "uniform",
    mask: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Tokens with quantised normal activations and a random routing.

    The experts of one token are distinct, except where that is impossible: with fewer experts than
    routes they are drawn with replacement.

    Args:
        problem: the layer.
        num_tokens: 0 or more.
        routing: `uniform`; `zipf:<exponent>`, a positive one; `skew`: an eighth of the experts is 8
            times as popular as the rest; `hot1`: every route of every token goes to one expert;
            `file:<path>`: the first tokens of a recorded routing (`load_routing`).
        mask: fraction of the routes dropped, 0 to 1.
        seed: any integer.
        device: where the tensors are made and stay.

    Raises:
        ValueError: an unknown routing, `mask` or `num_tokens` out of range, or a routing file that
            does not fit.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens} must not be negative")
    if not 0.0 <= mask <= 1.0:
        raise ValueError(f"mask={mask} is the fraction of dropped routes: 0 to 1")
    device = torch.device(device)
    generator = _generator(device, seed, 2)
    topk = problem.num_topk
    weights: Tensor | None = None
    if routing.startswith(FILE_ROUTING):
        topk_idx, weights = load_routing(routing, problem, num_tokens, device)
    else:
        topk_idx = _random_routes(problem, num_tokens, routing, generator, device)
    logits = torch.randn((num_tokens, topk), generator=generator, device=device)
    dropped = torch.rand((num_tokens, topk), generator=generator, device=device) < mask
    values = torch.randn((num_tokens, problem.hidden), generator=generator, device=device)
    x, x_sf = quantize_rows(values)
    weights = logits.softmax(1) if weights is None else weights
    return Inputs(x, x_sf, topk_idx.masked_fill(dropped, -1), weights)


def _random_routes(
    problem: Problem,
    num_tokens: int,
    routing: str,
    generator: torch.Generator,
    device: torch.device,
) -> Tensor:
    """(tokens, topk) int64 under a random law."""
    log_p = _log_popularity(problem, routing, generator, device)
    topk = problem.num_topk
    if topk > problem.num_experts or routing == "hot1":
        cumulative = log_p.exp().cumsum(0)
        draw = torch.rand((num_tokens, topk), generator=generator, device=device) * cumulative[-1]
        return torch.searchsorted(cumulative, draw, right=True).clamp(max=len(log_p) - 1)
    # The largest of log(p) + Gumbel noise: a draw without replacement.
    uniform = torch.rand((num_tokens, len(log_p)), generator=generator, device=device)
    noise = -(-uniform.clamp(1e-12, 1 - 1e-7).log()).log()
    return (log_p + noise).topk(topk, dim=1).indices


def load_routing(
    routing: str, problem: Problem, num_tokens: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """The first tokens of a recorded routing.

    The file is one of torch, read with `weights_only=True`: `topk_idx`, (tokens, topk) int64 with
    -1 for a dropped route, or a dict of `topk_idx` and, if recorded, `topk_weights`, (tokens, topk)
    float32. One draw serves all ranks: the tokens of rank 0 come first.

    Args:
        routing: `file:<path>`.
        problem: the layer; experts are counted over its ranks.
        num_tokens: of all ranks together.
        device: where the tensors are made.

    Returns:
        `topk_idx`, and `topk_weights` or None.

    Raises:
        ValueError: no such file, not a torch file, or it breaks one of the rules above.
    """
    path = Path(routing.removeprefix(FILE_ROUTING))
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"routing={routing!r}: there is no such file") from None
    except Exception as error:  # torch.load raises what pickle, zipfile and torch raise
        raise ValueError(
            f"routing={routing!r} cannot be read by torch.load(weights_only=True), "
            f"{type(error).__name__}. Save topk_idx, or a dict of topk_idx and topk_weights, with "
            "torch.save."
        ) from error
    tensors = held if isinstance(held, dict) else {"topk_idx": held}
    names = set(map(str, tensors))
    if "topk_idx" not in names or not names <= {"topk_idx", "topk_weights"}:
        raise ValueError(
            f"routing={routing!r} holds {', '.join(sorted(names)) or 'nothing'}: it must hold "
            "topk_idx and may hold topk_weights"
        )
    topk_idx, weights = tensors["topk_idx"], tensors.get("topk_weights")
    _check_routes(routing, topk_idx, problem, num_tokens)
    if weights is not None:
        _check_route_weights(routing, weights, topk_idx)
        weights = weights[:num_tokens].contiguous().to(device)
    return topk_idx[:num_tokens].contiguous().to(device), weights


def _check_routes(routing: str, topk_idx: Any, problem: Problem, num_tokens: int) -> None:
    where, topk, experts = f"topk_idx of routing={routing!r}", problem.num_topk, problem.num_experts
    if not isinstance(topk_idx, Tensor) or topk_idx.dtype != torch.int64:
        found = topk_idx.dtype if isinstance(topk_idx, Tensor) else type(topk_idx).__name__
        raise ValueError(f"{where} must be an int64 tensor, found {found}")
    if topk_idx.dim() != 2 or topk_idx.shape[1] != topk:
        raise ValueError(
            f"{where} has shape {tuple(topk_idx.shape)}: it must be (tokens, {topk}), {topk} being "
            f"num_topk of problem {problem.name!r}"
        )
    if topk_idx.shape[0] < num_tokens:
        raise ValueError(
            f"{where} has {topk_idx.shape[0]} tokens and {num_tokens} are asked for, over all "
            "ranks: record more, or ask for fewer"
        )
    if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        raise ValueError(
            f"{where} has experts {int(topk_idx.min())} to {int(topk_idx.max())}: they must be -1, "
            f"a dropped route, or 0 to {experts - 1}, the experts of problem {problem.name!r}"
            + (
                f" as one of {problem.from_num_ranks} ranks sees it. Map the routes to the experts "
                "of one rank, or run all ranks."
                if problem.from_num_ranks
                else ". Record it from a model of these sizes."
            )
        )


def _check_route_weights(routing: str, weights: Any, topk_idx: Tensor) -> None:
    where = f"topk_weights of routing={routing!r}"
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32:
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{where} must be a float32 tensor, found {found}")
    if weights.shape != topk_idx.shape:
        raise ValueError(
            f"{where} has shape {tuple(weights.shape)}: it must be that of topk_idx, "
            f"{tuple(topk_idx.shape)}"
        )
    if not bool(weights.isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinity: every weight must be finite")


def routing_name(routing: str) -> str:
    """A routing as the tables name it: a file by its name and 8 hex digits of its SHA-256.

    Two files of one name are then two routings, wherever they lie. Other words stay as they are.

    Args:
        routing: as for `random_inputs`.

    Raises:
        ValueError: the file cannot be read.
    """
    if not routing.startswith(FILE_ROUTING):
        return routing
    path = Path(routing.removeprefix(FILE_ROUTING))
    try:
        contents = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"routing={routing!r} cannot be read: {reason}") from error
    return f"{FILE_ROUTING}{path.name}@{hashlib.sha256(contents).hexdigest()[:8]}"
