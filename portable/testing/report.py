"""What a test session showed, by backend: the JSON that the support table is made of."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import pytest

from portable.testing.plugin import BACKEND, EVIDENCE

FORMAT = 1
COUNTS = ("passed", "failed", "not_run")
_MOST_FAILURES = 50
_VERSIONS = ("portable", "torch", "jax", "jaxlib", "triton", "libtpu")


class Reporter:
    """Counts the tests that are about a backend; writes the report at the end of the session."""

    def __init__(self, path: str, tier: int) -> None:
        self._path, self._tier = Path(path), tier
        self._complete = False  # whether no test that was asked for is left
        self._outcomes: dict[str, tuple[str, str, str]] = {}  # by test: (backend, evidence, outcome)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once: as failed if any of its phases failed, as passed if it was called and all is well."""
        properties = dict(report.user_properties)
        if BACKEND not in properties:
            return
        before = self._outcomes.get(report.nodeid, ("", "", ""))[2]
        if report.failed or before == "failed":
            outcome = "failed"
        elif report.skipped:  # an expected failure too: nothing was shown
            outcome = "not_run"
        else:
            outcome = "passed" if report.when == "call" else before
        self._outcomes[report.nodeid] = (str(properties[BACKEND]), str(properties[EVIDENCE]), outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the report."""
        self._complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        text = json.dumps(self.content(), indent=2)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text + "\n", encoding="utf-8")

    def content(self) -> dict[str, Any]:
        """The report as plain data."""
        found: dict[str, dict[str, Any]] = {}
        for test, (backend, evidence, outcome) in self._outcomes.items():
            counts = found.setdefault(backend, {}).setdefault(evidence, {**dict.fromkeys(COUNTS, 0), "failures": []})
            counts[outcome or "not_run"] += 1
            if outcome == "failed" and len(counts["failures"]) < _MOST_FAILURES:
                counts["failures"].append(test)
        for backend, shown in found.items():
            if shown.get("runs", {}).get("passed"):
                shown["hardware"] = hardware(backend)
        return {
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "complete": self._complete,
            "tier": self._tier,
            "machine": platform.machine(),
            "versions": {"Python": platform.python_version(), **_versions()},
            "backends": dict(sorted(found.items())),
        }


def hardware(backend: str) -> dict[str, str]:
    """The parts of the fingerprint that name a device: what the tests of ``backend`` ran on."""
    from portable import backends
    from portable.errors import PortableError

    try:
        return dict(backends.get(backend).hardware())
    except PortableError as failure:
        return {"device": f"unknown: {failure.message}"}


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
