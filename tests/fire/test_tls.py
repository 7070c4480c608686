"""TLS: callers that leave, do not read, speak plain HTTP or break off the handshake; certificates of callers; keys that cannot be used."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from firing import generate, get
from tiny_model import ServerProcess, served
from websockets.asyncio.client import connect

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
QUIET = ("--log-level", "error")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


class Papers:
    """An authority, and certificates that it has signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "ca.pem"
        self._authority_key = folder / "ca.key"
        new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=authority")
        openssl(*new, "-keyout", str(self._authority_key), "-out", str(self.authority))

    def sign(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for 127.0.0.1."""
        certificate, key, request = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extension = self.folder / "extension"
        extension.write_text("subjectAltName=IP:127.0.0.1")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        signed = ("x509", "-req", "-in", str(request), "-CA", str(self.authority), "-CAkey", str(self._authority_key), "-CAcreateserial")
        openssl(*signed, "-days", "1", "-extfile", str(extension), "-out", str(certificate))
        return certificate, key


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def flags(papers: Papers) -> list[str]:
    certificate, key = papers.sign("server")
    return ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), *QUIET]


@pytest.fixture(scope="module")
def trust(papers: Papers) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(papers.authority))


@pytest.fixture(scope="module")
def slow(tiny: Path, flags: list[str]) -> Iterator[ServerProcess]:
    with served(tiny, *flags, "--device", "fake:0.02") as process:
        yield process


async def load(url: str, trust: ssl.SSLContext) -> dict[str, Any]:
    async with httpx.AsyncClient(verify=trust, timeout=30) as client:
        return dict((await client.get(url + "/load")).json())


async def settle(url: str, trust: ssl.SSLContext, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            said = await load(url, trust)
            if not any(said[name] for name in ("server_load", "num_running", "num_waiting", "kv_usage")):
                return
            await asyncio.sleep(0.05)


async def opened(process: ServerProcess, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(process.url.rpartition(":")[2]), ssl=context)


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("stream", [True, False])
async def test_b36_leaving_over_tls_aborts(slow: ServerProcess, trust: ssl.SSLContext, stream: bool, how: str) -> None:
    _, writer = await opened(slow, trust)
    writer.write(generate(max_tokens=900, ignore_eos=True, stream=stream))
    async with asyncio.timeout(10):
        while not (await load(slow.url, trust))["num_running"]:
            await asyncio.sleep(0.02)
    if how == "close":
        writer.close()
    else:
        writer.transport.abort()
    await settle(slow.url, trust, 12)  # the answer would take 18 s


async def test_not_tls_and_broken_handshakes_harm_nobody(slow: ServerProcess, trust: ssl.SSLContext) -> None:
    reader, writer = await opened(slow, None)
    writer.write(get("/health"))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    before = psutil.Process(slow.process.pid).num_fds()
    halves = [await opened(slow, None) for _ in range(50)]
    for _, half in halves:
        half.write(bytes.fromhex("16030100c8010000c40303"))
    assert (await load(slow.url, trust))["server_load"] == 0
    for _, half in halves:
        half.transport.abort()
    async with asyncio.timeout(10):
        while psutil.Process(slow.process.pid).num_fds() > before + 2:
            await asyncio.sleep(0.05)


async def test_a_tls_caller_that_does_not_read_is_disconnected(tiny: Path, flags: list[str], trust: ssl.SSLContext) -> None:
    with served(tiny, *flags, "--write-timeout", "1") as process:
        _, writer = await opened(process, trust)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(generate(stream=True, max_tokens=1_000, n=16, ignore_eos=True, logprobs=20) * 3)
        await asyncio.sleep(0.5)
        await settle(process.url, trust, 60)
        writer.transport.abort()


async def test_websockets_over_tls(slow: ServerProcess, trust: ssl.SSLContext) -> None:
    async with connect(slow.url.replace("https", "wss") + "/v1/completions", ssl=trust) as socket:
        await socket.send(json.dumps({"prompt": "x", "max_tokens": 2, "ignore_eos": True}))
        messages = [await socket.recv()]
        while messages[-1] != "[DONE]":
            messages.append(await asyncio.wait_for(socket.recv(), 10))
        assert len(messages) > 1


@pytest.mark.parametrize("more", [[], ["--ssl-cert-reqs", "1"]])
def test_callers_show_certificates(tiny: Path, papers: Papers, flags: list[str], trust: ssl.SSLContext, more: list[str]) -> None:
    certificate, key = papers.sign("caller")
    named = ssl.create_default_context(cafile=str(papers.authority))
    named.load_cert_chain(certificate, key)
    with served(tiny, *flags, "--ssl-ca-certs", str(papers.authority), *more) as process:
        assert httpx.get(process.url + "/health", verify=named).status_code == 200
        if more:
            assert httpx.get(process.url + "/health", verify=trust).status_code == 200
        else:
            with pytest.raises(httpx.HTTPError):
                httpx.get(process.url + "/health", verify=trust)


def test_papers_that_cannot_be_used(tiny: Path, papers: Papers, flags: list[str]) -> None:
    locked = papers.folder / "locked.key"
    openssl("pkey", "-in", flags[3], "-aes256", "-passout", "pass:x", "-out", str(locked))
    for given, words in [
        ([*flags[:2], "--ssl-keyfile", str(locked)], "encrypted"),
        ([*flags, "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--ssl-ca-certs", str(papers.authority)], "--ssl-certfile"),
        ([*flags, "--ssl-ca-certs", "/nowhere.pem"], "/nowhere.pem"),
        ([*flags, "--ssl-ca-certs", flags[3]], "server.ssl_ca_certs"),
        ([*flags, "--ssl-cert-reqs", "3"], "server.ssl_cert_reqs"),
    ]:
        command = [sys.executable, "-m", "hexad", "serve", str(tiny), "--device", "fake", "--port", "0", *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 2, (given, done.stderr)
        assert words in done.stderr, (given, done.stderr)
        assert "Traceback" not in done.stderr
