"""What the lowering tests share: many functions lowered as one program, each compared with eager."""

import pytest
import torch

from portable.testing import lowered

# relative to the value, and absolute near zero; half precision is one rounding of a float32 computation
TOLERANCE = {
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-6),
    torch.complex64: (1e-4, 1e-6),
    torch.float16: (3e-3, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-4),
}


def _leaves(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _disagreement(want, got):
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype}{list(got.shape)}, want {want.dtype}{list(want.shape)}"
    rtol, atol = TOLERANCE.get(want.dtype, (0, 0))
    if torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    return f"{got.tolist()}, want {want.tolist()}"


@pytest.fixture
def agrees():
    """``agrees({name: function}, *args)``: the functions, lowered as one program, give what eager gives."""

    def check(functions, *args):
        want = {name: _leaves(f(*args)) for name, f in functions.items()}
        got = lowered(lambda *a: [_leaves(f(*a)) for f in functions.values()], *args)
        wrong = {
            f"{name}[{i}]": how
            for (name, values), results in zip(want.items(), got, strict=True)
            for i, (w, g) in enumerate(zip(values, results, strict=True))
            if (how := _disagreement(w, g))
        }
        assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())

    return check
