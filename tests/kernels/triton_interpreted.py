"""Runs the Triton kernels in Triton's interpreter and says as JSON where they differ from their references.

A program of its own: TRITON_INTERPRET=1 has to be set before Triton is imported.
"""

import inspect
import json
import math
import sys
import traceback

import torch

from portable import ops
from portable.kernels import registry
from portable.ops._op import recomputed
from portable.slo.correctness import difference

INF, NAN = math.inf, math.nan


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm_cases(parameters):
    """Widths about powers of two, more rows than programs of the backward, every mix of the optional arguments."""
    for shape in ((2, 1), (3, 1023), (2, 1025), (5, 2, 130)):
        yield (normal(*shape), *(normal(shape[-1], seed=i + 1) for i in range(parameters))), {}
    yield (normal(600, 5), *(normal(5, seed=i + 1) for i in range(parameters))), {}
    yield (normal(3, 40).t(), *(normal(6)[::2] for _ in range(parameters))), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (normal(4, 100, dtype=dtype), *(normal(100, dtype=torch.float64) for _ in range(parameters))), {}
    yield (3e38 * normal(2, 8), *(None for _ in range(parameters))), {}


def gated_cases():
    for shape in ((2047,), (2049,), (3, 700, 1)):
        yield (normal(*shape), normal(*shape, seed=1)), {}
    yield (normal(40, 70).t(), normal(70, 40, seed=1)), {}
    values = torch.tensor([0.0, -0.0, 88.0, -88.0, 104.0, -104.0, 3e38, -3e38])
    yield (values, torch.ones(8)), {}


def rotary_cases():
    for interleaved in (False, True):
        yield (normal(2, 5, 3, 12).transpose(1, 2), normal(5, 4), normal(5, 4, seed=1), interleaved), {}
        yield (normal(2, 3, 2, 5, 8), normal(5, 4), normal(5, 4, seed=1), interleaved), {}
        yield (normal(2, 3, 5, 8), normal(2, 3, 5, 3), normal(2, 3, 5, 3, seed=1), interleaved), {}
        yield (normal(3, 700, 6), normal(3, 1, 3), normal(3, 1, 3, seed=1), interleaved), {}
        half = (normal(5, 4, dtype=torch.bfloat16), normal(5, 4, dtype=torch.bfloat16, seed=1))
        yield (normal(2, 5, 8, dtype=torch.bfloat16), *half, interleaved), {}


def entropy_cases():
    target = torch.tensor([4096, -100, 0, 4999, 4095])
    for smoothing in (0.0, 0.3):
        yield (normal(5, 5000), target, -100, smoothing), {}
        yield (normal(5, 5000) + 1000, target, -100, smoothing, "none"), {}
        x = normal(5, 5000)
        x[0, :4500] = -INF  # the first block holds nothing
        x[2], x[3, 7], x[4, 7] = -INF, INF, NAN
        yield (x, target, -100, smoothing, "none"), {}
    yield (normal(2, 3, 9, dtype=torch.bfloat16), torch.tensor([[0, 1, 8], [8, 8, 2]]), 8, 0.1, "sum"), {}
    yield (normal(9, 6).t(), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])[::2][:5].repeat(2)[:6], 2), {}


def linear_cases():
    target = torch.tensor([3, -100, 0, 29, 7])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for chunks in (0, 1, 2, 3, 9):
            args = (normal(5, 6, dtype=dtype), normal(30, 6, dtype=dtype, seed=1), target, normal(30, dtype=dtype))
            yield args, {"chunks": chunks, "label_smoothing": 0.1 * (chunks % 2)}
    yield (normal(6, 5).t(), normal(6, 30).t(), target, None, -100, 0.0, "none", 2), {}


def dispatch_cases():
    draw = torch.Generator().manual_seed(0)
    for tokens, copies, experts in ((300, 2, 8), (33, 3, 300), (5, 2, 1), (4, 1, 0), (17, 1, 1023)):
        indices = torch.randint(-1, experts + 1, (tokens, copies), generator=draw)
        yield (normal(tokens, 3), indices, experts), {}
    yield (normal(3, 1030), torch.tensor([[1, 1], [0, 1], [1, 0]]), 2), {}
    yield (normal(3, 8).t(), torch.randint(0, 4, (2, 8), generator=draw).t(), 4), {}


CASES = {
    "rms_norm": lambda: norm_cases(1),
    "layer_norm": lambda: norm_cases(2),
    "swiglu": gated_cases,
    "rotary_embedding": rotary_cases,
    "softmax_cross_entropy": entropy_cases,
    "fused_linear_cross_entropy": linear_cases,
    "moe_dispatch": dispatch_cases,
}


