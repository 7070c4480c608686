"""The configuration from its four sources: flags > environment > file > profile > defaults. Each value remembers where it came from."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from hexad.cli.sizes import parse_size
from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, nearest
from hexad.common.presets import find_preset

ENV_PREFIX = "HEXAD_"
ENV_SEPARATOR = "__"
SECRET = frozenset({"server.api_key"})
MAX_FILE_BYTES = 2**20


@dataclass(frozen=True)
class Settings:
    """The configuration, and the origin of each value that is not a default."""

    config: HexadConfig
    origins: Mapping[str, str]  # "section.key" -> "flag --port", "environment HEXAD_SERVER__PORT", "file hexad.toml"

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value, origin) of the whole tree; secrets are not shown."""
        rows = []
        for section, keys in self.config.model_dump().items():
            for name, value in keys.items():
                key = f"{section}.{name}"
                shown = f"<{len(value)} hidden>" if key in SECRET and value else json.dumps(value, ensure_ascii=False)
                rows.append((key, shown, self.origins.get(key, "default")))
        return rows


def field_types() -> dict[str, Any]:
    """`"section.key"` -> its annotation, for the whole tree."""
    types = {}
    for section, field in HexadConfig.model_fields.items():
        for name, inner in field.annotation.model_fields.items():  # type: ignore[union-attr]
            types[f"{section}.{name}"] = inner.annotation
    return types


def load_settings(
    flags: Mapping[str, Any], file: str | None = None, env: Mapping[str, str] | None = None, profile: str | None = None
) -> Settings:
    """Put the sources together. `flags` are flat `{"section.key": value}`; a profile's values stand just above the defaults.

    Raises:
        ConfigError: an unknown key (names the nearest) or a bad value, and which source it came from.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [
        *([(f"profile {profile}", find_preset(profile).values)] if profile else []),
        *([(f"file {file}", read_file(Path(file)))] if file else []),
        *((f"environment {name}", {key: value}) for name, key, value in read_env(os.environ if env is None else env)),
        *((f"flag {flag_name(key)}", {key: value}) for key, value in flags.items()),
    ]
    types = field_types()
    for origin, layer in layers:
        for key, value in layer.items():
            values[key] = _coerce(key, value, types)
            origins[key] = origin
    try:
        return Settings(HexadConfig().with_values(values), origins)
    except ConfigError as error:
        sources = sorted({origin for key, origin in origins.items() if key in error.message})
        raise ConfigError(error.message + (f" (from {', '.join(sources)})" if sources else "")) from None


def flag_name(key: str) -> str:
    """The flag that sets `key`: the field's own name, a time without its unit."""
    name = key.partition(".")[2]
    return "--" + name.removesuffix("_s").replace("_", "-")


def read_env(env: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """(variable, key, value) of every HEXAD_SECTION__KEY. Other variables, HEXAD_CACHE among them, are not ours."""
    found = []
    for name, text in sorted(env.items()):
        section, separator, key = name.removeprefix(ENV_PREFIX).partition(ENV_SEPARATOR)
        if name.startswith(ENV_PREFIX) and separator:
            found.append((name, f"{section}.{key}".lower(), text))
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Flat values of a YAML or TOML file. Keys are sections with keys, or names of flags (`max-model-len: 4096`).

    Raises:
        ConfigError: unreadable, or not a mapping.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes; a configuration has at most {MAX_FILE_BYTES:,}")
        text = path.read_text(encoding="utf-8")
        tree = _parse(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:] or 'text'}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: should be a mapping, but is {type(tree).__name__}")
    return _flatten(tree, str(path))


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: use a file that ends in .yaml, .yml, .json or .toml")
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _flatten(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    by_flag = {flag_name(key)[2:]: key for key in field_types()}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = by_flag.get(str(name).replace("_", "-"))
        if name in HexadConfig.model_fields and isinstance(value, dict):
            flat.update({f"{name}.{inner}": item for inner, item in value.items()})
        elif key is not None:
            flat[key] = value
        else:
            near = nearest(str(name).replace("_", "-"), [*HexadConfig.model_fields, *by_flag], 3)
            hint = f": did you mean {near!r}?" if near else f"; sections are {', '.join(HexadConfig.model_fields)}"
            raise ConfigError(f"{where}: there is no section or flag {name!r}{hint}")
    return flat


def _coerce(key: str, value: Any, types: Mapping[str, Any]) -> Any:
    """Text from a flag, a variable or a file becomes what the field holds; what it cannot be is left to validation."""
    kind = types.get(key)
    if not isinstance(value, str) or kind is None:
        return value
    if NoneType in get_args(kind) and value.lower() in ("auto", "none", "null", ""):
        return None
    if _holds(kind, int) and not _holds(kind, bool):
        return parse_size(value, key)
    origin = get_origin(kind)
    if origin is tuple:
        return _list(key, value)
    if origin is dict:
        return _mapping(key, value)
    return value


def _holds(kind: Any, wanted: type) -> bool:
    return kind is wanted or (get_origin(kind) is UnionType and wanted in get_args(kind))


def list_items(key: str, text: str) -> list[str]:
    """What stands between the commas. An API key that is set but empty stays one, and is refused: it must not mean "no key needed"."""
    return [item.strip() for item in text.split(",") if item.strip()] or ([""] if key == "server.api_key" else [])


def _list(key: str, text: str) -> list[Any]:
    if not text.startswith("["):
        return list_items(key, text)
    value = _json(key, text)
    return value if isinstance(value, list) else [value]


def _mapping(key: str, text: str) -> Any:
    if text.startswith("{"):
        return _json(key, text)
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(separator for _, separator, _ in pairs):
        raise ConfigError(f"{key} = {text!r}: use name=value,name=value or a JSON object")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r}: not valid JSON ({error})") from None
