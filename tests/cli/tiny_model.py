"""A model folder without weights, for servers on the fake device; and a server process over it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_model(folder: Path) -> Path:
    """config.json, tokenizer.json (bytes and three special ids), a ChatML template, sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 258,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 40, "eos_token_id": 258}))
    return folder


class ServerProcess:
    """`hexad serve` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("address"):
                self.url = line.split()[1]
            if line.startswith("curl"):
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(60)
        assert self.url, (self.lines, self.process.stderr.read() if self.process.stderr else "")

    def children(self) -> list[int]:
        """Process ids of the descendants."""
        found, parents = [], {self.process.pid}
        for entry in sorted((p for p in Path("/proc").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                    found.append(int(entry.name))
                    parents.add(int(entry.name))
        return found

    def end(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def served(model: Path, *flags: str, wait: bool = True, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server over `model` on the fake device and a free port. Nothing is left behind."""
    command = [
        sys.executable,
        "-m",
        "hexad",
        "serve",
        str(model),
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "16MiB",
        "--served-model-name",
        "tiny",
    ]
    device = [] if "--device" in flags else ["--device", "fake"]
    process = subprocess.Popen(
        [*command, *device, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    server = ServerProcess(process)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        children = server.children()
        if process.poll() is None:
            process.kill()
        process.wait(10)
        end_s = time.monotonic() + 10
        while any(map(alive, children)) and time.monotonic() < end_s:
            time.sleep(0.05)
        left = [pid for pid in children if alive(pid)]
        assert not left, f"processes left behind: {left}"
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30)
