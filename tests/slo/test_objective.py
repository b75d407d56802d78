"""SLOs and their files: a mistake is named by file, line and key."""

import pytest

from portable.errors import ConfigError
from portable.slo.objective import SLO, load_slos, slo_for


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_gives_slos_by_pattern(tmp_path):
    path = write(
        tmp_path,
        """
        "cumsum/*" = { metric = "ratio", limit = 1.25, baseline = "eager" }
        "model/vit-s" = { metric = "p99_ms", limit = 40 }

        ["layer_norm/*"]
        metric = "roofline"
        limit = 0.5
        """,
    )
    assert load_slos(path) == {
        "cumsum/*": SLO("ratio", 1.25, "eager"),
        "model/vit-s": SLO("p99_ms", 40),
        "layer_norm/*": SLO("roofline", 0.5),
    }


MISTAKES = {
    "unknown metric": ('\n"a/*" = { metric = "p90_ms", limit = 1 }', 2, "metric", "'p90_ms' is not one of p50_ms"),
    "no metric": ('"a/*" = { limit = 1 }', 1, "metric", "is missing"),
    "no limit": ('\n\n["a/*"]\nmetric = "ratio"', 3, "limit", "is missing"),
    "limit of text": ('["a/*"]\nmetric = "ratio"\nlimit = "fast"', 3, "limit", "'fast' is not a positive number"),
    "limit of nothing": ('["a/*"]\nmetric = "ratio"\n\nlimit = 0', 4, "limit", "not a positive number"),
    "limit is a bool": ('"a/*" = { metric = "ratio", limit = true }', 1, "limit", "not a positive number"),
    "limit is nan": ('"a/*" = { metric = "ratio", limit = nan }', 1, "limit", "not a positive number"),
    "over the roof": ('"a/*" = { metric = "roofline", limit = 2 }', 1, "limit", "more than the whole roofline"),
    "misspelt field": ('["a/*"]\nmetric = "ratio"\nlimt = 1', 3, "limt", "did you mean 'limit'?"),
    "unknown baseline": (
        '# one\n["b/*"]\nmetric = "p50_ms"\nlimit = 1\n["a/*"]\nmetric = "ratio"\nlimit = 1\nbaseline = "jit"',
        8,
        "baseline",
        "'jit' is not one of eager",
    ),
    "baseline without ratio": (
        '"a/*" = { metric = "p50_ms", limit = 1, baseline = "eager" }',
        1,
        "baseline",
        "no meaning for metric 'p50_ms'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_by_file_line_row_and_key(tmp_path, mistake):
    text, line, key, message = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_slos(path)
    assert str(raised.value).startswith(f"{path}:{line}: a/*: {key}: ")
    assert message in str(raised.value)
    assert "Remedy:" in str(raised.value)


def test_a_row_that_is_no_table_is_named(tmp_path):
    path = write(tmp_path, '\n"a/*" = 1.25\n')
    with pytest.raises(ConfigError, match=r"mine\.toml:2: a/\*: a row is a table, not 1\.25"):
        load_slos(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"a/*" = { metric = "ratio", limit = 1 }\n"b/*" = { metric = ratio, limit = 1 }', 2),
        ('"a/*" = { metric = "ratio", limit = 1 }\n\n"a/*" = { metric = "ratio", limit = 2 }', 3),
        ('["a/*"]\nmetric = "ratio', 2),
        ('["a/*"\n', 1),
    ],
)
def test_bad_toml_is_named_by_line(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"mine\.toml:{line}: "):
        load_slos(path)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_slos(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b'# one\n\xff"')
    with pytest.raises(ConfigError, match=r"binary\.toml:2: not UTF-8"):
        load_slos(tmp_path / "binary.toml")


def test_an_slo_made_in_python_is_checked_alike():
    with pytest.raises(ConfigError, match="SLO: limit: -1 is not a positive number"):
        SLO("ratio", -1)
    with pytest.raises(ConfigError, match="SLO: metric: 'speed'"):
        SLO("speed", 1)  # type: ignore[arg-type]


def test_a_workloads_own_row_counts_then_the_longest_pattern():
    slos = {"*": SLO("ratio", 3), "cumsum/*": SLO("ratio", 2), "cumsum/mamba": SLO("ratio", 1.5)}
    assert slo_for("cumsum/mamba", slos).limit == 1.5
    assert slo_for("cumsum/other", slos).limit == 2
    assert slo_for("sort/other", slos).limit == 3
    assert slo_for("sort/other", {"cumsum/*": SLO("ratio", 2)}) is None


def test_an_slo_reads_as_a_sentence():
    assert str(SLO("ratio", 1.25)) == "≤ 1.25× best native"
    assert str(SLO("p99_ms", 40)) == "p99 ≤ 40 ms"
    assert str(SLO("peak_mb", 512)) == "peak ≤ 512 MB"
    assert str(SLO("roofline", 0.5)) == "≥ 50% of roofline"
