"""`hexad chat`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hexad.cli.flags import Settings, with_config
from hexad.common.errors import HexadError

if TYPE_CHECKING:
    from hexad.cli.session import Talker

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message, /stats shows figures, "
    "/exit or Ctrl-D leaves; Ctrl-C stops an answer"
)


def _chat(
    *,
    settings: Settings,
    url: Annotated[str | None, typer.Option("--url", help="Talk to the server there instead of an engine of its own.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
) -> None:
    """Talk to a model, answer by answer, as the text comes."""
    from hexad.cli.session import talker

    model = settings.config.model.model if "model.model" in settings.origins else None
    with talker(settings, url, model) as someone:
        print(f"{someone.model}: {HELP}", file=sys.stderr)
        Conversation(someone, system, {"max_tokens": max_tokens, "temperature": temperature}).run()


app.command("chat")(with_config(_chat))


class Conversation:
    """Reads lines, prints answers, remembers both."""

    def __init__(self, someone: Talker, system: str | None, fields: dict[str, float | None]) -> None:
        self._someone = someone
        self._system = system
        self._fields = fields
        self._turns: list[dict[str, str]] = []

    def run(self) -> None:
        """Until /exit or the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and line editing
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
        elif name == "/system":
            self._system = rest or None
        elif name == "/stats":
            print(self._someone.figures, file=sys.stderr)
        else:
            print(HELP, file=sys.stderr)

    def _answer(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces = self._someone.chat([*system, *self._turns], **self._fields)
        said = []
        try:
            for piece in pieces:
                said.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pieces.close()  # a generator: closing it ends the request
        except HexadError as error:
            self._turns.pop()
            print(f"{error.message}", file=sys.stderr)
            return
        print(flush=True)
        self._turns.append({"role": "assistant", "content": "".join(said)})
