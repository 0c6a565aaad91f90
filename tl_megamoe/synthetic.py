"""Seeded random layers for tests, search and demo. Never zeros: they draw less power, so lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3, quantize_rows, to_e4m3
from .weights import PlainWeights

ROUTINGS = ("uniform", "zipf:<exponent>", "skew", "hot1")
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
        routing: `uniform`; `zipf:<exponent>`; `skew`: an eighth of the experts is 8 times as
            popular as the rest; `hot1`: every route of every token goes to one expert.
        mask: fraction of the routes dropped, 0 to 1.
        seed: any integer.
        device: where the tensors are made and stay.

    Raises:
        ValueError: an unknown routing, or `mask` or `num_tokens` out of range.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens} must not be negative")
    if not 0.0 <= mask <= 1.0:
        raise ValueError(f"mask={mask} is the fraction of dropped routes: 0 to 1")
    device = torch.device(device)
    generator = _generator(device, seed, 2)
    topk = problem.num_topk
    log_p = _log_popularity(problem, routing, generator, device)
    if topk > problem.num_experts or routing == "hot1":
        cumulative = log_p.exp().cumsum(0)
        draw = torch.rand((num_tokens, topk), generator=generator, device=device) * cumulative[-1]
        topk_idx = torch.searchsorted(cumulative, draw, right=True).clamp(max=len(log_p) - 1)
    else:
        # The largest of log(p) + Gumbel noise: a draw without replacement.
        uniform = torch.rand((num_tokens, len(log_p)), generator=generator, device=device)
        noise = -(-uniform.clamp(1e-12, 1 - 1e-7).log()).log()
        topk_idx = (log_p + noise).topk(topk, dim=1).indices
    logits = torch.randn((num_tokens, topk), generator=generator, device=device)
    dropped = torch.rand((num_tokens, topk), generator=generator, device=device) < mask
    values = torch.randn((num_tokens, problem.hidden), generator=generator, device=device)
    x, x_sf = quantize_rows(values)
    return Inputs(x, x_sf, topk_idx.masked_fill(dropped, -1), logits.softmax(1))
