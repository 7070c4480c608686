"""A server whose standard streams are closed, full or read by nobody: it starts, answers, and ends with exit code 0."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from firing import Watched, generate

WAYS = ("<&- >&- 2>&-", "<&-", ">&-", "2>&-", ">/dev/full 2>/dev/full", "> >(head -1) 2> >(head -1)")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def up(url: str, process: subprocess.Popen[bytes]) -> Watched:
    watched = Watched(url, process.pid)
    async with asyncio.timeout(60):
        while await watched.status("/health") != 200:
            assert process.poll() is None, "the server did not start"
            await asyncio.sleep(0.1)
    return watched


@pytest.mark.parametrize(("redirections", "processes"), [*((way, 1) for way in WAYS), (WAYS[0], 2)])
async def test_b60_streams_that_nobody_reads(tiny: Path, redirections: str, processes: int) -> None:
    port = free_port()
    serve = f"{sys.executable} -m hexad serve {tiny} --device fake --port {port} --api-server-count {processes}"
    process = subprocess.Popen(["bash", "-c", f"exec {serve} {redirections}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        watched = await up(f"http://127.0.0.1:{port}", process)
        assert (await watched.ask(generate())).status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()
