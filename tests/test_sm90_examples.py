"""The examples on the GPU: a model against the reference and transformers, serving with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_modules import serving, swap
from gpu_cases import real_ranks
from test_examples import CASES, MOE_LAYERS
from torch import Tensor

from tl_megamoe import MegaMoE, Problem, reference
from tl_megamoe.explorer.ranks import join_job
from tl_megamoe.scaling import quantize_rows
from tl_megamoe.weights import restore_weights

CAPACITY = 512  # of both examples here, so that they run the same kernels
pytestmark = pytest.mark.sm90


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("case", CASES)
def test_model_matches_the_reference_and_transformers(tmp_path: Path, case: str, seed: int) -> None:
    family, num_shared, shared = CASES[case]
    folder = tmp_path / "checkpoint"
    swap.write_checkpoint(swap.make_config(family, num_shared), folder)
    ours, theirs = swap.load_both(folder, gpu(), shared, backend="kernel")
    twin, _ = swap.load_both(folder, gpu(), shared, backend="reference")
    seen: list[tuple[str, tuple[Any, ...], Tensor]] = []
    names = [name for name, m in ours.named_modules() if isinstance(m, MegaMoE)]
    assert len(names) == MOE_LAYERS
    hooks = [
        ours.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: seen.append((name, args, out.clone()))
        )
        for name in names
    ]
    rows = swap.compare(ours, theirs, gpu(), seed)
    for hook in hooks:
        hook.remove()
    for row in rows:
        assert 0 < row.rel_error < swap.expected_error(MOE_LAYERS), row
    # Layer by layer on the same inputs: a last bit that tips a router stays out of it.
    assert len(seen) >= 10 * MOE_LAYERS
    for name, args, out in seen:
        expected = twin.get_submodule(name)(*args)
        hidden = out.shape[-1]
        found = reference.compare(out.view(-1, hidden), expected.view(-1, hidden), intermediate=128)
        assert found, f"{name}, {len(out)} rows: {found.reason}"


def test_generate_on_the_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    swap.write_checkpoint(swap.make_config("deepseek"), folder)
    ours, _ = swap.load_both(folder, gpu(), backend="kernel")
    new = swap.generate(ours, gpu())
    whole = torch.cat([torch.arange(16, device=gpu()).view(2, 8), new], 1)
    logits = swap.run_prefill(ours, whole).logits.view(2, 16, -1)[:, 7:15]
    chosen = logits.gather(2, new.unsqueeze(2)).squeeze(2)
    assert (logits.amax(2) - chosen).max() < 0.15  # of a spread of 1; BF16 with and without cache


def make_engine(graphs: bool, problem: Problem, group: Any = None, host_group: Any = None) -> Any:
    layers = serving.make_layers(problem, CAPACITY, gpu(), backend="kernel", group=group)
    buckets = serving.make_buckets(CAPACITY)
    return serving.Engine(layers, problem.hidden, buckets, gpu(), graphs=graphs, group=host_group)


def test_graphs_equal_calls_and_the_reference(seed: int) -> None:
    graphs, calls = (make_engine(value, serving.SMALL) for value in (True, False))
    assert sorted(graphs.graphs) == list(serving.make_buckets(CAPACITY))
    assert graphs.layers[0].moe.buffer is calls.layers[0].moe.buffer
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (CAPACITY, serving.SMALL.hidden)
    every = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    for num_tokens, most in ((512, 512), (1, 1), (5, 5), (0, 3), (100, 300), (256, 256), (3, 3)):
        x = every[:num_tokens]
        y = graphs.step(x, most).clone()
        assert torch.equal(y, calls.step(x, most)), (num_tokens, most)
        assert torch.equal(y, graphs.step(x, most)), (num_tokens, most)
    # One layer against the reference: routes of its own router, padded rows at -1.
    layer = graphs.layers[0]
    seen: list[tuple[Any, ...]] = []
    hook = layer.moe.register_forward_hook(lambda m, args, out: seen.append((*args, out)))
    layer(every[:64], torch.tensor(50, device="cuda"), 64)
    hook.remove()
    x, experts, weights, _, out = seen[0]
    assert bool((experts[50:] == -1).all())
    assert bool((experts[:50] >= 0).all())
    problem = serving.SMALL
    plain = restore_weights(layer.moe.weights)
    codes, sf = quantize_rows(x)
    expected = reference.moe(problem, codes, sf, experts, weights, plain)
    found = reference.compare(out, expected, intermediate=problem.intermediate)
    assert found, found.reason


def test_requests_are_drained_over_graphs() -> None:
    said = []
    for graphs in (True, False):
        requests = serving.make_requests(24, seed=1, longest=60, num_new=8)
        words = serving.make_words(serving.SMALL.hidden, gpu())
        stats = serving.Scheduler(make_engine(graphs, serving.SMALL), *words, requests).drain()
        assert all(len(r.tokens) == r.num_new for r in requests)
        assert stats.seconds > 0
        said.append([r.tokens for r in requests])
    assert said[0] == said[1]


if real_ranks():

    @pytest.mark.multi_gpu(real_ranks())
    def test_ranks_with_and_without_requests() -> None:
        """The first rank has requests, the others run its buckets without a token."""
        join_job()
        size, rank = dist.get_world_size(), dist.get_rank()
        host_group = dist.new_group(backend="gloo")
        small = serving.SMALL
        problem = Problem(
            name="small",
            hidden=small.hidden,
            intermediate=small.intermediate,
            num_experts=8 * size,
            num_topk=small.num_topk,
            num_ranks=size,
        )
        said = []
        for graphs in (True, False):
            engine = make_engine(graphs, problem, dist.group.WORLD, host_group)
            requests = serving.make_requests(12, seed=1, longest=40, num_new=6) if rank == 0 else []
            words = serving.make_words(problem.hidden, gpu())
            stats = serving.Scheduler(engine, *words, requests).drain()
            steps: list[Any] = [None] * size
            dist.all_gather_object(steps, stats.steps, group=host_group)
            assert all(own == steps[0] for own in steps)
            assert sum(steps[0].values()) >= 6
            assert (sum(stats.tokens.values()) > 0) == (rank == 0)
            assert all(len(r.tokens) == r.num_new for r in requests)
            said.append([r.tokens for r in requests])
        assert said[0] == said[1]
