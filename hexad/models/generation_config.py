"""What a model's author says about sampling: generation_config.json. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hexad.models.formats.fields import Fields
from hexad.models.formats.files import read_json

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(path: Path, choice: str = "auto") -> dict[str, Any]:
    """Defaults for requests that leave a field out, under the API's names; only what the author set.

    Args:
        path: the model's folder, or its .gguf file (which has none).
        choice: "auto" (the model's own), "none", or another folder (`--generation-config`).

    Raises:
        ModelError: the file is not valid JSON, or a value is out of range.
    """
    if choice == "none":
        return {}
    folder = Path(path) if choice == "auto" else Path(choice).expanduser()
    if folder.is_file():
        folder = folder.parent
    file = folder / "generation_config.json"
    fields = Fields(read_json(file) or {}, file)
    defaults: dict[str, Any] = {name: value for name in _NUMBERS if (value := fields.optional_number(name)) is not None}
    if fields.get("top_k") is not None:
        defaults["top_k"] = fields.count("top_k", least=0)
    if fields.get("max_new_tokens") is not None:
        defaults["max_tokens"] = fields.count("max_new_tokens")
    if fields.get("do_sample") is False:
        return {"temperature": 0.0} | {k: v for k, v in defaults.items() if k in ("repetition_penalty", "max_tokens")}
    return defaults
