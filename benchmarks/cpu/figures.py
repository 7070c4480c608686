"""What every peer is asked for in its own process, with its own library: this file needs nothing but Python.

A peer module has `Peer(model, threads)` with `run(prompts, output_tokens) -> list of token lists` (all prompts at once) and is started as
`python peer_NAME.py MODEL THREADS STARTED SEED`, STARTED being the wall clock when the process was made. It prints one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

VOCABULARY = 49_152
STREAMS, INPUT, OUTPUT, LONG, MIDDLE = 16, 128, 128, 1024, 512
STREAMS_SWEEP = (1, 4, 16)

Prompts = list[list[int]]


class Peer(Protocol):
    def run(self, prompts: Prompts, output_tokens: int) -> Sequence[Sequence[int]]: ...


def prompts(count: int, length: int, seed: int) -> Prompts:
    make = random.Random(seed)
    return [[make.randrange(1_000, VOCABULARY) for _ in range(length)] for _ in range(count)]


def timed(peer: Peer, batch: Prompts, output_tokens: int) -> float:
    """Seconds of one call; every request must have got all of its tokens."""
    started = time.perf_counter()
    answers = peer.run(batch, output_tokens)
    took_s = time.perf_counter() - started
    lengths = {len(answer) for answer in answers}
    if len(answers) != len(batch) or lengths != {output_tokens}:
        raise SystemExit(f"asked for {output_tokens} tokens, got {sorted(lengths)}")
    return took_s


def measure(make: Callable[[str, int], Peer]) -> None:
    """Load, answer, print."""
    model, threads, started, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) * 1_000
    peer = make(model, threads)
    timed(peer, prompts(1, 16, seed), 1)
    found: dict[str, Any] = {"first_token_s": time.time() - started}
    timed(peer, prompts(1, INPUT, seed + 1), 8)
    one_s = statistics.median(timed(peer, prompts(1, INPUT, seed + 10 + i), 1) for i in range(3))
    all_s = statistics.median(timed(peer, prompts(1, INPUT, seed + 20 + i), OUTPUT + 1) for i in range(2))
    found["decode_tok_s"] = OUTPUT / (all_s - one_s)
    timed(peer, prompts(1, LONG, seed + 30), 1)
    found["prefill_tok_s"] = LONG / statistics.median(timed(peer, prompts(1, LONG, seed + 31 + i), 1) for i in range(5))
    found["ttft_512_ms"] = 1e3 * statistics.median(timed(peer, prompts(1, MIDDLE, seed + 40 + i), 1) for i in range(5))
    timed(peer, prompts(STREAMS, INPUT, seed + 50), 8)
    found["streams_tok_s"] = {}
    for count in STREAMS_SWEEP:
        took_s = statistics.median(timed(peer, prompts(count, INPUT, seed + 60 + 3 * count + i), OUTPUT) for i in range(2))
        found["streams_tok_s"][str(count)] = count * OUTPUT / took_s
    print(json.dumps(found), flush=True)
