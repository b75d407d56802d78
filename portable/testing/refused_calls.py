"""Calls that eager refuses, for each operator of torch's database, and whether a backend refuses them too.

Each call is one that eager takes with one thing changed: the dtype of a tensor, a size or a dimension of it, or a
number; and those that torch's own tests expect an error of (``OpInfo.error_inputs_func``). Values are not changed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.errors import LoweringError
from portable.testing import lowered

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
TENSORS = 5  # of a call are changed, the first ones
FAR = 17  # no tensor of the database has as many dimensions


@dataclass(frozen=True)
class Outcome:
    """What became of one call that eager refuses.

    Attributes:
        op: the operator's name in the database.
        kind: dtype, shape, number or error_inputs.
        change: what was changed, e.g. ``tensor 0: float32 → int64``.
        eager: what eager says.
        answer: "refused", "silent" (it computed something), or "reported" (an error that blames the lowering).
        said: the error.
    """

    op: str
    kind: str
    change: str
    eager: str
    answer: str
    said: str = ""

    def __str__(self) -> str:
        return f"{self.op}, {self.change}: {self.answer}, eager says {self.eager}"


@dataclass
class RefusalScore:
    """How many of the calls that eager refuses a backend refuses, and which it does not."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """Calls that both refuse."""
        return sum(o.answer == "refused" for o in self.outcomes)

    @property
    def wrong(self) -> list[Outcome]:
        """The others."""
        return [o for o in self.outcomes if o.answer != "refused"]

    def __str__(self) -> str:
        kinds = Counter(f"{o.kind} {o.answer}" for o in self.wrong)
        others = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none is silent"
        operators = len({o.op for o in self.outcomes})
        return f"{self.refused} of {len(self.outcomes)} calls of {operators} operators refused by both; {others}"


def operators(pattern: str = "") -> dict[str, Any]:
    """torch's database by name, as far as its operators take dense tensors on the CPU.

    Args:
        pattern: a regular expression that finds their names.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    named = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db}
    return {
        name: op
        for name, op in named.items()
        if re.search(pattern, name) and "sparse" not in name and not op.name.startswith(("empty", "new_empty"))
    }


def refusal_score(backend: str = "xla", *, ops: str = "", samples: int = 1) -> RefusalScore:
    """Have a backend of the XLA family compute what eager refuses.

    Args:
        ops: a regular expression that finds names of the database; by default all, which takes some minutes.
        samples: how many calls of each operator are changed.

    Returns:
        What became of each call; `RefusalScore.wrong` has to be empty.
    """
    score = RefusalScore()
    for name, op in operators(ops).items():
        for kind, change, args, kwargs in _changed(op, samples):
            said = _refusal_of(op, args, kwargs)
            if said:
                score.outcomes.append(_outcome(name, kind, change, said, _calling(op, backend, args, kwargs)))
    return score


def _calling(op: Any, backend: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: lowered(op, *_copied(args), backend=backend, fallback="error", **_copied(kwargs))


def _outcome(name: str, kind: str, change: str, eager: str, call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except LoweringError as failure:
        return Outcome(name, kind, change, eager, "reported", str(failure))
    except Exception as failure:  # of any kind: it is refused
        return Outcome(name, kind, change, eager, "refused", str(failure))
    return Outcome(name, kind, change, eager, "silent")


def _refusal_of(op: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    """What eager says against a call; '' if it takes it."""
    torch.manual_seed(0)
    try:
        op(*_copied(args), **_copied(kwargs))
    except Exception as failure:  # of any kind
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return ""


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def _changed(op: Any, samples: int) -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """(kind, what was changed, args, kwargs) of calls that eager may refuse."""
    supported = op.supported_dtypes("cpu")
    order = (torch.float32, torch.int64, torch.bool, torch.float64, torch.complex64)
    dtype = next((d for d in order if d in supported), None)
    if dtype is not None:
        torch.manual_seed(0)
        usable = (s for s in op.sample_inputs("cpu", dtype, requires_grad=False) if _usable(s) and _has_elements(s))
        for sample in itertools.islice(usable, samples):
            leaves, tree = pytree.tree_flatten(([sample.input, *sample.args], sample.kwargs))
            for kind, change, values in _variants(leaves):
                yield kind, change, *pytree.tree_unflatten(values, tree)
    if op.error_inputs_func:
        for error in op.error_inputs("cpu"):
            sample = error.sample_input
            if _usable(sample):
                yield "error_inputs", str(error.error_regex), [sample.input, *sample.args], sample.kwargs


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _usable(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    dense = all(x.layout is torch.strided and x.device.type == "cpu" and not x.is_nested for x in _tensors(sample))
    return dense and not any(isinstance(x, torch.Generator) for x in leaves)


def _has_elements(sample: Any) -> bool:
    return any(x.numel() for x in _tensors(sample))


def _variants(leaves: list[Any]) -> Iterator[tuple[str, str, list[Any]]]:
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)][:TENSORS]
    for i, x in enumerate(leaves):
        changes = _of_tensor(x) if i in tensors else _of_number(x) if type(x) is int else ()
        for kind, change, value in changes:
            yield kind, f"argument {i}: {change}", [*leaves[:i], value, *leaves[i + 1 :]]


def _of_number(x: int) -> Iterator[tuple[str, str, int]]:
    for value in (x + FAR, -x - FAR):
        yield "number", f"{x} → {value}", value


def _of_tensor(x: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    for dtype in DTYPES:
        if dtype != x.dtype:
            yield "dtype", f"{x.dtype} → {dtype}", x.detach().to(dtype)
    for dim in sorted({0, x.dim() - 1}) if x.dim() else ():
        if x.shape[dim]:
            yield "shape", f"one more in dimension {dim}", torch.cat([x, x.narrow(dim, 0, 1)], dim)
    yield "shape", "one more dimension", x.unsqueeze(0)
    if x.dim() and x.shape[0]:
        yield "shape", "one dimension less", x.select(0, 0).clone()
