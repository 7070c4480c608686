"""Fire hostile requests at a server of its own and report what broke: `python scripts/hostile.py --count 50000`.

Each must be answered 2xx, 4xx, or 503 with Retry-After, in the error format of the API; the engine must be the same process at the end,
nothing may be left running, memory and descriptors must be flat, and a normal request beside it must never wait past a bound. The fixed
corpus and every field with every value come first, then random variants up to --count. `--device auto` uses the real model.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from firing import NOTHING, Bystander, Connection, Watched
from hostile_corpus import Shot, corpus, every_field, judge, random_shot
from own_server import options, own_server, tell

ANSWER_TIMEOUT_S = 60.0


@dataclass
class Report:
    """What a volley came to."""

    statuses: Counter[int] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)  # the longest answers, longest first

    def note(self, attack: Shot, status: int, wait_s: float, complaint: str | None) -> None:
        self.statuses[status] += 1
        self.slowest = sorted([*self.slowest, (wait_s, attack.name)], reverse=True)[:5]
        if complaint is not None:
            self.complaints.append(f"{attack.name}: {complaint}")


def endless(rng: random.Random) -> Iterator[Shot]:
    while True:
        yield random_shot(rng)


async def volley(url: str, shots: Iterable[Shot], *, workers: int = 16) -> Report:
    """Fire all `shots`; each worker keeps one connection as long as the server lets it."""
    report, source = Report(), iter(shots)

    async def work() -> None:
        connection = Connection(url)
        for attack in source:
            start_s = time.monotonic()
            if attack.half_close:
                await connection.close()
            answer, complaint = NOTHING, None
            try:
                sending = connection.send(attack.pieces, pause_s=attack.pause_s, half_close=attack.half_close, head=attack.head)
                answer = await asyncio.wait_for(sending, ANSWER_TIMEOUT_S)
                complaint = judge(attack, answer)
            except TimeoutError:
                complaint = f"no answer within {ANSWER_TIMEOUT_S:g} s"
                connection.abort()
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                complaint = f"not HTTP: {error!r}"
                connection.abort()
            report.note(attack, answer.status, time.monotonic() - start_s, complaint)
        await connection.close()

    await asyncio.gather(*(work() for _ in range(workers)))
    return report


async def attack(server: Watched, count: int, seed: int, bound_s: float, *, may_be_refused: bool) -> dict[str, object]:
    """The whole attack; the figures, with `complaints` empty when all went well."""
    rng = random.Random(seed)
    fixed = [*corpus(), *every_field()]
    rng.shuffle(fixed)
    await volley(server.url, islice(iter(fixed), 200))  # warm: first imports, pools, caches
    engine, memory, descriptors = server.engine_pid(), server.rss_mib(), server.descriptors()
    start_s = time.monotonic()
    async with Bystander(server.url, may_be_refused=may_be_refused) as bystander:
        report = await volley(server.url, islice(chain(fixed, endless(rng)), count))
    took_s = time.monotonic() - start_s
    complaints = report.complaints + bystander.complaints
    await server.settle()
    if server.engine_pid() != engine:
        complaints.append("the engine was started again")
    if bystander.worst_s > bound_s:
        complaints.append(f"a normal request waited {bystander.worst_s:.2f} s, the bound is {bound_s:g}")
    return {
        "requests": sum(report.statuses.values()),
        "seed": seed,
        "seconds": round(took_s, 1),
        "statuses": dict(sorted(report.statuses.items())),
        "normal_requests": len(bystander.waits_s),
        "normal_wait_p50_s": round(bystander.quantile_s(0.5), 4),
        "normal_wait_p99_s": round(bystander.quantile_s(0.99), 4),
        "normal_wait_max_s": round(bystander.worst_s, 4),
        "slowest": [(round(wait_s, 3), name[:80]) for wait_s, name in report.slowest],
        "rss_mib": {"before": memory, "after": server.rss_mib()},
        "descriptors": {"before": descriptors, "after": server.descriptors()},
        "num_complaints": len(complaints),
        "complaints": complaints[:50],
    }


async def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--device", default="fake", help="fake, fake:SECONDS_PER_STEP, auto, cpu ...")
    parser.add_argument("--bound", type=float, default=2.0, help="longest wait of a normal request, seconds")
    args = parser.parse_args()
    with own_server(args.model, "--device", args.device) as server:
        figures = await attack(server, args.count, args.seed, args.bound, may_be_refused=False)
    return tell({"device": args.device, **figures}, args.out)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
