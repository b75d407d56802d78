"""What `portable doctor` shows: each backend, whether it can run here, and what it is good at."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import portable
from portable import backends, config
from portable.errors import PortableError

if TYPE_CHECKING:
    from portable.backends.base import Backend


def capabilities(name: str) -> dict[str, Any]:
    """What the backend ``name`` is good at, as plain data. Initialises its device in this process."""
    from dataclasses import fields

    about = backends.get(name).capabilities()
    plain = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731
    as_data: dict[str, Any] = {field.name: getattr(about, field.name) for field in fields(about)}
    as_data["dtypes"] = sorted(map(plain, about.dtypes))
    as_data["emulated"] = {plain(dtype): why for dtype, why in about.emulated.items()}
    as_data["multiples"] = dict(about.multiples)
    return as_data


def _executors(backend: type[Backend]) -> dict[str, str]:
    """Its variants that another package runs, each ready or why not."""
    kinds = {f"{backend.name}:{variant}": type(backend.of(variant)) for variant in backend.variants}
    return {name: kind.probe().reason for name, kind in kinds.items() if kind is not backend}


def _asked_capabilities(name: str) -> dict[str, Any]:
    """`capabilities`, found in a fresh process: no device is initialised in this one."""
    from portable.backends.base import ask

    asking = "import json; from portable.backends.diagnosis import capabilities"
    ok, text = ask(f"{asking}; print(json.dumps(capabilities({name!r})))")
    found: dict[str, Any] = json.loads(text) if ok else {"unknown": text}
    return found


_TRIAL = """
import torch, portable as pt
trial = pt.compile(lambda x: x * 2 + 1, backend={name!r}, fallback="error")
assert trial(torch.ones(3, device=pt.device({name!r}))).tolist() == [3, 3, 3], "a wrong result"
"""


def _tried(row: dict[str, Any]) -> None:
    """Compile and run one small program on a backend that is ready, in a fresh process: then it is verified here."""
    from portable.backends.base import ask

    if not row["ready"]:
        return
    ok, text = ask(_TRIAL.format(name=row["name"]), timeout=120.0)
    if ok:
        row["evidence"] = "verified here"
    else:
        row |= {"ready": False, "reason": f"a small program failed: {text}", "remedy": "", "evidence": "failed here"}


def places() -> dict[str, dict[str, Any]]:
    """The folder of the cache and the file of the ledger, and whether they can be written; neither is made."""
    from portable.kernels.ledger import Ledger

    found = {"cache": config.get("PORTABLE_CACHE_DIR"), "ledger": Ledger().path}
    return {name: {"path": str(path), "problem": _problem(path, name)} for name, path in found.items()}


def _problem(path: Path, name: str) -> str:
    if name == "ledger" and path.is_file() and not os.access(path, os.W_OK):
        return f"{path} is read-only"
    folder = path if name == "cache" or path.is_dir() else path.parent
    if name == "ledger" and path.is_dir():
        return f"{path} is a folder"
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as failure:
        return f"{folder}: {failure.strerror or failure}"


def diagnosis(verbose: bool = False, only: str = "") -> dict[str, Any]:
    """What `portable doctor` shows, as plain data; with ``verbose`` also what each backend that is ready is good at.

    Args:
        only: a backend's name: no other is looked at.

    A backend of which nothing has run here is "compiled for" where this project's tests, or this installation, compile
    for its devices.
    """
    from importlib.metadata import version

    from portable.backends.base import installed

    rows = []
    for name in (only,) if only else backends.names():
        state, failure = backends.diagnosed(name)
        plugin = backends.plugins().get(name) if name not in backends.BUILTIN else None
        broken = plugin is not None and plugin.backend is None
        row: dict[str, Any] = {"path": "?" if broken else backends.backend_class(name).path, **asdict(state)}
        row |= {"compiles_for": [], "capabilities": {}, "executors": {}, "traceback": failure}
        if plugin is None:
            backend = backends.backend_class(name)
            row["compiles_for"] = list(backend.deviceless())
            row["executors"] = _executors(backend) if verbose else {}
            if row["evidence"] == "contract only":
                row["evidence"] = "compiled for" if row["compiles_for"] else backend.evidence
        row["capabilities"] = _asked_capabilities(name) if verbose and row["ready"] else {}
        rows.append({"name": name, **row})
    with ThreadPoolExecutor() as pool:  # each is a process of its own
        list(pool.map(_tried, [row for row in rows if not row["traceback"]]))
    return {
        "versions": {
            "portable": portable.__version__,
            "Python": platform.python_version(),
            **{name: version(name) if installed(name) else "absent" for name in ("torch", "jax")},
        },
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "backends": rows,
        "choice": "" if only else _choice({row["name"]: row for row in rows}),
        "places": places(),
    }


def _choice(rows: dict[str, dict[str, Any]]) -> str:
    if config.is_set("PORTABLE_BACKEND"):
        name = config.get("PORTABLE_BACKEND")
        row = rows.get(name.partition(":")[0], {})
        if row.get("traceback"):  # it is not asked again: its code may hang
            return f"PORTABLE_BACKEND={name}: {row['reason']}"
        try:
            return f"PORTABLE_BACKEND={name}: {backends.get(name)} is used."
        except PortableError as failure:
            return f"PORTABLE_BACKEND={name}: {failure}"
    return f"PORTABLE_BACKEND is unset: auto would choose {backends.autodetected()}."
