"""The command line, as a user runs it."""

import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from portable import backends, cli, config
from portable.errors import PortableError

runner = CliRunner()


def portable(*args: str, **env: str):
    return runner.invoke(cli.app, list(args), env=env)


def test_doctor_shows_each_backend_with_state_and_evidence():
    result = portable("doctor")
    assert result.exit_code == 0
    for name in backends.BUILTIN:
        assert name in result.output
    for evidence in ("verified here", "contract only"):
        assert evidence in result.output
    assert "auto would choose" in result.output


def test_doctor_speaks_json():
    report = json.loads(portable("doctor", "--json").output)
    rows = {row["name"]: row for row in report["backends"]}
    assert rows["cpu"]["ready"]
    assert "PJRT platform" in rows["xla"]["reason"]
    assert all(row["ready"] or row["remedy"] for row in rows.values())
    assert set(report["versions"]) == {"portable", "Python", "torch", "jax"}


def test_doctor_says_what_the_environment_chooses():
    assert "PORTABLE_BACKEND=xla: xla is used" in portable("doctor", PORTABLE_BACKEND="xla").output
    assert "unknown backend 'abacus'" in portable("doctor", PORTABLE_BACKEND="abacus").output


def test_doctor_shows_what_a_backend_is_good_at(monkeypatch):
    monkeypatch.setattr(backends, "BUILTIN", ("tpu", "cpu"))
    shown = portable("doctor", "--verbose").output
    assert "collectives: gloo" in shown and "graphs: no" in shown and "float32" in shown
    assert "tpu:torch_xla: torch_xla is not installed" in shown
    rows = {row["name"]: row for row in json.loads(portable("doctor", "--verbose", "--json").output)["backends"]}
    assert "float32" in rows["cpu"]["capabilities"]["dtypes"]
    assert rows["tpu"]["capabilities"] == {}
    assert set(rows["tpu"]["executors"]) == {"tpu:torch_tpu", "tpu:torch_xla"}


def test_doctor_says_for_which_absent_devices_a_backend_compiles(monkeypatch):
    from portable.backends.xpu import Xpu

    monkeypatch.setattr(backends, "BUILTIN", ("xpu", "cpu"))
    monkeypatch.setattr(Xpu, "deviceless", classmethod(lambda cls: ("arc", "max")))
    rows = {row["name"]: row for row in json.loads(portable("doctor", "--json").output)["backends"]}
    assert (rows["xpu"]["ready"], rows["xpu"]["evidence"], rows["xpu"]["compiles_for"]) == (
        False, "compiled for", ["arc", "max"],
    )  # fmt: skip
    assert rows["cpu"]["evidence"] == "verified here"
    assert "can compile for: arc max" in portable("doctor", "--verbose").output


@pytest.mark.parametrize("columns", [60, 80])
def test_env_cuts_nothing_in_a_narrow_terminal(columns, monkeypatch):
    path = "/a/folder/with/a/rather/long/name/on/some/disk/ledger.sqlite"
    monkeypatch.setattr(cli, "console", Console(width=columns))
    shown = portable("env", PORTABLE_LEDGER=path).output
    for variable in config.VARIABLES.values():
        assert variable.name in shown
    assert path in _folded(shown, "set to")
    assert config.VARIABLES["PORTABLE_LEDGER"].default in _folded(shown, "default")


def _folded(shown: str, title: str) -> str:
    """The text of one column of a table, its folded lines joined."""
    titles = shown.splitlines()[0]
    start = titles.index(title)
    end = start + len(title) + len(titles[start + len(title) :]) - len(titles[start + len(title) :].lstrip())
    return "".join(line[start:end].strip() for line in shown.splitlines()[1:])


def test_no_command_offers_shell_completion():
    for command in ("bench", "check", "doctor"):
        shown = portable(command, "--help")
        assert shown.exit_code == 0
        assert "completion" not in shown.output


def test_the_help_of_check_breaks_no_sentence():
    shown = portable("check", "--help", COLUMNS="200", TERM="dumb", NO_COLOR="1").output
    assert "Exit status 1 if the model does not compile or does not fit somewhere." in shown


def test_env_prints_every_variable():
    result = portable("env", "--json")
    assert [row["name"] for row in json.loads(result.output)] == list(config.VARIABLES)
    assert "PORTABLE_BACKEND" in portable("env").output


