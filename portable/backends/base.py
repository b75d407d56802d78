"""The protocol of a backend: what it is called, whether it can run here and why not, and how it compiles a graph."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from portable.errors import BackendUnavailableError, UnknownBackendError, UnsupportedInputError
from portable.explain import GraphRecord, Record

Evidence = Literal["verified here", "compiled for", "contract only"]


@dataclass(frozen=True)
class State:
    """Whether a backend can run here.

    Attributes:
        ready: it can.
        reason: what it runs on, or why it cannot run.
        remedy: what makes it ready ('' where nothing is to be done).
        evidence: what this installation can prove about it.
    """

    ready: bool
    reason: str
    remedy: str = ""
    evidence: Evidence = "contract only"


class Backend(ABC):
    """A place to run. Subclass it in one file; another package adds one through the entry-point group
    `portable.backends`.

    Attributes:
        name: what users write, e.g. in PORTABLE_BACKEND.
        path: "stablehlo" (our lowering and PJRT) or "native" (the device's own PyTorch path).
        variants: what may follow the name after a colon (`cpu:eager`); empty where nothing may.
    """

    name: ClassVar[str]
    path: ClassVar[Literal["stablehlo", "native"]]
    variants: ClassVar[tuple[str, ...]] = ()

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in self.variants:
            legal = ", ".join(f"{self.name}:{v}" for v in self.variants) or f"{self.name} alone"
            raise UnknownBackendError(
                f"backend {self.name!r} has no variant {variant!r}", remedy=f"legal: {self.name}, {legal}"
            )
        self.variant = variant

    def __str__(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @classmethod
    @abstractmethod
    def probe(cls) -> State:
        """Whether it can run here, found without initialising its device in this process."""

    @classmethod
    def diagnose(cls) -> State:
        """What `portable doctor` shows: `probe`, and what takes longer to find out."""
        return cls.probe()

    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors of a model live that this backend runs."""

    def label(self) -> str:
        """What decisions about kernels are stored under: the backend, with its platform where it has several."""
        return str(self)

    def other_paths(self) -> tuple[str, ...]:
        """Backends that run the same tensors on the same device by another path: candidates for an objective."""
        return ()

    @abstractmethod
    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        """Compile one graph that Dynamo captured; what is returned takes and gives what ``gm`` does, and trains."""

    def check_input(self, tensor: torch.Tensor, name: str) -> None:
        """Refuse, by name, a tensor that no compiled program of this backend takes.

        Raises:
            UnsupportedInputError: sparse, nested, on `meta` or on another device.
        """
        here = self.device().type
        if tensor.is_nested:
            kind, remedy = "a nested tensor", "pad it (torch.nested.to_padded_tensor) and pass a mask"
        elif tensor.layout is not torch.strided:
            kind, remedy = f"sparse ({tensor.layout})", "pass tensor.to_dense()"
        elif tensor.device.type == "meta":
            kind, remedy = (
                "on the meta device: it has no values",
                f"materialise it, e.g. model.to_empty(device={here!r}), and load weights",
            )
        elif tensor.device.type not in (here, "cpu"):
            kind, remedy = f"on {tensor.device}", f"move it: tensor.to({here!r})"
        else:
            return
        raise UnsupportedInputError(f"{name} is {kind}; backend {self} takes dense tensors on {here}", remedy=remedy)

    def require(self) -> Backend:
        """This backend, if it can run here.

        Raises:
            BackendUnavailableError: it cannot; the message is what `portable doctor` shows.
        """
        state = _probed(type(self))
        if not state.ready:
            raise BackendUnavailableError(f"backend {self} cannot run here: {state.reason}", remedy=state.remedy)
        return self


@functools.cache
def _probed(backend: type[Backend]) -> State:
    return backend.probe()


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def ask(code: str, timeout: float = 60.0) -> tuple[bool, str]:
    """Run ``code`` in a fresh process, so that no device is initialised in this one; (succeeded, its last line)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer in {timeout:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""
