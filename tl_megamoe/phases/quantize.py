"""Quantize: BF16 activations and routes of any dtype to a buffer's inputs. A kernel of its own.

It runs before the fused kernel of a layer that is called with BF16 activations, and is bound by
memory: 2 bytes read and 1 written a value.

work of a block                            threads
GROUPS scales: `rows` tokens x `columns`   8 lanes a scale; each reads 2 x 16 bytes, writes 16
THREADS entries (token, slot) of routes    one an entry; each writes an expert and a weight

A block does one of the two. Those of the scales come first, a token's next to each other; they are
small, so that few tokens still spread: one of 7168 columns over seven blocks. The lanes of a scale
take its maximum by shuffles; no block waits for another and none uses shared memory.

A routed expert e is stored as e + e // L * S, for L routed and S shared experts a rank: every
rank's own copies of the shared experts follow its routed ones. Slots behind the caller's are the
shared experts of this rank, with weight 1, so those rows never leave it.
"""

import math

import tilelang.language as T

from ..device.plan import FP8
from ..problem import SCALE_BLOCK
from ..quantize import QuantizeSpec
from ..recipe import Recipe
from ..scaling import SCALING_CUDA, device_e4m3_scale, device_inverse

GROUPS = 16
"""Scales of a block."""
THREADS = 8 * GROUPS
ROW_UNIT = 8
"""BF16 values of a 16-byte load: rows of x start at multiples of it."""
PASS_CONFIGS = {
    # Rows are read at an address, whose bounds no check knows; the ends are guarded here.
    "tl.disable_safe_memory_legalize": True,
    # Scales and codes are those of scaling.py to the bit.
    "tl.enable_fast_math": False,
}
QUANTIZE_CUDA = "#define TLMM_DEV static __device__ __forceinline__" + SCALING_CUDA


