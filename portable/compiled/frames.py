"""How Dynamo captures the frames of a compiled model: what holds while it does, and what is kept of it.

Dynamo looks for a capture whose guards hold at each call, also at sizes that it has seen: a dtype, an attribute, a hook
may have changed. So what a capture needs is arranged around the capture itself, not around the calls that are thought
to lead to one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext

from portable.explain import Record
from portable.lowering import refusals

# Dynamo lets threads that miss its cache together compile one after the other, each its own copy, until its recompile
# limit: calls with sizes not seen before go one at a time.
_COLD = threading.RLock()


def cold() -> threading.RLock:
    """The lock of this process within which captures happen."""
    return _COLD


def _renew_lock() -> None:
    global _COLD
    _COLD = threading.RLock()


# A fork waits for the compilation of another thread: Dynamo's own lock would be held in the child for good.
os.register_at_fork(before=lambda: _COLD.acquire(), after_in_parent=lambda: _COLD.release(), after_in_child=_renew_lock)


# Hooks may come and go after the first call; a counter that a module keeps is no reason to capture it at each call.
_GUARDS = {"skip_nnmodule_hook_guards": False, "allow_unspec_int_on_nn_module": True}


class Capture:
    """Dynamo's callback for a frame that no capture fits."""

    def __init__(self, callback: Any, record: Record) -> None:
        self._callback, self._record = callback, record
        # Dynamo tells captures of different backends apart by the end of this chain, and its stances by its length.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend

    def __call__(self, *frame: Any) -> Any:
        before, made = len(self._record.graphs), None
        lasting = _recurrent_layers() if self._record.path == "stablehlo" else contextlib.nullcontext()
        with _COLD, refusals.said_once(), torch._dynamo.config.patch(_GUARDS), lasting:
            try:
                made = self._callback(*frame)
            finally:
                if made is None or made.guarded_code is None:
                    self._record.give_up(self._record.graphs[before:])
        return made


@contextlib.contextmanager
def _recurrent_layers() -> Any:
    """Have Dynamo capture LSTM, GRU and RNN, which our lowering does not unroll; other compilers do."""
    from portable.lowering.kept_whole import kept_whole

    with torch._dynamo.config.patch(allow_rnn=True), kept_whole():
        yield


def captured(
    target: Callable[..., Any], backend: Callable[[fx.GraphModule, Any], Any], record: Record, **options: Any
) -> Callable[..., Any]:
    """``target``, a function or a module with its hooks, run by Dynamo with our backend.

    Args:
        options: of ``torch._dynamo.optimize``.
    """
    context = torch._dynamo.optimize(backend, **options)
    if isinstance(context, _TorchDynamoContext):  # not where Dynamo is switched off
        context.callback = Capture(context.callback, record)  # type: ignore[assignment]
    call: Callable[..., Any] = context(target)
    # As a module, what Dynamo makes of one would run the hooks of all modules a second time.
    return call.forward if isinstance(call, OptimizedModule) else call
