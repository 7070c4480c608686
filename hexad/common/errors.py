"""The one exception tree for mistakes of callers and operators. Internal invariants use `assert`.

    HexadError                        500 server_error
    ├── RequestError                  400 invalid_request_error   the request itself is wrong
    │   ├── UnknownFieldError         400 unknown_field           a field within two edits of a known one
    │   ├── UnsupportedError          400 unsupported             known, but this build or model cannot do it
    │   ├── ContextLengthError        400 context_length_exceeded
    │   ├── NeverFitsError            400 kv_cache_exceeded       larger than the whole KV pool
    │   └── PayloadTooLargeError      413 payload_too_large
    ├── AuthenticationError           401 invalid_api_key
    ├── PermissionDeniedError         403 permission_denied
    ├── NotFoundError                 404 not_found / model_not_found
    ├── RateLimitError                429 rate_limit_exceeded     a tenant's own limit (Retry-After)
    ├── OverloadedError               503 overloaded              the server's capacity (Retry-After)
    ├── EngineDeadError               503 engine_dead             the engine process is gone (Retry-After)
    ├── DeadlineError                 504 deadline_exceeded
    ├── RequestFailedError            500 request_failed          this request alone failed in the engine (NaN logits ...)
    └── StartupError                  the process cannot start: exit code 2
        ├── ConfigError               a bad flag, key or value
        ├── ModelError                a model that cannot be found, read or is not supported
        │   └── WeightsError          missing, left-over, corrupt or misshapen tensors
        └── OutOfMemoryError          a device limit that binds, and a value that fits

Every message names the one limit that binds, the value given and a value that would work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


class HexadError(Exception):
    """Root of the tree. `status` is the HTTP status, `type` and `code` go into the OpenAI error body."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The OpenAI-style error body: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestError(HexadError):
    """The request itself is wrong; sending it again unchanged cannot work."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class UnknownFieldError(RequestError):
    """A field that looks like a misspelling of a known one."""

    default_code = "unknown_field"


class UnsupportedError(RequestError):
    """A known field or combination that this build or this model cannot serve."""

    default_code = "unsupported"


class ContextLengthError(RequestError):
    """Prompt, or prompt plus requested output, exceeds the model's context."""

    default_code = "context_length_exceeded"


class NeverFitsError(RequestError):
    """The request needs more KV blocks than the whole pool has: it could wait for ever."""

    default_code = "kv_cache_exceeded"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    status = 413
    default_code = "payload_too_large"


class AuthenticationError(HexadError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(HexadError):
    """A valid key that may not do this."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(HexadError):
    """No such route, model or object."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class RateLimitError(HexadError):
    """A tenant's own limit is used up."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class OverloadedError(HexadError):
    """The server is at capacity; `retry_after_s` estimates when it will not be."""

    status = 503
    type = "overloaded_error"
    default_code = "overloaded"


class EngineDeadError(HexadError):
    """The engine process died or does not answer."""

    status = 503
    default_code = "engine_dead"


class DeadlineError(HexadError):
    """The request's own deadline passed before it finished."""

    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


class RequestFailedError(HexadError):
    """This request alone failed inside the engine; its neighbours did not."""

    default_code = "request_failed"


class StartupError(HexadError):
    """The process cannot start; the CLI prints the message and exits with `exit_code`."""

    exit_code: ClassVar[int] = 2
    default_code = "startup_failed"


class ConfigError(StartupError):
    """A bad flag, key or value in the configuration."""

    default_code = "bad_config"


class ModelError(StartupError):
    """A model that cannot be found, read, or that no family here supports."""

    default_code = "bad_model"


class WeightsError(ModelError):
    """Missing, left-over, corrupt or misshapen tensors; the message names them."""

    default_code = "bad_weights"


class OutOfMemoryError(StartupError):
    """Device memory does not suffice; the message has the sum and a value that fits."""

    default_code = "out_of_memory"


def edit_distance(a: str, b: str, limit: int = 3) -> int:
    """Levenshtein distance between `a` and `b`, cut off at `limit` (returned when it is reached)."""
    if abs(len(a) - len(b)) >= limit:
        return limit
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (ca != cb))
        if min(row) >= limit:
            return limit
    return min(row[-1], limit)


def nearest(name: str, known: Iterable[str], within: int = 2) -> str | None:
    """The known name closest to `name`, if at most `within` edits away (ties: alphabetical)."""
    best = min(((edit_distance(name, k, within + 1), k) for k in known), default=(within + 1, ""))
    return best[1] if best[0] <= within else None
