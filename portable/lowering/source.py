"""Where in the user's code a node of a graph comes from, for errors and for the metadata of HLO."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from portable import errors

_GENERATED = re.compile(r"c[a-z2-7]{50,}\.py")  # Inductor's files are named by a digest
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@functools.lru_cache(maxsize=65536)
def frame_of(stack_trace: str) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame of the user's code in a node's stack trace."""
    frames = _FRAME.findall(stack_trace)
    return (frames[-1][0], int(frames[-1][1]), frames[-1][2]) if frames else None


def location(node: fx.Node) -> str:
    """Where in the user's code ``node`` comes from, as ``file:line, in function``; '' where torch does not know."""
    frame = frame_of(node.meta.get("stack_trace") or "")
    return place(*frame) if frame else ""


def traced() -> str:
    """The stack trace of what is being traced."""
    return str(traceback.get_current_meta().get("stack_trace") or "")


# torch's own layers stand between the user's call and the op
_NOT_THE_USERS = (
    *(f"{Path(str(package.__file__)).parent}/" for package in (errors, torch)),
    contextlib.__file__,
    "<",
    f"{sys.prefix}/bin/",
)


def users_line(stack_trace: str, module: str = "") -> str:
    """The innermost line of a stack trace that is outside torch, as `place` names it; else the line that calls us.

    Args:
        module: the path of a layer, which is named too.
    """
    frames = [frame for frame in _FRAME.findall(stack_trace) if not frame[0].startswith(_NOT_THE_USERS)]
    where = place(frames[-1][0], int(frames[-1][1]), frames[-1][2]) if frames else calling_line()
    module = re.sub(r"^L\.\w+\.?", "", module)
    return f"{where}, module {module}" if module and where else where


def line_inside(failure: BaseException, function: Any) -> str:
    """The innermost line of the file of ``function`` that ``failure`` was raised through; '' if it was not."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [(n, f.f_code.co_name) for f, n in walk_tb(failure.__traceback__) if f.f_code.co_filename == file]
    return place(file, *lines[-1]) if file and lines else ""


def raised_at(failure: BaseException) -> str:
    """The line of the user's code that raised, or called what raised in torch; '' where something else called that."""
    stack = getattr(failure, "real_stack", None)  # what Dynamo was tracing
    if stack:
        return users_line("".join(f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in stack))
    if isinstance(failure, SyntaxError) and failure.filename:
        return f"{Path(failure.filename).name}:{failure.lineno}"
    frames = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in walk_tb(failure.__traceback__)]
    ours, others = (
        f"{Path(str(errors.__file__)).parent}/",
        ("<", contextlib.__file__, f"{Path(torch.__file__).parent}/"),
    )
    for file, line, function in reversed(frames):
        if not file.startswith(others):
            imports = file.startswith(str(Path(contextlib.__file__).parent)) and "/importlib/" in file
            if imports:
                continue
            return "" if file.startswith(ours) or "/site-packages/jax" in file else place(file, line, function)
    return ""


def calling_line() -> str:
    """The innermost line of this thread's stack that is the user's, as `place` names it; '' if none is."""
    for frame in _frames():
        code = frame.f_code
        generated = _GENERATED.fullmatch(Path(code.co_filename).name)
        if not (generated or code.co_filename.startswith(_NOT_THE_USERS) or "/site-packages/" in code.co_filename):
            return place(code.co_filename, frame.f_lineno, code.co_name)
    return ""


def _frames() -> Iterator[FrameType]:
    """The frames of this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place(file: str, line: int, function: str) -> str:
    """A line of the user's code as errors and `explain` name it."""
    return f"{file.rsplit('/', 1)[-1]}:{line}, in {function}"


def module_path(node: fx.Node) -> str:
    """The path of the nn.Module that ``node`` was traced in, e.g. ``encoder.layer.0.attention``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path.replace("L['self']", "").replace("_modules", ""))
    return re.sub(r"\.+", ".", path.replace("slf", "")).strip(".")


_TAKE = compile("take()", "", "eval")


@functools.lru_cache(maxsize=65536)
def _traceback(frame: tuple[str, int, str]) -> Any:
    """jaxlib's traceback whose innermost frame is the user's: taken inside a code object that claims to stand there."""
    from jax._src.lib import xla_client

    file, line, function = frame
    there = _TAKE.replace(co_filename=file, co_firstlineno=line, co_name=function, co_qualname=function)
    return eval(there, {"take": xla_client.Traceback.get_traceback})


def annotated(node: fx.Node, op: Any = None) -> contextlib.AbstractContextManager:
    """Within it, what JAX traces carries the node's module path and source line in its HLO metadata.

    Args:
        op: what runs, where it is not the node's target.
    """
    from jax._src import source_info_util

    frame = frame_of(node.meta.get("stack_trace") or "")
    stack = source_info_util.current_name_stack()
    for part in filter(None, (module_path(node), str(op or node.target))):
        stack = stack.extend(part)
    return source_info_util.user_context(_traceback(frame) if frame else None, name_stack=stack)
