"""A toy serving loop: one buffer, a CUDA graph for each bucket of token counts, all ranks in step.

    python examples/serving.py                                 # one GPU, or the reference
    python examples/serving.py --problem deepseek-v4-flash     # one rank's experts of that model
    torchrun --nproc_per_node=8 examples/serving.py --problem deepseek-v4-flash

The model is a stack of routers and MoE layers between an embedding and a head, without attention,
so that a token's successor follows from the token alone. What a serving engine has to do for
MegaMoE is all here: every layer over one buffer; inputs in static tensors; a graph for each bucket;
rows beyond a step's tokens routed nowhere; one bucket on all ranks, also where a rank has no token.
Without an SM90 GPU, the reference, one process, and no graphs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tl_megamoe import MegaMoE, Problem, disable_multicast, load_problem, transform_weights
from tl_megamoe.synthetic import random_weights

MAX_RUNNING = 256
"""Requests that generate at once; also the largest bucket of a generation step."""
VOCABULARY = 1024
SMALL = Problem(name="small", hidden=256, intermediate=128, num_experts=16, num_topk=4, num_ranks=1)
"""The layer when `--problem` names none; over more ranks its experts are split."""


def make_buckets(capacity: int) -> tuple[int, ...]:
    """1, 2, 4, ... 256 tokens for generation, then doubled up to the capacity for prefill."""
    buckets = [1]
    while buckets[-1] < capacity:
        buckets.append(min(2 * buckets[-1], capacity))
    return tuple(buckets)


# ---- the model


class Layer(nn.Module):
    """Norm, router, experts, residual."""

    def __init__(self, moe: MegaMoE, hidden: int, num_experts: int, top_k: int):
        super().__init__()
        self.moe = moe
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor, num_tokens: Tensor, token_bound: int) -> Tensor:
        """The layer on (rows, hidden) bf16, of which the first `num_tokens` are tokens.

        Args:
            x: static rows of a bucket; those past `num_tokens` hold what earlier steps left.
            num_tokens: () int64 on the device, so that a captured graph reads it at each replay.
            token_bound: the bucket; the same on all ranks, which choose their kernel by it.
        """
        normed = nn.functional.rms_norm(x, x.shape[-1:])
        weights, experts = self.gate(normed).float().softmax(-1).topk(self.top_k)
        rows = torch.arange(len(x), device=x.device)
        # A row without a route costs its router and nothing else: it is dispatched nowhere.
        experts = experts.masked_fill((rows >= num_tokens)[:, None], -1)
        return x + self.moe(normed, experts, weights, token_bound)


def make_layers(
    problem: Problem,
    capacity: int,
    device: torch.device,
    *,
    num_layers: int = 2,
    backend: str = "auto",
    group: Any = None,
) -> nn.ModuleList:
    """Layers with random weights over one buffer; every rank of the group calls this.

    One layer runs at a time, so one buffer serves them all; the first layer makes it.
    """
    rank = 0 if group is None else dist.get_rank(group)
    layers, buffer = nn.ModuleList(), None
    for number in range(num_layers):
        moe = MegaMoE(
            problem.hidden,
            problem.intermediate,
            problem.num_experts,
            problem.num_topk,
            group,
            capacity=capacity,
            buffer=buffer,
            backend=backend,
            device=device,
        )
        buffer = moe.buffer
        plain = random_weights(problem, device, seed=number, rank=rank)
        tiled = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)
        moe.load_state_dict(
            {"l1": tiled.l1[0], "l1_sf": tiled.l1[1], "l2": tiled.l2[0], "l2_sf": tiled.l2[1]}
        )
        torch.manual_seed(number)  # routers are replicated: the same on all ranks
        layer = Layer(moe, problem.hidden, problem.num_experts, problem.num_topk)
        layers.append(layer.to(device))
        layer.gate.bfloat16()
    return layers.requires_grad_(False)


class Engine:
    """The layers of one rank behind static tensors, and a graph for each bucket.

    Args:
        layers: see `make_layers`.
        hidden: model width.
        buckets: token counts, ascending; the last is the capacity.
        device: of the layers.
        graphs: capture a graph for each bucket; False calls the layers each time.
        group: process group of the ranks, None with one; it is asked for MAX of host integers, so
            a gloo group: a CUDA one would make every step wait for the GPU.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        hidden: int,
        buckets: tuple[int, ...],
        device: torch.device,
        *,
        graphs: bool,
        group: Any = None,
    ):
        self.layers, self.buckets, self.group = layers, buckets, group
        self.x = torch.zeros((buckets[-1], hidden), dtype=torch.bfloat16, device=device)
        self.y = torch.zeros_like(self.x)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if graphs:
            self._capture()

    def _capture(self) -> None:
        """Capture from the largest bucket down: the smaller graphs reuse its memory.

        Each bucket runs once before: cuBLAS and the allocator set themselves up outside of a graph.
        That is a launch, so all ranks do it, in this order, as they later replay.
        """
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for bucket in reversed(self.buckets):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(bucket)
            torch.cuda.synchronize()
            self.graphs[bucket] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[bucket], pool=pool, stream=stream):
                self._run(bucket)

    def _run(self, bucket: int) -> None:
        x = self.x[:bucket]
        for layer in self.layers:
            x = layer(x, self.num_tokens, bucket)
        self.y[:bucket].copy_(x)  # out of the graphs' shared memory

    def agree(self, num_tokens: int) -> int:
        """The most tokens that any rank has for this step; every rank asks, also with none."""
        if self.group is None:
            return num_tokens
        most = torch.tensor(num_tokens)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def bucket_of(self, most: int) -> int:
        """The smallest bucket that holds `most` tokens.

        Raises:
            ValueError: none does.
        """
        for bucket in self.buckets:
            if most <= bucket:
                return bucket
        raise ValueError(
            f"a step of {most} tokens is over the capacity={self.buckets[-1]}: split the batch"
        )

    def step(self, x: Tensor, most: int) -> Tensor:
        """Run the layers on this rank's tokens; nothing waits for the GPU.

        Args:
            x: (tokens, hidden) bf16; 0 rows run a dummy batch, because the other ranks' tokens
                may need this rank's experts, and their launches wait for this one.
            most: from `agree`: decides the bucket, so that all ranks replay the same.

        Returns:
            (tokens, hidden) bf16, valid until the next step.
        """
        bucket, num_tokens = self.bucket_of(most), len(x)
        self.x[:num_tokens].copy_(x)
        self.num_tokens.fill_(num_tokens)
        if self.graphs:
            self.graphs[bucket].replay()
        else:
            self._run(bucket)
        return self.y[:num_tokens]


