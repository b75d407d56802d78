"""The protocol of a backend: what it is called, whether it can run here and why not, and how it compiles a graph."""

from __future__ import annotations

import functools
import importlib.util
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from portable.errors import BackendUnavailableError, ConfigError, UnknownBackendError, UnsupportedInputError
from portable.explain import GraphRecord, Record
from portable.kernels.fingerprint import ABSENT

Evidence = Literal["verified here", "compiled for", "contract only"]

# Error relative to the output's scale that a correct operator may have where eager itself is nearer to the float64
# result: a few hundred roundings for sums in another order.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class State:
    """Whether a backend can run here.

    Attributes:
        ready: it can.
        reason: what it runs on, or why it cannot run.
        remedy: what makes it ready ('' where nothing is to be done).
        evidence: what has been shown of it, in the words of README's table.
    """

    ready: bool
    reason: str
    remedy: str = ""
    evidence: Evidence = "contract only"


@dataclass(frozen=True)
class Capabilities:
    """What a backend's device is good at.

    Attributes:
        dtypes: the dtypes that it computes with.
        emulated: of these, the ones that cost more than their size says, each with the reason.
        multiples: preferred multiples of a size, by what it is the size of: {"matmul": 128}.
        graphs: whether a sequence of its launches can be recorded and replayed (CUDA graphs).
        collectives: the name of its collectives: a backend of torch.distributed, "XLA", or '' for none.
    """

    dtypes: frozenset[torch.dtype]
    emulated: Mapping[torch.dtype, str] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    graphs: bool = False
    collectives: str = ""


@dataclass(frozen=True)
class MemoryStats:
    """Memory of a device, in bytes; None where it does not say.

    Attributes:
        used: by this process, now.
        peak: the most that this process has used.
        total: that the device has.
    """

    used: int | None
    peak: int | None
    total: int | None


class Backend(ABC):
    """A place to run. Subclass it in one file; another package adds one through the entry-point group
    `portable.backends`.

    Attributes:
        name: what users write, e.g. in PORTABLE_BACKEND.
        path: "stablehlo" (our lowering and PJRT) or "native" (the device's own PyTorch path).
        variants: what may follow the name after a colon (`cpu:eager`); empty where nothing may.
        static_shapes: why its compiler takes no symbolic size, '' where it does. Each set of sizes is then captured
            and compiled apart, exactly as it is: nothing is padded.
        no_graphs: why a sequence of its launches is never recorded, for the error of ``graphs="require"``.
        evidence: what this project's tests have shown of it without its device.
    """

    name: ClassVar[str]
    path: ClassVar[Literal["stablehlo", "native"]]
    variants: ClassVar[tuple[str, ...]] = ()
    static_shapes: ClassVar[str] = ""
    no_graphs: ClassVar[str] = "its device records no launches"
    evidence: ClassVar[Evidence] = "contract only"

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in self.variants and variant not in self.other_variants():
            variants = dict.fromkeys((*self.variants, *self.other_variants()))
            legal = ", ".join(f"{self.name}:{v}" for v in variants) or f"{self.name} alone"
            raise UnknownBackendError(
                f"backend {self.name!r} has no variant {variant!r}", remedy=f"legal: {self.name}, {legal}"
            )
        self.variant = variant

    def __str__(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @classmethod
    def of(cls, variant: str) -> Backend:
        """The backend that ``name:variant`` names.

        Raises:
            UnknownBackendError: there is no such variant.
        """
        return cls(variant)

    @classmethod
    def other_variants(cls) -> tuple[str, ...]:
        """Variants that this installation has beyond `variants`; asked for only where one is named that is none of
        them."""
        return ()

    @classmethod
    def deviceless(cls) -> tuple[str, ...]:
        """Device names that this backend can compile for without a device, here and now."""
        return ()

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

    def capabilities(self) -> Capabilities:
        """What its device is good at."""
        integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        return Capabilities(frozenset({*TOLERANCES, *integers}))

    def hardware(self) -> dict[str, str]:
        """Its part of a `fingerprint`: "device", "architecture", "driver", "runtime"; "absent" where there is none.

        Initialises the device in this process.
        """
        return {"device": str(self.device()), "architecture": platform.machine(), "driver": ABSENT, "runtime": ABSENT}

    def records_graphs(self, policy: str) -> bool:
        """Whether its launches are recorded and replayed under a policy of ``graphs=``: "auto", "require" or "off".

        Raises:
            ConfigError: "require", where it cannot; names the reason.
        """
        if policy == "off":
            return False
        able = self.capabilities().graphs
        if policy == "require" and not able:
            raise ConfigError(
                f"graphs='require', and backend {self} records none: {self.no_graphs}",
                remedy="leave graphs out: under 'auto' what can be recorded is recorded",
            )
        return able

    def synchronize(self) -> None:
        """Wait until the device has done all that this process asked of it."""
        if self.device().type != "cpu":
            torch.accelerator.synchronize()

    def seconds(self, function: Callable[[], object]) -> float:
        """How long the device takes for what ``function`` asks of it: one call, after all that came before."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

    def memory_stats(self) -> MemoryStats:
        """Memory of the device."""
        return MemoryStats(None, None, None)

    def manual_seed(self, seed: int) -> None:
        """Seed every random generator that this backend's programs read."""
        torch.manual_seed(seed)

    def tolerances(self) -> Mapping[torch.dtype, float]:
        """By dtype, the error relative to the output's scale that a correct operator may have here."""
        return TOLERANCES

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
    try:
        state = backend.probe()
    except Exception as failure:  # of another author's code
        return State(False, f"its probe failed: {type(failure).__name__}: {failure}", "portable doctor --verbose")
    if not isinstance(state, State):
        return State(False, f"its probe gave {type(state).__name__}, not a State", "report it to its author")
    return state


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
