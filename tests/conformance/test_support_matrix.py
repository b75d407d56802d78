"""docs/support.md says what the lowering does."""

import pytest

from tests.conformance.support_matrix import PAGE, page, ways_of


def test_an_operator_runs_as_the_page_says():
    assert {how for how, _ in ways_of("add").values()} == {"lowered"}
    assert {t: how for t, (how, _) in ways_of("linalg.eigvals").items()}["tpu"] == "refused"
    assert "| linalg.eigvals | lowered |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_is_the_one_that_is_written_now():
    assert PAGE.read_text(encoding="utf-8") == page()
