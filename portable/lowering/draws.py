"""Where in torch's random stream each op of a trace draws.

A program's random numbers come from the state of torch's generator when the program runs. Two things that a function
does while it is traced must still hold in the program: what it seeds itself (`torch.manual_seed` inside it) is the same
at every run, and a state that it saves and restores (activation checkpointing does) gives the same numbers again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch.utils._mode_utils import no_dispatch


@dataclass(frozen=True)
class Draw:
    """One draw of a sequence.

    Attributes:
        start: the generator state that the sequence starts from; None for the state when the program runs.
        index: how many draws precede it in the sequence.
    """

    start: bytes | None
    index: int


class Draws:
    """Follows the state of torch's CPU generator through a trace.

    After each draw the state is moved to one that nothing else gives, so that it tells which draws precede it.
    """

    def __init__(self) -> None:
        self._initial = generator_state()
        self._known = {self._initial: Draw(None, 0)}

    def next(self, state: bytes) -> Draw:
        """The draw that an op does from this state."""
        draw = self._known.setdefault(state, Draw(state, 0))
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(state).digest()[:7], "little"))
        self._known[generator_state()] = Draw(draw.start, draw.index + 1)
        return draw

    def close(self) -> None:
        """Undo what the trace itself moved: the state stays only where the function has seeded it."""
        draw = self._known.get(generator_state())
        if draw is not None and draw.start is None and draw.index:
            torch.default_generator.set_state(_tensor(self._initial))


def generator_state() -> bytes:
    """The state of torch's CPU generator."""
    with no_dispatch():
        return torch.default_generator.get_state().numpy().tobytes()


def generator_at(state: bytes) -> torch.Generator:
    """A CPU generator in this state."""
    generator = torch.Generator()
    generator.set_state(_tensor(state))
    return generator


def _tensor(state: bytes) -> torch.Tensor:
    with no_dispatch():
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
