"""Every exception of portable: what happened, to which op on which backend, at which line, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class PortableError(RuntimeError):
    """Base of all errors of portable. ``remedy`` says what the user can do."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """The whole message."""
        return f"{self.message}\n  Remedy: {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple:
        return _rebuilt, (type(self), str(self), self.__dict__)


def _rebuilt(kind: type[PortableError], text: str, state: dict) -> PortableError:
    error = kind.__new__(kind)
    RuntimeError.__init__(error, text)
    error.__dict__.update(state)
    return error


class ConfigError(PortableError, ValueError):
    """An environment variable or an option holds a value that is not legal."""


class UserCodeError(PortableError):
    """A user's function or model raised, on the command line: its error, and the line that raised it."""


class UnknownBackendError(PortableError, ValueError):
    """The named backend does not exist; the message lists those that do."""


class BackendUnavailableError(PortableError):
    """The named backend exists, but cannot run here; the message gives the reason that `portable doctor` shows."""


class UnsupportedInputError(PortableError, TypeError):
    """A tensor that no program can take: sparse, nested, on `meta`, on another device, or of a foreign dtype."""


class InvalidInputError(PortableError, ValueError, IndexError):
    """A call that eager refuses too, such as `mm` of two dtypes: what torch says, with the op, dtypes and shapes.

    It is no TypeError: Python's operators take one of theirs to mean that the other operand has to be asked.

    Attributes:
        call: (op, its arguments, what torch says), where they are known.
    """

    call: tuple[Any, ...] = ()


class OpArgumentError(PortableError, ValueError):
    """An argument of a portable op has a shape, dtype or value that the op does not take."""


class UnsupportedDtypeError(UnsupportedInputError):
    """The backend has no such dtype."""


class UnsupportedOutputError(PortableError, TypeError):
    """The function returns something that a compiled program cannot return."""


class UnsupportedGradientError(PortableError, RuntimeError):
    """A derivative that a compiled function does not have: a second one, or one in forward mode."""


@dataclass(frozen=True)
class UnsupportedOp:
    """One operator that was refused: its overload, why, and the line of the user's code that calls it, if known."""

    op: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.op}{place}: {self.reason}"


class UnsupportedOpError(PortableError, NotImplementedError):
    """Operators without a lowering; all of them at once in ``.ops``.

    Args:
        fallback_is_off: torch's own kernels were not tried, since the mode is "error".
    """

    def __init__(self, ops: Sequence[UnsupportedOp], *, backend: str, fallback_is_off: bool = False) -> None:
        self.ops = tuple(ops)
        self.backend = backend
        count = f"{len(ops)} operator{'s' if len(ops) > 1 else ''}"
        listing = "".join(f"\n    {op}" for op in ops)
        super().__init__(
            f"{count} of this program {'have' if len(ops) > 1 else 'has'} no exact lowering on {backend}:{listing}",
            remedy=(
                "let torch's own kernels stand in where they can (fallback='warn' or 'allow'), "
                if fallback_is_off
                else ""
            )
            + "register a lowering (README, “Where to add what”), run the model with backend='cpu', or move these "
            "operators out of the compiled function with torch.compiler.disable",
        )


class SpecialisationError(PortableError):
    """A program was specialised on a number, such as the size of a result, and computes another one when it runs."""


class LoweringError(PortableError):
    """A lowering gave another dtype or shape than torch does, or failed; the remedy says whose it is to mend."""

    def __init__(self, op: str, message: str, *, where: str = "", remedy: str = "") -> None:
        place = f" at {where}" if where else ""
        super().__init__(
            f"the lowering of {op}{place} {message}",
            remedy=remedy or "this is a bug in the lowering, not in your model: please report it with this message",
        )
        self.op = op


class ProgramError(PortableError):
    """A compiled program failed while it ran, e.g. in a kernel of the host that it calls."""


class KernelError(PortableError):
    """A kernel raised, or gave something else than its op gives: another number of results, another dtype or shape."""


class GraphCaptureError(PortableError):
    """The launches of a graph cannot be recorded, and the model was compiled with ``graphs="require"``."""


class RecompileError(PortableError):
    """A frozen model was called in a way that needs a new compilation."""


class RegistrationError(PortableError, ValueError):
    """A lowering, backend or kernel was registered twice, under an ambiguous name, or with a wrong signature."""


class LedgerError(PortableError):
    """The ledger cannot be read or written, or what was to be written contradicts what it holds."""
