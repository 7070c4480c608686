"""Streams with random cancels for a long time: `python scripts/soak.py --minutes 30 --streams 64`.

Memory, descriptors and KV blocks must be flat: the last quarter of the run is compared with the second one, and at the end nothing may be
left. `--device auto` uses the real model.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from firing import Bystander, Watched
from kill_engine import Load
from own_server import options, own_server, tell

MAX_GROWTH_MIB = 16.0
MAX_GROWTH_DESCRIPTORS = 2.0


async def sample(server: Watched, start_s: float, load: Load) -> dict[str, Any]:
    """How the server is at this moment."""
    said = await server.load()
    return {
        "seconds": round(time.monotonic() - start_s, 1),
        **{f"rss_{name}_mib": round(size, 1) for name, size in server.rss_mib().items()},
        "descriptors": server.descriptors(),
        "running": said["num_running"],
        "waiting": said["num_waiting"],
        "kv_usage": round(said["kv_usage"], 4),
        "ended": sum(load.outcomes.values()),
    }


def growth(samples: list[dict[str, Any]], key: str) -> float:
    """Largest of the last quarter minus largest of the second: the first is warming up, and what is open at a moment varies."""
    quarter = len(samples) // 4
    return float(max(s[key] for s in samples[-quarter:]) - max(s[key] for s in samples[quarter : 2 * quarter]))


async def soak(server: Watched, seconds: float, streams: int, seed: int, every_s: float) -> dict[str, Any]:
    """Run the load, sample, judge; `complaints` is empty when all went well."""
    load = Load(server.url, seed, callers=streams, share_leaving=0.25, max_tokens=120)
    start_s, samples = time.monotonic(), []
    async with Bystander(server.url, every_s=0.5, timeout_s=120) as bystander:
        running = asyncio.create_task(load.run())
        while time.monotonic() - start_s < seconds and not running.done():
            await asyncio.sleep(every_s)
            samples.append(await sample(server, start_s, load))
        load.stop.set()
        await running
    end = await server.settle(60)
    complaints = load.complaints + bystander.complaints
    for key in ("rss_api_mib", "rss_engine_mib"):
        if (grown := growth(samples, key)) > MAX_GROWTH_MIB:
            complaints.append(f"{key} grew by {grown:.1f}")
    if (grown := growth(samples, "descriptors")) > MAX_GROWTH_DESCRIPTORS:
        complaints.append(f"descriptors grew by {grown:.1f}")
    return {
        "seed": seed,
        "streams": streams,
        "seconds": round(time.monotonic() - start_s),
        "outcomes": dict(load.outcomes),
        "growth": {key: round(growth(samples, key), 2) for key in ("rss_api_mib", "rss_engine_mib", "descriptors", "kv_usage")},
        "normal_wait_p99_s": round(bystander.quantile_s(0.99), 3),
        "normal_wait_max_s": round(bystander.worst_s, 3),
        "at_the_end": {key: end[key] for key in ("server_load", "num_running", "num_waiting", "kv_usage")},
        "num_complaints": len(complaints),
        "complaints": complaints[:20],
        "samples": samples[:: max(1, len(samples) // 60)],
    }


async def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--device", default="fake:0.005", help="fake:SECONDS_PER_STEP, auto, cpu ...")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("flags", nargs="*", help="more flags of hexad serve, after --")
    args = parser.parse_args()
    with own_server(args.model, "--device", args.device, *args.flags) as server:
        figures = await soak(server, args.minutes * 60, args.streams, args.seed, args.every)
    return tell({"device": args.device, **figures}, args.out)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
