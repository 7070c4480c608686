"""API keys. Deny by default: when keys are set, every route needs one, except the short table below."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from hexad.common.errors import AuthenticationError, ConfigError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
HASHED = "sha256:"  # a configured key with this prefix is already a digest, in hex


class Keys:
    """The accepted keys, as sha256 digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises ConfigError for an empty key or a digest that is none."""
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, key: bytes) -> str | None:
        """A name for the holder of `key`, or None if it is not accepted. The time taken does not depend on the keys."""
        digest = hashlib.sha256(key).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(digest, known):
                found = known
        return found.hex()[:16] if found is not None else None


def _digest(key: str) -> bytes:
    if not key.strip():
        raise ConfigError("server.api_key has an empty key: remove it, or set a real one")
    if not key.startswith(HASHED):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError("server.api_key has an entry that starts with sha256: but is not followed by 64 hex digits")
    return digest


class Authenticate:
    """ASGI middleware. Sets `scope["state"]["tenant"]`."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_key = scope["type"] == "websocket" or (scope["type"] == "http" and scope["path"] not in OPEN_PATHS)
        if self.keys and needs_key:
            scope.setdefault("state", {})["tenant"] = self._tenant(scope)
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        """The holder of the key in the headers.

        Raises:
            AuthenticationError: no key, several, a malformed header, or a key that is not accepted (never repeated in the message).
        """
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if not values:
            values = [b"bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        if not values:
            raise AuthenticationError("no API key: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'")
        scheme, _, key = values[0].partition(b" ")
        if len(values) > 1 or scheme.lower() != b"bearer" or not key:
            raise AuthenticationError("malformed header with the API key: send one 'Authorization: Bearer KEY', or one 'x-api-key: KEY'")
        tenant = self.keys.tenant(key)
        if tenant is None:
            raise AuthenticationError("this API key is not accepted: check it for typing errors")
        return tenant
