"""libstdc++'s order of equal elements, step by step: what torch's CPU `topk` and `kthvalue` return among ties.

torch selects with ``std::nth_element``, ``std::partial_sort`` and a quickselect of its own. Which of several equal
elements they pick, and in which order, follows from their swaps alone, so the swaps are done here: a sequential program
for each slice, all slices at once. It is run only where ties decide the answer (see sorting.py).

Sources: GCC's libstdc++ ``bits/stl_algo.h`` and ``bits/stl_heap.h`` (the algorithms; their constants are unchanged
since GCC 4), and ATen's ``native/TopKImpl.h`` and ``native/Sorting.cpp`` (which of them is used when). An element is
denoted by its place in ``order``, a permutation of the slice; "before" is the comparison of the sort: a larger key goes
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Key = jax.Array  # [n], integers; a larger one goes first
Order = jax.Array  # int32[n], a permutation
_INSERTION = 16  # std::sort leaves runs of this length to insertion sort, which is stable


def _before(key: Key, order: Order, i: Any, j: Any) -> jax.Array:
    return key[order[i]] > key[order[j]]


def _swap(order: Order, i: Any, j: Any) -> Order:
    x, y = order[i], order[j]
    return order.at[i].set(y).at[j].set(x)


def _median_to_first(key: Key, order: Order, first: Any, a: Any, b: Any, c: Any) -> Order:
    """``__move_median_to_first``."""
    ab, bc, ac = _before(key, order, a, b), _before(key, order, b, c), _before(key, order, a, c)
    if_ab = jnp.where(bc, b, jnp.where(ac, c, a))
    otherwise = jnp.where(ac, a, jnp.where(bc, c, b))
    return _swap(order, first, jnp.where(ab, if_ab, otherwise))


def _partition(key: Key, order: Order, first: Any, last: Any) -> tuple[Order, jax.Array]:
    """``__unguarded_partition_pivot``: the permutation, and the cut."""
    n = key.shape[0]  # the bounds below hold by themselves, except in slices that are done and wait for the others
    order = _median_to_first(key, order, first, first + 1, first + (last - first) // 2, last - 1)
    pivot = key[order[first]]

    def up(order: Order, i: jax.Array) -> jax.Array:
        return lax.while_loop(lambda i: (i < n) & (key[order[i]] > pivot), lambda i: i + 1, i)

    def down(order: Order, j: jax.Array) -> jax.Array:
        return lax.while_loop(lambda j: (j > 0) & (pivot > key[order[j]]), lambda j: j - 1, j)

    def step(state: tuple[Order, jax.Array, jax.Array]) -> tuple[Order, jax.Array, jax.Array]:
        order, i, j = state
        order = _swap(order, i, j)
        i = up(order, i + 1)
        return order, i, down(order, j - 1)

    i = up(order, first + 1)
    order, i, _ = lax.while_loop(lambda s: s[1] < s[2], step, (order, i, down(order, last - 1)))
    return order, i


def _few(key: Key, order: Order, first: Any, last: Any) -> Order:
    """Insertion sort of at most three elements."""
    n = order.shape[0]
    for offset in (0, 1, 0):
        i = jnp.minimum(first + offset, n - 2)
        wanted = (first + offset + 1 < last) & _before(key, order, i + 1, i)
        order = jnp.where(wanted, _swap(order, i, i + 1), order)
    return order


def _push(key: Key, order: Order, hole: Any, top: Any, value: Any) -> Order:
    """``__push_heap``."""

    def up(state: tuple[Order, Any]) -> tuple[Order, Any]:
        order, hole = state
        parent = (hole - 1) // 2
        return order.at[hole].set(order[parent]), parent

    def more(state: tuple[Order, Any]) -> jax.Array:
        order, hole = state
        parent = jnp.maximum((hole - 1) // 2, 0)
        return (hole > top) & (key[order[parent]] > key[value])

    order, hole = lax.while_loop(more, up, (order, hole))
    return order.at[hole].set(value)


def _adjust(key: Key, order: Order, hole: Any, length: Any, value: Any) -> Order:
    """``__adjust_heap`` of the heap ``order[:length]``."""
    top = hole

    def sink(state: tuple[Order, Any]) -> tuple[Order, Any]:
        order, hole = state
        child = 2 * (hole + 1)
        child = jnp.where(_before(key, order, child, child - 1), child - 1, child)
        return order.at[hole].set(order[child]), child

    order, hole = lax.while_loop(lambda s: s[1] < (length - 1) // 2, sink, (order, hole))
    lone = (length % 2 == 0) & (hole == (length - 2) // 2)
    child = jnp.where(lone, 2 * hole + 1, hole)
    order = jnp.where(lone, order.at[hole].set(order[child]), order)
    return _push(key, order, child, top, value)


def _pop(key: Key, order: Order, length: Any, result: Any) -> Order:
    """``__pop_heap``: the heap's top goes to ``result``, whose element enters the heap."""
    value = order[result]
    return _adjust(key, order.at[result].set(order[0]), jnp.int32(0), length, value)


