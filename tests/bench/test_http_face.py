import os
import signal
import threading

import pytest

from hexad.bench.httpface import HttpFace, _share
from hexad.common.errors import ConfigError


def test_times_are_those_of_the_server(timed_server):
    server = timed_server(ttft_s=0.1, itl_s=0.02)
    face = HttpFace(server.url, None, 1000)
    records = face.run([[300, 301]] * 6, 6, concurrency=2)
    assert len(records) == 6 and all(r.ok and r.output_tokens == 6 and len(r.events_s) == 6 for r in records)
    assert server.most_live == 2
    typical = sorted(r.ttft_s for r in records)[3]
    gap = sorted(g for r in records for g in r.itl_s)[15]
    assert 0.1 <= typical < 1 and 0.02 <= gap < 0.5
    body = server.requests[0]
    assert body["model"] == "stub" and body["prompt"] == [300, 301] and body["ignore_eos"] is True and body["temperature"] == 0


def test_several_clients_share_the_streams(timed_server):
    server = timed_server(ttft_s=0.3, itl_s=0.001)
    face = HttpFace(server.url, "stub", 1000, clients=2)
    assert len(face.run([[300 + i] for i in range(7)], 3, concurrency=5)) == 7
    assert server.most_live == 5 and {tuple(b["prompt"]) for b in server.requests} == {(300 + i,) for i in range(7)}
    assert 0 < face.info()["client_busy_max"] < 1.5


def test_refusals_are_errors_of_their_records(timed_server):
    server = timed_server(fail_after=1)
    records = HttpFace(server.url, "stub", 1000).run([[300]] * 3, 2, concurrency=1)
    assert [r.ok for r in records] == [True, False, False] and "HTTP 503" in records[1].error and "busy" in records[1].error


def test_a_connection_that_the_server_left_is_made_anew(timed_server):
    server = timed_server(ttft_s=0.01, itl_s=0.001, leave=True)
    records = HttpFace(server.url, "stub", 1000).run([[300 + i] for i in range(6)], 3, concurrency=2)
    assert all(r.ok and r.output_tokens == 3 and r.events_s[0] >= r.start_s for r in records), records
    assert {b["prompt"][0] for b in server.requests} == {300 + i for i in range(6)} and len(server.requests) == 6


def test_duration_cuts_the_run_and_never_repeats_a_prompt(timed_server):
    server = timed_server(ttft_s=0.01, itl_s=0.001)
    records = HttpFace(server.url, "stub", 1000).run([[300, 1], [301, 1]], 4, concurrency=2, duration_s=0.6)
    assert len(records) > 4 and sum(r.ok for r in records) >= len(records) - 2
    prompts = [tuple(b["prompt"]) for b in server.requests]
    assert len(set(prompts)) == len(prompts)


def test_poisson_arrivals(timed_server):
    server = timed_server(ttft_s=0.01, itl_s=0.001)
    records = HttpFace(server.url, "stub", 1000).run([[300 + i] for i in range(20)], 2, request_rate=100.0)
    starts = sorted(r.start_s for r in records)
    assert len(records) == 20 and 0.05 < starts[-1] - starts[0] < 1.0


def test_an_interrupt_hands_over_what_was_finished(timed_server):
    server = timed_server(ttft_s=0.01, itl_s=0.02)
    face = HttpFace(server.url, "stub", 1000)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            face.run([[300]] * 500, 5, concurrency=2)
    finally:
        signal.signal(signal.SIGINT, before)
    done = [r for r in face.records if r.ok]
    assert 1 <= len(done) < 500


def test_addresses_that_are_no_server_are_refused(timed_server):
    with pytest.raises(ConfigError, match="does not answer"):
        HttpFace("http://127.0.0.1:9", None, 1000)
    with pytest.raises(ConfigError, match="--served-model-name"):
        HttpFace(timed_server(models=("a", "b")).url, None, 1000)


def test_shares_add_up():
    assert [_share(7, 3, i) for i in range(3)] == [3, 2, 2]


def test_client_is_far_from_being_the_bottleneck(timed_server):
    """One client process on 64 streams, a token each 50 ms: it must be idle most of the time."""
    server = timed_server(ttft_s=0.05, itl_s=0.05)
    face = HttpFace(server.url, "stub", 1000, clients=1)
    face.run([[300]] * 64, 20, concurrency=64)
    assert face.info()["client_busy_max"] < 0.8 and not face.flags()
