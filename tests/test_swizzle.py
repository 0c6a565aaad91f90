"""Where the 16-byte chunks of an operand's rows lie, and that packing loses nothing."""

from __future__ import annotations

import pytest
import torch

from tl_megamoe.scaling import E4M3
from tl_megamoe.swizzle import pack_rows, swizzle_rows, unpack_rows


def random_codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def hardware_offset(byte: int, width: int) -> int:
    """PTX ISA, swizzling modes: bits 7 to 9 of an address are added to bits 4 to 6 without carry
    (128 bytes), bits 7 and 8 to bits 4 and 5 (64 bytes)."""
    return byte ^ (byte >> 3 & (0x70 if width == 128 else 0x30))


@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("rows", [8, 64, 128])
def test_chunks_are_where_the_hardware_reads_them(rows: int, width: int, seed: int) -> None:
    plain = random_codes((rows, width), seed)
    found = swizzle_rows(plain).flatten()
    chunk_of = {
        128: lambda row, chunk: chunk ^ row % 8,
        64: lambda row, chunk: chunk ^ row // 2 % 4,
    }
    for row in range(rows):
        for chunk in range(width // 16):
            at = row * width + chunk_of[width](row, chunk) * 16
            assert at == hardware_offset(row * width + chunk * 16, width)
            assert torch.equal(found[at : at + 16], plain[row, chunk * 16 : chunk * 16 + 16])


@pytest.mark.parametrize("width", [128, 64])
def test_swizzling_twice_changes_nothing(width: int, seed: int) -> None:
    plain = random_codes((3, 2, 24, width), seed)
    swizzled = swizzle_rows(plain)
    assert swizzled.shape == plain.shape
    assert not torch.equal(swizzled, plain)
    assert torch.equal(swizzle_rows(swizzled), plain)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 384), (192, 128), (320, 256)])
def test_pool_positions(rows: int, columns: int, seed: int) -> None:
    plain = random_codes((rows, columns), seed)
    packed = pack_rows(plain)
    assert packed.shape == (rows // 64, columns // 64, 64, 64)
    assert packed.is_contiguous()
    memory = packed.flatten()
    for row in {0, 1, 2, 7, 8, 63, 64 % rows, rows - 1, seed % rows}:
        for column in {0, 15, 16, 63, 64 % columns, columns - 1, seed % columns}:
            chunk = column % 64 // 16 ^ row % 64 // 2 % 4
            tile = row // 64 * (columns // 64) + column // 64
            at = tile * 4096 + row % 64 * 64 + chunk * 16 + column % 16
            assert memory[at] == plain[row, column]


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
def test_unpacking_is_the_inverse(dtype: torch.dtype, seed: int) -> None:
    plain = random_codes((192, 320), seed)
    packed = pack_rows(plain.view(dtype))
    back = unpack_rows(packed)
    assert packed.dtype == back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), plain)
    tiles = random_codes((3, 5, 64, 64), seed)
    assert torch.equal(pack_rows(unpack_rows(tiles)), tiles)


def test_results_are_copies(seed: int) -> None:
    plain = random_codes((64, 64), seed)
    before = plain.clone()
    pack_rows(plain).zero_()
    unpack_rows(pack_rows(plain)).zero_()
    assert torch.equal(plain, before)


def test_views_of_larger_tensors(seed: int) -> None:
    """What the checkpoint reader and `pretile` pass: rows with gaps between them."""
    plain = random_codes((64, 256), seed)
    assert torch.equal(pack_rows(plain[:, 64:192]), pack_rows(plain[:, 64:192].contiguous()))
    blocks = plain.unflatten(1, (2, 128)).transpose(0, 1)
    assert torch.equal(swizzle_rows(blocks), swizzle_rows(blocks.contiguous()))
