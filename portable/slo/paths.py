"""Objectives of whole models: which path a compiled model runs on, decided at the first call of each signature.

The order is the gate's (portable/slo/gate.py): the selected backend is measured first and stays if it meets the
objective; only if it does not are the other paths of the same device tried, all interleaved in one run; a path counts
only where its results agree with eager; if none meets the objective the selected backend stays and the miss is said.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.errors import ConfigError, PortableError
from portable.slo import trial
from portable.slo.correctness import difference, exactly
from portable.slo.judgement import Judgement, judge
from portable.slo.objective import SLO
from portable.slo.statistics import Interval, bootstrap

BUDGET_S = 2.0  # of timing, for each of the two runs
MIN_ROUNDS = 7
METRICS = ("p50_ms", "p99_ms", "ratio")
Call = Callable[..., Any]


@dataclass(frozen=True)
class PathDecision:
    """Which path runs one signature of a model, and why.

    Attributes:
        signature: types of the call's arguments.
        slo: the objective, in words.
        backend: what runs from now on.
        met: whether it meets the objective.
        reason: one line with the figures.
        seconds: median and confidence interval of a call by name: the paths and the baselines that were measured.
        rejected: (backend, why not) for each other path.
    """

    signature: str
    slo: str
    backend: str
    met: bool
    reason: str
    seconds: Mapping[str, Interval]
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        return f"objective {self.slo} for {self.signature}: {self.backend} {self.reason}{others}"


def check_slo(slo: Any) -> SLO:
    """``slo`` if it can be an objective of `compile`.

    Raises:
        ConfigError: it is none, or its metric cannot be measured here.
    """
    if not isinstance(slo, SLO):
        raise ConfigError(f"slo={slo!r} is not an objective", remedy='pass e.g. pt.SLO("p50_ms", 5.0)')
    if slo.metric not in METRICS:
        remedy = f"one of {', '.join(METRICS)}; `portable bench` measures the others"
        raise ConfigError(f"slo: metric {slo.metric!r} is not measured while a model runs", remedy=remedy)
    return slo


def signature_of_call(target: Any, args: Any, kwargs: Any) -> str:
    """The types of a call's arguments as text; of a module also its mode."""
    from portable.kernels.select import signature_of

    text = signature_of(pytree.tree_leaves((args, kwargs)), {})
    return f"{text} training" if getattr(target, "training", False) is True else text


