"""Random programs of views and writes: chains of views of one tensor, each written to now and then.

A program is its seed. It has no arithmetic that rounds, so that what a capture makes of it is equal to eager's: values,
strides, contiguity, and what the argument holds afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch

View = Callable[[torch.Tensor], torch.Tensor]


class Line(NamedTuple):
    """``values[of]`` is viewed, or written to, as ``text`` says."""

    text: str
    of: int
    function: Callable[..., torch.Tensor]
    other: int | None = None


def layouts() -> dict[str, torch.Tensor]:
    """Tensors of 24 elements that lie in different ways in their memory."""
    x = torch.arange(24.0)
    return {
        "row-major": x.reshape(4, 6).clone(),
        "transposed": x.reshape(6, 4).clone().t(),
        "stepped": torch.arange(48.0).reshape(4, 12)[:, ::2],
        "offset": torch.arange(40.0)[7:31].view(4, 6),
        "stepped line": torch.arange(50.0)[1:49:2],
        "channels-last": x.reshape(1, 2, 4, 3).clone(memory_format=torch.preserve_format).permute(0, 3, 1, 2),
        "complex": torch.complex(torch.arange(12.0), torch.arange(12.0) + 50).reshape(3, 4),
    }


def copied(x: torch.Tensor) -> torch.Tensor:
    """The same tensor in other memory, the gaps and the offset included."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _view(r: random.Random, x: torch.Tensor) -> tuple[str, View] | None:
    d = r.randrange(x.ndim) if x.ndim else 0
    kinds = ["transpose", "slice", "select", "unsqueeze", "as_strided", "diagonal", "narrow", "unfold", "flat", "split"]
    kind = r.choice([*kinds, "view_as_real", "imag", "squeeze", "expand"])
    if kind == "unsqueeze":
        return f"unsqueeze({d})", lambda x: x.unsqueeze(d)
    if x.ndim == 0 or x.numel() == 0:
        return None
    n, k = x.shape[d], r.randrange(1, 4)
    if kind == "transpose":
        return f"transpose({d}, -1)", lambda x: x.transpose(d, -1)
    if kind == "slice":
        where = (slice(None),) * d + (slice(r.randrange(n), None, k),)
        return f"[{where}]", lambda x: x[where]
    if kind == "select":
        i = r.randrange(n)
        return f"select({d}, {i})", lambda x: x.select(d, i)
    if kind == "narrow":
        return f"narrow({d}, 0, {(n + 1) // 2})", lambda x: x.narrow(d, 0, (n + 1) // 2)
    if kind == "diagonal" and x.ndim > 1:
        return "diagonal(0, 0, -1)", lambda x: x.diagonal(0, 0, -1)
    if kind == "unfold":
        size = r.randrange(1, n + 1)
        return f"unfold({d}, {size}, {k})", lambda x: x.unfold(d, size, k)
    if kind == "flat":
        return "view(-1)", lambda x: x.view(-1)
    if kind == "split":
        return f"split(2, {d})[0]", lambda x: x.split(2, d)[0]
    if kind == "squeeze":
        return "squeeze()", lambda x: x.squeeze()
    if kind == "expand":
        return "unsqueeze(0).expand(2, …)", lambda x: x.unsqueeze(0).expand(2, *x.shape)
    if kind == "as_strided":
        size, stride, offset = (r.randrange(1, 4), 2), (r.randrange(1, 5), r.randrange(1, 3)), r.choice([None, 0, 1, 8])
        return f"as_strided({size}, {stride}, {offset})", lambda x: x.as_strided(size, stride, offset)
    if kind in ("view_as_real", "imag") and x.is_complex():
        return kind, torch.view_as_real if kind == "view_as_real" else torch.imag
    return None


def _write(r: random.Random, x: torch.Tensor, y: torch.Tensor) -> tuple[str, Callable[..., torch.Tensor], bool] | None:
    kind = r.choice(["add", "mul", "copy", "zero", "out", "item", "masked", "index", "cumsum"])
    if kind == "add":
        return "add_(1)", lambda x: x.add_(1), False
    if kind == "mul":
        return "mul_(-3)", lambda x: x.mul_(-3), False
    if kind == "zero":
        return "zero_()", lambda x: x.zero_(), False
    if kind == "item" and x.ndim and x.numel():
        return "[0] = 7", lambda x: (x.__setitem__(0, 7), x)[1], False
    if kind == "masked" and not x.is_complex():
        return "masked_fill_(x > 9, 2)", lambda x: x.masked_fill_(x > 9, 2), False
    if kind == "index" and x.ndim and x.numel():
        return "index_fill_(0, [0], 5)", lambda x: x.index_fill_(0, torch.tensor([0]), 5), False
    if kind == "cumsum" and x.ndim:
        return "cumsum_(0)", lambda x: x.cumsum_(0), False
    if kind == "copy" and x.shape == y.shape and x.dtype == y.dtype:
        return "copy_({})", lambda x, y: x.copy_(y.clone()), True
    if kind == "out" and x.shape == y.shape and x.dtype == y.dtype:
        return "add({}, 1, out=)", lambda x, y: torch.add(y.clone(), 1, out=x), True
    return None


def _copy(r: random.Random, x: torch.Tensor) -> tuple[str, View] | None:
    kind = r.choice(["as_strided_copy", "clone", "twice", "roll", "as_strided_scatter"])
    if kind == "clone":
        return "clone()", lambda x: x.clone()
    if kind == "twice":
        return "* 2", lambda x: x * 2
    if x.ndim == 0 or x.numel() == 0:
        return None
    if kind == "roll":
        return "roll(1, 0)", lambda x: x.roll(1, 0)
    size, stride, offset = (2,), (r.randrange(1, 4),), r.choice([None, None, 1, 8])
    if kind == "as_strided_copy":
        return f"as_strided_copy({size}, {stride}, {offset})", lambda x: torch.as_strided_copy(x, size, stride, offset)
    source = torch.tensor([70, 80], dtype=x.dtype)
    return (
        f"as_strided_scatter([70, 80], {size}, {stride}, {offset})",
        lambda x: torch.as_strided_scatter(x, source.clone(), size, stride, offset),
    )


class Program:
    """Lines on one tensor; called, it gives every value."""

    def __init__(self, seed: int, lines: int = 5) -> None:
        r = random.Random(seed)
        self.layout, self.input = r.choice([*layouts().items()])
        self.lines: list[Line] = []
        x = copied(self.input)
        values = [x]
        for _ in range(30):
            i, j = r.randrange(len(values)), r.randrange(len(values))
            wrote = r.random() < 0.4 and _write(r, values[i], values[j])
            made = wrote or (_view if r.random() < 0.6 else _copy)(r, values[i])
            if not made:
                continue
            line = Line(made[0], i, made[1], j if wrote and wrote[2] else None)
            try:
                values.append(self._run(line, values))
            except RuntimeError:  # eager refuses it
                values = self(copied(self.input))
                continue
            self.lines.append(line)
            if len(self.lines) == lines:
                return

    @staticmethod
    def _run(line: Line, values: list[torch.Tensor]) -> torch.Tensor:
        others = [] if line.other is None else [values[line.other]]
        return line.function(values[line.of], *others)

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for line in self.lines:
            values.append(self._run(line, values))
        return values

    def __repr__(self) -> str:
        x = self.input
        text = [f"v0 = {self.layout}: {tuple(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}"]
        for i, line in enumerate(self.lines, 1):
            text.append(f"v{i} = v{line.of}.{line.text.format(f'v{line.other}')}")
        return "\n".join(text)


def difference(want: torch.Tensor, have: torch.Tensor) -> str:
    """'' if two tensors have the same values and lie in the same way, else how they differ."""
    if want.shape != have.shape or want.dtype != have.dtype:
        return f"{have.dtype}{list(have.shape)}, want {want.dtype}{list(want.shape)}"
    if not torch.equal(want, have):
        return f"{have.tolist()}, want {want.tolist()}"
    return layout_difference(want, have)


def layout_difference(want: torch.Tensor, have: torch.Tensor) -> str:
    """'' if two tensors of one shape lie in the same way: strides of dimensions of more than one element count."""
    sizes = want.shape
    if want.numel() and any(n > 1 and s != t for n, s, t in zip(sizes, want.stride(), have.stride(), strict=True)):
        return f"strides {have.stride()}, want {want.stride()}, for {tuple(sizes)}"
    formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(want.ndim, [])
    for form in [torch.contiguous_format, *formats]:
        if want.is_contiguous(memory_format=form) != have.is_contiguous(memory_format=form):
            return f"is_contiguous({form}) is {not want.is_contiguous(memory_format=form)}"
    return ""
