"""GGUF's packed block formats -> numbers, vectorised in torch.

Each function takes blocks [n, bytes a block] uint8 and gives [n, numbers a block] float32. A "d" is a float16 scale; unless said
otherwise, the low nibbles of the bytes come first, then the high ones. Products are formed in float32 in the order that the reference
uses, so results are equal to it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hexad.models.formats.stored import FORMATS

CHUNK_BYTES = 4 * 2**20  # dequantise in pieces that stay in cache; bounds the temporaries


def is_packed(format_name: str) -> bool:
    """Whether the format packs several numbers into a block."""
    return FORMATS[format_name][0] > 1


def dequantize(packed: torch.Tensor, format_name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed rows [..., bytes a row] uint8 -> [..., numbers a row] in `dtype`."""
    block, block_bytes = FORMATS[format_name]
    blocks = packed.reshape(-1, block_bytes)
    out = torch.empty(blocks.shape[0], block, dtype=dtype, device=packed.device)
    unpack = _UNPACK[format_name]
    step = max(1, CHUNK_BYTES // block_bytes) if packed.device.type == "cpu" else max(1, blocks.shape[0])
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.reshape(*packed.shape[:-1], packed.shape[-1] // block_bytes * block)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, b] -> [n, 2b]: low nibbles, then high ones."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[n, 4] -> [n, 32]: bit j of the little-endian word, moved to the value 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    return bits.reshape(packed.shape[0], 32) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.float32) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.to(torch.float32) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; bytes 8-11 hold the low nibbles of scales 4-7 and, in
    their high nibbles, of minima 4-7, whose upper two bits are the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, 128] -> [n, 8, 32]: of each 32 bytes the low nibbles are one sub-block, the high ones the next."""
    quads = packed.reshape(-1, 4, 1, 32)
    return torch.cat((quads & 0x0F, quads >> 4), dim=2).reshape(-1, 8, 32)


def _k_affine(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Eight sub-blocks of 32 codes: (d * scale) * code - (dmin * minimum)."""
    scales, minima = _k_scales(blocks[:, 4:16])
    step = (_half(blocks, 0) * scales).unsqueeze(2)  # [n, 8, 1]
    base = (_half(blocks, 2) * minima).unsqueeze(2)
    return (step * codes.to(torch.float32) - base).reshape(-1, 256)


def _crumbs(packed: torch.Tensor) -> torch.Tensor:
    """[n, 64] -> [n, 8, 32]: sub-block 4 h + j is made of the two bits at 2 j of each of the 32 bytes of half h."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).reshape(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    both = blocks[:, 0:16]  # 16 sub-blocks of 16: a scale in the low nibble, a minimum in the high one
    step = (_half(blocks, 80) * (both & 0x0F).to(torch.float32)).unsqueeze(2)
    base = (_half(blocks, 82) * (both >> 4).to(torch.float32)).unsqueeze(2)
    codes = _crumbs(blocks[:, 16:80]).reshape(-1, 16, 16).to(torch.float32)
    return (step * codes - base).reshape(-1, 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    packed = blocks[:, 96:108]  # 16 scales of 6 bits: low nibbles of 8 bytes, then their high ones; upper two bits in the last four
    low = torch.cat((packed[:, :8] & 0x0F, packed[:, :8] >> 4), dim=1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).reshape(1, 4, 1)
    high = ((packed[:, 8:].reshape(-1, 1, 4) >> shifts) & 3).reshape(-1, 16)
    scales = (low | (high << 4)).to(torch.float32) - 32
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(1, 8, 1)
    top = (blocks[:, 0:32].reshape(-1, 1, 32) >> bits) & 1  # bit j of byte i: code i of sub-block j; 0 takes 4 away
    codes = (_crumbs(blocks[:, 32:96]) | (top << 2)).to(torch.float32) - 4
    step = (_half(blocks, 108) * scales).unsqueeze(2)
    return (step * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1  # bit j of byte i: code i of sub-block j
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:176]) | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=2).reshape(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    codes = (low | (high << 4)).to(torch.float32) - 32
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)  # [n, 16], one for 16 numbers
    step = (_half(blocks, 208) * scales).unsqueeze(2)
    return (step * codes.reshape(-1, 16, 16)).reshape(-1, 256)


_UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
