"""Recorded launches: Inductor's CUDA graph trees record a graph's launches and replay them by one call.

What a replay returns lives in the recording's own memory, which the next replay writes over. A compiled model is
called like the model itself, so its results are copied out; what only the backward pass reads is not.

A graph with symbolic sizes is recorded once for each distinct set of sizes, the first `LIMIT` of them; the others run
as they would without recording. Every graph and call that is not recorded leaves its reason in the record.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from portable.errors import GraphCaptureError
from portable.explain import GraphRecord, Note, Record

LIMIT = 8  # recordings of one graph; torch warns beyond as many, since each holds its memory
_NOTHING = "it launches nothing on the device"
SETTLING = 3  # a graph's first call warms up, its second records, its third is the first replay


def settings(policy: str, able: bool) -> dict[str, Any]:
    """Inductor's settings under a policy of ``graphs=`` on a device that records launches (``able``) or does not.

    Under "auto" Inductor may cut out what cannot be recorded, and record the rest.
    """
    if not able:
        return {"triton.cudagraphs": False} if policy == "off" else {}
    whole = {"graph_partition": False} if policy == "require" else {}
    return {"triton.cudagraphs": True, "triton.cudagraph_trees": True, **whole}


@dataclass(frozen=True)
class Plan:
    """What is known of a graph before Inductor compiles it, which changes it.

    Attributes:
        sizes: positions of the arguments that are sizes.
        kept: positions of the results that the caller may keep.
        incompatible: the first op that cannot be recorded, '' if there is none.
    """

    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    incompatible: str

    @classmethod
    def of(cls, aten: fx.GraphModule, kind: str) -> Plan:
        """The plan of a graph that AOTAutograd is compiling."""
        from torch._inductor.utils import get_first_incompatible_cudagraph_node

        inputs = [n for n in aten.graph.nodes if n.op == "placeholder"]
        sizes = tuple(i for i, n in enumerate(inputs) if isinstance(n.meta.get("val"), torch.SymInt))
        (results,) = next(n for n in aten.graph.nodes if n.op == "output").args
        kept = [i for i, n in enumerate(results) if isinstance(n, fx.Node)]
        context = torch._guards.TracingContext.try_get()
        metadata = context.fw_metadata if context else None
        if kind == "forward" and metadata is not None:
            visible = metadata.num_forward + len(metadata.tokens)  # what follows is for the backward pass alone
            kept = [i for i in kept if i < visible]
        node = get_first_incompatible_cudagraph_node(aten)
        return cls(sizes, tuple(kept), str(node.target) if node is not None else "")


@dataclass(frozen=True)
class Watch:
    """Where the reasons of one graph go: into the record, or an error where recording is required."""

    graph: GraphRecord
    record: Record
    kind: str
    required: bool

    def skipped(self, reason: str) -> None:
        """Launches are not recorded.

        Raises:
            GraphCaptureError: that was required.
        """
        text, where = _plainly(reason)
        if self.required:
            raise GraphCaptureError(
                f"graphs='require', and the launches of graph {self.graph.index} ({self.kind}) of {self.record.name} "
                f"are not recorded{f', at {where}' if where else ''}: {text}",
                remedy="change what is named there, or compile with graphs='auto'",
            )
        self._note(f"is not recorded: {text}", where)

    def _note(self, text: str, where: str = "") -> None:
        self.record.add_note(Note("graphs", f"graph {self.graph.index} ({self.kind}) {text}", where))

    def compiled(self, output: Any, plan: Plan, recorded: bool) -> None:
        """Have an Inductor graph own its results where its launches are recorded, and say why where they are not.

        Args:
            output: what Inductor compiled.
            recorded: whether Inductor is to record it, as it says after compilation.
        """
        if not recorded:
            self.skipped(_why_not(output, plan, self.kind))
            return
        if plan.incompatible:
            self._note(f"is recorded in parts, with {plan.incompatible} between them")
        output.current_callable = Recorded(output.current_callable, plan, self)


def _why_not(output: Any, plan: Plan, kind: str) -> str:
    disabled = getattr(output, "disabled_cudagraphs_reason", None)
    about = getattr(output, "cudagraph_info", None)
    failed = about.cudagraph_fail_reasons if about is not None else ()
    if disabled or failed:
        return str(disabled or ", ".join(failed))
    if kind == "backward":
        return "its forward pass is not"
    return f"nothing is left beside {plan.incompatible}" if plan.incompatible else _NOTHING


def _plainly(reason: str) -> tuple[str, str]:
    """A reason of Inductor's without its stack, and the user's line from that."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', reason)
    text = re.split(r"\.?\s*Found from", reason)[0]
    text = " ".join(re.sub(r"^(skipping|disabling) cudagraphs? due to ", "", text).split())
    if text == "multiple devices:":  # and it lists none
        text = _NOTHING
    if not frames:
        return text, ""
    file, line, function = frames[-1]
    return text, f"{file.rsplit('/', 1)[-1]}:{line}, in {function}"


class Recorded:
    """A graph whose launches Inductor records. Takes its arguments as one list, which it empties."""

    def __init__(self, call: Callable[[list[Any]], Any], plan: Plan, watch: Watch) -> None:
        from torch._dynamo.utils import counters

        self._call, self._plan, self._watch = call, plan, watch
        self._counters = counters
        self._seen: dict[tuple[int, ...], int] = {}
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        key = tuple(args[i] for i in self._plan.sizes)
        seen = self._seen.get(key, 0)
        if not seen and len(self._seen) >= LIMIT:
            self._watch.skipped(f"its sizes are beyond the first {LIMIT} sets, and each recording holds its memory")
            with _unrecorded():
                return self._call(args)
        before = self._skips()
        if seen < SETTLING:
            self._seen[key] = seen + 1
            with _reasons() as reasons:
                results = self._call(args)
        else:
            reasons, results = [], self._call(args)
        if self._skips() != before:
            self._watch.skipped(reasons[-1] if reasons else "TORCH_LOGS=cudagraphs says why")
        return _owned(results, self._plan.kept)

    def _skips(self) -> int:
        return self._counters["inductor"]["cudagraph_skips"]


def _owned(results: Sequence[Any], kept: Sequence[int]) -> list[Any]:
    from torch._prims_common import clone_preserve_strides

    own = list(results)
    for i in kept:
        x = own[i]
        if isinstance(x, torch.Tensor):
            copy = x.clone()
            own[i] = copy if copy.stride() == x.stride() else clone_preserve_strides(x)
    return own


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextlib.contextmanager
def _reasons() -> Iterator[list[str]]:
    """Within it, what Inductor says in this process of launches that it does not record."""
    from torch._inductor.cudagraph_utils import cudagraphs_log

    listener = _Listener()
    cudagraphs_log.addHandler(listener)
    try:
        yield listener.heard
    finally:
        cudagraphs_log.removeHandler(listener)


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Within it Inductor records no new graph. Its setting is the process's: calls that need it take turns, and a call
    that another thread makes meanwhile may run unrecorded too."""
    from torch._inductor import config

    if not hasattr(config.triton, "cudagraph_capture_sizes"):
        yield  # this torch records every set of sizes, and warns
        return
    with _one_at_a_time, config.patch({"triton.cudagraph_capture_sizes": ()}):
        yield
