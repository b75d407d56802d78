"""torch's operator database (OpInfo): which operators it has, their samples, and how results compare."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

UNINITIALISED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
OPERATORS = {
    f"{op.name}.{op.variant_test_name}".strip("."): op
    for op in op_db
    if "sparse" not in op.name and op.name not in UNINITIALISED and op.supported_dtypes("cpu")
}
LIMITATIONS = Path(__file__).parent.parent / "limitations.toml"
TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float8_e4m3fn: 0.125,  # one unit in the last place: how torch's products round depends on the processor
    torch.float8_e5m2: 0.25,
}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Limitation(NamedTuple):
    """An operator that is refused in a dtype, and why."""

    op: str
    dtype: str
    reason: str


def limitations() -> list[Limitation]:
    """The entries of limitations.toml, one for each operator and dtype."""
    table = tomllib.loads(LIMITATIONS.read_text(encoding="utf-8"))
    return [
        Limitation(op, dtype, entry["reason"])
        for entry in table.get("limitation", ())
        for op in entry["ops"]
        for dtype in entry["dtypes"]
    ]


def first_dtype(name: str) -> torch.dtype:
    """The dtype in which an operator is looked at where one has to do: float32, if it takes that."""
    supported = OPERATORS[name].supported_dtypes("cpu")
    order = (torch.float32, torch.int64, torch.bool, torch.float64, torch.complex64, *sorted(supported, key=str))
    return next(d for d in order if d in supported)


def samples(name: str, dtype: torch.dtype) -> Iterator[Any]:
    """The SampleInputs whose tensors are dense."""
    torch.manual_seed(0)
    for sample in OPERATORS[name].sample_inputs("cpu", dtype, requires_grad=False):
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if any(t.layout is not torch.strided or t.is_nested for t in tensors):
            continue
        if not any(isinstance(x, torch.Generator) for x in leaves):
            yield sample


def copied(tree: Any) -> Any:
    """The same, its tensors cloned."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def eager(name: str, sample: Any, seed: int) -> Any:
    """What eager gives for a sample; raises what it raises."""
    torch.manual_seed(seed)
    return copied(OPERATORS[name](copied(sample.input), *copied(sample.args), **copied(sample.kwargs)))


def compare(want: Any, have: Any) -> None:
    """Raise AssertionError where two trees of results differ."""
    expected, got = pytree.tree_leaves(want), pytree.tree_leaves(have)
    assert len(expected) == len(got)
    for e, g in zip(expected, got, strict=True):
        if not isinstance(e, torch.Tensor):
            g = g.item() if isinstance(g, torch.Tensor) else g
            assert e == g or (e != e and g != g), f"{g}, want {e}"
            continue
        e, g = (t.detach().resolve_conj().resolve_neg() for t in (e, g))
        limit = TOLERANCE.get(e.dtype, 0)
        if e.dtype in FLOAT8 and g.dtype == e.dtype:
            e, g = e.float(), g.float()
        torch.testing.assert_close(g, e, rtol=limit, atol=limit, equal_nan=True, check_stride=False)
