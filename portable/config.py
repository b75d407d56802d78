"""The environment variables of portable: one table, one parser.

Nothing is read at import. Precedence everywhere: Python argument, then context manager, then environment, then default.
An empty variable counts as unset.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable.errors import ConfigError

FALLBACK_MODES = ("warn", "allow", "error")
GRAPHS_POLICIES = ("auto", "require", "off")


def _text(raw: str) -> str:
    return raw.strip()


def _choice(*legal: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        value = raw.strip().lower()
        if value not in legal:
            raise ValueError(f"legal values: {', '.join(legal)}")
        return value

    return parse


def _level(raw: str) -> int:
    levels = logging.getLevelNamesMapping()
    value = levels.get(raw.strip().upper())
    if value is None:
        raise ValueError(f"legal values: {', '.join(name.lower() for name in levels)}")
    return value


def _kernels(raw: str) -> Any:
    from portable.kernels.select import Policy

    return Policy.parse(raw)


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the type it is shown with, its default, its meaning and its parser."""

    name: str
    type: str
    default: str
    doc: str
    parse: Callable[[str], Any] = _text


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable(
            "PORTABLE_BACKEND", "auto | name", "auto", "Backend that pt.compile uses when none is named in Python."
        ),
        Variable(
            "PORTABLE_FALLBACK",
            "warn | allow | error",
            "warn",
            "Whether an op without an exact lowering runs as torch's own kernel, where the host can run it.",
            _choice(*FALLBACK_MODES),
        ),
        Variable(
            "PORTABLE_KERNELS",
            "auto | off | provider | op=provider,…",
            "auto",
            "Which kernels run: those the ledger has decided for, none, or those named.",
            _kernels,
        ),
        Variable(
            "PORTABLE_CACHE_DIR",
            "folder",
            "~/.cache/portable",
            "Where native code that was built here is kept, and what `portable check` found.",
            lambda raw: Path(raw).expanduser(),
        ),
        Variable(
            "PORTABLE_LEDGER",
            "path",
            "~/.local/share/portable/ledger.sqlite",
            "File of the ledger: what was measured here, and which kernels are used because of it.",
        ),
        Variable("PORTABLE_LOG", "log level", "warning", "Level of the `portable` logger.", _level),
    )
}


@functools.lru_cache(maxsize=256)
def _parsed(name: str, raw: str) -> Any:
    variable = VARIABLES[name]
    try:
        return variable.parse(raw)
    except ValueError as failure:
        raise ConfigError(
            f"{name}={raw!r} is not valid; {failure}",
            remedy=f"unset {name} for its default ({variable.default}), or run `portable env` for the table",
        ) from failure


def get(name: str) -> Any:
    """The value of the variable ``name``: from the environment where it is set and not empty, else its default.

    Raises:
        ConfigError: the variable holds a value that is not legal.
    """
    return _parsed(name, os.environ.get(name, "").strip() or VARIABLES[name].default)


def fallback_mode(named: str | None = None) -> str:
    """What to do with an op that has no exact lowering: as ``named``, else as PORTABLE_FALLBACK says.

    Raises:
        ConfigError: there is no such mode.
    """
    mode: str = named or get("PORTABLE_FALLBACK")
    if mode not in FALLBACK_MODES:
        raise ConfigError(f"fallback={named!r} is not legal", remedy=f"one of {', '.join(FALLBACK_MODES)}")
    return mode


def graphs_policy(named: str | None = None) -> str:
    """Whether launches are recorded and replayed: as ``named``, else "auto".

    Raises:
        ConfigError: there is no such policy.
    """
    policy = named or "auto"
    if policy not in GRAPHS_POLICIES:
        raise ConfigError(f"graphs={named!r} is not legal", remedy=f"one of {', '.join(GRAPHS_POLICIES)}")
    return policy


def is_set(name: str) -> bool:
    """Whether the environment sets ``name`` to something."""
    return bool(os.environ.get(name, "").strip())


@functools.cache
def logger() -> logging.Logger:
    """The `portable` logger, at the level of PORTABLE_LOG unless the program has set one.

    Where PORTABLE_LOG is set and the program has not configured logging, it writes to standard error.
    """
    log = logging.getLogger("portable")
    level = get("PORTABLE_LOG")
    if log.level == logging.NOTSET:
        log.setLevel(level)
    if is_set("PORTABLE_LOG") and not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    return log