def test_explain_runs_a_script_with_its_arguments(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import sys, torch, portable as pt\n"
        "if __name__ == '__main__':\n"
        "    f, g = pt.compile(torch.sin), pt.compile(torch.cos, backend='cpu:eager')\n"
        "    f(torch.ones(int(sys.argv[1]))), g(torch.ones(2)), pt.compile(torch.tan)\n"
        "    sys.exit(0)\n"
    )
    result = portable("explain", "--backend", "xla", "--json", str(path), "3")
    assert result.exit_code == 0, result.output
    assert [(e["name"], e["backend"]) for e in json.loads(result.output)] == [("sin", "xla"), ("cos", "cpu:eager")]
    assert "sin on xla" in portable("explain", "--backend", "xla", str(path), "3").output


def test_explain_runs_a_model_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    result = portable("explain", f"{path}:make", "--backend", "xla", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["ops"]["aten.addmm.default"] == {"lowered": 1}
    assert "fallbacks: none" in portable("explain", f"{path}:make", "--backend", "xla").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["explain", "nowhere.py:make"], "no file nowhere.py"),
        (["explain", "make"], "names no function"),
        (["explain", "nowhere.py"], "no file nowhere.py"),
        (["explain", "json:dumps", "3"], "takes no arguments: 3"),
        (["explain", "json:dumps_all"], "no attribute 'dumps_all'"),
        (["explain", "math:pi"], "is a float, not a function"),
        (["explain", "os:getcwd"], "not (model, args[, kwargs])"),
        (["explain", "os:getcwd", "--backend", "abacus"], "not (model, args[, kwargs])"),
    ],
)
def test_a_mistake_is_one_message_with_a_remedy_and_status_2(args, message):
    done = subprocess.run([sys.executable, "-m", "portable.cli", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert message in text
    assert "Remedy:" in text
    assert "Traceback" not in text


def test_a_terminal_without_unicode_is_served():
    done = subprocess.run(
        [sys.executable, "-m", "portable.cli", "doctor"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert b"xla" in done.stdout


MISTAKES = {
    "needs": ("def needs(n): return model, (x,)", r"needs arguments \(n\)"),
    "raises": ("def raises(): return {}['key']", r"KeyError at made.py:\d+, in raises"),
    "nn": ("", "is a module, not a function"),
    "number": ("number = 3", "is a int, not a function"),
    "pair": ("def pair(): return model, x", r"returned \(Linear, Tensor\): args is a tuple"),
    "listed": ("def listed(): return model, (x,), [1]", r"returned \(Linear, tuple, list\)"),
    "few": ("def few(): return model, ()", "cannot be called so: missing a required argument: 'input'"),
    "none": ("def none(): pass", "returned NoneType"),
    "picky": (
        "class Picky(nn.Module):\n    def forward(self, x): raise ValueError('no')\ndef picky(): return Picky(), (x,)",
        r"ValueError at made.py:\d+, in forward: no",
    ),
    "size": ("def size(): return nn.Sequential(nn.Linear(3, 4)), (x,)", r"linear .*float32\[4, 3\]"),
    "mixed": ("def mixed(): return model, (x.double(),)", r"addmm.*float64\[2, 8\].*same dtype"),
    "broken": ("def broken(:", r"SyntaxError at made.py:\d+"),
    "lonely": ("import not_there_at_all", r"ModuleNotFoundError at made.py:\d+"),
}


@pytest.mark.parametrize("command", [("explain", "--backend", "xla"), ("coverage", "--target", "xla")])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_users_mistake_is_one_short_message_with_its_line(name, command, tmp_path):
    text, said = MISTAKES[name]
    file = tmp_path / "made.py"
    file.write_text(f"import torch\nfrom torch import nn\nmodel, x = nn.Linear(8, 4), torch.ones(2, 8)\n{text}\n")
    result = portable(command[0], f"{file}:{name}", *command[1:])
    assert isinstance(result.exception, PortableError), result.output
    assert re.search(said, str(result.exception)), str(result.exception)
    assert len(str(result.exception).splitlines()) <= 2


def test_check_says_a_users_mistake_without_a_traceback(tmp_path):
    file = tmp_path / "made.py"
    file.write_text("import torch\ndef make(): return torch.nn.Linear(3, 4), (torch.ones(2, 8),)\n")
    result = portable("check", f"{file}:make", "--target", "tpu:v5e")
    assert isinstance(result.exception, PortableError)
    assert "float32[2, 8], float32[4, 3]" in str(result.exception)


def test_the_error_of_a_script_is_one_message(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def go():\n    raise OSError('no disk')\ngo()\n")
    result = portable("explain", str(script))
    assert str(result.exception) == "OSError at script.py:2, in go: no disk"
