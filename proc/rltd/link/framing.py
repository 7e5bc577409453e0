"""Length-prefixed frames on a stream socket: 4 bytes little-endian length, then that many bytes of MessagePack."""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")

#: Far above every real message; a larger length means that the other side does not speak this protocol.
MAX_FRAME_BYTES = 16 << 20


class FramingError(Exception):
    """The stream ended inside a frame, or a length is impossible."""


def frame(data: bytes) -> bytes:
    """Return `data` with its length in front."""
    if len(data) > MAX_FRAME_BYTES:
        raise FramingError(f"a message of {len(data)} bytes is more than the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(data)) + data


def read_frame(sock: socket.socket) -> bytes | None:
    """Return the next frame of a blocking socket, or None at a clean end of the stream."""
    head = _read_exactly(sock, _LENGTH.size)
    if not head:
        return None
    body = _read_exactly(sock, _length(head))
    if body is None:
        raise FramingError("the stream ended inside a frame")
    return body


async def read_frame_async(reader: asyncio.StreamReader) -> bytes | None:
    """Like `read_frame`, on an asyncio stream."""
    try:
        head = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FramingError("the stream ended inside a frame") from error
        return None
    try:
        return await reader.readexactly(_length(head))
    except asyncio.IncompleteReadError as error:
        raise FramingError("the stream ended inside a frame") from error


def _length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise FramingError(f"a frame claims {length} bytes, more than the limit of {MAX_FRAME_BYTES}")
    return length


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Return `size` bytes, or None when the stream ends before the first one."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            if parts:
                raise FramingError("the stream ended inside a frame")
            return None
        parts += part
    return bytes(parts)
