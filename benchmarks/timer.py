"""The one timer of this project.

Every function that is compared runs in every round, in an order that alternates. A turn is: wait until the threads of
what ran before are asleep (an OpenMP or XLA thread spins for milliseconds after its last work, on a core that the next
one needs); warm-up calls, since what ran before took the caches and the pages (a long function warms itself up); wait
for the device; as many calls as make one sample long enough for the clock; wait for the device. Nothing is discarded: a
slow sample is part of the distribution.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

MIN_SAMPLE_S = 4e-3
MAX_ROUNDS = 200
MAX_WARM_UP_S = 50e-3
_MAX_REPEAT = 100_000
_NAP_S = 1e-3
_MAX_NAPS = 20


def synchronise() -> None:
    """Wait until this process's accelerator, if torch has one, has done all that was asked of it."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def settle() -> None:
    """Wait until this process's other threads sleep, 20 ms at most."""
    for _ in range(_MAX_NAPS):
        before = time.process_time()
        time.sleep(_NAP_S)
        if time.process_time() - before < _NAP_S / 4:
            return


def interleave(
    functions: dict[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int = 7,
    max_rounds: int = MAX_ROUNDS,
    sync: Callable[[], None] = synchronise,
    clock: Callable[[], float] = time.perf_counter,
    settle: Callable[[], None] = settle,
) -> dict[str, list[float]]:
    """Time functions against each other: seconds per call, one figure a round, by name.

    Args:
        functions: what to call, without arguments. Compile before: the first call here is warm-up, but it costs budget.
        budget_s: stop after the round in which this many seconds have gone by, calibration included.
        min_rounds: never stop before so many rounds, whatever the budget.
        sync: waits for the device.
        clock: seconds, monotonic.
        settle: waits until nothing else of this process runs.

    Raises:
        ValueError: nothing to time, or fewer than one round asked for.
        Exception: what a function raised, with a note that names it.
    """
    if not functions or min_rounds < 1:
        raise ValueError("interleave needs functions and at least one round")
    began = clock()
    typical, repeats = {}, {}
    for name, function in functions.items():
        typical[name], repeats[name] = _calibrate(name, function, sync, clock)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for done in range(max(min_rounds, max_rounds)):
        if done >= min_rounds and clock() - began >= budget_s:
            break
        for name in order:
            repeat = repeats[name]
            settle()
            if typical[name] < MAX_WARM_UP_S:
                _timed(name, functions[name], math.ceil(repeat / 2), sync, clock)
            samples[name].append(_timed(name, functions[name], repeat, sync, clock) / repeat)
        order.reverse()
    return samples


def _calibrate(
    name: str, function: Callable[[], object], sync: Callable[[], None], clock: Callable[[], float]
) -> tuple[float, int]:
    """Seconds of a call, and how many calls make a sample of at least MIN_SAMPLE_S."""
    elapsed = _timed(name, function, 1, sync, clock)
    repeat = 1
    while repeat < _MAX_REPEAT and elapsed < 20 * MAX_WARM_UP_S:  # else the first call has said enough
        elapsed = _timed(name, function, repeat, sync, clock)
        if elapsed >= MIN_SAMPLE_S:
            break
        # aim a little above the least length, and never more than tenfold on the word of one short sample
        repeat = min(max(repeat + 1, math.ceil(1.2 * repeat * MIN_SAMPLE_S / max(elapsed, 1e-9))), 10 * repeat)
    return elapsed / repeat, repeat


def _timed(
    name: str, function: Callable[[], object], repeat: int, sync: Callable[[], None], clock: Callable[[], float]
) -> float:
    """Seconds that ``repeat`` calls take, device included; Python's cyclic collector waits meanwhile."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        sync()
        began = clock()
        for _ in range(repeat):
            function()
        sync()
        return clock() - began
    except Exception as failure:
        failure.add_note(f"while timing {name!r}")
        raise
    finally:
        if collecting:
            gc.enable()
