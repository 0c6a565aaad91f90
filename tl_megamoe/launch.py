"""Launches that cost the host little: everything but counts, output and tokens stays in place.

`CompiledKernel.launch` converts fourteen tensors and passes tilelang's Python wrapper in every
call. Here the kernel's own TVM-FFI function is called with tensors that were converted once, by a
function that holds them (native.py). `tl-megamoe host` times both; results/README.md has numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .kernel import CompiledKernel
from .native import BIND, native_module
from .schedule import Schedule
from .weights import MoEWeights

if TYPE_CHECKING:
    from .buffer import SymmBuffer

WEIGHTS, STATS, Y, NUM_TOKENS = slice(9, 13), 13, 14, 18
"""Places in the program's parameters (`program.build_program`)."""


@lru_cache(maxsize=512)
def raw_module(kernel: Any) -> Any:
    """The TVM-FFI module behind a tilelang kernel, which imports `native_module`; else None."""
    adapter = getattr(kernel, "adapter", None)
    if adapter is None:
        return None
    executable = adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    beside = native_module()
    if beside is not None:
        module.import_module(beside)  # where the module looks first
    return module


@lru_cache(maxsize=512)
def raw_function(kernel: Any) -> Callable[..., Any]:
    """The TVM-FFI function behind a tilelang kernel; what is one already, as it is."""
    module = raw_module(kernel)
    if module is None:
        function: Callable[..., Any] = kernel
        return function
    name = str(kernel.adapter.prim_func.attrs["global_symbol"])
    found: Callable[..., Any] = module.get_function(name, query_imports=True)
    return found


def binder_of(kernel: CompiledKernel) -> Callable[..., Any] | None:
    """`native.BIND` for a kernel; None where there is no native module or no such function."""
    if not hasattr(kernel.kernel, "adapter"):
        return getattr(kernel, "binder", None)
    beside = native_module()
    return None if beside is None else beside.get_function(BIND)


def to_ffi(tensor: torch.Tensor) -> Any:
    """A tensor as TVM-FFI passes it on without looking at it again.

    It holds an alias, not the tensor: that may die, and the launch that is bound to it with it.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor.detach())


BoundLaunch = Callable[["torch.Tensor", int, int], Any]
"""Launches on torch's current stream: counts (a torch tensor, by whose device TVM-FFI finds the
stream), the output's address, the number of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundKernel:
    """A kernel on a buffer with a schedule: all arguments but weights and those of a `BoundLaunch`.

    Attributes:
        function: takes the program's parameters.
        binder: `native.BIND`, if it can be had.
        before: the parameters before the weights.
        between: those between the output's address and the number of tokens.
        after: those behind the number of tokens.
    """

    function: Callable[..., Any]
    binder: Callable[..., Any] | None
    before: tuple[Any, ...]
    between: tuple[Any, ...]
    after: tuple[Any, ...]

    def bind(self, weights: tuple[Any, ...]) -> BoundLaunch:
        """The launches of a layer's weights."""
        if self.binder is not None:
            call: BoundLaunch = self.binder(
                self.function,
                *(STATS, Y, NUM_TOKENS),
                *self.before,
                *weights,
                *(None, 0),
                *self.between,
                0,
                *self.after,
            )
            return call
        head, between, after, function = (
            self.before + weights,
            self.between,
            self.after,
            self.function,
        )

        def launch(stats: torch.Tensor, y: int, tokens: int) -> None:
            function(*head, stats, y, *between, tokens, *after)

        return launch


class BoundWeights:
    """The four weight tensors of a layer, converted once.

    Good while they live, which `Launcher` sees to, and are where they were (`t.data = ...` moves
    one).

    Attributes:
        addresses: where they were.
        values: the converted tensors; they keep the memory, and so it is kept until a tensor dies.
        launches: of these weights, by kernel.
    """

    __slots__ = ("_alive", "addresses", "launches", "values")

    def __init__(self, tensors: tuple[torch.Tensor, ...], forget: Callable[[Any], None]) -> None:
        self._alive = tuple(weakref.ref(t, forget) for t in tensors)
        self.addresses = tuple(t.data_ptr() for t in tensors)
        self.values = tuple(to_ffi(t) for t in tensors)
        self.launches: dict[BoundKernel, BoundLaunch] = {}


MAX_KNOWN = 4096
"""Calls that a buffer remembers: an eager server makes one for each number of tokens."""


