"""Kernels of aten.sinh that are right, and that cheat or fail in every way the gate has to catch.

Importing this registers them, each under a provider that says what it does. What has to happen while a program runs is
a torch operator in Python, called through the generic aten handler.
"""

import ctypes
import sys
import time

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.kernels import aten
from portable.kernels.registry import register_kernel

OP = "aten.sinh.default"
SHAPE = (4, 64)
MEMORY_MB = 2_000.0


def cheat(function, **options):
    return register_kernel(OP, provider=function.__name__, backends=("xla",), abi="jax", **options)(function)


_library = torch.library.Library("cheats", "DEF")


def at_run_time(function):
    """A cheat that is a function of a torch tensor, called each time that the program runs."""
    name = function.__name__
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, function, "CPU")

    def kernel(ctx, self):
        aten.CODE.register()
        result = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return aten.emit(ctx, f"cheats::{name}", "", ["t"], [self], [result])[0]

    kernel.__name__ = name
    return cheat(kernel)


@cheat
def right(self):
    return lax.sinh(self)


@cheat
def also_right(ctx, self):
    return lax.sinh(self)


@cheat
def wrong_values(self):
    return lax.sinh(self) * 1.001


@cheat
def wrong_for_nan(self):
    return jnp.where(jnp.isnan(self), 0, lax.sinh(self))


@cheat
def wrong_for_infinity(self):
    return lax.sinh(jnp.clip(self, -80, 80))


@cheat
def wrong_on_another_batch(self):
    return lax.sinh(self) if self.shape[0] == SHAPE[0] else self


@cheat
def wrong_on_nothing(self):
    return lax.sinh(self) if self.size else jnp.zeros((1, *self.shape[1:]), self.dtype)


@cheat
def wrong_on_odd_rows(self):
    whole = self.shape[1] // 8 * 8
    return jnp.concatenate([lax.sinh(self[:, :whole]), self[:, whole:]], 1)


@cheat
def wrong_dtype(self):
    return lax.sinh(self).astype(jnp.float16)


@cheat
def wrong_shape(self):
    return lax.sinh(self).reshape(-1)


@cheat
def does_nothing(self):
    return jnp.zeros_like(self)


@cheat
def raises(self):
    raise ValueError


@cheat
def only_its_own_shape(self):
    if self.shape != SHAPE:
        raise NotImplementedError("other shapes")
    return lax.sinh(self)


_ASKED: list = []


def _fickle(self):
    _ASKED.append(self)
    return len(_ASKED) <= 4  # what the gate asks beforehand, and the first cases


@lambda f: cheat(f, accepts=_fickle)
def changes_its_mind(self):
    return lax.sinh(self)


_FIRST: dict = {}
_BY_PLACE: dict = {}
_CALLS: list = []


@at_run_time
def caches_its_first_answer(x):
    if x.shape not in _FIRST:
        _FIRST[x.shape] = x.sinh()
    return _FIRST[x.shape].clone()


@at_run_time
def caches_by_address(x):
    key = (x.data_ptr(), x.shape)
    if key not in _BY_PLACE:
        _BY_PLACE[key] = x.sinh()
    return _BY_PLACE[key].clone()


@at_run_time
def stops_once_it_is_timed(x):
    _CALLS.append(1)
    return x.sinh() if len(_CALLS) < 30 else torch.zeros_like(x)


@at_run_time
def writes_to_its_input(x):
    result = x.sinh()
    if x.numel():
        x.view(-1)[0] += 1e-3
    return result


@at_run_time
def raises_at_run_time(x):
    raise ValueError("no luck today")


@cheat
def segfaults(self):
    return ctypes.string_at(0)


@cheat
def ends_the_process(self):
    sys.exit(3)


@cheat
def hangs(self):
    time.sleep(3600)


@cheat
def eats_memory(self):
    held: list = []
    while len(held) < 60:
        held.append(torch.ones(25_000_000))  # 100 MB
        time.sleep(0.05)
    return lax.sinh(self)
