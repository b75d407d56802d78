"""Special functions: against eager, and against mpmath."""

import math

import mpmath
import pytest
import torch

from portable.testing import lowered

inf, nan = math.inf, math.nan
special = torch.special
EDGES = [0.0, -0.0, 0.3, -0.3, 1, -1, 0.5, 2.5, -2.5, 7.3, -7.3, 40, -40, inf, -inf, nan]
UNARY = (
    "erf erfc erfinv erfcx digamma gammaln i0 i0e i1 i1e entr log_ndtr ndtri expit spherical_bessel_j0 "
    "modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1"
).split()
POLYNOMIALS = [
    *(f"{prefix}chebyshev_polynomial_{kind}" for prefix in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_one_argument_at_the_edges(agrees, dtype):
    agrees({name: getattr(special, name) for name in UNARY}, torch.tensor(EDGES, dtype=dtype))


def test_integers_give_floats(agrees):
    agrees({name: getattr(special, name) for name in UNARY if name != "erfinv"}, torch.tensor([0, 1, 2, 5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta_polygamma_and_incomplete_gamma(agrees, dtype):
    s = torch.tensor([[1.0], [2], [3], [2.5], [20], [0.5], [nan]], dtype=dtype)
    q = torch.tensor([[0.5, 1, 2, -0.5, -1, 0, -8.4784, 30, 1e10, inf, nan]], dtype=dtype)
    agrees({"zeta": special.zeta, "number": lambda s, q: special.zeta(3, q)}, s, q)
    x = torch.tensor([0.0, -0.0, -8.4784, 0.3, -0.3, 100, nan], dtype=dtype)
    agrees({f"polygamma {n}": lambda x, n=n: special.polygamma(n, x) for n in range(4)}, x)
    a = torch.tensor([[0.0], [1], [-1], [0.5], [30], [inf], [1e-3]], dtype=dtype)
    x = torch.tensor([[0.0, -1, 0.5, 3, 30, inf, nan]], dtype=dtype)
    agrees({"lower": special.gammainc, "upper": special.gammaincc}, a, x)
    agrees({"multigammaln": lambda x: special.multigammaln(x, 3)}, torch.tensor([2.5, 7.0], dtype=dtype))


def test_products_with_logarithms(agrees):
    x = torch.tensor(EDGES)
    functions = {"xlogy": torch.xlogy, "xlog1py": special.xlog1py, "number": lambda x, y: torch.xlogy(0, y)}
    agrees(functions, x[:, None], x[None])


def test_orthogonal_polynomials(agrees):
    x = torch.tensor([[-2.0, -1, -0.5, 0, 0.25, 0.5, 1, 2]], dtype=torch.float64)
    n = torch.tensor([[-1.0], [0], [1], [2], [2.7], [12], [40]], dtype=torch.float64)
    functions = {name: getattr(special, name) for name in POLYNOMIALS}
    agrees(functions, x, n)
    agrees({name: lambda x, f=f: f(x, 3) for name, f in functions.items()}, x)


@pytest.mark.parametrize(
    "name, exact",
    [
        ("modified_bessel_k0", lambda x: mpmath.besselk(0, x)),
        ("scaled_modified_bessel_k1", lambda x: mpmath.exp(x) * mpmath.besselk(1, x)),
    ],
)
def test_modified_bessel_functions_are_exact_to_float64(name, exact):
    points = [1e-3, 0.7, 1.9, 2.1, 5.5, 7.9, 8.1, 13.7, 40.0]
    got = lowered(getattr(special, name), torch.tensor(points, dtype=torch.float64))
    want = torch.tensor([float(exact(mpmath.mpf(p))) for p in points], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai"])
def test_bessel_and_airy_functions_err_as_torchs_do(name, dtype, tolerance):
    edges = torch.tensor([0.0, -0.0, 1e-6, 1e-5, 5, -5, 2.09, -2.09, 103.892, 104, inf, -inf, nan], dtype=dtype)
    x = torch.cat([torch.linspace(-12, 12, 801, dtype=dtype), torch.linspace(12, 200, 50, dtype=dtype), edges])
    function = getattr(special, name)
    got, want = lowered(function, x), function(x)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta_where_either_argument_is_not_finite(agrees, dtype):
    s = torch.tensor([[2.0], [inf], [nan], [-inf], [1], [3.5]], dtype=dtype)
    q = torch.tensor([[inf, 2.0, 1, 0.5, -0.5, -1.5, nan, -inf, 0, -1]], dtype=dtype)
    agrees({"zeta": special.zeta}, s, q)
