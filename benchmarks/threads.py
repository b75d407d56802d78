"""Threads and cores: OpenMP threads that are not bound stall for milliseconds when another process shares the cores.

The OpenMP runtime reads its environment when torch is loaded, so `bind` comes before. It binds the main thread too,
and whatever that one starts inherits one core: XLA's pool and compilers must be started within `unbound`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_all_cores: frozenset[int] = frozenset()


def bind() -> bool:
    """Have OpenMP bind its threads to cores; whether it will: not once torch is loaded, nor against the user's say."""
    global _all_cores
    if "torch" in sys.modules or not hasattr(os, "sched_getaffinity") or "OMP_PROC_BIND" in os.environ:
        return False
    _all_cores = frozenset(os.sched_getaffinity(0))
    os.environ["OMP_PROC_BIND"] = "close"
    os.environ.setdefault("OMP_PLACES", "cores")
    return True


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Within it this thread may use every core again, and so may the threads and processes that it starts."""
    if not _all_cores:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
