"""Overload is a 503 with a time to wait, given before any costly work; load and metrics say what happens."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx2 as httpx
import pytest
from api_stub import ByteTokenizer, StubEngine, serving

from hexad.application.api.admission import Admission, retry_after_header
from hexad.common.errors import OverloadedError


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        return super().encode(text, add_special_tokens)


def test_overload_is_refused_before_tokenising() -> None:
    engine, tokenizer = StubEngine(), CountingTokenizer()
    engine.first_delay_s = 1.0
    values = {"scheduler__max_num_seqs": 2, "scheduler__max_num_queued_reqs": 1}
    with serving(engine, tokenizer=tokenizer, **values) as server, httpx.Client(base_url=server.url, timeout=10) as http:
        body = {"prompt": "x", "max_tokens": 1}
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(httpx.post(server.url + "/v1/completions", json=body).status_code))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + 3
        while server.state.admission.in_flight < 3 and time.monotonic() < end_s:
            time.sleep(0.01)
        assert http.get("/load").json()["server_load"] == 3
        calls = tokenizer.calls
        for stream in (False, True):
            refused = http.post("/v1/completions", json={**body, "stream": stream})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert tokenizer.calls == calls
        assert http.get("/health").status_code == 200
        for thread in threads:
            thread.join()
        assert statuses == [200] * 3
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/load").json()["server_load"] == 0


async def test_admission_counts() -> None:
    admission = Admission(max_running=None, max_queued=1)
    first = admission.enter()
    with pytest.raises(OverloadedError) as caught:
        admission.enter()
    assert caught.value.retry_after_s is not None
    first.started = True
    second = admission.enter()
    first.release()
    first.release()
    assert admission.in_flight == 1
    assert not await admission.drain(0.01)
    with pytest.raises(OverloadedError):
        admission.enter()
    admission.kill()
    assert second.killed.done()
    asyncio.get_running_loop().call_later(0.01, second.release)
    assert await admission.drain(1.0)
    unbounded = Admission(1, None)
    tickets = [unbounded.enter() for _ in range(100)]
    assert len(tickets) == unbounded.in_flight
    assert [retry_after_header(s) for s in (0.0, 1.2, 500.0)] == ["1", "2", "60"]


def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            time.sleep(4.0)
            return super().encode(text, add_special_tokens)

    with serving(tokenizer=Slow()) as server:
        slow = threading.Thread(target=lambda: httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}))
        slow.start()
        time.sleep(0.1)
        start_s = time.monotonic()
        assert httpx.get(server.url + "/health").status_code == 200
        assert time.monotonic() - start_s < 3
        slow.join()


def test_metrics_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    engine = StubEngine()
    with serving(engine) as server, httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 5, "n": 2})
        http.post("/v1/completions", json={"prompt": "x", "temperature": 9})
        http.get("/nowhere")
        text = http.get("/metrics").text
    assert 'hexad:generation_tokens_total{model_name="m"} 10.0' in text
    assert 'vllm:prompt_tokens_total{model_name="m"} 4.0' in text
    assert 'hexad:time_to_first_token_seconds_count{model_name="m"} 1.0' in text
    assert 'hexad:http_requests_total{method="POST",route="/v1/completions",status="400"} 1.0' in text
    assert 'route="none",status="404"' in text
    assert "/nowhere" not in text


def test_access_records_have_sizes_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hexad.access"), serving() as server:
        httpx.post(server.url + "/v1/completions", json={"prompt": "my secret", "max_tokens": 5}, headers={"x-request-id": "r1"})
        httpx.get(server.url + "/health")
        httpx.post(server.url + "/v1/completions", json={"prompt": "x", "temperature": 9})
        httpx.get(server.url + "/nowhere")
    records = [record for record in caplog.records if record.name == "hexad.access"]
    assert [record.hexad_fields.get("error") for record in records] == [None, "invalid_value", "not_found"]
    fields = records[0].hexad_fields
    assert fields["request_id"] == "r1"
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["finish_reason"]) == (9, 5, "length")
    assert "secret" not in caplog.text
