"""What a device lacks that a graph asks for: dtypes that it emulates, sizes that leave part of it idle. Each with the
user's line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from portable.backends.targets import Target
from portable.lowering.source import location

_WASTE = 0.2  # from which part of a lane that stays empty on there is a note
_READS_ROWS = frozenset(
    "embedding gather index index_select embedding_bag _embedding_bag slice select "
    "index_copy index_put slice_scatter select_scatter scatter".split()  # of these rows are written
)


@dataclass(frozen=True)
class Note:
    """Something about a model on a target.

    Attributes:
        text: what.
        where: the user's lines, most frequent first, as ``file:line, in function``.
        count: how many operators it is about.
    """

    text: str
    where: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        place = f" ({self.where[0].partition(',')[0]}{', …' if len(self.where) > 1 else ''})" if self.where else ""
        return self.text + place


def notes(gm: fx.GraphModule, target: Target) -> list[Note]:
    """The notes on one functional graph."""
    places: dict[str, Counter[str]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            for text in (*_emulated(node, target), *_narrow(node, target)):
                places.setdefault(text, Counter())[location(node)] += 1
    return [
        Note(text, tuple(where for where, _ in at.most_common() if where), at.total()) for text, at in places.items()
    ]


def merged(every: list[Note]) -> list[Note]:
    """Notes of several graphs, each text once."""
    found: dict[str, Note] = {}
    for note in every:
        old = found.get(note.text)
        where = tuple(dict.fromkeys((*old.where, *note.where))) if old else note.where
        found[note.text] = Note(note.text, where, note.count + (old.count if old else 0))
    return list(found.values())


def _emulated(node: fx.Node, target: Target) -> Iterator[str]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in target.emulated:
            yield f"{dtype} is emulated {target.emulated[dtype]}"


def _narrow(node: fx.Node, target: Target) -> Iterator[str]:
    for what, size, itemsize in _widths(node):
        lane = target.multiples.get("lane", 0)
        if lane and size % lane and (empty := 1 - size / (-(-size // lane) * lane)) >= _WASTE:
            yield f"{what} {size} leaves {empty:.0%} of a {lane}-wide lane empty"
        word = target.multiples.get("word", 0)
        if word and itemsize < 4 and size * itemsize % word:
            yield f"{what} {size} is no multiple of {word} bytes: the tensor cores take no such rows"


def _widths(node: fx.Node) -> Iterator[tuple[str, int, int]]:
    """(what, size, bytes of an element) of the rows of a matrix product."""
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    values = [a.meta.get("val") for a in node.args if isinstance(a, fx.Node)]
    tensors = [t for t in values if isinstance(t, torch.Tensor)]
    operands = {"mm": tensors[:2], "bmm": tensors[:2], "addmm": tensors[1:3], "baddbmm": tensors[1:3]}.get(name)
    if "scaled_dot_product" in name and tensors:
        yield "head size", int(tensors[0].shape[-1]), tensors[0].itemsize
    elif name == "linear" and len(tensors) > 1:
        yield from (("matrix width", int(n), tensors[1].itemsize) for n in tensors[1].shape)
    elif name == "convolution" and len(tensors) > 1:
        transposed, groups = bool(node.args[6]), int(node.args[8])  # type: ignore[arg-type]
        channels = int(tensors[1].shape[1]) * groups if transposed else int(tensors[1].shape[0])
        yield "convolution to channels", channels, tensors[1].itemsize
    elif operands and len(operands) == 2:
        a, b = operands
        yield from (("matrix width", int(n), a.itemsize) for n in {a.shape[-1], b.shape[-1]})


def read_by_row(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the arguments of which only some rows are read, such as the table of an embedding."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return frozenset(
        i for i, node in enumerate(placeholders) if node.users and all(_reads_rows(user, node) for user in node.users)
    )


def _reads_rows(user: fx.Node, table: fx.Node) -> bool:
    parts = str(user.target).split(".")
    return len(parts) > 1 and parts[1] in _READS_ROWS and user.args[0] is table