# ---- the scheduler


@dataclass(slots=True)
class Request:
    """A prompt and how many tokens it wants.

    Attributes:
        prompt: token numbers.
        num_new: tokens to generate.
        tokens: those generated, filled when the requests have been drained.
        slot: place of its last token on the device while it runs.
        done: tokens generated so far.
    """

    prompt: list[int]
    num_new: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    done: int = 0


@dataclass(slots=True)
class Stats:
    """What a rank did: steps, tokens and host microseconds of each bucket."""

    steps: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    host_us: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, bucket: int, tokens: int, host_us: float) -> None:
        self.steps[bucket] = self.steps.get(bucket, 0) + 1
        self.tokens[bucket] = self.tokens.get(bucket, 0) + tokens
        self.host_us[bucket] = self.host_us.get(bucket, 0.0) + host_us


class Scheduler:
    """Waiting prompts first, as many as fit; else a token for every running request."""

    def __init__(self, engine: Engine, embedding: Tensor, head: Tensor, requests: list[Request]):
        capacity = engine.buckets[-1]
        for request in requests:
            if not 1 <= len(request.prompt) <= capacity or request.num_new < 1:
                raise ValueError(
                    f"a request of {len(request.prompt)} prompt tokens and {request.num_new} new "
                    f"ones: both must be at least 1, the prompt at most capacity={capacity}"
                )
        self.engine, self.embedding, self.head = engine, embedding, head
        self.waiting = deque(requests)
        self.running: list[Request] = []
        device = embedding.device
        self.last = torch.zeros(MAX_RUNNING, dtype=torch.int64, device=device)
        self.free = list(range(MAX_RUNNING))
        self.said: list[tuple[list[Request], Tensor]] = []

    def next_prompts(self) -> list[Request]:
        """Waiting requests whose prompts fit into one step, and get a slot."""
        chosen: list[Request] = []
        room = self.engine.buckets[-1]
        while self.waiting and self.free and len(self.waiting[0].prompt) <= room:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            room -= len(request.prompt)
            chosen.append(request)
        return chosen

    def drain(self) -> Stats:
        """Step until no rank has a request left."""
        stats = Stats()
        start = time.perf_counter()
        while True:
            prompts = self.next_prompts()
            batch = prompts or self.running[: self.engine.buckets[-1]]
            counts = [len(r.prompt) if prompts else 1 for r in batch]
            most = self.engine.agree(sum(counts))
            if most == 0:
                break
            began = time.perf_counter()
            y = self.engine.step(self._inputs(batch, bool(prompts)), most)
            self._take(batch, counts, y)
            host_us = (time.perf_counter() - began) * 1e6
            stats.add(self.engine.bucket_of(most), sum(counts), host_us)
        for batch, tokens in self.said:  # the first wait for the GPU
            for request, token in zip(batch, tokens.tolist(), strict=True):
                request.tokens.append(token)
        stats.seconds = time.perf_counter() - start
        return stats

    def _inputs(self, batch: list[Request], prompts: bool) -> Tensor:
        device = self.embedding.device
        if prompts:
            tokens = torch.tensor([t for r in batch for t in r.prompt], device=device)
        else:
            slots = torch.tensor([r.slot for r in batch], dtype=torch.int64, device=device)
            tokens = self.last[slots]
        return self.embedding[tokens]

    def _take(self, batch: list[Request], counts: list[int], y: Tensor) -> None:
        """The most likely token after each request's last; stays on the device."""
        if not batch:
            return
        ends = torch.tensor(counts, device=y.device).cumsum(0) - 1
        tokens = (y[ends] @ self.head).argmax(1)
        self.last[torch.tensor([r.slot for r in batch], device=y.device)] = tokens
        self.said.append((batch, tokens))
        for request in batch:
            request.done += 1
        known = {id(r) for r in self.running}
        everyone = self.running + [r for r in batch if id(r) not in known]
        self.free += [r.slot for r in everyone if r.done == r.num_new]
        self.running = [r for r in everyone if r.done < r.num_new]


