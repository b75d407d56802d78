"""A smoke test of the torch release that is installed: ``python -m tests.conformance.releases``.

Every lowering is loaded, one model runs forward and backward, and fifty operators are compared with eager. What this
release lacks is named. It needs nothing but portable; .ci/nightly runs it for each torch that setup.py allows.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import portable as pt
from portable.lowering import registry
from portable.testing import lowered

X = torch.linspace(-2, 2, 24).reshape(4, 6)
Y = torch.linspace(0.5, 3, 24).reshape(4, 6)
UNARY = "abs neg exp log1p sin cos tanh sigmoid relu floor ceil round sign square erf rsqrt sqrt expm1 atan".split()
BINARY = "add sub mul div maximum minimum pow atan2 fmod remainder copysign hypot eq lt logaddexp".split()
OTHERS = {
    "sum": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(1),
    "amax": lambda x, y: x.amax(0),
    "argmax": lambda x, y: x.argmax(1),
    "cumsum": lambda x, y: x.cumsum(1),
    "sort": lambda x, y: x.sort(dim=1, descending=True, stable=True)[0],
    "topk": lambda x, y: x.topk(2)[0],
    "matmul": lambda x, y: x @ y.T,
    "softmax": lambda x, y: x.softmax(-1),
    "layer_norm": lambda x, y: nn.functional.layer_norm(x, (6,)),
    "gelu": lambda x, y: nn.functional.gelu(x),
    "cat": lambda x, y: torch.cat((x, y), 1),
    "gather": lambda x, y: x.gather(1, torch.zeros(4, 2, dtype=torch.int64)),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "conv2d": lambda x, y: nn.functional.conv2d(x[None, None], y[None, None, :3, :3]),
    "max_pool2d": lambda x, y: nn.functional.max_pool2d(x[None, None], 2),
    "cholesky": lambda x, y: torch.linalg.cholesky(x @ x.T + 9 * torch.eye(4)),
    "solve": lambda x, y: torch.linalg.solve(x @ x.T + 9 * torch.eye(4), y),
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
}


def operators():
    def unary(function):
        return lambda x, y: function(x)

    named = {name: unary(getattr(torch, name)) for name in UNARY}
    return {**named, **{name: getattr(torch, name) for name in BINARY}, **OTHERS}


def check_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(5, 1, 6, 6)
    losses, gradients = [], []
    for run in (model, pt.compile(model, backend="xla", fallback="error")):
        model.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def main() -> int:
    count = len(registry.load())
    named = operators()
    failed = []
    for name, function in named.items():
        try:
            torch.testing.assert_close(
                lowered(function, X, Y, fallback="error"), function(X, Y), rtol=1e-4, atol=1e-5, equal_nan=True
            )
        except Exception as failure:  # the others are wanted too
            failed.append(f"{name}: {type(failure).__name__}: {failure}")
    check_model()
    sys.stdout.write(
        f"torch {torch.__version__}: {count} lowerings; absent here: {', '.join(registry.absent()) or 'none'}; "
        f"one model forward and backward; {len(named) - len(failed)} of {len(named)} operators agree with eager\n"
    )
    sys.stdout.writelines(f"  {line}\n" for line in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