class Paths:
    """Decides for one model.

    Args:
        target: the model or function itself, which runs in eager.
        paths: {backend: a call of the model compiled for it}; the selected backend first. The others are made when they
            are tried.
        native: the backend among them that is Inductor, which is the baseline of that name.
        name: the model's, for messages.
    """

    def __init__(
        self, target: Any, slo: SLO, paths: Mapping[str, Callable[[], Call]], native: str | None, name: str
    ) -> None:
        self._target, self._slo, self._paths, self._native, self._name = target, slo, paths, native, name
        self._selected = next(iter(paths))

    def decide(self, signature: str, args: Any, kwargs: Any) -> PathDecision:
        """Measure, and decide for calls like this one. The model's buffers, the arguments and torch's random state are
        as before afterwards; other state that the model keeps is not put back.

        Raises:
            Exception: what the selected path itself raises.
        """
        with _put_back(self._target):
            reference = self._reference(args, kwargs)
            wrong: dict[str, str] = {}
            calls = {self._selected: self._checked(self._selected, reference, args, kwargs, wrong)}
            baselines = self._baselines(reference, args, kwargs, wrong, calls)
            samples = self._timed({self._selected: calls[self._selected]}, baselines, args, kwargs)
            first = self._judged(self._selected, samples, wrong)
            others = [name for name in self._paths if name != self._selected]
            if first.met:
                rejected = tuple((name, "not needed") for name in others)
                return self._decision(signature, self._selected, first, samples, rejected)
            for name in others:
                if name not in calls and name not in wrong:
                    self._try(name, reference, args, kwargs, wrong, calls)
            if len(calls) > 1:
                samples = self._timed(calls, baselines, args, kwargs)
        judged = {name: self._judged(name, samples, wrong) for name in calls}
        backend = next((name for name in self._paths if name in judged and judged[name].met), self._selected)
        rejected = tuple(
            (name, wrong.get(name) or judged[name].reason) for name in self._paths if name != backend
        )  # fmt: skip
        decision = self._decision(signature, backend, judged[backend], samples, rejected)
        if not decision.met:
            warnings.warn(f"{self._name}: UNMET {decision}", stacklevel=5)
        return decision

    def _decision(
        self,
        signature: str,
        backend: str,
        judged: Judgement,
        samples: Mapping[str, Sequence[float]],
        rejected: tuple[tuple[str, str], ...],
    ) -> PathDecision:
        seconds = {name: bootstrap(values) for name, values in samples.items()}
        return PathDecision(signature, str(self._slo), backend, bool(judged.met), judged.reason, seconds, rejected)

    def _judged(self, name: str, samples: Mapping[str, Sequence[float]], wrong: Mapping[str, str]) -> Judgement:
        if name in wrong:
            return Judgement(self._slo, None, False, wrong[name])
        measured = dict(samples)
        if self._native is not None and self._native in samples:
            measured["inductor"] = samples[self._native]
        return judge(self._slo, measured, subject=name)

    def _reference(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What eager gives, and the same in float64; eager again where the model cannot run in float64."""
        eager = self._target(*_cloned(args), **_cloned(kwargs))
        widened = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, eager)
        try:
            wide = copy.deepcopy(self._target).double() if isinstance(self._target, torch.nn.Module) else self._target
            exact = exactly(wide, _cloned(args), _cloned(kwargs))
        except Exception:  # a model that insists on its dtype, or cannot be copied
            return eager, widened
        right = [x.dtype for x in pytree.tree_leaves(exact) if isinstance(x, torch.Tensor)]
        return eager, exact if right == [x.dtype for x in pytree.tree_leaves(widened) if _tensor(x)] else widened

    def _checked(self, name: str, reference: tuple[Any, Any], args: Any, kwargs: Any, wrong: dict[str, str]) -> Call:
        """The path's call, compiled; an answer that is not eager's is noted."""
        call = self._paths[name]()
        problem = difference(call(*_cloned(args), **_cloned(kwargs)), reference[0], reference[1])
        if problem:
            wrong[name] = f"disagrees with eager: {problem}"
        return call

    def _try(
        self,
        name: str,
        reference: tuple[Any, Any],
        args: Any,
        kwargs: Any,
        wrong: dict[str, str],
        calls: dict[str, Call],
    ) -> None:
        try:
            call = self._checked(name, reference, args, kwargs, wrong)
        except PortableError as failure:
            wrong[name] = failure.message.splitlines()[0]
        except Exception as failure:  # of a compiler that was tried and is not needed
            wrong[name] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"
        else:
            if name not in wrong:
                calls[name] = call

    def _baselines(
        self, reference: tuple[Any, Any], args: Any, kwargs: Any, wrong: dict[str, str], calls: dict[str, Call]
    ) -> dict[str, Call]:
        """What the objective is a ratio to: eager, and Inductor, which is a path itself."""
        if self._slo.metric != "ratio":
            return {}
        found: dict[str, Call] = {}
        if self._slo.baseline in ("eager", "best_native"):
            found["eager"] = self._target
        if self._slo.baseline in ("inductor", "best_native") and self._native and self._native != self._selected:
            self._try(self._native, reference, args, kwargs, wrong, calls)
            if self._native in calls:
                found[self._native] = calls[self._native]
        return found

    def _timed(
        self, calls: Mapping[str, Call], baselines: Mapping[str, Call], args: Any, kwargs: Any
    ) -> dict[str, list[float]]:
        functions = {}
        for name, call in {**calls, **baselines}.items():
            own_args, own_kwargs = _cloned(args), _cloned(kwargs)
            functions[name] = lambda call=call, args=own_args, kwargs=own_kwargs: call(*args, **kwargs)
        timer = trial._timer()
        samples: dict[str, list[float]] = timer.interleave(functions, budget_s=BUDGET_S, min_rounds=MIN_ROUNDS)
        return samples


def _tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _cloned(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, values)


@contextlib.contextmanager
def _put_back(target: Any) -> Iterator[None]:
    """Afterwards the module's buffers and torch's random state are what they were."""
    modules = list(target.modules()) if isinstance(target, torch.nn.Module) else []
    before = [(m, dict(m._buffers), {k: b.clone() for k, b in m._buffers.items() if b is not None}) for m in modules]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = torch.random.fork_rng(device_type=kind.type) if kind else torch.random.fork_rng(devices=[])
    try:
        with devices:
            yield
    finally:
        for module, buffers, values in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, value in values.items():
                buffer = buffers[name]
                if buffer is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
