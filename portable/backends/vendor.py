"""Devices whose vendor registers a Dynamo backend: their package is imported when the backend is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from portable.backends.base import Backend, State, ask, installed
from portable.backends.native import NativeBackend, calls
from portable.errors import BackendUnavailableError, UnsupportedInputError
from portable.explain import Compilation, GraphRecord, Record, ran


class VendorBackend(NativeBackend):
    """Compiles with the Dynamo backend ``dynamo``, which the import of ``package`` registers, as it does the device.

    Attributes:
        device_name: an expression that gives the device's name once torch and the package are imported.
        where: what has it, for the remedy of a missing package.
    """

    package: ClassVar[str]
    dynamo: ClassVar[str]
    device_name: ClassVar[str]
    where: ClassVar[str]

    @classmethod
    def executor(cls) -> State:
        """Whether the vendor's package is here, loads beside this torch and finds a device."""
        if not installed(cls.package):
            return State(False, f"{cls.package} is not installed", f"install it on {cls.where}")
        ok, text = ask(f"import torch, {cls.package}; print({cls.device_name})")
        if not ok:
            return State(False, f"no usable device: {text}", f"run on {cls.where}; see the vendor's troubleshooting")
        return State(True, f"ready, {text}")

    @classmethod
    def probe(cls) -> State:
        return cls.executor()

    def require(self) -> Backend:
        super().require()
        importlib.import_module(self.package)
        return self

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        if self.variant == "eager":
            return super().compile(gm, example_inputs, graph, record)
        for name, x in zip(graph.arguments, example_inputs, strict=False):
            if isinstance(x, torch.Tensor):
                self.check_input(x, name)
            self._check_static(x, name)
        capture_s = graph.since_call()
        counted = calls(gm, "vendor")
        compiled = self._compiler()(gm, list(example_inputs))
        graph.ops.update(counted)
        record.add(Compilation(graph.index, "graph", graph.cause, capture_s, 0.0, graph.since_call() - capture_s))

        def run(*args: Any) -> Any:
            ran()
            return compiled(*args)

        return run

    def _compiler(self) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend
        from torch._dynamo.exc import InvalidBackend

        try:
            found: Callable[..., Any] = lookup_backend(self.dynamo)
        except InvalidBackend as failure:
            raise BackendUnavailableError(
                f"backend {self}: {self.package} has registered no Dynamo backend {self.dynamo!r}",
                remedy=f"install the {self.package} that is made for torch {torch.__version__}",
            ) from failure
        return found

    def _check_static(self, x: Any, name: str) -> None:
        sizes = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,)
        if self.static_shapes and any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in sizes):
            raise UnsupportedInputError(
                f"{name} has a symbolic size; backend {self} takes none: {self.static_shapes}",
                remedy="use portable.compile, or torch.compile(dynamic=False)",
            )
