"""The fingerprint of a machine: everything whose change makes a measurement there worthless.

Device, architecture, driver, runtime, and the versions of torch, jax, jaxlib, triton and portable. (The kernel's own
digest is the registry's; the ledger compares it beside the fingerprint.)
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

ABSENT = "absent"


@dataclass(frozen=True)
class Fingerprint:
    """What a verdict was measured on.

    Attributes:
        text: canonical: equal texts are equal machines. This is what a verdict stores.
        parts: the same by name: device, architecture, driver, runtime, torch, jax, jaxlib, triton, portable.
    """

    text: str
    parts: dict[str, str] = field(hash=False)

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        """The fingerprint with these parts; white space within them is collapsed."""
        clean = {name: " ".join(str(parts[name]).split()) or ABSENT for name in sorted(parts)}
        return cls(json.dumps(clean, separators=(",", ":")), clean)

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """From the text that a verdict stores; a text of another form becomes one part, ``fingerprint``."""
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
        if not isinstance(parts, dict):
            parts = {"fingerprint": text}
        return cls(text, {str(name): str(value) for name, value in parts.items()})

    @property
    def short(self) -> str:
        """Eight hexadecimal digits, for tables."""
        return sha256(self.text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return self.text


def changes(then: str, now: str) -> list[str]:
    """The parts in which two fingerprints differ, as ``name old → new``; empty if they are the same."""
    if then == now:
        return []
    old, new = Fingerprint.parse(then).parts, Fingerprint.parse(now).parts
    differing = [name for name in sorted({*old, *new}) if old.get(name, ABSENT) != new.get(name, ABSENT)]
    return [f"{name} {old.get(name, ABSENT)} → {new.get(name, ABSENT)}" for name in differing]


@functools.cache
def fingerprint(backend: str) -> Fingerprint:
    """The fingerprint of this machine as ``backend`` sees it. Initialises the backend's device in this process.

    Args:
        backend: a name, with or without variant: "xla", "cpu:eager", "cuda".

    Raises:
        UnknownBackendError, BackendUnavailableError: there is no such backend, or it cannot run here.
    """
    import torch

    import portable
    from portable import backends

    versions = {name: version(name) for name in ("jax", "jaxlib", "triton")}
    versions |= {"torch": torch.__version__, "portable": portable.__version__}
    return Fingerprint.of({**backends.get(backend).hardware(), **versions})


def version(package: str) -> str:
    """The installed version of a package; "absent" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
