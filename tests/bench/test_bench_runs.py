import random
import time

import pytest

from hexad.bench.loads import all_loads, find_load, random_prompts
from hexad.bench.records import Record, Slo, parse_slo, percentile, serving_metrics, summary_ms, tokens_between
from hexad.bench.runs import Options, Run, RunFailedError, step_time_s
from hexad.common.errors import ConfigError


def measure(face, load, **options):
    saved = []
    metrics = Run(face, load, Options(**options), save=lambda m: saved.append({**m})).measure()
    return metrics, saved


def test_percentiles_agree_with_numpy():
    import numpy as np

    seed = random.randrange(2**32)
    print("seed", seed)
    sample = np.random.default_rng(seed).exponential(size=101).tolist()
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(sorted(sample), percent) == pytest.approx(np.percentile(sample, percent))
    found = summary_ms(sample)
    assert found["mean"] == pytest.approx(1e3 * np.mean(sample)) and found["std"] == pytest.approx(1e3 * np.std(sample))


def test_record_times():
    record = Record(10, 1.0, [1.5, 1.6, 1.8], 3, 1.8)
    assert record.ttft_s == 0.5 and record.e2el_s == pytest.approx(0.8)
    assert record.tpot_s == pytest.approx(0.15) and record.itl_s == pytest.approx([0.1, 0.2])
    assert Record(1, 0.0, [1.0], 1, 1.0).tpot_s is None
    assert not Record(1, 0.0).ok and not Record(1, 0.0, [1.0], 1, 1.0, "broken").ok


def test_speculative_arrivals_count_all_their_tokens():
    record = Record(1, 0.0, [1.0, 2.0], 6, 2.0)  # three tokens an arrival
    assert record.tpot_s == pytest.approx(0.2)
    assert tokens_between([record], 1.5, 2.5) == 3


