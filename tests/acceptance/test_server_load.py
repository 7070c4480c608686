"""500 requests at 32 in flight, a third of the callers disconnected at random: nothing is left behind, and the others notice nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from engine_driver import fresh_seed
from load import load, resident_bytes, wait_idle
from tiny_model import ServerProcess, make_model, served

GROWTH_LIMIT = 24 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = make_model(tmp_path_factory.mktemp("load"))
    with served(folder, "--device", "fake:0.002", "--log-level", "warning") as process:
        yield process


def test_b36_nothing_is_left_after_500_requests(server: ServerProcess) -> None:
    rng = random.Random(fresh_seed())
    prompts = ["x" * rng.randint(1, 300) + str(index) for index in range(20)]
    options = {"in_flight": 32, "patience_s": 0.25, "tokens": 16}
    load(server, rng, prompts, count=150, **options)
    wait_idle(server)
    before = resident_bytes(server)
    outcome = load(server, rng, prompts, count=500, **options)
    assert outcome.num_complete == 333
    assert outcome.num_gone > 120
    state = wait_idle(server)
    assert (state["num_running"], state["num_waiting"], state["server_load"]) == (0, 0, 0)
    assert state["kv_usage"] == 0, "a block is neither free nor cached"
    assert resident_bytes(server) - before < GROWTH_LIMIT
    assert all(len(texts) == 1 for texts in outcome.answers.values()), "a caller's answer depends on the others"
    metrics = httpx.get(server.url + "/metrics").text
    assert 'hexad:request_success_total{finished_reason="abort"' in metrics
    with httpx.Client(base_url=server.url, timeout=30) as http:  # and it serves on
        for prompt, texts in list(outcome.answers.items())[:5]:
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            assert {http.post("/v1/completions", json=body).json()["choices"][0]["text"]} == texts