class Launcher:
    """What a buffer keeps of its launches, so that the next one like it is checked no more.

    Attributes:
        recv_stats: the buffer's own.
        inputs: x, x_sf, topk_idx and topk_weights of the buffer, as the kernel that quantises
            takes them: the first as a torch tensor, by whose device TVM-FFI finds the stream.
        device_index: of the buffer's GPU, -1 on a CPU.
        known: kernels by the output's shape, the activation and the call's options.
        weights: by the ids of a layer's four tensors; an entry goes when one of them dies, before
            its id can be another's.
    """

    def __init__(self, recv_stats: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
        self.recv_stats = recv_stats
        self.inputs = (inputs[0], *map(to_ffi, inputs[1:]))
        self.device_index = recv_stats.get_device()
        self.known: dict[Hashable, BoundKernel] = {}
        self.weights: dict[tuple[int, ...], BoundWeights] = {}
        self._stats: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._bound: dict[Hashable, BoundKernel] = {}
        self._stream: int | None = None
        self.enter_stream()  # that on which the buffer is zeroed

    def enter_stream(self) -> None:
        """Let what comes on the current stream wait for the launches before it on another one.

        A buffer serves one launch at a time. While a CUDA graph is captured nothing is ordered:
        when it will be replayed is not known here.
        """
        if self.device_index < 0:
            return
        stream: int = torch._C._cuda_getCurrentRawStream(self.device_index)
        if stream == self._stream or torch.cuda.is_current_stream_capturing():
            return
        if self._stream is not None:
            before = (
                torch.cuda.ExternalStream(self._stream, self.device_index)
                if self._stream
                else torch.cuda.default_stream(self.device_index)  # 0 asks for a new stream
            )
            torch.cuda.current_stream(self.device_index).wait_stream(before)
        self._stream = stream

    def bind(
        self,
        kernel: CompiledKernel,
        buffer: SymmBuffer,
        weights: MoEWeights,
        y: torch.Tensor,
        schedule: Schedule,
        activation_clamp: float | None,
    ) -> BoundKernel:
        """A kernel on this buffer, made at its first call. The arguments have been checked.

        Args:
            kernel: of this buffer's problem, capacity and recipe.
            weights, y: any that fit; they are not kept.
            schedule: gives the runtime fields.
            activation_clamp: the bound, iff the kernel clamps.
        """
        key = (kernel.spec.key(), schedule, activation_clamp, buffer.timeout_ms)
        bound = self._bound.get(key)
        if bound is None:
            values: list[Any] = []
            recorder = CompiledKernel(kernel.spec, lambda *arguments: values.extend(arguments))
            recorder.launch(buffer, weights, y, 0, schedule, activation_clamp=activation_clamp)
            before = tuple(to_ffi(t) for t in values[: WEIGHTS.start])
            between, after = values[Y + 1 : NUM_TOKENS], values[NUM_TOKENS + 1 :]
            function, binder = raw_function(kernel.kernel), binder_of(kernel)
            bound = BoundKernel(function, binder, before, tuple(between), tuple(after))
            self._bound[key] = bound
        return bound

    def remember(self, call: Hashable, kernel: BoundKernel) -> None:
        """Keep the kernel of a call; all calls are forgotten when they are many."""
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[call] = kernel

    def bind_weights(self, l1: Any, l2: Any) -> BoundWeights:
        """The converted weights of a layer, made at its first call. They have been checked."""
        tensors = (*l1, *l2)
        key = tuple(map(id, tensors))
        found = self.weights.get(key)
        if found is None or found.addresses != tuple(t.data_ptr() for t in tensors):
            found = BoundWeights(tensors, self._forgetting(lambda alive: alive.weights, key))
            self.weights[key] = found
        return found

    def bind_stats(self, stats: torch.Tensor) -> None:
        """Remember a tensor of cumulative counts that has been checked."""
        key = id(stats)
        forget = self._forgetting(lambda alive: alive._stats, key)
        self._stats[key] = weakref.ref(stats, forget), stats.data_ptr()

    def _forgetting(
        self, store: Callable[[Launcher], dict[Any, Any]], key: Hashable
    ) -> Callable[[Any], None]:
        """What removes an entry when a tensor of it dies; it keeps the launcher's memory no longer
        than the launcher lives."""
        launcher = weakref.ref(self)

        def forget(_: Any) -> None:
            alive = launcher()
            if alive is not None:
                store(alive).pop(key, None)

        return forget

    def knows_stats(self, stats: torch.Tensor) -> bool:
        """Whether this tensor of cumulative counts has been checked, and is where it was."""
        found = self._stats.get(id(stats))
        return found is not None and found[0]() is stats and found[1] == stats.data_ptr()