def test_serving_metrics_have_the_names_of_vllm_bench():
    records = [Record(10, 0.0, [0.1, 0.2, 0.3], 3, 0.3), Record(10, 0.0, [5.0, 5.1], 2, 5.1), Record(1, 0.0, error="503")]
    found = serving_metrics(records, 10.0, Slo(1000, None))
    assert found["completed"] == 2 and found["failed"] == 1 and found["request_goodput"] == 0.1
    assert found["output_throughput"] == 0.5 and found["total_token_throughput"] == 2.5 and found["errors"] == ["503"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{p}_{name}_ms" for p in ("mean", "median", "std", "p99")} <= set(found)


def test_goodput_limits_are_read_and_checked():
    assert parse_slo(["ttft:500", "e2el:9"]) == Slo(500, None, 9)
    assert parse_slo([]) == Slo()
    for bad in ("ttft", "speed:1", "ttft:-1", "ttft:x"):
        with pytest.raises(ConfigError):
            parse_slo([bad])


def test_standard_loads_are_the_published_numbers():
    loads = all_loads()
    assert sorted(loads) == [f"W{i}" for i in range(1, 10)]
    assert (loads["W1"].requests, loads["W1"].input_tokens, loads["W1"].output_tokens) == (1000, (512,), 256)
    assert loads["W5"].prompt_tokens == 2176 and loads["W7"].batch == (1, 8, 64, 256) and loads["W9"].concurrency == (1, 16, 64, 256)
    small = loads["W9"].scaled(input_tokens=[8], concurrency=[2])
    assert small.input_tokens == (8,) and small.concurrency == (2,) and small.output_tokens == 128
    assert loads["W1"].scaled(batch=[4]).batch == ()  # only what a load sweeps can be scaled


def test_prompts_are_random_repeatable_and_share_their_prefix():
    a, b = (random_prompts(3, 5, 1000, 7, [1, 2]) for _ in range(2))
    assert a == b and all(p[:2] == [1, 2] and len(p) == 7 for p in a) and a[0] != a[1]
    assert all(250 <= token < 1000 for p in a for token in p[2:])


def test_single_stream(scripted_face):
    metrics, saved = measure(scripted_face(), find_load("W2"))
    assert metrics["ttft_ms"] == pytest.approx(100) and metrics["tpot_ms"] == pytest.approx(10) and len(saved) == 3


def test_prefill_takes_the_median_of_separate_requests(scripted_face):
    face = scripted_face()
    metrics, _ = measure(face, find_load("W3").scaled(requests=4))
    assert metrics["ttft_ms"] == {"512": pytest.approx(100), "8192": pytest.approx(100)}
    assert metrics["prefill_tok_s"]["8192"] == pytest.approx(81920)
    measured = [call for call in face.calls if call[1] == 1]
    assert len(measured) == 8 and all(len(prompts) == 1 for prompts, _, _ in measured)


def test_decode_sweep_times_steps_with_the_whole_batch_running(scripted_face):
    metrics, saved = measure(scripted_face(), find_load("W7").scaled(batch=[1, 8]))
    assert metrics["ms_per_step"] == {"1": pytest.approx(10), "8": pytest.approx(10)} and len(saved) == 2


def test_step_time_leaves_out_the_filling_of_the_batch():
    late = Record(1, 0.0, [1.0 + 0.01 * i for i in range(100)], 100, 2.0)
    early = Record(1, 0.0, [0.1, 0.6, *(1.0 + 0.01 * i for i in range(98))], 100, 2.0)  # slow while the other is prefilled
    assert step_time_s([late, early]) == pytest.approx(0.01, rel=0.02)
    with pytest.raises(RunFailedError, match="together"):
        step_time_s([Record(1, 0.0, [1.0, 2.0], 2, 2.0), Record(1, 0.0, [3.0, 4.0], 2, 4.0)])


def test_offline(scripted_face):
    metrics, _ = measure(scripted_face(), find_load("W1").scaled(requests=10, output_tokens=11))
    assert metrics["total_s"] == pytest.approx(0.2) and metrics["output_tok_s"] == pytest.approx(550)
    assert metrics["total_tok_s"] == pytest.approx(10 * 523 / 0.2) and metrics["ttft_ms"]["p50"] == pytest.approx(100)


def test_shared_prefix_is_the_same_in_both_passes_and_the_rest_is_not(scripted_face):
    face = scripted_face()
    metrics, _ = measure(face, find_load("W5").scaled(requests=4, shared_prefix_tokens=16, input_tokens=[8]))
    (cold, _, _), (cached, _, _) = face.calls[-2:]
    prefixes = {tuple(p[:16]) for p in cold + cached}
    assert len(prefixes) == 1 and len({tuple(p[16:]) for p in cold + cached}) == 8
    assert set(metrics["total_s"]) == {"cold", "cached"}


def test_closed_loop_sends_eight_requests_a_stream(scripted_face):
    face = scripted_face()
    metrics, _ = measure(face, find_load("W9").scaled(concurrency=[2, 4], output_tokens=4))
    runs = [(len(prompts), more["concurrency"]) for prompts, _, more in face.calls if more.get("concurrency")]
    assert runs == [(16, 2), (32, 4)]
    assert set(metrics["ttft_ms"]) == {"2", "4"} and metrics["serving"]["4"]["completed"] == 32
    assert {"ttft_ms", "itl_ms", "output_tok_s", "goodput"} <= set(metrics)


def test_the_start_and_end_of_a_load_generator_are_not_in_the_load(scripted_face):
    """A client process takes a while to start, and to hand its records over: that is no time of the server's."""
    face, run = scripted_face(ttft_s=0.1, itl_s=0.1), scripted_face.run

    def late(*args, **more):
        time.sleep(0.3)
        began = time.perf_counter()
        for record in run(face, *args, **more):
            record.start_s, record.end_s = began, began + record.end_s
            record.events_s = [began + moment for moment in record.events_s]
        time.sleep(0.3)
        return face.records

    face.run = late
    load = find_load("W9").scaled(concurrency=[2], requests=2, output_tokens=4)
    whole = measure(face, load)[0]
    assert whole["output_tok_s"]["2"] == pytest.approx(8 / 0.4) and whole["serving"]["2"]["duration"] == pytest.approx(0.4)
    cut = measure(face, load, duration_s=0.25)[0]  # two of the four tokens of each; those after a fifth of the time count
    assert cut["serving"]["2"]["duration"] == pytest.approx(0.25) and cut["output_tok_s"]["2"] == pytest.approx(4 / 0.2)
    steady = measure(face, find_load("W1").scaled(requests=2, output_tokens=4), duration_s=0.25)[0]
    assert steady["steady_s"] == pytest.approx(0.2) and steady["output_tok_s"] == pytest.approx(4 / 0.2)


def test_failed_requests_are_an_error_not_a_number(scripted_face):
    for load in (find_load("W1").scaled(requests=3), find_load("W2"), find_load("W9").scaled(concurrency=[2])):
        with pytest.raises(RunFailedError, match="out of blocks"):
            measure(scripted_face(fail="out of blocks"), load)