def _heap_select(key: Key, order: Order, middle: Any, last: int) -> Order:
    """``__heap_select``: the first ``middle`` elements of the order, as a heap."""

    def make(state: tuple[Order, Any]) -> tuple[Order, Any]:
        order, parent = state
        return _adjust(key, order, parent, middle, order[parent]), parent - 1

    order, _ = lax.while_loop(lambda s: s[1] >= 0, make, (order, (middle - 2) // 2))

    def take(i: Any, order: Order) -> Order:
        return lax.cond(_before(key, order, i, 0), lambda o: _pop(key, o, middle, i), lambda o: o, order)

    return lax.fori_loop(middle, last, take, order)


def partial_sort(key: Key, k: int) -> Order:
    """``std::partial_sort`` of the first ``k``: positions in the slice, in order."""
    n = key.shape[0]
    order = _heap_select(key, jnp.arange(n, dtype=jnp.int32), jnp.int32(k), n)

    def sort(i: Any, order: Order) -> Order:
        end = jnp.int32(k) - 1 - i
        return _pop(key, order, end, end)

    return lax.fori_loop(0, k - 1, sort, order)[:k]


def nth_element(key: Key, nth: int) -> Order:
    """``std::nth_element``: the whole permutation."""
    n = key.shape[0]
    state = (jnp.arange(n, dtype=jnp.int32), jnp.int32(0), jnp.int32(n), jnp.int32(2 * (n.bit_length() - 1)))

    def narrow(state: tuple[Order, Any, Any, Any]) -> tuple[Order, Any, Any, Any]:
        order, first, last, depth = state
        order, cut = _partition(key, order, first, last)
        right = cut <= nth
        return order, jnp.where(right, cut, first), jnp.where(right, last, cut), depth - 1

    order, first, last, depth = lax.while_loop(lambda s: (s[2] - s[1] > 3) & (s[3] > 0), narrow, state)
    # The depth ends only inputs that are made to defeat the median of three; libstdc++ then selects by a heap.
    del depth
    return _few(key, order, first, last) if n > 1 else order


def top(key: Key, k: int, ordered: bool) -> Order:
    """The positions that torch's CPU `topk` returns for one slice."""
    n = key.shape[0]
    if k * 64 <= n:
        return partial_sort(key, k)
    order = nth_element(key, k - 1)
    if not ordered or k <= 2:
        return order[:k]
    head = introsort(key, order[: k - 1])
    return jnp.concatenate([head, order[k - 1 : k]])


def introsort(key: Key, order: Order) -> Order:
    """``std::sort``: partitions down to short runs, then a stable sort of what they left."""
    n = order.shape[0]
    if n > _INSERTION:
        order = _partitioned(key, order)
    return lax.sort([lax.bitwise_not(key)[order], order], dimension=0, is_stable=True, num_keys=1)[1]


def _partitioned(key: Key, order: Order) -> Order:
    """``__introsort_loop``: an explicit stack of ranges; ranges are disjoint, so their sequence does not matter."""
    n = order.shape[0]
    stack = jnp.zeros((n // _INSERTION + 2, 2), jnp.int32).at[0].set(jnp.array([0, n], jnp.int32))

    def step(state: tuple[Order, jax.Array, Any]) -> tuple[Order, jax.Array, Any]:
        order, stack, depth = state
        first, last = stack[depth - 1, 0], stack[depth - 1, 1]
        order, cut = _partition(key, order, first, last)
        depth = depth - 1
        for low, high in ((cut, last), (first, cut)):
            long = high - low > _INSERTION
            stack = jnp.where(long, stack.at[depth].set(jnp.stack([low, high])), stack)
            depth = jnp.where(long, depth + 1, depth)
        return order, stack, depth

    order, _, _ = lax.while_loop(lambda s: s[2] > 0, step, (order, stack, jnp.int32(1)))
    return order


def quick_select(key: Key, k: int) -> Order:
    """ATen's ``quick_select_template``, ascending: the permutation; its element ``k`` is the answer."""
    n = key.shape[0]

    def greater(order: Order, i: Any, j: Any) -> jax.Array:
        return key[order[i]] > key[order[j]]

    def when(wanted: jax.Array, order: Order, i: Any, j: Any) -> Order:
        return jnp.where(wanted, _swap(order, i, j), order)

    def narrow(state: tuple[Order, Any, Any]) -> tuple[Order, Any, Any]:
        order, left, right = state
        order = _swap(order, left + (right - left) // 2, left + 1)
        order = when(greater(order, left + 1, right), order, left + 1, right)
        order = when(greater(order, left, right), order, left, right)
        order = when(greater(order, left + 1, left), order, left + 1, left)
        pivot = key[order[left]]

        def up(order: Order, i: Any) -> Any:
            return lax.while_loop(lambda i: (i < n) & (pivot > key[order[i]]), lambda i: i + 1, i + 1)

        def down(order: Order, j: Any) -> Any:
            return lax.while_loop(lambda j: (j > 0) & (key[order[j]] > pivot), lambda j: j - 1, j - 1)

        def step(state: tuple[Order, Any, Any]) -> tuple[Order, Any, Any]:
            order, i, j = state
            order = _swap(order, i, j)
            return order, up(order, i), down(order, j)

        order, i, j = lax.while_loop(lambda s: s[2] >= s[1], step, (order, up(order, left + 1), down(order, right)))
        order = _swap(order, left, j)
        return order, jnp.where(j <= k, i, left), jnp.where(j >= k, j - 1, right)

    state = (jnp.arange(n, dtype=jnp.int32), jnp.int32(0), jnp.int32(n - 1))
    order, left, right = lax.while_loop(lambda s: s[2] > s[1] + 1, narrow, state)
    pair = (right == left + 1) & greater(order, left, jnp.minimum(left + 1, n - 1))
    return when(pair, order, left, jnp.minimum(left + 1, n - 1))


def by_slice(select: Callable[[Key], Order], key: jax.Array) -> jax.Array:
    """``select`` for every slice along the last dimension of ``key``."""
    flat = lax.reshape(key, (-1 if 0 in key.shape else key.size // key.shape[-1], key.shape[-1]))
    found = jax.vmap(select)(flat)
    return lax.reshape(found, (*key.shape[:-1], found.shape[-1]))
