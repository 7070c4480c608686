"""Composition: what is built, what is refused, what is let go when building fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hexad import compose
from hexad.common.config import HexadConfig
from hexad.common.errors import OutOfMemoryError

FAKE = {"device.device": "fake", "cache.kv_cache_memory_bytes": 2**22}


def test_build_on_the_fake_device(model_folder: Path) -> None:
    phases: list[str] = []
    config = HexadConfig().with_values({**FAKE, "model.model": str(model_folder), "scheduler.max_num_seqs": 4})
    engine = compose.build(config, lambda phase, detail: phases.append(phase))
    welcome = engine.welcome
    assert phases == ["open", "import", "read", "allocate"]
    assert welcome.model == model_folder.name and welcome.vocab_size == 258 and welcome.max_len == 512
    assert welcome.config_hash == engine.config.fingerprint() != config.fingerprint()
    assert welcome.kv_bytes <= 2**22 and welcome.num_blocks * welcome.block_size == welcome.max_request_blocks_tokens
    assert engine.config.scheduler.max_num_seqs == 4
    assert any("max_num_batched_tokens" in note for note in engine.notes)
    engine.core.close()


def test_the_longest_sequence_follows_kv_memory(model_folder: Path) -> None:
    small = HexadConfig().with_values(
        {**FAKE, "model.model": str(model_folder), "model.dtype": "float32", "cache.kv_cache_memory_bytes": 60_000}
    )
    engine = compose.build(small)
    page_bytes = 16 * 2 * 2 * 16 * 2 * 4
    assert engine.welcome.max_len == 60_000 // page_bytes * 16 < 512
    with pytest.raises(OutOfMemoryError, match=f"use at most {engine.welcome.max_len}"):
        compose.build(small.with_values({"model.max_model_len": 512}))


def test_a_failed_build_closes_the_executor(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hexad.engine.executor.fake import FakeExecutor

    made: list[FakeExecutor] = []
    allocate = FakeExecutor.allocate

    def fail(self: FakeExecutor, layout: object) -> None:
        made.append(self)
        raise OutOfMemoryError("no")

    monkeypatch.setattr(FakeExecutor, "allocate", fail)
    with pytest.raises(OutOfMemoryError):
        compose.build(HexadConfig().with_values({**FAKE, "model.model": str(model_folder)}))
    assert made[0].closed and allocate is not fail


def test_importing_the_roof_loads_no_torch() -> None:
    code = "import sys, hexad.compose, hexad.llm; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
