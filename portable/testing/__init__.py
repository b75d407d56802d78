"""The conformance kit: what third-party backends, kernels and lowerings are tested with.

It is a pytest plugin too (`portable.testing.plugin`). Importing it imports neither torch nor JAX, since pytest does so
in every session; nor pytest, which `lowered` does not need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.testing.conformance import BackendConformance
    from portable.testing.refused_calls import RefusalScore, refusal_score

pytest_plugins = ("portable.testing.plugin",)


def lowered(
    fn: Callable[..., Any], *args: Any, backend: str = "xla", fallback: str | None = "error", **kwargs: Any
) -> Any:
    """Call ``fn`` once, lowered as ONE StableHLO program.

    The call is captured at ATen level (functionalised; ``torch.autograd.grad`` inside ``fn`` works), lowered, compiled
    and run; arguments that ``fn`` writes to are written to. Where ``fn`` needs a number that depends on data (``item``,
    a branch, the size of a result), the program is specialised on this call's; it computes the number itself too, and
    the two are compared after the run.

    Args:
        fn: a function of tensors and constants.
        backend: a backend of the XLA family.
        fallback: what to do with an op that has no exact lowering, as in `portable.compile`; None is PORTABLE_FALLBACK.

    Returns:
        What ``fn`` returns, with dense CPU tensors.

    Raises:
        UnsupportedOpError: names every op without an exact lowering at once, unless it falls back, or one whose size
            depends on random numbers.
        SpecialisationError: the program computes another size or branch than eager, where rounding decides.
        UnsupportedInputError: a sparse, nested, meta or non-CPU argument.
        UnsupportedOutputError: ``fn`` returns something other than tensors, numbers, strings and None.
    """
    from portable.lowering.once import run

    return run(fn, args, kwargs, backend, fallback)


_ELSEWHERE = {
    "BackendConformance": "portable.testing.conformance",
    "RefusalScore": "portable.testing.refused_calls",
    "refusal_score": "portable.testing.refused_calls",
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'portable.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)


__all__ = ["BackendConformance", "RefusalScore", "lowered", "refusal_score"]
