"""Train a small convolutional network on handwritten digits, on whichever backend is chosen.

    python examples/train_digits.py
    python examples/train_digits.py --backend xla --epochs 20

The forward and the backward pass run compiled; the optimiser is plain ``torch.optim.AdamW``. Batches have a fixed
size, so that training has one shape and is compiled once.
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import portable as pt

BATCH = 64
TEST_SHARE = 0.2
LEARNING_RATE = 3e-3
DROPOUT = 0.2
ACCURACY = 0.97  # on the digits that training has not seen
CHECKED_STEPS = 20
MAX_LOSS_DIFFERENCE = 1e-3

console = Console()


class DigitNet(nn.Module):
    """Grey images ``[n, 1, 8, 8]`` → logits ``[n, 10]``."""

    def __init__(self, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images))


@dataclass(frozen=True)
class Digits:
    """The data set, split once: images ``[n, 1, 8, 8]`` in 0 … 1, and labels ``[n]``."""

    train: TensorDataset
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(seed: int, device: torch.device) -> Digits:
    """scikit-learn's 1797 digits, on ``device``; ``seed`` decides which fifth is kept for the test."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError as missing:
        console.print(
            "This example needs the package 'scikit-learn': pip install 'portable\\[demo]'", style="red", soft_wrap=True
        )
        raise typer.Exit(2) from missing
    raw = datasets.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(raw.target, dtype=torch.int64, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = round(len(labels) * TEST_SHARE)
    test, train = order[:held_out], order[held_out:]
    return Digits(TensorDataset(images[train], labels[train]), images[test], labels[test])


def make_loader(digits: Digits, seed: int) -> DataLoader[Any]:
    shuffle = torch.Generator().manual_seed(seed)
    return DataLoader(digits.train, batch_size=BATCH, shuffle=True, drop_last=True, generator=shuffle)


def train_step(model: nn.Module, optimiser: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    optimiser.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimiser.step()
    return loss.item()


def train(model: nn.Module, digits: Digits, epochs: int, seed: int, progress: Progress) -> None:
    loader = make_loader(digits, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    task = progress.add_task("training", total=epochs * len(loader))
    model.train()
    for epoch in range(epochs):
        for images, labels in loader:
            loss = train_step(model, optimiser, images, labels)
            progress.update(task, advance=1, description=f"training, epoch {epoch + 1}, loss {loss:.4f}")


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test digits that ``model`` names correctly."""
    model.eval()
    with torch.no_grad():
        named = model(digits.test_images).argmax(dim=1)
    return float((named == digits.test_labels).float().mean())


def first_losses(digits: Digits, seed: int, compiled: bool, backend: str | None) -> tuple[list[float], Any]:
    """The losses of the first steps of a fresh network without dropout, and the report if it was compiled.

    Dropout is off because a backend may draw other random numbers than eager from the same seed.
    """
    torch.manual_seed(seed)
    model: nn.Module = DigitNet(dropout=0.0).to(digits.test_images.device)
    if compiled:
        model = pt.compile(model, backend=backend)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = list(make_loader(digits, seed))[:CHECKED_STEPS]
    losses = [train_step(model, optimiser, images, labels) for images, labels in batches]
    return losses, pt.explain(model, show=False) if compiled else None


def problems(share: float, eager: list[float], losses: list[float], reports: list[Any]) -> list[str]:
    """One plain sentence for each thing that does not hold."""
    found = []
    if share < ACCURACY:
        found.append(f"accuracy {share:.2%}; at least {ACCURACY:.0%} is required")
    for step, (want, have) in enumerate(zip(eager, losses, strict=True), start=1):
        if not abs(want - have) <= MAX_LOSS_DIFFERENCE:  # NaN must fail too
            found.append(f"the loss of step {step} is {have:.6f}, eager's is {want:.6f}")
    for report in reports:
        if report.fallbacks:
            found.append(f"not on the backend: {', '.join(fallback.op for fallback in report.fallbacks)}")
    return found


def main(
    backend: Annotated[str | None, typer.Option(help="Backend to run on. Default: PORTABLE_BACKEND.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to see the training digits.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the split, the weights, the order and dropout.")] = 0,
    check: Annotated[bool, typer.Option(help="Require the accuracy, and eager's losses in the first steps.")] = True,
) -> None:
    """Train on handwritten digits, test on the ones held out, then show what ran where."""
    device = pt.device(backend)
    digits = load_digits(seed, device)
    torch.manual_seed(seed)
    model = pt.compile(DigitNet().to(device), backend=backend)
    with Progress(console=console) as progress:
        began = time.perf_counter()
        train(model, digits, epochs, seed, progress)
        seconds = time.perf_counter() - began
    share = accuracy(model, digits)
    console.print(
        f"{share:.2%} of {len(digits.test_labels)} test digits named correctly "
        f"after {epochs} epochs in {seconds:.1f} s with compilation"
    )
    console.rule("what ran where")
    report = pt.explain(model)
    if not check:
        return
    eager, _ = first_losses(digits, seed, compiled=False, backend=backend)
    losses, check_report = first_losses(digits, seed, compiled=True, backend=backend)
    found = problems(share, eager, losses, [report, check_report])
    for problem in found:
        console.print(f"check failed: {problem}", style="red", markup=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    difference = max(abs(want - have) for want, have in zip(eager, losses, strict=True))
    console.print(
        f"check passed: accuracy {share:.2%}, losses within {difference:.1g} of eager's, no fallback, "
        f"{len(report.compiles)} compilations",
        style="green",
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except pt.errors.PortableError as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
