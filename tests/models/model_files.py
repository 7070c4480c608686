"""Small models and texts made on the spot, for tests of everything that reads model files."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch

from hexad.models.spec import AttentionSpec, MLPSpec, ModelSpec, RopeSpec

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def fresh_seed() -> int:
    """A new seed each run; printed, so that pytest shows it on failure."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    return seed


def tiny_spec(**changes: Any) -> ModelSpec:
    spec = ModelSpec(
        name="tiny",
        family="llama",
        vocab_size=96,
        hidden=32,
        num_layers=2,
        max_len=128,
        attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5),
        mlp=MLPSpec(intermediate=48),
        rope=RopeSpec(dim=8),
        layer_kinds=("full", "full"),
    )
    return msgspec.structs.replace(spec, **changes)


def save_llama(folder: Path, seed: int, *, shard_bytes: int | None = None, **config: Any) -> dict[str, torch.Tensor]:
    """A random Llama checkpoint as transformers writes it; returns its tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | config)))
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return {n: t.clone() for n, t in model.state_dict().items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters to GGUF do to Llama's q and k: features (i, i + half) of a head become neighbours."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    _, _, index, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{GGUF_NAMES[stem]}.{kind}"


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any] | None = None, **types: gguf.GGMLQuantizationType
) -> None:
    """A Llama GGUF of Hugging Face named tensors; `types` by suffix of the GGUF name ("attn_q"), F32 otherwise."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(tensors["model.embed_tokens.weight"].shape[1])
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in (metadata or {}).items():
        add(writer, key, value)
    for name, values in tensors.items():
        theirs = gguf_name(name)
        if ".attn_q." in theirs or ".attn_k." in theirs:
            values = interleave(values, 4 if ".attn_q." in theirs else 2)
        kind = next((t for stem, t in types.items() if f"{stem}." in theirs), gguf.GGMLQuantizationType.F32)
        writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def damaged(data: bytes, rng: random.Random, head: int) -> bytes:
    """The file with a few bytes changed near its start, or cut short."""
    out = bytearray(data)
    if rng.random() < 0.3:
        return bytes(out[: rng.randrange(len(out))])
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(head, len(out)))
        choice = rng.random()
        if choice < 0.5:
            out[at] = rng.randrange(256)
        elif choice < 0.8:
            out[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", rng.randbytes(8)])
        else:
            del out[at : at + rng.randint(1, 9)]
    return bytes(out)


_PIECES = [
    "I'll", "you've", "can't", "we'RE", "IT'S", "'tis", "don’t", " the", " quick", "brown", "\n", "\n\n", "\r\n", "\t", "\t\t",
    "  ", "    ", " ", "12345", "3.14159", "1,000,000", "0x1F", "½", "²³", "٣٤٥", "Ⅷ", "東京駅", "中文字符", "안녕하세요",
    "ありがとう", "🦜", "🚀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "é", "e\u0301", "ñ", "n\u0303", "Å", "ﬁ", "ſ", "İstanbul", "straße",
    "Ελλάδα", "Привет", "עברית", "العربية", "ไทย", "हिन्दी", "def f(x):\n    return x**2\n", "for (int i = 0; i < n; ++i) {",
    "</div>", "<a href=\"x\">", "SELECT * FROM t;", "a_b_c", "camelCase", "HTTPServer2", "https://example.org/a?b=c&d=%20",
    "user@example.com", "...", "!!!", "?!", "--", "—", "“quoted”", "«»", "$100", "€5", "100%", "a/b", "\\n", "\u00a0", "\u200b",
    "\ufeff", "\u3000", "\u2028", "\x00", "\x07", "\x7f", "\u0085", "\ufffd", "\U0001d54f", "\ue000", "▁", "Ġ", "Ċ", "<0x0A>",
    "<s>x", "[INST]",
]  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    """Strings that tokenizers disagree about: contractions, digits, scripts, emoji, both normal forms, white space, code."""
    rng = random.Random(seed)
    out = list(_PIECES)
    while len(out) < count:
        kind = rng.random()
        if kind < 0.8:
            out.append("".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 12))))
        elif kind < 0.9:
            out.append(
                "".join(chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x250, 0xD800)])) for _ in range(rng.randint(1, 20)))
            )
        else:
            out.append(" ".join(rng.choices(["a", "Word", "of", "mixed", "LENGTH", "7", "42"], k=rng.randint(1, 30))))
    return out
