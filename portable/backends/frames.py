"""Messages between a process and one that compiles for it: eight bytes of length, then the bytes."""

from __future__ import annotations

from typing import Any


def send(stream: Any, data: bytes) -> None:
    """Write one message."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: Any) -> bytes:
    """Read one message; empty where the other side has gone."""
    header = stream.read(8)
    return stream.read(int.from_bytes(header, "little")) if len(header) == 8 else b""
