"""Backends of other packages that fail in every way there is: doctor reports them, and nothing else suffers."""

import os

import pytest
import torch

import portable as pt
from portable import backends
from portable.backends import diagnosis
from portable.errors import BackendUnavailableError

TIMEOUT_S = 12.0
MODULE = """
import os, time
from portable.backends.base import State
from portable.backends.cpu import Cpu

class Raises(Cpu):
    name = "raises"
    @classmethod
    def probe(cls):
        raise OSError("libacme.so.7: cannot open shared object file")

class Crashes(Cpu):
    name = "crashes"
    @classmethod
    def probe(cls):
        os._exit(3)

class Hangs(Cpu):
    name = "hangs"
    @classmethod
    def probe(cls):
        time.sleep(600)

class Stateless(Cpu):
    name = "stateless"
    @classmethod
    def probe(cls):
        return True

class Works(Cpu):
    name = "works"

class Renamed(Works):
    pass

from portable.backends.base import Backend

class Halved(Backend):
    name = "halved"
    @classmethod
    def probe(cls):
        return State(True, "ready")
"""
ENTRIES = {"imports": "absent_module:Backend"} | {
    name: f"acme_broken:{name.capitalize()}"
    for name in ("raises", "crashes", "hangs", "stateless", "works", "renamed", "halved")
}
SAID = {
    "imports": "No module named 'absent_module'",
    "raises": "libacme.so.7: cannot open shared object file",
    "crashes": "ended with status 3",
    "hangs": "no answer in 12 s",
    "stateless": "dataclass instances",
    "renamed": "is called 'works', its entry point 'renamed'",
    "halved": "Halved lacks compile, device, path",
}


def install(folder, module, entries, text):
    """What pip leaves behind of a package: its module and its entry points."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("[portable.backends]\n" + "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    install(folder, "acme_broken", ENTRIES, MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))
        backends.plugins.cache_clear()
        yield
    backends.plugins.cache_clear()


@pytest.fixture(scope="module")
def rows(installed):
    """What doctor shows, by backend."""
    whole = backends.diagnosed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "diagnosed", lambda name: whole(name, TIMEOUT_S))
        return {row["name"]: row for row in diagnosis.diagnosis()["backends"]}


@pytest.mark.parametrize("name", SAID)
def test_doctor_says_how_a_plugin_failed(rows, name):
    assert not rows[name]["ready"]
    assert "acme-broken 1.0" in rows[name]["reason"]
    assert SAID[name] in rows[name]["reason"]


@pytest.mark.parametrize("name", ["imports", "raises", "stateless", "renamed", "halved"])
def test_doctor_has_the_traceback_of_a_plugin_that_raised(rows, name):
    assert "Traceback (most recent call last)" in rows[name]["traceback"]


def test_the_other_backends_are_reported_as_ever(rows):
    assert [name for name in ("cpu", "xla", "works") if rows[name]["ready"]] == ["cpu", "xla", "works"]
    assert not any(rows[name]["traceback"] for name in (*backends.BUILTIN, "works"))


@pytest.mark.parametrize("name", ["cpu:eager", "works:eager"])
def test_the_other_backends_run_as_ever(installed, name):
    assert pt.compile(torch.neg, backend=name)(torch.ones(2)).tolist() == [-1, -1]


@pytest.mark.parametrize("name", ["imports", "raises", "stateless", "renamed", "halved"])
def test_a_plugin_that_failed_is_refused_with_the_reason_when_it_is_named(installed, name):
    reason = "not a State" if name == "stateless" else SAID[name]
    with pytest.raises(BackendUnavailableError) as caught:
        pt.compile(torch.neg, backend=name)
    assert reason in str(caught.value)


def test_doctor_survives_an_environment_that_names_a_plugin_which_hangs(rows, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND", "hangs")
    assert "no answer in 12 s" in diagnosis._choice(rows)
