"""The package is laid out as the README says: each thing in its one obvious place."""

import ast
import importlib
from pathlib import Path

import pytest

import portable
from portable import backends

ROOT = Path(portable.__file__).parent
TOP_LEVEL = {
    "__init__",
    "config",
    "errors",
    "dtypes",
    "api",
    "compiled",
    "capture",
    "explain",
    "testing",
    "cli",
    "backends",
    "lowering",
    "kernels",
    "slo",
    "ops",
}


def test_the_top_level_is_the_documented_one():
    found = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert found == TOP_LEVEL


@pytest.mark.parametrize("name", backends.BUILTIN)
def test_a_backend_is_one_file_of_its_name(name):
    module = importlib.import_module(f"portable.backends.{name}")
    assert module.BACKEND.name == name
    assert issubclass(module.BACKEND, importlib.import_module("portable.backends.base").Backend)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_print_no_assert_for_users_no_bare_except(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), (
            f"print at line {node.lineno}"
        )
        assert not isinstance(node, ast.Assert), f"assert at line {node.lineno}"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"bare except at line {node.lineno}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
