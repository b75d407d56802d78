"""Rows as the runner makes them, from stubbed measurements."""

import pytest

from benchmarks.runner import run
from tests.benchmarks.stubs import PEAK, SLOS, workload


@pytest.fixture
def rows_of():
    """Rows for {name: Measurement or exception}; keywords go to `run`."""

    def make(results, **options):
        def measurer(found, backend, **_):
            result = results[found.name]
            if isinstance(result, Exception):
                raise result
            return result

        options = {"budget_s": 100.0, "peak": PEAK, **options}
        return list(run([workload(n) for n in results], "xla", SLOS, measurer=measurer, **options))

    return make
