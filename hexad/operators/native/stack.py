"""`decoder_stack` in one native call: this file lays the network and each step out as the structs of stack.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.kv_int8 import row_width
from hexad.operators.native.library import (
    ACTIVATIONS,
    DTYPES,
    PAGE_DTYPES,
    GroupCall,
    LayerDesc,
    PackedWeight,
    StackCall,
    StackDesc,
    check,
    probe,
    require,
)
from hexad.operators.registry import Kernel
from hexad.operators.stack import Product, StackArgs, StackParams

MAX_HEAD_DIM = 256  # the kernels keep a head in registers and on the stack
LANES = 16


def supports_stack(args: StackArgs) -> list[str]:
    reasons = []
    if args.device_type != "cpu":
        return [f"needs a CPU, not {args.device_type}"]
    dim, kv_dtype = args.attention.head_dim, args.attention.kv_dtype
    if dim % LANES or dim > MAX_HEAD_DIM:
        reasons.append(f"needs heads of a multiple of {LANES} features, at most {MAX_HEAD_DIM}, not {dim}")
    if args.gated and args.intermediate % LANES:
        reasons.append(f"needs a multiple of {LANES} intermediate features, not {args.intermediate}")
    if args.dtype not in DTYPES or kv_dtype not in PAGE_DTYPES:
        reasons.append(f"needs float32 or bfloat16 (pages also int8), not {args.dtype} with pages in {kv_dtype}")
    if args.activation not in ACTIVATIONS:
        reasons.append(f"has no activation {args.activation}")
    if reasons:
        return reasons
    library, reason = probe()
    return [] if library is not None else [reason]


class NativeStack:
    """A network laid out for the library. Owns every tensor and array that the structs point to."""

    def __init__(self, args: StackArgs, params: StackParams) -> None:
        self.args = args
        self.library = require()
        self.forward = self.library.handle.hx_stack_forward
        self._kept: list[Any] = [params]
        self.layers = (LayerDesc * len(params.layers))()
        for index, (target, layer) in enumerate(zip(self.layers, params.layers, strict=True)):
            for name in ("qkv", "attention_out", "gate_up", "down"):
                setattr(target, name, _packed(getattr(layer, name)).pointer)
            target.input_norm = self._floats(layer.input_norm)
            target.post_norm = self._floats(layer.post_attention_norm)
            target.q_norm, target.k_norm = self._floats(layer.q_norm), self._floats(layer.k_norm)
            target.attention_out_norm, target.down_norm = self._floats(layer.attention_out_norm), self._floats(layer.down_norm)
            target.cos_sin = self._floats(layer.cos_sin)
            target.kv_group = args.kv_group[index]
            target.window = (args.attention.window or 0) if args.windowed[index] else 0
        self.desc = self._describe(args, params)
        self._pages: Sequence[KVPages] = ()
        self._keys: Any = None
        self._values: Any = None

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().to(torch.float32).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _describe(self, args: StackArgs, params: StackParams) -> StackDesc:
        rope, attention = args.rope, args.attention
        return StackDesc(
            hidden=args.hidden,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            dim=attention.head_dim,
            rotary=rope.rotary_dim,
            interleaved=rope.interleaved,
            intermediate=args.intermediate,
            activation=ACTIVATIONS[args.activation],
            gated=args.gated,
            layers=len(params.layers),
            dtype=DTYPES[args.dtype],
            kv_dtype=PAGE_DTYPES[attention.kv_dtype],
            eps=args.eps,
            scale=attention.scale,
            softcap=attention.softcap or 0.0,
            embedding_scale=args.embedding_scale,
            embedding=_packed(params.embedding).pointer,
            final_norm=self._floats(params.final_norm),
            max_len=args.max_len,
        )

    def pages(self, kv_layers: Sequence[KVPages]) -> tuple[Any, Any]:
        """Pointers to the layers' pages; the same list as last time costs nothing."""
        if kv_layers is not self._pages:
            attention = self.args.attention
            assert kv_layers[0].k.shape[-1] == row_width(attention.head_dim, attention.kv_dtype)
            for kv in kv_layers:
                assert kv.k.dtype == kv.v.dtype == attention.kv_dtype
                assert kv.k.is_contiguous() and kv.v.is_contiguous() and kv.k.shape == kv.v.shape == kv_layers[0].k.shape
            make = ctypes.c_void_p * len(kv_layers)
            self._keys = make(*(kv.k.data_ptr() for kv in kv_layers))
            self._values = make(*(kv.v.data_ptr() for kv in kv_layers))
            self._pages = kv_layers
        return self._keys, self._values


def _packed(product: Product) -> PackedWeight:
    assert isinstance(product.packed, PackedWeight)
    return product.packed


def prepare_stack(args: StackArgs, params: StackParams) -> NativeStack:
    require().set_threads(torch.get_num_threads())
    return NativeStack(args, params)


def bind_stack(args: StackArgs) -> Kernel:
    hidden, dtype = args.hidden, args.dtype

    def decoder_stack(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: Sequence[AttentionBatch],
        kv_layers: Sequence[KVPages],
        prepared: NativeStack,
        starting: Callable[[], None] | None = None,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = prepared.pages(kv_layers)
        tables = [batch.block_table.contiguous() for batch in groups]
        slots = [batch.slots.contiguous() for batch in groups]
        calls = (GroupCall * len(groups))(
            *(GroupCall(table.data_ptr(), slot.data_ptr(), table.shape[1]) for table, slot in zip(tables, slots, strict=True))
        )
        token_ids, positions, first = token_ids.contiguous(), positions.contiguous(), groups[0]
        last = None if last is None else last.contiguous()
        out = torch.empty(len(token_ids if last is None else last), hidden, dtype=dtype)
        call = StackCall(
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            query_start=first.query_start.data_ptr(),
            seq_lens=first.seq_lens.data_ptr(),
            groups=ctypes.addressof(calls),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            out=out.data_ptr(),
            last=None if last is None else last.data_ptr(),
            num_blocks=kv_layers[0].k.shape[0],
            tokens=token_ids.shape[0],
            rows=first.seq_lens.shape[0],
            num_groups=len(groups),
            block_size=first.block_size,
            num_last=-1 if last is None else len(last),
        )
        arguments = ctypes.addressof(prepared.desc), ctypes.addressof(prepared.layers), ctypes.addressof(call)
        if starting is not None:
            starting()
        check(prepared.forward(*arguments))
        return out

    return decoder_stack
