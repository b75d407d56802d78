"""Arithmetic, rounding, powers and conversions agree with eager at the edges of each dtype."""

import math

import pytest
import torch

from portable.errors import InvalidInputError, UnsupportedOpError
from portable.testing import lowered

inf, nan = math.inf, math.nan
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
# no subnormal: XLA's CPU client flushes those to zero
EDGES = [
    0.0,
    -0.0,
    1,
    -1,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3,
    -7,
    100,
    -100,
    1e-3,
    88.9,
    -104,
    1e10,
    -1e10,
    3e38,
    inf,
    -inf,
    nan,
]

UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh sigmoid sqrt "
    "rsqrt reciprocal sinc deg2rad rad2deg logit neg abs sign sgn round ceil floor trunc frac square positive "
    "nan_to_num angle"
).split()
PAIRS = (
    "add sub mul div floor_divide pow atan2 maximum minimum fmax fmin hypot copysign heaviside xlogy logaddexp "
    "logaddexp2 nextafter ldexp rsub float_power"
).split()


def named(names):
    return {name: getattr(torch, name) for name in names}


def of_integers(dtype, *, divisors=False):
    """The edges of an integer dtype; as divisors without 0 and -1, where eager dies of the smallest integer."""
    limits = torch.iinfo(dtype)
    values = [0, 1, -1, 2, 3, -3, 7, -8, 100, limits.max, limits.min, limits.max // 2]
    values = [v for v in values if v >= limits.min and not (divisors and v in (0, -1))]
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unary_functions_at_the_edges(agrees, dtype):
    agrees(named(UNARY), torch.tensor(EDGES, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_functions_of_all_pairs_of_edges(agrees, dtype):
    x = torch.tensor([v for v in EDGES if v != -0.5], dtype=dtype)
    agrees(named(PAIRS), x[:, None], x[None])


@pytest.mark.parametrize("dtype", FLOATS)
def test_remainders_have_the_sign_torch_gives_them(agrees, dtype):
    # without the huge dividends that eager's vectorised fmod turns into NaN
    x = torch.tensor([v for v in EDGES if abs(v) < 1e6 or not math.isfinite(v)], dtype=dtype)
    functions = {
        "remainder": torch.remainder,
        "fmod": torch.fmod,
        "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    }
    agrees(functions, x[:, None], x[None])


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_with_numbers_among_their_arguments(agrees, dtype):
    x = torch.tensor(EDGES, dtype=dtype)
    powers = {f"pow {p}": lambda x, p=p: x**p for p in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, True)}
    clamps = {
        f"clamp {lo} {hi}": lambda x, lo=lo, hi=hi: torch.clamp(x, lo, hi)
        for lo, hi in [(-1, 2.5), (2, 1), (None, 0), (0.3, None), (nan, None), (None, nan)]
    }
    rounds = {f"round {d}": lambda x, d=d: torch.round(x, decimals=d) for d in (2, 0, -1)}
    others = {
        "2 ** x": lambda x: 2.0**x,
        "1 / x": lambda x: 1 / x,
        "x // 2": lambda x: x // 2,
        "x % -3": lambda x: x[:14] % -3.0,
        "rsub": lambda x: torch.rsub(x, 2, alpha=3),
        "add alpha": lambda x: torch.add(x, x, alpha=-2.5),
        "lerp near": lambda x: torch.lerp(x, -x, 0.3),
        "lerp far": lambda x: torch.lerp(x, -x, 0.7),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
        "addcdiv": lambda x: torch.addcdiv(x, x, x + 1, value=2),
        "logit eps": lambda x: torch.logit(x, 0.1),
        "nan_to_num": lambda x: torch.nan_to_num(x, 1.5, 7, -7),
        "where": lambda x: torch.where(x > 0, x, 2),
        "fill": lambda x: torch.fill(x, 1.7),
    }
    agrees({**powers, **clamps, **rounds, **others}, x)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_divide_as_in_eager(agrees, dtype):
    functions = named("add sub mul div floor_divide remainder fmod pow maximum minimum rsub true_divide".split())
    functions["trunc"] = lambda x, y: torch.div(x, y, rounding_mode="trunc")
    functions["floor"] = lambda x, y: torch.div(x, y, rounding_mode="floor")
    functions["alpha"] = lambda x, y: torch.add(x, y, alpha=3)
    functions["addcmul"] = lambda x, y: torch.addcmul(x, y, x, value=2)
    functions["clamp"] = lambda x, y: torch.clamp(x, y)
    agrees(functions, of_integers(dtype)[:, None], of_integers(dtype, divisors=True)[None])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_unary_functions_of_integers(agrees, dtype):
    names = "neg abs sign sgn square sqrt exp sigmoid reciprocal ceil round exp2 nan_to_num".split()
    functions = named(names)
    functions |= {"x ** 3": lambda x: x**3, "x + 1.5": lambda x: x + 1.5, "x * True": lambda x: x * True}
    functions |= {"x // 7": lambda x: x // 7, "x % 7": lambda x: x % 7}
    agrees(functions, of_integers(dtype))


def test_booleans_add_as_or_and_multiply_as_and(agrees):
    x = torch.tensor([True, False])
    functions = named("add mul maximum minimum true_divide fmax copysign heaviside".split())
    functions |= {"x + 1": lambda x, y: x + 1, "x * 2.5": lambda x, y: x * 2.5, "x ** 2": lambda x, y: x**2}
    functions |= {"alpha": lambda x, y: torch.add(x, y, alpha=True), "exp": lambda x, y: torch.exp(x)}
    agrees(functions, x[:, None], x[None])


@pytest.mark.parametrize("divisor", [49.0, 41.0, 3.0, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_quotient_is_correctly_rounded_where_the_divisor_is_broadcast(divisor, dtype):
    x = torch.tensor([divisor, 2 * divisor, 0.1, -7, 100, inf], dtype=dtype)
    y = torch.tensor([divisor], dtype=dtype)
    for quotient in lowered(lambda x, y: (x / divisor, x / y, x / y[0]), x, y):
        torch.testing.assert_close(quotient, x / divisor, rtol=0, atol=1e-38)  # a subnormal quotient may be 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithms_and_powers_of_the_base_are_exact(dtype):
    k = torch.arange(11, dtype=dtype)
    two, ten = 2.0 ** (3 * k), 10.0**k
    results = lowered(lambda k, two, ten: (two.log2(), (3 * k).exp2(), ten.log10()), k, two, ten)
    for got, want in zip(results, (3 * k, two, k), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
def test_floats_convert_to_integers_as_on_torchs_hosts(agrees, dtype):
    x = torch.tensor(
        [2.7, -2.7, nan, inf, -inf, 1e20, 300, -1, 255.9, 256, 3e9, -3e9, 2.0**31, 2.0**63, 0], dtype=dtype
    )
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    agrees({str(kind): lambda x, kind=kind: x.to(kind) for kind in kinds}, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_beside_half_precision_is_rounded_where_eager_rounds_it(dtype):
    x = (torch.arange(-400, 400) / 37).to(dtype)
    functions = {
        "add": lambda x: x + 0.7,
        "rsub": lambda x: 0.7 - x,
        "mul": lambda x: x * 0.7,
        "div": lambda x: x / 0.7,
        "remainder": lambda x: x % 0.7,
        "fmod": lambda x: torch.fmod(x, 0.7),
        "floor": lambda x: x // 0.7,
        "trunc": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
        "0-d": lambda x: x * torch.tensor(0.7),
        "0-d remainder": lambda x: x % torch.tensor(0.7),
        "where": lambda x: torch.where(x > 0, x, 0.7),
        "clamp": lambda x: torch.clamp(x, -0.7, 0.7),
        "alpha": lambda x: torch.add(x, x.flip(0), alpha=0.7),
    }
    results = lowered(lambda x: [f(x) for f in functions.values()], x)
    for (name, f), got in zip(functions.items(), results, strict=True):
        # a product and its sum may round once (fused) or twice
        torch.testing.assert_close(
            got, f(x), rtol=0, atol=1e-2 if name == "alpha" else 0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_quotients_round_step_by_step(dtype):
    x, y = (torch.arange(-400, 400) / 37).to(dtype), (torch.arange(800, 0, -1) / 91).to(dtype)
    functions = [lambda x, y, m=m: torch.div(x, y, rounding_mode=m) for m in ("floor", "trunc", None)]
    results = lowered(lambda x, y: [f(x, y) for f in functions], x, y)
    for f, got in zip(functions, results, strict=True):
        torch.testing.assert_close(got, f(x, y), rtol=0, atol=0)


def test_operands_of_different_dtypes_promote_as_in_eager(agrees):
    values = [torch.tensor([1, 2], dtype=d) for d in (torch.uint8, torch.int32, torch.bfloat16, torch.float32)]
    values += [torch.tensor(3, dtype=torch.int64), torch.tensor(2.5, dtype=torch.float64), torch.tensor([True, False])]
    functions = {
        f"{op.__name__} {i} {j}": lambda *v, op=op, i=i, j=j: op(v[i], v[j])
        for op in (torch.add, torch.mul, torch.div, torch.maximum, torch.pow)
        for i in range(7)
        for j in range(7)
        if not (op is torch.pow and i == j == 6)
    }
    agrees(functions, *values)


def test_complex_numbers(agrees):
    x = torch.tensor([1 + 2j, -3j, 0, -1, 2.5 - 0.5j])
    functions = named("exp log sin cos tanh sqrt rsqrt reciprocal sigmoid square abs angle sgn neg log2 log10".split())
    functions |= {"pow": lambda x: x**2.5, "cube": lambda x: x**3, "div": lambda x: x / (1 + x), "mul": lambda x: x * x}
    functions |= {"conj": lambda x: torch.conj_physical(x), "alpha": lambda x: torch.add(x, x, alpha=2j)}
    agrees(functions, x)
    agrees({"abs": torch.abs}, torch.tensor([complex(inf, nan), complex(nan, inf), complex(3, 4)]))


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_0d_tensors(agrees, shape):
    functions = named("exp neg relu round abs".split())
    functions |= {"add": lambda x: x + 1, "pow": lambda x: x**2, "where": lambda x: torch.where(x > 0, x, -x)}
    agrees(functions, torch.full(shape, -1.5))


def test_inputs_that_are_not_contiguous(agrees):
    x = torch.arange(24.0).reshape(4, 6)
    agrees({"sub": lambda x, y: x - y, "div": lambda x, y: x / (1 + y)}, x.t()[::2], x.t()[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_mask_times_nan_or_infinity_is_nan(agrees, dtype):
    x = torch.tensor([math.nan, 2.0, math.inf, -math.inf]).to(dtype)
    mask = torch.tensor([False, True, False, False])
    agrees(
        {
            "mask": lambda x, m: m * x,
            "cast mask": lambda x, m: m.to(x.dtype) * x,
            "comparison": lambda x, m: (x == 2) * x,
            "in place": lambda x, m: x.clone().mul_(m),
            "product": lambda x, m: m.to(x.dtype) @ x,
            "addcmul": lambda x, m: torch.addcmul(torch.zeros_like(x), m.to(x.dtype), x),
        },
        x,
        mask,
    )


@pytest.mark.parametrize("count", [7, 40, 64, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_powers_of_half_precision_round_as_eager(dtype, count):
    x = torch.linspace(0.01, 9, count).to(dtype)  # torch's vectors and its remainder round differently
    powers = [-3, -2, -1, -0.5, 0.5, 2, 3]

    def raised(x):
        return [x**p for p in powers]

    for want, got in zip(raised(x), lowered(raised, x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_bound_keeps_the_sign_of_zero(dtype):
    x = torch.tensor([-0.0, 0.0, torch.nan, -1.0, 2.0] * 20, dtype=dtype)

    def bounded(x):
        functional = torch.nn.functional
        values = [torch.relu(x), functional.relu6(x), functional.hardtanh(x, 0, 1), functional.hardtanh(x, -1, 0)]
        for bound in (0.0, -0.0):
            values += [torch.clamp_min(x, bound), torch.clamp_max(x, bound), torch.clamp(x, bound, 1.0)]
        return [1 / v for v in values]

    for want, got in zip(bounded(x), lowered(bounded, x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


CUT_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh sqrt rsqrt "
    "reciprocal sinc"
).split()
SIZES = [0.0, 1e-3, 0.5, 1.0, 1.5, 2.0]
PLANE = [complex(x, y) for x in SIZES for y in SIZES]
PLANE = [complex(s * z.real, t * z.imag) for z in PLANE for s in (1.0, -1.0) for t in (1.0, -1.0)]
# where torch's own kernels lose the sign of an imaginary zero
SIGN_LEFT_OPEN = {(torch.acos, torch.complex128), (torch.log1p, torch.complex64), (torch.log1p, torch.complex128)}


def assert_parts_agree(want, got, *, signs=True):
    """Both parts, NaN and the signs of zeros too."""
    limit = 1e-5 if want.dtype == torch.complex64 else 1e-12
    parts, others = torch.view_as_real(want), torch.view_as_real(got)
    torch.testing.assert_close(others, parts, rtol=limit, atol=limit, equal_nan=True)
    zeros = (parts == 0) & (others == 0)
    if signs:
        assert torch.equal(others.signbit()[zeros], parts.signbit()[zeros])


@pytest.mark.parametrize("function", [getattr(torch, name) for name in CUT_FUNCTIONS], ids=CUT_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_functions_on_both_sides_of_their_cuts_and_at_zeros_of_either_sign(dtype, function):
    z = torch.tensor(PLANE, dtype=dtype)
    assert_parts_agree(function(z), lowered(function, z), signs=(function, dtype) not in SIGN_LEFT_OPEN)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2, 3, -1, -2, 1.5, 2j, 1 + 2j, -1 + 1j, 0.0])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_powers_of_zeros_of_either_sign_and_on_the_cut(dtype, exponent):
    z = torch.tensor(
        [complex(s * a, t * 0.0) for a in (0.0, 1.5) for s in (1.0, -1.0) for t in (1.0, -1.0)], dtype=dtype
    )

    def raised(z):
        return z**exponent, z ** torch.full_like(z, exponent), z.real**exponent, torch.pow(0, z * exponent)

    for want, got in zip(raised(z), lowered(raised, z), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("exponent", [True, False, torch.tensor(True), torch.tensor([True, False])], ids=str)
def test_a_boolean_to_the_power_of_a_boolean_is_refused(exponent):
    refusals = UnsupportedOpError, InvalidInputError  # the second where eager refuses it too
    with pytest.raises(refusals, match="a boolean to the power of a boolean|eager refuses it too"):
        lowered(lambda x, y: x**y, torch.tensor([True, False]), exponent, fallback="error")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_difference_has_eagers_zeros_and_nan(dtype):
    z = torch.tensor([complex(x, y) for x in (0.0, -0.0, 1.0, -1.0, inf) for y in (0.0, -0.0, 1.0, inf)], dtype=dtype)

    def differences(x, y):
        return [x - y, x - 1, 1 - x, x + 1, torch.sub(x, y, alpha=2)]

    for want, got in zip(differences(z[:, None], z), lowered(differences, z[:, None], z), strict=True):
        assert_parts_agree(want, got)


@pytest.mark.parametrize("function", [getattr(torch, name) for name in CUT_FUNCTIONS], ids=CUT_FUNCTIONS)
def test_gradients_of_complex_functions_on_both_sides_of_their_cuts(function):
    away = [complex(x, y) for x in (-2.0, -0.5, 0.5, 2.0) for y in (-0.5, -0.0, 0.0, 2.0)]
    z = torch.tensor(away, dtype=torch.complex128)
    weights = torch.linspace(0.5, 1.5, len(away)) * torch.tensor(1 + 0.3j, dtype=torch.complex128)

    def gradient(z):
        leaf = z.detach().requires_grad_(True)
        return torch.autograd.grad(function(leaf), leaf, weights)[0]

    torch.testing.assert_close(lowered(gradient, z), gradient(z), rtol=1e-9, atol=1e-9)
