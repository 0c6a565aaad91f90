"""What one call of the layer does: bring the tokens into the buffer, find the kernel, launch it.

The function form (`op.py`) and the operators (`library.py`) share these. A call like one before is
launched after a few comparisons; everything else is checked in full first.
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import ALIGNMENT, check_activation, check_grad, check_tensor, check_weights, check_y
from .buffer import SymmBuffer
from .handshake import in_step
from .launch import BoundLaunch
from .loading import (
    NotLoadedError,
    Options,
    check_kernel_buffer,
    has_peers,
    prepare_launch,
    tell_peers,
)
from .quantize import QuantizeKernel, QuantizeSpec, compile_quantize
from .reference_buffer import ReferenceBuffer
from .weights import MoEWeights

Buffer = SymmBuffer | ReferenceBuffer


def is_traced(x: Any) -> bool:
    """Whether a call with this tensor must be an operator: something looks at operators only.

    That is Dynamo, a tensor subclass (a FakeTensor has no memory to launch on), a dispatch mode, a
    transform of torch.func, or a tracer, all of this thread: `torch.compiler.is_compiling()` is
    also true while another thread compiles.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or (type(x) is not torch.Tensor and isinstance(x, torch.Tensor))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def run(
    y: torch.Tensor,
    l1_weights: Any,
    l2_weights: Any,
    sym_buffer: Buffer,
    stats: torch.Tensor | None,
    activation: str,
    options: tuple[Any, ...],
    may_load: bool = True,
) -> None:
    """Run the layer on the tokens in the buffer.

    Args:
        y, l1_weights, l2_weights, sym_buffer, activation: as for `op.fp8_mega_moe`.
        stats: its `cumulative_local_expert_recv_stats`.
        options: its other arguments, in the order of `Options`.
        may_load: whether a kernel that is not loaded is loaded, or NotLoadedError raised.

    Raises:
        ValueError, ScheduleError: as `op.fp8_mega_moe`.
        NotLoadedError: the kernel is not loaded, and may not be.
    """
    try:  # what was launched before and is as it was needs no second look
        launcher = sym_buffer.launcher
        w1, w1_sf = l1_weights
        w2, w2_sf = l2_weights
        weights = launcher.weights[id(w1), id(w1_sf), id(w2), id(w2_sf)]
        launch = weights.launches[launcher.known[y.shape, activation, options]]
        address = y.data_ptr()
        known = (
            weights.addresses == (w1.data_ptr(), w1_sf.data_ptr(), w2.data_ptr(), w2_sf.data_ptr())
            and y.dtype is torch.bfloat16
            and y.is_contiguous()
            and not address % ALIGNMENT
            and y.get_device() == launcher.device_index
            and (stats is None or launcher.knows_stats(stats))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        known = False  # new, or wrong: which of the two is found out below
    if not known:
        if isinstance(sym_buffer, ReferenceBuffer):
            sym_buffer.launcher.enter_stream()
            num_tokens = _check_call(y, l1_weights, l2_weights, sym_buffer, stats, activation)
            given = MoEWeights(l1=l1_weights, l2=l2_weights)
            sym_buffer.compute(y, given, num_tokens, stats, Options(*options))
            return
        launch = _bind(
            y, l1_weights, l2_weights, sym_buffer, stats, activation, Options(*options), may_load
        )
        launcher, address = sym_buffer.launcher, y.data_ptr()
    launcher.enter_stream()
    launch(launcher.recv_stats if stats is None else stats, address, y.shape[0])


def _check_call(
    y: Any, l1_weights: Any, l2_weights: Any, sym_buffer: Buffer, stats: Any, activation: str
) -> int:
    """The number of tokens, of arguments that ranks need not have alike."""
    num_tokens = check_y(y, sym_buffer)
    check_weights("l1_weights", l1_weights, sym_buffer)
    check_weights("l2_weights", l2_weights, sym_buffer)
    if stats is not None:
        check_tensor(
            "cumulative_local_expert_recv_stats",
            stats,
            (sym_buffer.problem.num_local_experts,),
            torch.int32,
            sym_buffer,
        )
    check_activation(activation)
    return num_tokens


def _bind(
    y: torch.Tensor,
    l1_weights: Any,
    l2_weights: Any,
    sym_buffer: SymmBuffer,
    stats: torch.Tensor | None,
    activation: str,
    options: Options,
    may_load: bool,
) -> BoundLaunch:
    """The launches of a call that was checked in full; kept for the next call like it."""
    kernel, chosen, _ = prepare_launch(
        sym_buffer,
        lambda: _check_call(y, l1_weights, l2_weights, sym_buffer, stats, activation),
        options,
        may_load=may_load,
    )
    launcher = sym_buffer.launcher
    weights = MoEWeights(l1=l1_weights, l2=l2_weights)
    bound = launcher.bind(kernel, sym_buffer, weights, y, chosen, options.activation_clamp)
    held = launcher.bind_weights(l1_weights, l2_weights)
    if bound not in held.launches:
        launch, debug = bound.bind(held.values), sym_buffer.debug
        held.launches[bound] = launch if debug is None else debug.guarded(sym_buffer, launch)
    if stats is not None:
        launcher.bind_stats(stats)
    if not isinstance(options.recipe, list):  # a list of DeepGEMM's cannot be looked up
        launcher.remember((y.shape, activation, options), bound)
    return held.launches[bound]


def bring_in(
    sym_buffer: Buffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_shared: int = 0,
    may_load: bool = True,
) -> int:
    """Write a launch's tokens into the buffer, on the current stream; returns how many.

    Args:
        sym_buffer: holds at least as many.
        x, x_sf: e4m3 rows and their scales; or bfloat16 rows and None, which are quantised.
        topk_idx, topk_weights: as `SymmBuffer.fill`; with bfloat16 rows as `SymmBuffer.quantize`.
        num_shared: shared experts, whose routes are added; with bfloat16 rows only.
        may_load: whether the quantising kernel may be loaded, or NotLoadedError raised.

    Raises:
        ValueError: as `SymmBuffer.fill` and `SymmBuffer.quantize`.
        NotLoadedError: the kernel is not loaded, and may not be.
        RuntimeError: the result would have to be differentiated.
    """
    if x_sf is not None:
        if num_shared:
            raise ValueError(
                f"num_shared={num_shared} with x_sf: routes to shared experts are added while "
                "bfloat16 activations are quantised. Pass x in bfloat16 and x_sf=None."
            )
        return sym_buffer.fill(x, x_sf, topk_idx, topk_weights)
    check_grad(x=x, topk_weights=topk_weights)
    if isinstance(sym_buffer, ReferenceBuffer):
        sym_buffer.launcher.enter_stream()
        return sym_buffer.quantize(x, topk_idx, topk_weights, num_shared)
    check_kernel_buffer(sym_buffer)
    kernel = sym_buffer.quantizers.get(num_shared)
    if kernel is None:
        if not may_load:
            raise NotLoadedError(
                f"the kernel that quantises activations with num_shared={num_shared} is not "
                "loaded, and a call from model code never compiles. Call "
                f"sym_buffer.warmup(num_shared={num_shared}) on every rank before the first "
                "forward."
            )
        kernel = load_quantizer(sym_buffer, num_shared)
    sym_buffer.launcher.enter_stream()
    kernel.launch(sym_buffer, x, topk_idx, topk_weights)
    return x.shape[0]


def load_quantizer(sym_buffer: SymmBuffer, num_shared: int) -> QuantizeKernel:
    """Load the kernel that quantises activations into a buffer; kept with the buffer.

    All ranks of a process group call it: it returns, or raises, when all of them are done.
    """
    check_kernel_buffer(sym_buffer)
    b = sym_buffer

    def load() -> QuantizeKernel:
        spec = QuantizeSpec.of(b.problem, b.capacity, b.recipe, num_shared)
        if b.device.type != "cuda":
            raise ValueError(
                f"sym_buffer is on {b.device}: the kernel that quantises needs an SM90 GPU. Use a "
                "ReferenceBuffer elsewhere."
            )
        return compile_quantize(spec) if b.exported is None else b.exported.quantize(spec)

    with b.lock:
        kernel = in_step(load, b.group, b.device) if has_peers(b) else load()
        b.quantizers[num_shared] = kernel
    return kernel


def forward(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: MoEWeights,
    sym_buffer: Buffer,
    num_shared: int,
    options: tuple[Any, ...],
    *,
    stats: torch.Tensor | None = None,
    activation: str = "swiglu",
    may_load: bool = False,
) -> torch.Tensor:
    """One functional call: bring in, allocate the output, run.

    Args:
        x, x_sf, topk_idx, topk_weights, weights, sym_buffer: as for `op.mega_moe`.
        num_shared: as for `bring_in`.
        options, stats, activation: as for `run`.
        may_load: whether kernels that are not loaded are loaded; a call from model code never does.

    Raises:
        RuntimeError: as `bring_in`.
        ValueError, ScheduleError, NotLoadedError: as `bring_in` and `run`.
    """
    with sym_buffer.lock:
        try:
            bring_in(sym_buffer, x, x_sf, topk_idx, topk_weights, num_shared, may_load)
        except Exception as error:
            if may_load:  # else nobody waits
                tell_peers(sym_buffer, error, Options(*options), quantizes=x_sf is None)
            raise
        y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        run(y, weights.l1, weights.l2, sym_buffer, stats, activation, options, may_load)
    return y