def all_cases(op):
    yield from getattr(ops, op).samples()
    yield from CASES[op]()


def bound(op, args, kwargs):
    """All arguments by position, as a compiled program passes them."""
    given = inspect.signature(getattr(ops, op).reference).bind(*args, **kwargs)
    given.apply_defaults()
    return list(given.args)


# What the documentation promises and the reference's own arithmetic does not show.


def unused_rows_stay_out(kernel):
    """A target that takes no part has no loss and no gradient, whatever its logits are."""
    x = normal(3, 7)
    x[1] = NAN
    args = (x, torch.tensor([1, -100, 2]), -100, 0.1, "mean")
    (of_x, *_) = kernel.backward((torch.ones(()),), [True, False, False, False, False], *args)
    finite = bool(kernel.implementation(*args).isfinite() and of_x.isfinite().all())
    return "" if finite and bool((of_x[1] == 0).all() and (of_x[0] != 0).all()) else f"{of_x}"


def a_target_out_of_range_gives_nan(kernel):
    """There is no way to raise; it must not be read from beyond the logits, nor pass for a loss."""
    args = (normal(4, 7), torch.tensor([7, -1, 1, 1 << 40]), -100, 0.0, "none")
    loss = kernel.implementation(*args)
    (of_x, *_) = kernel.backward((torch.ones(4),), [True, False, False, False, False], *args)
    odd = [loss.isnan().tolist(), of_x.isnan().all(1).tolist(), of_x.isnan().any(1).tolist()]
    return "" if odd == 3 * [[True, True, False, True]] else f"{loss} {of_x}"


def compiled_it_trains_as_eager_does(kernel):
    """Inside Inductor's graphs, forward and backward, with sizes that change."""
    import portable as pt

    registry.register_kernel("softmax_cross_entropy", provider="here", backends=("cpu",), backward=kernel.backward)(
        kernel.implementation
    )

    def loss(x, target):
        return pt.ops.softmax_cross_entropy(3 * x, target) * 2

    program = pt.compile(loss, backend="cpu", dynamic=True, kernels="softmax_cross_entropy=here")
    for rows in (4, 6):
        x, target = normal(rows, 9).requires_grad_(), torch.arange(rows)
        got, want = (f(x, target) for f in (program, loss))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))
    ways = pt.explain(program, show=False).ops["softmax_cross_entropy"]
    return "" if ways == {"kernel here": 2} else str(ways)


CLAIMS = {
    "softmax_cross_entropy": (
        unused_rows_stay_out,
        a_target_out_of_range_gives_nan,
        compiled_it_trains_as_eager_does,
    )
}


@torch.no_grad()
def gradients(op, args, kernel):
    """By the kernel, by the reference, and by the reference in float64."""
    reference = getattr(ops, op).reference
    outs = reference(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [normal(*o.shape, dtype=o.dtype, seed=7) if o.is_floating_point() else None for o in outs]
    needs = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    exact = recomputed(reference, wide, [None if g is None else g.double() for g in grads], needs)
    found = kernel.backward(grads, needs, *args)
    pairs = [
        (f, e, x)
        for f, e, x, n in zip(found, recomputed(reference, args, grads, needs), exact, needs, strict=True)
        if n
    ]
    missing = [i for i, (f, e, _) in enumerate(pairs) if (f is None) != (e is None)]
    if missing:
        return f"no gradient of argument {missing}"
    return difference(*([p[i] for p in pairs if p[1] is not None] for i in range(3)))


def problems(op):
    """What is wrong, by case and direction; '' where nothing is."""
    kernel = registry.KERNELS[op, "triton"]
    for i, (args, kwargs) in enumerate(all_cases(op)):
        args = bound(op, args, kwargs)
        name = f"{op}[{i}]"
        if why := kernel.why_not(args, {}):
            yield name, "refused", why
            continue
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        reference = getattr(ops, op).reference
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        try:
            yield name, "forward", difference(kernel.implementation(*args), reference(*args), reference(*wide))
            yield name, "backward", gradients(op, args, kernel)
        except Exception:
            yield name, "raised", traceback.format_exc()[-1500:]
        changed = [a for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor) and not same(a, b)]
        yield name, "arguments", "it wrote to its arguments" if changed else ""
    for claim in CLAIMS.get(op, ()):
        yield op, claim.__name__, claim(kernel)


def same(a, b):
    return torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) if a.is_floating_point() else torch.equal(a, b)


if __name__ == "__main__":
    registry.load()
    sys.stdout.write(json.dumps([row for op in sys.argv[1:] or CASES for row in problems(op)]))
