"""Recording and replaying step plans: clean traces are clean, and each kind of mistake is found."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time

import msgspec
import pytest
from sched_driver import FULL, Driver, layout, sliding

from hexad.common.errors import RequestError
from hexad.engine.executor.fake import FakeExecutor, FakeScript
from hexad.engine.plan import KVMove
from hexad.orchestration.recorder import Planned, PlanRecorder, Retired, read_trace
from hexad.orchestration.replay import Replayer, replay


def busy_driver(r: random.Random, **options) -> Driver:
    """All features on: two groups, a pool that is too small, prefixes, choices, drafts, priorities, aborts."""
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "max_prefill_tokens_per_step": 24,
        "max_model_len": 160,
        "scheduling_policy": "priority",
        "check": False,
    }
    script = FakeScript(vocab_size=200, eos_every=60)
    executor = FakeExecutor(script=script, drafts=r.choice([0, 2]), check_kv="last")  # the replay checks all the rest
    return Driver(layout(90, 8, FULL, sliding(20)), executor=executor, **{**defaults, **options})


def feed(driver: Driver, r: random.Random) -> None:
    """Now and then something arrives or goes away."""
    if driver.scheduler.stats().num_waiting < 6 and r.random() < 0.3:
        head = [r.randrange(4)] * r.choice([8, 16, 24])
        with contextlib.suppress(RequestError):
            driver.submit(
                head + [r.randrange(200) for _ in range(r.randrange(1, 40))],
                max_tokens=r.choice([1, 8, 40, 90]),
                n=r.choice([1, 1, 1, 2, 4]),
                seed=r.randrange(100),
                priority=r.randrange(3),
                logprobs=r.choice([None, None, 1]),
                prompt_logprobs=r.choice([None, None, None, 0]),
                eos=(7,),
            )
    if r.random() < 0.01 and driver.seen:
        driver.abort(max(driver.seen))


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    return seed


def test_ten_thousand_steps_with_all_features_replay_clean(tmp_path, seed):
    r = random.Random(seed)
    driver = busy_driver(r)
    driver.scheduler.preempt_hook = lambda step: step % 977 == 0
    path = tmp_path / "trace.bin"
    with PlanRecorder(path, layout(90, 8, FULL, sliding(20))) as recorder:
        driver.observers.append(recorder)
        while len(driver.plans) < 10_000:
            feed(driver, r)
            driver.step()
        driver.drain()
    begin = time.perf_counter()
    report = replay(path)
    print(report, f"{time.perf_counter() - begin:.1f} s")
    assert report.violations == () and report.num_steps >= 10_000 and report.max_in_flight == 2
    stats = driver.scheduler.stats()
    assert stats.preemptions_total > 0 and stats.prefix_hits_total > 0 and stats.evicted_blocks_total > 0
    assert report.num_moves > 0 and report.num_cached_tokens > 0 and report.num_reads > 100 * report.num_steps
    driver.scheduler.check_integrity()


def records(seed: int, steps: int = 150):
    """A short trace as a list: ("plan", plan) and ("result", result)."""
    r = random.Random(seed)
    driver = busy_driver(r)

    class Log(list):
        def on_plan(self, plan):
            self.append(("plan", plan))

        def on_result(self, plan, result):
            self.append(("result", result))

    log = Log()
    driver.observers.append(log)
    for _ in range(steps):
        feed(driver, r)
        driver.step()
    driver.drain()
    return driver, list(log)


def replayed(log) -> tuple[str, ...]:
    replayer = Replayer(layout(90, 8, FULL, sliding(20)))
    for kind, record in log:
        (replayer.planned if kind == "plan" else replayer.retired)(record)
        if replayer.report().violations:
            break
    return replayer.report().violations


def change(log, find, make):
    """The log with the first record for which `find` is true replaced by what `make` gives."""
    for index, (kind, record) in enumerate(log):
        if kind == "plan" and find(record):
            return [*log[:index], (kind, make(record)), *log[index + 1 :]]
    pytest.skip("this load never made such a plan")
    return []


def _replace_row(plan, find, **values):
    rows = list(plan.rows)
    index = next(i for i, row in enumerate(rows) if find(row))
    rows[index] = msgspec.structs.replace(rows[index], **values)
    return msgspec.structs.replace(plan, rows=tuple(rows))


def test_mistakes_are_found(seed):
    _, log = records(seed)
    assert replayed(log) == ()

    def grows(row):
        return bool(row.new_block_ids)

    plan = next(record for kind, record in log if kind == "plan" and any(map(grows, record.rows)))
    row = next(row for row in plan.rows if grows(row))
    others = [block for kind, other in log if kind == "plan" for new in other.new for block in new.block_ids[0]]
    wrong = tuple(tuple(others[0] for _ in table) for table in row.new_block_ids)
    broken = change(log, lambda p: p is plan, lambda p: _replace_row(p, lambda q: q is row, new_block_ids=wrong))
    assert replayed(broken), "another's block was handed out"

    broken = change(log, lambda p: p is plan, lambda p: _replace_row(p, lambda q: q is row, new_block_ids=()))
    assert replayed(broken), "a block was forgotten"

    def cached(p):
        return any(new.num_cached for new in p.new)

    def swap(p):
        new = next(new for new in p.new if new.num_cached >= 16)
        tables = [list(table) for table in new.block_ids]
        tables[0][0], tables[0][1] = tables[0][1], tables[0][0]
        swapped = msgspec.structs.replace(new, block_ids=tuple(map(tuple, tables)))
        return msgspec.structs.replace(p, new=tuple(swapped if n is new else n for n in p.new))

    broken = change(log, lambda p: any(new.num_cached >= 16 for new in p.new), swap)
    assert "another prefix" in replayed(broken)[0]

    def claim(p):
        return msgspec.structs.replace(p, new=tuple(msgspec.structs.replace(n, num_cached=n.num_cached + 1) for n in p.new))

    assert replayed(change(log, cached, claim)), "a position that nobody computed was taken as cached"
    assert replayed(change(log, lambda p: p.kv_moves, lambda p: msgspec.structs.replace(p, kv_moves=()))), "a copy was left out"

    def short(p):
        moves = tuple(KVMove(m.group, m.source_block, m.target_block, m.num_tokens - 1) for m in p.kv_moves)
        return msgspec.structs.replace(p, kv_moves=moves)

    assert replayed(change(log, lambda p: p.kv_moves, short)), "a copy was one token short"
    assert replayed(change(log, lambda p: p.finished, lambda p: msgspec.structs.replace(p, finished=(*p.finished, 10**9))))
    shifted = change(log, lambda p: p.step_id > 20 and p.rows, lambda p: _replace_row(p, lambda q: True, start=p.rows[0].start + 1))
    assert replayed(shifted), "a row left a gap"


def test_a_block_reused_too_early_is_found():
    """A scheduler that frees at once: the overshot row of the step in flight still names the page."""
    driver = Driver(layout(8, 2), script=FakeScript(vocab_size=50, eos_every=5), depth=2, check=False, enable_prefix_caching=False)
    pool = driver.scheduler._kv.pool
    pool._free_page = lambda page: pool._free.append(page)
    r = random.Random(1)
    for _ in range(200):
        driver.submit([r.randrange(50) for _ in range(r.randrange(1, 6))], max_tokens=8, eos=(3,), seed=r.randrange(99))
        driver.step()
    assert any("in flight" in text for text in driver.replayer.report().violations)


def test_a_trace_that_was_cut_short_is_valid_up_to_there(tmp_path, seed):
    _, log = records(seed, steps=20)
    path = tmp_path / "trace.bin"
    with PlanRecorder(path, layout(90, 8, FULL, sliding(20))) as recorder:
        for kind, record in log:
            if kind == "plan":
                recorder.on_plan(record)
            else:
                recorder.on_result(None, record)
    whole = list(read_trace(path))
    assert [r.plan if isinstance(r, Planned) else r.result for r in whole[1:]] == [record for _, record in log]
    assert isinstance(whole[-1], Retired)
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_trace(path)) == whole[:-1]
    assert replay(path).ok


@pytest.mark.parametrize("content", [b"", b"not a trace at all", b"\x00\x00\x00\x01\x80"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        replay(path)


def test_the_command_line(tmp_path):
    path = tmp_path / "trace.bin"
    driver = Driver(layout(16))
    with PlanRecorder(path, layout(16)) as recorder:
        driver.observers.append(recorder)
        driver.run(range(10), max_tokens=5)
    done = subprocess.run([sys.executable, "-m", "hexad.orchestration.replay", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and '"violations": []' in done.stdout
    assert subprocess.run([sys.executable, "-m", "hexad.orchestration.replay"], capture_output=True, timeout=60).returncode == 2


def test_a_full_disk_ends_the_trace_and_not_the_service(tmp_path):
    recorder = PlanRecorder(tmp_path / "trace.bin", layout(16))

    class Full:
        def write(self, data):
            raise OSError("no space left")

        def close(self):
            pass

    recorder._file = Full()
    driver = Driver(layout(16), executor=FakeExecutor())
    driver.observers.append(recorder)
    driver.run(range(10), max_tokens=5)
    recorder.close()
