"""Functions in Triton's language: compiled when they are first launched, or for a GPU that is not here.

Triton is imported then and not before, so that kernels are registered where it is not installed. What is compiled
without a GPU is what a kernel really launches: its own code runs on tensors without data, and each launch is noted
instead of made (`launches`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from portable.errors import BackendUnavailableError

# architecture: (Triton's backend, its name there, lanes of a warp)
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
BACKENDS = ("cuda", "rocm")
HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_VALUES_A_WARP = 512
_MOST_WARPS = 16  # a workgroup of AMD's has 1024 lanes at most
_ALIGNMENT = 16  # Triton compiles apart for sizes and addresses that are multiples of it
_NOTED: ContextVar[list[Launch] | None] = ContextVar("portable_triton_noted", default=None)


class TritonFunction:
    """A function in Triton's language, e.g. ``def scale(x, out, n, BLOCK: tl.constexpr)``; see `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    @functools.cached_property
    def compiled(self) -> Any:
        """Triton's form of it.

        Raises:
            BackendUnavailableError: Triton is not installed.
        """
        try:
            import triton
            import triton.language
        except ImportError as failure:
            raise BackendUnavailableError(
                f"the kernels in Triton ({self.function.__module__}) need it, and it cannot be imported: {failure}",
                remedy="pip install triton, or set PORTABLE_KERNELS=off",
            ) from failure

        # Triton reads the names in a function from its module, which imports `tl` for the type checker alone
        self.function.__globals__["tl"] = triton.language
        return triton.jit(self.function)

    def launch(self, grid: tuple[int, ...], *args: Any, values: int, **constants: Any) -> None:
        """Run it on the device of the first tensor.

        Args:
            grid: how many programs, by axis; none at all where one is 0.
            args: tensors, numbers, or None, which is a constant.
            values: how many values a program works on at a time; more get more warps.
            constants: its ``tl.constexpr`` parameters.
        """
        warps = min(max(values // _VALUES_A_WARP, 1), _MOST_WARPS)
        noted = _NOTED.get()
        if noted is not None:
            noted.append(_launch(self, args, constants, warps))
        elif 0 not in grid:
            device = next(a.device for a in args if isinstance(a, torch.Tensor))
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                self.compiled[grid](*args, **constants, num_warps=warps, enable_fp_fusion=True)


def jit(function: Callable[..., Any]) -> TritonFunction:
    """Decorator: a function in Triton's language."""
    return TritonFunction(function)


def block(size: int, most: int = 1 << 30) -> int:
    """The power of two, which the size of a block of values has to be, that holds ``size`` values, or ``most``."""
    return min(1 << max(size - 1, 0).bit_length(), most)


@dataclass(frozen=True)
class Launch:
    """What Triton compiles a function for.

    Attributes:
        types: of its parameters, in Triton's notation; "constexpr" for a constant.
        constants: (parameter, value).
        aligned: positions of the parameters that are multiples of 16.
    """

    function: TritonFunction
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int

    def __str__(self) -> str:
        types = ", ".join(f"{name}: {kind}" for name, kind in self.types if kind != "constexpr")
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.function.__name__}({types}; {constants}; {self.warps} warps)"


@dataclass(frozen=True)
class Compiled:
    """A launch compiled for a target.

    Attributes:
        code_bytes: of the cubin or hsaco.
        registers: of a thread.
        spilled_bytes: of a thread, in memory because there were too few registers.
        shared_bytes: of a block of threads.
    """

    launch: Launch
    target: str
    code_bytes: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def launches(op: str, calls: Iterable[tuple[Any, ...]] | None = None) -> list[Launch]:
    """What the Triton kernel of ``op`` launches, forward and backward, each once.

    Args:
        calls: all arguments of each call, tensors on the meta device; default: what the kernel's module calls
            ``typical``.
    """
    from portable.kernels.registry import KERNELS, load

    load()
    kernel = KERNELS[op, "triton"]
    with _noting() as noted:
        for args in importlib.import_module(kernel.implementation.__module__).typical() if calls is None else calls:
            results = kernel.implementation(*args)
            if kernel.backward is not None:
                grads = results if isinstance(results, tuple) else (results,)
                kernel.backward(grads, [isinstance(a, torch.Tensor) for a in args], *args)
    return list(dict.fromkeys(noted))


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile for one of TARGETS, which need not be here.

    Raises:
        BackendUnavailableError: Triton is not installed.
        triton.CompilationError: it does not compile.
    """
    function = launch.function.compiled
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=function,
        signature=dict(launch.types),
        constexprs=dict(launch.constants),
        attrs={(i,): [["tt.divisibility", _ALIGNMENT]] for i in launch.aligned},
    )
    options = {"num_warps": launch.warps, "enable_fp_fusion": True}
    done = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    binary = done.asm["cubin"] if TARGETS[target][0] == "cuda" else done.asm["hsaco"]
    usage = _usage_nvidia(binary) if TARGETS[target][0] == "cuda" else _usage_amd(done.asm["amdgcn"])
    return Compiled(launch, target, len(binary), *usage, done.metadata.shared)


@contextlib.contextmanager
def _noting() -> Iterator[list[Launch]]:
    noted: list[Launch] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def _launch(function: TritonFunction, args: Sequence[Any], constants: dict[str, Any], warps: int) -> Launch:
    names = list(inspect.signature(function.function).parameters)
    given = dict(zip(names, args, strict=False)) | constants
    types, fixed, aligned = [], [], []
    for i, name in enumerate(names):
        value = given[name]
        if name in constants or value is None or (type(value) is int and value == 1):  # Triton makes 1 a constant
            types.append((name, "constexpr"))
            fixed.append((name, value))
        elif isinstance(value, torch.Tensor):
            types.append((name, _POINTERS[value.dtype]))
            aligned.append(i)
        elif isinstance(value, float):
            types.append((name, "fp32"))
        else:
            types.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
            aligned += [i] if value % _ALIGNMENT == 0 else []
    return Launch(function, tuple(types), tuple(fixed), tuple(aligned), warps)


def _usage_nvidia(cubin: bytes) -> tuple[int, int]:
    """(registers, spilled bytes) by the tool that Triton brings."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump does not say what the kernel uses: {text[-300:]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _usage_amd(assembly: str) -> tuple[int, int]:
    """(registers, spilled bytes) from the metadata at the end of LLVM's assembly."""
    found = {
        name: int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[-1])
        for name in ("vgpr_count", "private_segment_fixed_size")
    }
    return found["vgpr_count"], found["private_segment_fixed_size"]
