"""MessagePack encoding of the message Structs, and frames for token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """Bytes that are no message of this protocol version."""


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as MessagePack bytes."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one union of message Structs; anything else is a `ProtocolError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | memoryview) -> T:
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from error


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes, the form in which they travel in a frame of their own."""
    return array("i", ids).tobytes()


def unpack_ids(frame: bytes | memoryview) -> list[int]:
    """Inverse of `pack_ids`."""
    if len(frame) % 4:
        raise ProtocolError(f"a frame of token ids has {len(frame)} bytes, no multiple of 4")
    ids = array("i")
    ids.frombytes(frame)
    return ids.tolist()
