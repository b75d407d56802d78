"""The pytest plugin: which backends tests run on, which tiers of them run, and a report of what passed where.

pytest --portable-backends cpu,xla          tests that take `portable_backend` run once for each
pytest --portable-tier 1                    also tests that compile for hardware which is absent (compiles_for)
pytest --portable-tier 2                    also tests on hardware (hardware), where it is ready
pytest --slo                                also tests of an objective (slo)
pytest --portable-report support.json       what passed, failed and did not run, by backend
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest

TIERS = {"compiles_for": 1, "hardware": 2}
MARKERS = (
    "slow: takes minutes",
    "compiles_for(target): compiles for a target that is absent, e.g. tpu:v5e:2x2; runs from --portable-tier 1 on",
    "hardware(backend): needs the device of a backend; runs with --portable-tier 2, where the backend is ready",
    "slo(metric, limit, baseline): an objective as in portable.SLO, measured by the fixture `slo`; runs with --slo",
)
BACKEND, EVIDENCE = "portable_backend", "portable_evidence"  # properties of a test's report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options above."""
    group = parser.getgroup("portable")
    group.addoption(
        "--portable-backends",
        default="",
        metavar="NAMES",
        help="backends for tests that take `portable_backend`, separated by commas (default: PORTABLE_BACKEND or xla)",
    )
    group.addoption(
        "--portable-tier",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="0: what needs nothing but this machine's CPU; 1: also compiling for hardware that is absent; "
        "2: also tests on hardware",
    )
    group.addoption("--slo", action="store_true", help="also run tests that measure an objective (marked slo)")
    group.addoption(
        "--portable-report", default="", metavar="FILE", help="write what passed where, by backend, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and collect the report where one was asked for."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    path = config.getoption("--portable-report")
    if path and not hasattr(config, "workerinput"):  # with pytest-xdist the workers' results come to one process
        from portable.testing.report import Reporter

        config.pluginmanager.register(Reporter(path, config.getoption("--portable-tier")), "portable-report")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``portable_backend`` once for each backend that was named."""
    if "portable_backend" not in metafunc.fixturenames:
        return
    from portable import config

    default = config.get("PORTABLE_BACKEND") if config.is_set("PORTABLE_BACKEND") else "xla"
    named = [n.strip() for n in metafunc.config.getoption("--portable-backends").split(",") if n.strip()]
    metafunc.parametrize("portable_backend", named or [default])


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tiers and objectives that were not asked for, and note what each test is evidence for."""
    for item in items:
        _declare(item, getattr(item, "cls", None))
    tier, objectives = config.getoption("--portable-tier"), config.getoption("--slo")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        needed = max((level for marker, level in TIERS.items() if item.get_closest_marker(marker)), default=0)
        run = needed <= tier and (objectives or not item.get_closest_marker("slo"))
        (kept if run else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    for item in kept:
        item.user_properties += _evidence(item)


def _declare(item: pytest.Item, kit: Any) -> None:
    """Mark a test of a conformance kit as its class says: slow, or a strict expected failure with the reason."""
    if any(fnmatchcase(item.name, pattern) for pattern in getattr(kit, "slow", ())):
        item.add_marker("slow")
    for pattern, reason in getattr(kit, "limitations", {}).items():
        if fnmatchcase(item.name, pattern):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _evidence(item: pytest.Item) -> list[tuple[str, object]]:
    """Which backend a test is about, and what it shows: that programs run there, or that they compile for it."""
    target = item.get_closest_marker("compiles_for")
    if target:
        return [(BACKEND, _argument(target)), (EVIDENCE, "compiles")]
    device = item.get_closest_marker("hardware")
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name = (
        _argument(device)
        if device
        else parameters.get("portable_backend") or getattr(getattr(item, "cls", None), "backend", "")
    )
    return [(BACKEND, name), (EVIDENCE, "runs")] if name else []


def _argument(marker: pytest.Mark) -> str:
    values = (*marker.args, *marker.kwargs.values())
    if len(values) != 1 or not isinstance(values[0], str):
        raise pytest.UsageError(f"@pytest.mark.{marker.name} takes one name, e.g. @pytest.mark.{marker.name}('cuda')")
    return values[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test on hardware that is not ready is skipped, with the reason that `portable doctor` shows."""
    marker = item.get_closest_marker("hardware")
    if marker is None:
        return
    from portable import backends
    from portable.errors import BackendUnavailableError

    try:
        backends.get(_argument(marker))
    except BackendUnavailableError as absent:
        pytest.skip(absent.message)


@pytest.fixture
def slo(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``slo(function)`` or ``slo(function, baseline=other)``: measure with the one timer, and fail unless the objective
    of the test's marker ``@pytest.mark.slo(metric, limit)`` is met."""
    marker = request.node.get_closest_marker("slo")
    if marker is None:
        raise pytest.UsageError(f"{request.node.nodeid} takes `slo` and has no marker @pytest.mark.slo(metric, limit)")

    def check(function: Callable[[], object], *, baseline: Callable[[], object] | None = None) -> None:
        from portable.testing.objective import figures

        met, text = figures(marker.args, marker.kwargs, function, baseline)
        request.node.user_properties.append(("portable_slo", text))
        if not met:
            pytest.fail(text, pytrace=False)

    return check
