"""Ratios of two results, and why two results may not be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hexad.bench.directions import better
from hexad.common.config import HexadConfig

# what a result says of the run beside the engine's configuration -> the flag that sets it; "": name what must be the same
_FLAGS = {
    "load.requests": "--requests", "load.input_tokens": "--input-len", "load.output_tokens": "--output-len", "load.batch": "--batch",
    "load.shared_prefix_tokens": "--prefix-len", "load.concurrency": "--concurrency", "duration_s": "--duration-s", "load.name": "--load",
    "model": "--model", "settings.repeats": "--repeats", "settings.seed": "--seed", "settings.request_rate": "--request-rate",
    "settings.goodput": "--goodput", "settings.extra_body": "--extra-body", "settings.dtype": "--dtype", "settings.threads": "--threads",
    "settings.batch": "--batch", "settings.context": "--context", "settings.input_len": "--input-len", "settings.steps": "--steps",
    "settings.window": "--window", "settings.max_tokens": "--max-tokens", "settings.text": "--text",
    "settings.warm_runs": "--warm-runs", "settings.by_layer": "--by-layer", "settings.mixed": "--mixed", "reference": "--reference",
}  # fmt: skip
_PLAIN = ("kind", "model", "format", "kv_dtype", "duration_s", "reference")
# names and paths, and what is decided from the memory that happens to be free
_NOT_MEASURED = frozenset(
    {
        "model.model", "model.served_model_name", "model.tokenizer", "model.revision", "model.chat_template", "model.generation_config",
        "cache.kv_cache_memory_bytes",
    }
)  # fmt: skip
_ABSENT = object()


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why `a` and `b` are not runs of the same thing: the field, both values, what to do. Empty when they may be compared."""
    found = [_line(name, *values) for name, values in _unlike(a, b)]
    found += [
        f"{which} is partial (interrupted): run it again to its end"
        for which, r in (("the first", a), ("the second", b))
        if r.get("partial")
    ]
    return found


def _unlike(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    sides = _fields(a), _fields(b)
    unrecorded = {"device.cores"}
    if not ("settings" in a and "settings" in b):
        unrecorded |= {name for side in sides for name in side if name.startswith("settings.")}
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(name, _ABSENT) for side in sides)
        if _ABSENT in (first, second):
            known = second if first is _ABSENT else first
            if name in _PLAIN or name in unrecorded or known == _default(name) or known in (None, [], {}, 0, False):
                continue  # a result of before the field was recorded
        if first != second and not (first is _ABSENT and second is _ABSENT):
            yield name, (first, second)


def _fields(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in two runs, by name."""
    load, device, engine = (_mapping(result.get(key)) for key in ("load", "device", "engine"))
    found: dict[str, Any] = {key: result[key] for key in _PLAIN if key in result}
    found |= {f"load.{key}": value for key, value in load.items()}
    on_gpu = _mapping(result.get("calibration")).get("kind") == "gpu"  # then the processors around it are not what is measured
    found |= {f"device.{key}": device[key] for key in ("name", "cores") if key in device and not (on_gpu and key == "cores")}
    found |= {f"engine.{key}": engine[key] for key in ("face", "dtype", "detokenizes") if key in engine}
    settings = dict(_mapping(result.get("settings")))
    options = _mapping(settings.pop("options", None))
    found |= {f"settings.{key}": value for key, value in settings.items()}
    config = _mapping(engine.get("config"))
    if not config:
        return found | {f"options.{key}": value for key, value in options.items()}
    if "kv_cache_memory_bytes" in options:  # asked for, not decided
        found["options.kv_cache_memory_bytes"] = options["kv_cache_memory_bytes"]
    for section, keys in config.items():
        found |= {f"{section}.{key}": value for key, value in _mapping(keys).items() if f"{section}.{key}" not in _NOT_MEASURED}
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _default(name: str) -> Any:
    return HexadConfig.keys().get(name, _ABSENT)


def _line(name: str, first: Any, second: Any) -> str:
    shown = " in the first, ".join(_show(value) for value in (first, second))
    text = f"{name}: {shown} in the second"
    key = name.partition(".")[2]
    if _default(name) is not _ABSENT or name.startswith("options."):
        value = second if first is _ABSENT else first
        return f"{text}: run one of them again with the other's, such as -o {key}={_show(value)}"
    if name in _FLAGS:
        return f"{text}: run one of them again with the other's {_FLAGS[name]}"
    same = {"engine.face": "in the same way (in process, or against an address)", "device.name": "on the same device",
            "device.cores": "on as many cores", "format": "with weights of one format", "kind": "with the same command",
            "kv_dtype": "with the same -o kv_cache_dtype", "engine.dtype": "with the same -o dtype"}  # fmt: skip
    return f"{text}: compare runs made {same.get(name, 'with the same value')}"


def _show(value: Any) -> str:
    return "not given" if value is _ABSENT else value if isinstance(value, str) else json.dumps(value)


def ratios(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Each number that both have: first, second, second over first, and whether that is better (None: equal, or there is no better)."""
    rows = []
    left, right = flatten(a["metrics"]), flatten(b["metrics"])
    for name, first in left.items():
        second = right.get(name)
        if second is None or not first:
            continue
        rows.append({"metric": name, "first": first, "second": second, "ratio": second / first, "better": better(name, first, second)})
    return rows


def flatten(tree: Any, prefix: str = "") -> dict[str, float]:
    """Numbers of nested dicts under dotted names."""
    if isinstance(tree, dict):
        return {name: value for key, sub in tree.items() for name, value in flatten(sub, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix: float(tree)} if isinstance(tree, int | float) and not isinstance(tree, bool) else {}
