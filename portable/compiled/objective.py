"""A compiled model that has an objective: the path of each signature is decided by measuring at its first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from portable import backends
from portable.backends.base import Backend
from portable.compiled.frames import cold
from portable.compiled.run import Run
from portable.errors import ConfigError
from portable.explain import Record


class RunByObjective(Run):
    """One callable compiled for the selected backend, and for the other paths of its device where the objective asks
    for them; each signature runs on the path that was decided for it at its first call."""

    def __init__(self, target: Any, chosen: Backend, fullgraph: bool, dynamic: bool | None, options: dict[str, Any]):
        super().__init__(target, chosen, fullgraph, dynamic, options)
        from portable.slo.paths import Paths

        self._runs: dict[str, Run] = {str(chosen): self}
        self._decided: dict[str, Run] = {}
        names = [str(chosen), *(name for name in chosen.other_paths() if name != str(chosen))]
        native = next((n for n in names if ":" not in n and backends.backend_class(n).path == "native"), None)
        paths = {name: functools.partial(self._call_on, name) for name in names}
        self._paths = Paths(target, options["slo"], paths, native, self.record.name)

    def _call_on(self, name: str) -> Callable[..., Any]:
        if name not in self._runs:
            run = Run(self.target, backends.get(name), self.options["fullgraph"], self.options["dynamic"], self.options)
            run.record.objectives = self.record.objectives
            self._runs[name] = run
        run = self._runs[name]
        return functools.partial(Run.__call__, run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.target(*args, **kwargs)
        return Run.__call__(self._chosen_for(args, kwargs), *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """On the path that calls with these arguments run on."""
        return Run.forward(self._chosen_for(args, kwargs), *args, **kwargs)

    def _chosen_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{self.record.name} was compiled with slo=, which is for inference, and gradients are enabled",
                remedy="call it under torch.no_grad(), or compile without slo for training",
            )
        from portable.slo.paths import signature_of_call

        signature = signature_of_call(self.target, args, kwargs)
        return self._decided.get(signature) or self._decide(signature, args, kwargs)

    def _decide(self, signature: str, args: Any, kwargs: Any) -> Run:
        with cold():
            if signature not in self._decided:
                self.record.forbid_when_frozen(f"no path has been decided for {signature}")
                decision = self._paths.decide(signature, args, kwargs)
                self.record.objectives.append(decision)
                self._decided[signature] = self._runs[decision.backend]
            return self._decided[signature]

    def freeze(self) -> None:
        for run in self._runs.values():
            run.record.frozen = True

    def explained(self) -> Record:
        """That of the path which every signature runs on; the selected backend's where they differ."""
        used = {id(run): run for run in self._decided.values()}
        return next(iter(used.values())).record if len(used) == 1 else self.record