# ---- running it


def make_requests(number: int, seed: int, longest: int, num_new: int) -> list[Request]:
    """Prompts of 1 to `longest` random tokens that want 1 to `num_new` more."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> list[int]:
        return torch.randint(high, (count,), generator=generator).tolist()

    lengths, news = draw(longest, number), draw(num_new, number)
    return [
        Request(draw(VOCABULARY, length + 1), new + 1)
        for length, new in zip(lengths, news, strict=True)
    ]


def make_words(hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An embedding (vocabulary, hidden) and a head (hidden, vocabulary), alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((VOCABULARY, hidden), (hidden, VOCABULARY))
    embedding, head = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return embedding.to(device), head.to(device)


def report(stats: Stats, ranks: int, all_tokens: int, lines: Iterable[str] = ()) -> str:
    """A table of the buckets of this rank and the tokens a second of all."""
    table = [*lines, f"{'bucket':>8} {'steps':>8} {'tokens a step':>14} {'host us a step':>15}"]
    for bucket in sorted(stats.steps):
        steps = stats.steps[bucket]
        table.append(
            f"{bucket:8} {steps:8} {stats.tokens[bucket] / steps:14.1f} "
            f"{stats.host_us[bucket] / steps:15.0f}"
        )
    table.append(
        f"{all_tokens} tokens of {ranks} rank{'s' if ranks > 1 else ''} in {stats.seconds:.3f} s: "
        f"{all_tokens / stats.seconds:,.0f} tokens/s"
    )
    return "\n".join(table)


def pick_problem(name: str | None, ranks: int) -> Problem:
    """The layer over this job's ranks; with one process, a model's layer as one rank sees it."""
    if name is None:
        return replace(SMALL, num_ranks=ranks)
    return load_problem(name, num_ranks=ranks) if ranks > 1 else load_problem(name).one_rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--problem", help="a preset or a .toml file; a small layer if not given")
    parser.add_argument("--capacity", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64, help="of each rank")
    parser.add_argument("--longest", type=int, default=128, help="tokens of a prompt, at most")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate, at most")
    parser.add_argument("--backend", choices=("reference", "kernel", "auto"), default="auto")
    args = parser.parse_args()
    for word in ("capacity", "layers", "requests", "longest", "new"):
        if getattr(args, word) < 1:
            parser.error(f"--{word} {getattr(args, word)} must be at least 1")
    disable_multicast()  # before CUDA starts
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    on_gpu = args.backend != "reference" and torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    expert_group, host_group = None, None
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        expert_group, host_group = dist.group.WORLD, dist.new_group(backend="gloo")
    problem = pick_problem(args.problem, ranks)
    layers = make_layers(
        problem,
        args.capacity,
        device,
        num_layers=args.layers,
        backend=args.backend,
        group=expert_group,
    )
    buffer, graphs = layers[0].moe.buffer, layers[0].moe.backend == "kernel"
    try:
        buckets = make_buckets(args.capacity)
        engine = Engine(layers, problem.hidden, buckets, device, graphs=graphs, group=host_group)
        words = make_words(problem.hidden, device)
        requests = make_requests(args.requests, rank, min(args.longest, args.capacity), args.new)
        stats = Scheduler(engine, *words, requests).drain()
    except RuntimeError:
        if graphs:  # a wait that timed out ends the launch with a CUDA error: say which
            buffer.check_report()
        raise
    all_tokens = torch.tensor(sum(stats.tokens.values()))
    if host_group is not None:
        dist.all_reduce(all_tokens, group=host_group)
    if rank == 0:
        print(report(stats, ranks, int(all_tokens), [f"{layers[0].moe}, {args.layers} layers"]))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
