"""Write text with a small decoder-only transformer and a key-value cache updated in place, on whichever backend.

    python examples/generate.py
    python examples/generate.py --backend xla --prompt "The harbour"

The network learns the short text below at start-up, in eager, so that its output can be read; it learns it nearly by
heart, and claims no more. Then one decoding step is compiled: a token and its position go in as tensors, each layer
writes its key and value into a cache of fixed size, the logits of the next token come out. Prompt and continuation go
through that same step, so that one compilation serves the whole generation.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

import portable as pt

TEXT = (
    "The lighthouse stands at the end of the long stone pier. Every evening the keeper climbs the stairs and lights "
    "the lamp. Far out on the dark water the sailors see its beam and know that the harbour is near. In winter the "
    "waves break over the pier, and the keeper stays in the tower for days. Then he reads old letters, mends his nets "
    "and listens to the wind. In summer the children of the village come to visit him. He shows them the great lamp "
    "and tells them about ships that lost their way. The oldest of the children asks who will light the lamp one day. "
    "The keeper smiles and gives her the key."
)
WORDS = re.findall(r"\w+|[.,]", TEXT)  # a token is a word or a punctuation mark
VOCABULARY = sorted(set(WORDS))
LENGTH = 64  # tokens in a generation, prompt included: the size of the cache
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 16
LEARNING_RATE = 3e-3
MAX_CACHE_DIFFERENCE = 1e-3

console = Console()


class Attention(nn.Module):
    """Causal self-attention with a cache of ``LENGTH`` keys and values, each ``[heads, LENGTH, WIDTH / heads]``."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.combine = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(HEADS, LENGTH, WIDTH // HEADS))
        self.register_buffer("values", torch.zeros(HEADS, LENGTH, WIDTH // HEADS))

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``[..., tokens, WIDTH]`` → query, key and value, each ``[..., heads, tokens, WIDTH / heads]``."""
        return [part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in self.project(x).chunk(3, dim=-1)]

    def step(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """One token ``[1, WIDTH]`` at ``position`` ``[1]``: extends the cache, attends to all tokens so far."""
        query, key, value = self.split(x)
        self.keys.index_copy_(1, position, key)
        self.values.index_copy_(1, position, value)
        written = torch.arange(LENGTH, device=x.device) <= position
        found = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=written)
        return self.combine(found.transpose(-3, -2).flatten(-2))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """A batch of whole sequences ``[batch, tokens, WIDTH]``, without the cache: for training."""
        query, key, value = self.split(x)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.combine(found.transpose(-3, -2).flatten(-2))


class Decoder(nn.Module):
    """``forward`` is one decoding step; ``whole`` gives the logits of whole sequences with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.attention_norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY)))

    def layers(self) -> Any:
        return zip(self.attention_norms, self.attentions, self.mlps, strict=True)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``token`` and ``position``: int64 ``[1]``. Returns the logits of the next token, ``[1, vocabulary]``."""
        x = self.tokens(token) + self.positions(position)
        for norm, attention, mlp in self.layers():
            x = x + attention.step(norm(x), position)
            x = x + mlp(x)
        return self.logits(x)

    def whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: int64 ``[batch, tokens]``. Returns logits ``[batch, tokens, vocabulary]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for norm, attention, mlp in self.layers():
            x = x + attention.whole(norm(x))
            x = x + mlp(x)
        return self.logits(x)

    def caches(self) -> dict[str, torch.Tensor]:
        return dict(self.named_buffers())

    def forget(self) -> None:
        """Empty the cache."""
        for cache in self.caches().values():
            cache.zero_()


def encode(text: str) -> list[int]:
    """The tokens of ``text``; ``ValueError`` names the words that the network does not know."""
    words = re.findall(r"\w+|[^\w\s]", text)
    unknown = [word for word in words if word not in VOCABULARY]
    if unknown:
        raise ValueError(f"the network does not know {', '.join(map(repr, unknown))}; it knows: {' '.join(VOCABULARY)}")
    return [VOCABULARY.index(word) for word in words]


def decode(tokens: list[int]) -> str:
    return re.sub(r" ([.,])", r"\1", " ".join(VOCABULARY[token] for token in tokens))


def learn(steps: int, seed: int, progress: Progress) -> Decoder:
    """A decoder that has seen random stretches of ``TEXT`` (read in a circle) ``steps`` times."""
    torch.manual_seed(seed)
    decoder = Decoder()
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE)
    circle = torch.tensor(encode(TEXT) + encode(TEXT)[: LENGTH + 1])
    task = progress.add_task("learning", total=steps)
    for _ in range(steps):
        starts = torch.randint(len(WORDS), (BATCH, 1))
        stretch = circle[starts + torch.arange(LENGTH + 1)]
        logits = decoder.whole(stretch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), stretch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        progress.update(task, advance=1, description=f"learning, loss {loss.item():.3f}")
    return decoder.eval()


def generate(step: nn.Module, prompt: list[int], progress: Progress, label: str) -> list[int]:
    """Feed ``prompt`` token by token, then the likeliest next token each time, until the cache is full."""
    tokens = list(prompt)
    device = next(step.parameters()).device
    with torch.no_grad():
        for position in progress.track(range(LENGTH - 1), description=label):
            logits = step(*(torch.tensor([number], device=device) for number in (tokens[position], position)))
            if position + 1 == len(tokens):
                tokens.append(int(logits.argmax()))
    return tokens


def problems(
    tokens: list[int],
    eager: list[int],
    caches: dict[str, torch.Tensor],
    eager_caches: dict[str, torch.Tensor],
    report: Any,
) -> list[str]:
    """One plain sentence for each thing that does not hold."""
    found = []
    if tokens != eager:
        first = next(i for i, (have, want) in enumerate(zip(tokens, eager, strict=True)) if have != want)
        found.append(f"token {first} differs from eager's, which continues “{decode(eager[first:])}”")
    for name, cache in caches.items():
        difference = float((cache - eager_caches[name]).abs().max())
        if not difference <= MAX_CACHE_DIFFERENCE:  # NaN must fail too
            found.append(f"the cache {name} differs from eager's by {difference:.2g}")
    if report.fallbacks:
        found.append(f"not on the backend: {', '.join(fallback.op for fallback in report.fallbacks)}")
    if len(report.compiles) != 1:
        found.append(f"{len(report.compiles)} compilations; the decoding step must be compiled exactly once")
    return found


def main(
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The keeper",
    backend: Annotated[str | None, typer.Option(help="Backend to run on. Default: PORTABLE_BACKEND.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps at start-up, in eager.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the weights and of the training.")] = 0,
    check: Annotated[bool, typer.Option(help="Require eager's tokens and cache, no fallback, one compilation.")] = True,
) -> None:
    """Continue a prompt with a key-value cache updated in place, then show what ran where."""
    try:
        tokens = encode(prompt)
    except ValueError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--prompt") from unknown
    if not 0 < len(tokens) < LENGTH:
        raise typer.BadParameter(f"it must have 1 to {LENGTH - 1} words", param_hint="--prompt")
    device = pt.device(backend)
    with Progress(console=console) as progress:
        decoder = learn(steps, seed, progress)
        step = pt.compile(decoder.to(device), backend=backend)
        began = time.perf_counter()
        compiled = generate(step, tokens, progress, "writing, compiled")
        seconds = time.perf_counter() - began
        caches = {name: cache.clone() for name, cache in decoder.caches().items()}
        decoder.forget()
        eager = generate(decoder, tokens, progress, "writing, eager") if check else compiled
    console.print(f"[bold]{decode(tokens)}[/bold]{decode(compiled)[len(decode(tokens)) :]}", highlight=False)
    console.print(f"{LENGTH - 1} steps in {seconds:.1f} s with compilation")
    console.rule("what ran where")
    report = pt.explain(step)
    if not check:
        return
    found = problems(compiled, eager, caches, decoder.caches(), report)
    for problem in found:
        console.print(f"check failed: {problem}", style="red", markup=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    console.print(
        f"check passed: {len(eager)} tokens and the cache as eager's, no fallback, 1 compilation", style="green"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except pt.errors.PortableError as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
