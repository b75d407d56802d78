"""The conformance kit: what third-party backends, kernels and lowerings are tested with.

It is a pytest plugin too: a test that takes ``portable_backend`` runs once for each of ``--portable-backends``.
Importing it imports neither torch nor JAX, since pytest does so in every session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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


def pytest_addoption(parser: Any) -> None:
    """Add ``--portable-backends``."""
    parser.getgroup("portable").addoption(
        "--portable-backends",
        default="",
        metavar="NAMES",
        help="backends for tests that take `portable_backend`, separated by commas (default: PORTABLE_BACKEND or xla)",
    )


def pytest_generate_tests(metafunc: Any) -> None:
    """Run a test that takes ``portable_backend`` once for each backend that was named."""
    if "portable_backend" not in metafunc.fixturenames:
        return
    from portable import config

    default = config.get("PORTABLE_BACKEND") if config.is_set("PORTABLE_BACKEND") else "xla"
    named = [n.strip() for n in metafunc.config.getoption("--portable-backends").split(",") if n.strip()]
    metafunc.parametrize("portable_backend", named or [default])


__all__ = ["lowered"]