@T.macro
def quantize_tile(x, codes, sf, at, shape, num_tokens, recipe):
    """Codes and scales of `rows` tokens x `columns` scales. All threads.

    Args:
        x: (capacity, groups, 128) BF16 of the caller, of which `num_tokens` rows exist.
        codes: (capacity, hidden) e4m3 of the buffer.
        sf: (capacity, groups) float32 of the buffer.
        at: the tile's place, counted in tiles of `shape`, in tokens and scales of a token.
        shape: (rows, columns) of the tile.
        num_tokens: tokens of the launch.
        recipe: exact or power-of-two scales.
    """
    rows, columns = shape
    # Bound, else every address divides anew, in 64 bits; multiplied where they are used, else the
    # vectoriser does not see that rows and columns are aligned.
    row_tile = T.alloc_var("int32")
    piece = T.alloc_var("int32")
    row_tile = at[0]
    piece = at[1]
    raw = T.alloc_fragment((rows * columns, SCALE_BLOCK), "bfloat16")
    values = T.alloc_fragment((rows * columns, SCALE_BLOCK), "float32")
    scale = T.alloc_fragment((rows * columns,), "float32")
    for i, j in T.Parallel(rows * columns, SCALE_BLOCK):
        if row_tile * rows + i // columns < num_tokens:
            raw[i, j] = x[row_tile * rows + i // columns, piece * columns + i % columns, j]
    for i, j in T.Parallel(rows * columns, SCALE_BLOCK):
        values[i, j] = T.Cast("float32", raw[i, j])
    T.reduce_absmax(values, scale, dim=1)
    for i in T.Parallel(rows * columns):
        scale[i] = device_e4m3_scale(scale[i], recipe)
        if row_tile * rows + i // columns < num_tokens:
            sf[row_tile * rows + i // columns, piece * columns + i % columns] = scale[i]
        scale[i] = device_inverse(scale[i], recipe, fast_math=False)
    for i, j in T.Parallel(rows * columns, SCALE_BLOCK):
        if row_tile * rows + i // columns < num_tokens:
            codes[
                row_tile * rows + i // columns, (piece * columns + i % columns) * SCALE_BLOCK + j
            ] = T.Cast(FP8, values[i, j] * scale[i])


@T.macro
def copy_route(idx, weights, topk_idx, topk_weights, entry, spec, rank):
    """One entry of the routes: the buffer's expert and the float32 weight. One thread.

    Args:
        idx: address, element strides of tokens and slots, whether int64 (else int32).
        weights: address, element strides, whether float32 (else BF16).
        topk_idx: (capacity, num_topk) int64 of the buffer.
        topk_weights: (capacity, num_topk) float32 of the buffer.
        entry: token * num_topk + slot.
        spec: a QuantizeSpec.
        rank: this rank.
    """
    local = spec.num_local_experts - spec.num_shared
    token = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    expert = T.alloc_var("int64")
    weight = T.alloc_var("float32")
    token = entry // spec.num_topk
    slot = entry - token * spec.num_topk
    if slot < spec.top_k:
        at = T.Cast("int64", token) * idx[1] + T.Cast("int64", slot) * idx[2]
        if idx[3] != 0:
            wide = T.make_tensor_from_addr(idx[0] + at * 8, (1,), "int64")
            expert = wide[0]
        else:
            narrow = T.make_tensor_from_addr(idx[0] + at * 4, (1,), "int32")
            expert = T.Cast("int64", narrow[0])
        # Compared before it is narrowed: a wide index may be anything.
        expert = T.if_then_else(
            (expert >= 0) & (expert < spec.num_routed_experts), expert, T.int64(-1)
        )
        if expert > 0:
            expert += T.Cast("int64", T.Cast("int32", expert) // local * spec.num_shared)
        start = T.Cast("int64", token) * weights[1] + T.Cast("int64", slot) * weights[2]
        if weights[3] != 0:
            full = T.make_tensor_from_addr(weights[0] + start * 4, (1,), "float32")
            weight = full[0]
        else:
            half = T.make_tensor_from_addr(weights[0] + start * 2, (1,), "bfloat16")
            weight = T.Cast("float32", half[0])
    else:
        expert = T.Cast("int64", rank * spec.num_local_experts + local + slot - spec.top_k)
        weight = 1.0
    topk_idx[token, slot] = expert
    topk_weights[token, slot] = weight


def build_quantize(spec: QuantizeSpec):
    """The TileLang program of a spec: a `T.prim_func` that `QuantizeKernel.launch` calls.

    Its launch takes at least one token. Strides of x are in units of `ROW_UNIT` values, so that
    the compiler knows each row to be aligned; those of the routes in elements.
    """
    hidden, topk, capacity = spec.hidden, spec.num_topk, spec.capacity
    groups = hidden // SCALE_BLOCK
    columns = math.gcd(groups, GROUPS)
    rows = GROUPS // columns
    pieces = groups // columns
    recipe = Recipe(scale=spec.scale)

    @T.prim_func
    def quantize(
        x: T.Tensor((capacity, hidden), FP8),
        x_sf: T.Tensor((capacity, groups), "float32"),
        topk_idx: T.Tensor((capacity, topk), "int64"),
        topk_weights: T.Tensor((capacity, topk), "float32"),
        from_x: T.int64,
        x_stride: T.int64,
        from_idx: T.int64,
        idx_token_stride: T.int64,
        idx_slot_stride: T.int64,
        idx_is_int64: T.int32,
        from_weights: T.int64,
        weights_token_stride: T.int64,
        weights_slot_stride: T.int64,
        weights_are_float32: T.int32,
        rank: T.int32,
        num_tokens: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(num_tokens, rows) * pieces + T.ceildiv(num_tokens * topk, THREADS),
            threads=THREADS,
        ) as grid_block:
            T.import_source(QUANTIZE_CUDA)
            tiles = T.alloc_var("int32")
            tiles = T.ceildiv(num_tokens, rows) * pieces
            if grid_block < tiles:
                quantize_tile(
                    T.make_tensor_from_addr(
                        from_x,
                        (capacity, groups, SCALE_BLOCK),
                        "bfloat16",
                        strides=(x_stride * ROW_UNIT, SCALE_BLOCK, 1),
                    ),
                    x,
                    x_sf,
                    (grid_block // pieces, grid_block % pieces),
                    (rows, columns),
                    num_tokens,
                    recipe,
                )
            else:
                entry = T.alloc_var("int32")
                entry = (grid_block - tiles) * THREADS + T.get_thread_binding()
                if entry < num_tokens * topk:
                    copy_route(
                        (from_idx, idx_token_stride, idx_slot_stride, idx_is_int64),
                        (
                            from_weights,
                            weights_token_stride,
                            weights_slot_stride,
                            weights_are_float32,
                        ),
                        topk_idx,
                        topk_weights,
                        entry,
                        spec,
                        rank,
                    )

    return quantize
