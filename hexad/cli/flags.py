"""Every configuration key as a flag, with vLLM's name where the meaning is the same. Generated, so that no key lacks one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from hexad.cli.settings import Settings, field_types, flag_name, list_items, load_settings
from hexad.common.presets import PRESETS

ALIASES: dict[str, tuple[str, ...]] = {
    "model.model": ("--model",),
    "parallel.tensor_parallel_size": ("-tp",),
    "parallel.pipeline_parallel_size": ("-pp",),
    "parallel.data_parallel_size": ("-dp",),
}
HELP: dict[str, str] = {
    "model.model": "Same as the argument MODEL.",
    "model.served_model_name": "Names the API answers to. Repeat, or separate by commas.",
    "model.tokenizer": "Folder or file of another tokenizer.",
    "model.revision": "Revision of a hub model.",
    "model.load_format": "How weights are stored.",
    "model.dtype": "Number format of the computation.",
    "model.quantization": "Round weights while they are read (CPUs): int8, int4_g32 or int4_g32_zp.",
    "model.max_model_len": "Longest sequence in tokens, e.g. 4096, 32k, auto.",
    "model.generation_config": "Sampling defaults: auto (the model's), none, or a folder.",
    "model.chat_template": "A template file, or the template itself.",
    "model.seed": "Draws the seeds of requests that name none.",
    "cache.block_size": "Tokens in a KV block.",
    "cache.kv_cache_dtype": "Number format of the KV cache.",
    "cache.kv_cache_memory_bytes": "KV memory, e.g. 4GiB; wins over --gpu-memory-utilization.",
    "cache.gpu_memory_utilization": "Share of device memory to use.",
    "cache.enable_prefix_caching": "Reuse the KV of common prefixes.",
    "scheduler.max_num_seqs": "Sequences that run at once.",
    "scheduler.max_num_batched_tokens": "Tokens of one engine step.",
    "scheduler.max_num_queued_reqs": "Requests that may wait; more get 503.",
    "scheduler.max_queued_tokens": "Prompt tokens that may wait; more get 503.",
    "scheduler.enable_chunked_prefill": "Compute long prompts in pieces.",
    "scheduler.max_prefill_tokens_per_step": "Bounds how long a prompt delays running answers.",
    "scheduler.scheduling_policy": "Who runs first.",
    "scheduler.tenant_weights": "Shares under the fair policy, e.g. a=2,b=1.",
    "scheduler.async_scheduling": "Plan a step while the one before computes.",
    "device.device": "auto, cpu, cuda or cuda:N.",
    "device.threads": "CPU threads.",
    "device.cpu_pin": "Cores that the CPU threads keep to, one each, e.g. 0-3,8.",
    "device.enforce_eager": "No CUDA graphs.",
    "device.operators": "Force providers, e.g. attention=torch.",
    "device.determinism": "Batch-invariant kernels only.",
    "parallel.tensor_parallel_size": "Devices that share each layer.",
    "parallel.pipeline_parallel_size": "Devices that share the stack of layers.",
    "parallel.data_parallel_size": "Whole copies of the model.",
    "server.host": "Address to listen on.",
    "server.port": "Port to listen on; 0 picks a free one.",
    "server.api_key": "A key that callers must send. Repeat for several; sha256:HEX is accepted.",
    "server.api_server_count": "API processes.",
    "server.shutdown_timeout_s": "Seconds that running requests may take after SIGTERM.",
    "server.max_body_bytes": "Largest request body, e.g. 32MiB.",
    "server.heartbeat_s": "Seconds between comment lines in a silent stream.",
    "server.read_timeout_s": "Seconds that a request may take to arrive.",
    "server.write_timeout_s": "Seconds after which a caller that reads nothing is disconnected.",
    "server.engine_timeout_s": "Seconds without a sign of life after which the engine process is replaced.",
    "server.max_engine_restarts": "Deaths of the engine process within ten minutes that are survived.",
    "server.ssl_certfile": "TLS certificate.",
    "server.ssl_keyfile": "TLS key, not encrypted.",
    "server.ssl_ca_certs": "Authorities whose signature a caller's certificate must have.",
    "server.ssl_cert_reqs": "Certificates of callers: 0 none, 1 optional, 2 required (default with --ssl-ca-certs).",
    "server.allowed_origins": "Origins that browsers may call from (CORS).",
    "server.otlp_traces_endpoint": "Send OpenTelemetry traces here, e.g. http://collector:4318/v1/traces.",
    "server.log_level": "How much is logged.",
    "server.log_format": "Log lines for people, or JSON.",
}
PANELS = {
    "model": "Model",
    "cache": "KV memory",
    "scheduler": "Scheduling",
    "device": "Device",
    "parallel": "Parallelism",
    "server": "Server",
}


def with_config(command: Callable[..., None], *, model_argument: bool = True) -> Callable[..., None]:
    """Give a typer command every configuration flag, `--config` and the argument MODEL; it receives them as `settings`."""
    own = dict(inspect.signature(command, eval_str=True).parameters)
    own.pop("settings")
    options = {key.replace(".", "__"): key for key in field_types()}

    def run(**values: Any) -> None:
        flags = {key: values.pop(name) for name, key in options.items()}
        file, model, profile = values.pop("config_file"), values.pop("model_argument", None), values.pop("profile")
        given = {key: _plain(key, value) for key, value in flags.items() if value is not None and value != []}
        if model is not None:
            given["model.model"] = model
        command(settings=load_settings(given, file, profile=profile), **values)

    model_help = "A folder, a .gguf file, or a source (hf:org/name, pypi:package)."
    file_help = "YAML or TOML file with any of the keys below."
    profile_help = f"Scheduler settings for a kind of traffic: {', '.join(f'{p.name} ({p.purpose})' for p in PRESETS.values())}."
    argument = _parameter("model_argument", str | None, typer.Argument(metavar="MODEL", help=model_help), None)
    parameters = [
        *([argument] if model_argument else []),
        *own.values(),
        _parameter("config_file", str | None, typer.Option("--config", metavar="FILE", help=file_help), None),
        _parameter("profile", str | None, typer.Option("--profile", metavar="|".join(PRESETS), help=profile_help), None),
        *(_option(name, key) for name, key in options.items()),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    return run


def _plain(key: str, value: Any) -> Any:
    """Repeated options may also hold comma-separated lists."""
    if not isinstance(value, list):
        return value
    return [item for text in value for item in list_items(key, str(text))]


def _parameter(name: str, kind: Any, info: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _option(name: str, key: str) -> inspect.Parameter:
    kind = field_types()[key]
    flag = flag_name(key)
    panel = PANELS.get(key.partition(".")[0], "More")
    texts: dict[str, Any] = {"help": HELP.get(key, ""), "rich_help_panel": panel, "show_default": False}
    names = tuple(dict.fromkeys((flag, *ALIASES.get(key, ()))))
    if kind is bool:
        return _parameter(name, bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **texts), None)
    if get_origin(kind) is tuple:
        return _parameter(name, list[str] | None, typer.Option(*names, metavar="TEXT", **texts), None)
    return _parameter(name, str | None, typer.Option(*names, metavar=_metavar(kind), **texts), None)


def _metavar(kind: Any) -> str:
    kinds = [k for k in get_args(kind) if k is not NoneType] if NoneType in get_args(kind) else [kind]
    if get_origin(kinds[0]) is Literal:
        return "|".join(map(str, get_args(kinds[0])))
    return {int: "NUMBER", float: "NUMBER"}.get(kinds[0], "TEXT")


__all__ = ["Settings", "with_config"]
