"""`cpu`: the host, by Inductor (`cpu`) or eager (`cpu:eager`). Always there; the reference of every comparison."""

from __future__ import annotations

from portable.backends.base import State
from portable.backends.native import NativeBackend


class Cpu(NativeBackend):
    name = "cpu"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> State:
        return State(True, "ready", evidence="verified here")


BACKEND = Cpu
