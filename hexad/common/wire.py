"""msgpack of typed structs. One encoder and decoder per direction, reused; nothing here can run code from the wire."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Codec(Generic[T]):
    """Encode and decode messages of a tagged union `T`. Not thread-safe.

    Raises on decode: msgspec.DecodeError or msgspec.ValidationError (a subclass) for anything that is not a `T`.
    """

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        return self._decoder.decode(frame)
