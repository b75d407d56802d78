"""How the arguments of a program lie on a mesh of devices, in the syntax of XLA's partitioner."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

import numpy as np

from portable.errors import ConfigError

AXES = ("batch", "tensor")
REPLICATED = "{replicated}"


class Mesh:
    """Devices in a grid with the axes "batch" and "tensor", either of which may be left out.

    Attributes:
        shape: {axis: how many devices}.
        plan: {pattern of names of weights: the dimension that lies along "tensor"}; a weight of two or more dimensions
            that no pattern names is divided along its largest dimension that can be, one of one dimension is not.
    """

    def __init__(self, shape: Mapping[str, int] | None, plan: Mapping[str, int] | None = None) -> None:
        self.shape, self.plan = dict(shape or {}), dict(plan or {})
        if any(type(n) is not int for n in (*self.shape.values(), *self.plan.values())):
            raise ConfigError(f"mesh={shape!r}, plan={plan!r}: each value is an int", remedy='as in {"batch": 4}')
        self.size = math.prod(self.shape.values())
        if set(self.shape) - set(AXES) or any(n < 1 for n in self.shape.values()):
            raise ConfigError(
                f"mesh={shape!r} is not legal", remedy='as {"batch": 4, "tensor": 4}, either may be left out'
            )
        if self.plan and "tensor" not in self.shape:
            raise ConfigError("a sharding plan needs a mesh with the axis tensor", remedy='mesh={"tensor": 4}')

    def shardings(
        self, shapes: Sequence[tuple[int, ...]], names: Sequence[str], weights: frozenset[int], batch: int | None
    ) -> tuple[str, ...]:
        """One sharding for each argument.

        Args:
            shapes, names: of the arguments.
            weights: positions of the weights; the others are inputs.
            batch: the first dimension of the inputs that are divided.

        Raises:
            ConfigError: the batch or a named dimension is not divisible.
        """
        if (batch or 0) % self.shape.get("batch", 1):
            raise ConfigError(
                f"a batch of {batch} cannot be divided over {self.shape['batch']} devices",
                remedy="make the batch a multiple of the mesh's axis",
            )
        return tuple(
            self._along("tensor", self._divided(names[i], shape), shape)
            if i in weights
            else self._along("batch", 0 if shape and shape[0] == batch else None, shape)
            for i, shape in enumerate(shapes)
        )

    def check(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """The plan is about these weights, by name and shape, and "tensor" divides some of them.

        Raises:
            ConfigError: a pattern names no weight, or none can be divided.
        """
        names = [name for name, _ in weights]
        for pattern in self.plan:
            if not any(_named(pattern, name) for name in names):
                shown = ", ".join(names[:8])
                raise ConfigError(f"the plan's {pattern!r} names no weight", remedy=f"weights here: {shown}, …")
        n = self.shape.get("tensor", 1)
        if n > 1 and all(self._divided(name, shape) is None for name, shape in weights):
            raise ConfigError(f"no weight can be divided over {n} devices", remedy='another mesh, as {"tensor": 4}')

    def _divided(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The dimension of a weight that lies along "tensor"."""
        n = self.shape.get("tensor", 1)
        named = [dim for pattern, dim in self.plan.items() if _named(pattern, name)]
        if named:
            if not -len(shape) <= named[0] < len(shape) or shape[named[0]] % n:
                raise ConfigError(
                    f"dimension {named[0]} of {name} {list(shape)} cannot be divided over {n} devices",
                    remedy="name another dimension in the plan",
                )
            return named[0] % len(shape)
        possible = [d for d, size in enumerate(shape) if size % n == 0 and size > 1]
        return max(possible, key=lambda d: shape[d]) if len(shape) > 1 and possible else None

    def _along(self, axis: str, dim: int | None, shape: tuple[int, ...]) -> str:
        if dim is None or self.shape.get(axis, 1) == 1:
            return REPLICATED
        grid = np.arange(self.size).reshape(tuple(self.shape.values()))
        at = list(self.shape).index(axis)
        devices = ",".join(map(str, np.moveaxis(grid, at, 0).ravel()))
        tiles = [self.shape[axis] if d == dim else 1 for d in range(len(shape))]
        others = self.size // self.shape[axis]
        rest = f",{others}" if others > 1 else ""
        tail = " last_tile_dim_replicate" if others > 1 else ""
        return f"{{devices=[{','.join(map(str, tiles))}{rest}]{devices}{tail}}}"


def _named(pattern: str, name: str) -> bool:
    """Whether a pattern names a weight, as Dynamo calls it (``self.layers.0.weight``) or its module does."""
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, name.partition(".")[2]))
