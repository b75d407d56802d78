"""What the tests of neural-network lowerings share: outputs and gradients of a function, lowered and eager."""

import torch

from portable.testing import lowered

# of the largest element: sums of many terms in another order
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}


def with_gradients(f, cotangents):
    """``f`` followed by the gradients of its differentiable outputs by its floating-point arguments.

    The cotangents are made at the first call, from the outputs' shapes.
    """

    def run(*args):
        leaves = [a.detach().requires_grad_(a.is_floating_point() or a.is_complex()) for a in args]
        outputs = f(*leaves)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        differentiable = [o for o in outputs if o.requires_grad]
        if not cotangents:
            cotangents.extend(torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape).to(o.dtype) for o in differentiable)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
        return [o.detach() for o in outputs] + [g for g in grads if g is not None]

    return run


def assert_agree(f, *args, gradients=True, tolerance=None):
    """``f`` lowered gives what eager gives, gradients too; NaN where eager has NaN."""
    run = with_gradients(f, []) if gradients else f
    want = run(*args)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    got = lowered(run, *args)
    got = list(got) if isinstance(got, (tuple, list)) else [got]
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        finite = w[torch.isfinite(w)].abs() if w.is_floating_point() or w.is_complex() else w.flatten()[:0]
        scale = max(float(finite.max()), 0.1) if finite.numel() else 1.0
        limit = TOLERANCE.get(w.dtype, 0) if tolerance is None else tolerance
        torch.testing.assert_close(
            g, w, rtol=limit, atol=limit * scale, equal_nan=True, msg=lambda m, i=i: f"result {i}: {m}"
        )
