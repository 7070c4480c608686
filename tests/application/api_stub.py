"""A tokenizer, a template and an engine that live in the test's own process, for tests of the HTTP side alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import msgspec
import uvicorn

from hexad.application.api.admission import Admission
from hexad.application.api.app import build_app
from hexad.application.api.protocol import guarded
from hexad.application.api.state import ServerState
from hexad.common.config import HexadConfig
from hexad.common.errors import EngineDeadError, RequestError
from hexad.common.metrics import MetricsRegistry
from hexad.engine.plan import TokenLogprobs
from hexad.orchestration.messages import Output, Submit, Welcome
from hexad.orchestration.stream import RequestStream

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {BOS: "<bos>", EOS: "<eos>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
VOCAB = 260


class ByteTokenizer:
    """One id a byte, four special ids; special names in text become their ids."""

    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            name = next((i for i, s in SPECIAL.items() if text.startswith(s)), None)
            ids.extend([name] if name is not None else text[0].encode())
            text = text[len(SPECIAL[name]) :] if name is not None else text[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(t) for t in token_ids if not (skip_special_tokens and t in SPECIAL)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL


class ChatML:
    """ChatML, and a refusal of two user turns in a row when `alternate`."""

    def __init__(self, alternate: bool = False) -> None:
        self.alternate = alternate

    def encode(
        self,
        tokenizer: ByteTokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], str]:
        roles = [m["role"] for m in messages]
        if self.alternate and any(a == b for a, b in pairwise(roles)):
            raise RequestError("roles must alternate", param="messages")
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        if continue_final_message:
            text = text.removesuffix("<|im_end|>\n")
        elif add_generation_prompt:
            text += "<|im_start|>assistant\n"
        return tokenizer.encode(text), text


def echo_words(submit: Submit, choice: int) -> bytes:
    """The default script: what the choice says, before any limit."""
    return f"choice {choice} says 🦜 東京駅: ".encode() + b"the quick brown fox jumps over the lazy dog. " * 400


class StubEngine:
    """Says what `script` returns, one byte a token. Thread-bound to the loop that serves."""

    def __init__(self, script: Callable[[Submit, int], bytes] = echo_words, *, context: int = 512, pool: int = 4096) -> None:
        self.script = script
        self.first_delay_s = 0.0
        self.delay_s = 0.0
        self.per_output = 1
        self.refuse: Output | None = None
        self.is_alive = True
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.made = 0  # tokens
        self.live: dict[str, asyncio.Task[None]] = {}
        self.welcome = Welcome(
            protocol=1, version="0", config_hash="abc", model="stub", max_len=context, max_request_blocks_tokens=pool,
            vocab_size=VOCAB, device="stub", dtype="float32", kv_bytes=1 << 20, num_blocks=pool // 16, block_size=16,
        )  # fmt: skip

    def fail_midway(self) -> None:
        """From now on every request says two tokens, and fails a moment later."""

        async def fail_later(submit: Submit, stream: RequestStream) -> None:
            stream.feed(Output(request_id=submit.request_id, choice=0, token_ids=(104, 105)))
            await asyncio.sleep(0.05)
            stream.feed(Output(request_id=submit.request_id, choice=0, error="NaN in the logits", error_code="request_failed"))

        self._run = fail_later  # type: ignore[method-assign]

    def submit(self, submit: Submit) -> RequestStream:
        if not self.is_alive:
            raise EngineDeadError("the engine is gone")
        self.submitted.append(submit)
        stream = RequestStream(submit.request_id, submit.params.n, self._abort)
        task = asyncio.get_running_loop().create_task(self._run(submit, stream))
        self.live[submit.request_id] = task
        task.add_done_callback(lambda _: self.live.pop(submit.request_id, None))
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborted.append(f"{request_id}/{choice}")

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self.live:
            self.live[request_id].cancel()

    async def call(self, method: str, timeout_s: float = 30.0) -> dict[str, Any]:
        return {"num_running": len(self.live), "num_waiting": 0, "kv_usage": 0.0}

    async def _run(self, submit: Submit, stream: RequestStream) -> None:
        if self.refuse is not None:
            for choice in range(submit.params.n):
                stream.feed(msgspec.structs.replace(self.refuse, request_id=submit.request_id, choice=choice))
            return
        await asyncio.sleep(self.first_delay_s)
        prompt = submit.prompt[0].ids
        said = [self.script(submit, choice)[: submit.params.max_tokens] for choice in range(submit.params.n)]
        extra: dict[str, Any] = {"num_cached": len(prompt) // 2, "queued_s": self.first_delay_s}
        if submit.params.prompt_logprobs is not None:
            extra["prompt_logprobs"] = (None, *(self._logprob(t, submit.params.prompt_logprobs) for t in prompt[1:]))
        length = max(map(len, said))
        for start in range(0, max(length, 1), self.per_output):
            for choice, text in enumerate(said):
                ids = tuple(text[start : start + self.per_output])
                ends = start + self.per_output >= len(text) and (start < len(text) or start == 0)
                if not ids and not ends:
                    continue
                self.made += len(ids)
                k = submit.params.logprobs
                stream.feed(
                    Output(
                        request_id=submit.request_id,
                        choice=choice,
                        token_ids=ids,
                        logprobs=tuple(self._logprob(t, k) for t in ids) if k is not None else (),
                        finish_reason=("length" if len(text) == submit.params.max_tokens else "stop") if ends else None,
                        **(extra if choice == 0 and start == 0 else {}),
                    )
                )
            await asyncio.sleep(self.delay_s)

    @staticmethod
    def _logprob(token_id: int, k: int) -> TokenLogprobs:
        top = tuple(((token_id + i) % 256, -0.5 - i) for i in range(k))
        return TokenLogprobs(token_id, -0.5, 1, top)


def make_state(engine: StubEngine, **values: Any) -> ServerState:
    """State over `engine`; `values` are flat configuration keys, or fields of the state."""
    fields = {key: values.pop(key) for key in list(values) if key in ServerState.__dataclass_fields__}
    config = HexadConfig().with_values({key.replace("__", "."): value for key, value in values.items()})
    scheduler = config.scheduler
    given: dict[str, Any] = {
        "config": config,
        "engine": engine,
        "tokenizer": ByteTokenizer(),
        "template": ChatML(),
        "models": ("m", "alias"),
        "metrics": MetricsRegistry("m"),
        "admission": Admission(scheduler.max_num_seqs, scheduler.max_num_queued_reqs),
        "eos_token_ids": (EOS,),
        **fields,
    }
    return ServerState(**given)


class Running:
    """A real uvicorn on loopback, in a thread of its own."""

    def __init__(self, engine: StubEngine, state: ServerState, url: str) -> None:
        self.engine = engine
        self.state = state
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    def wait_idle(self, timeout_s: float = 3.0) -> None:
        """Nothing runs in the engine, nobody is inside."""
        end_s = time.monotonic() + timeout_s
        while (self.engine.live or self.state.admission.in_flight) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not self.engine.live, f"still running: {list(self.engine.live)}"
        assert self.state.admission.in_flight == 0


@contextlib.contextmanager
def serving(engine: StubEngine | None = None, **values: Any) -> Iterator[Running]:
    """Serve `engine` until the block ends."""
    engine = engine or StubEngine()
    started, box = threading.Event(), {}

    async def main() -> None:
        state = make_state(engine, **values)
        http: Any = guarded(30.0, 60.0)
        config = uvicorn.Config(build_app(state), host="127.0.0.1", port=0, log_level="warning", lifespan="off", http=http)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        box.update(server=server, running=Running(engine, state, f"http://127.0.0.1:{port}"))
        started.set()
        await task
        state.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield box["running"]
    finally:
        box["server"].should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def fresh_seed() -> int:
    """A seed from the clock, printed so that a failure can be repeated."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event of a stream; its name must be the data's type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
