"""Bessel functions of the first and second kind and the Airy function by the approximations of
S. Moshier's Cephes library.

The constants are those of its j0.c, j1.c and airy.c, from highest to lowest power, as torch has them in its Math.h.
Cephes leaves out the leading coefficient of some denominators, which is 1, and so does torch, but torch adds no 1: its
J, Y and Ai are off by up to 1e-6, and a program that gives eager's answer has to be as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax import lax

from portable.lowering.elementwise import num, where
from portable.lowering.special import is_finite

NEAR = 5.0  # up to here J and Y are rational functions of x², from here on amplitudes in 25 / x²
AIRY_NEAR = 2.09  # within it Ai is its Taylor series
AIRY_ZERO = 103.892  # from here on Ai is 0
TERMS = 20  # of that series, enough for float64
ZEROS = ((5.78318596294678452118, 30.4712623436620863991), (14.6819706421238932572, 49.2184563216946036703))

PP0 = (
    0.0007969367292973471,
    0.08283523921074408,
    1.239533716464143,
    5.447250030587687,
    8.74716500199817,
    5.303240382353949,
    1.0,
)
PQ0 = (
    0.0009244088105588637,
    0.08562884743544745,
    1.2535274390105895,
    5.470977403304171,
    8.761908832370695,
    5.306052882353947,
    1.0,
)
QP0 = (
    -0.011366383889846916,
    -1.2825271867050931,
    -19.553954425773597,
    -93.20601521237683,
    -177.68116798048806,
    -147.07750515495118,
    -51.41053267665993,
    -6.050143506007285,
)
QQ0 = (
    64.3178256118178,
    856.4300259769806,
    3882.4018360540163,
    7240.467741956525,
    5930.727011873169,
    2062.0933166032783,
    242.0057402402914,
)
RP0 = (
    -4794432209.782018,
    1956174919465.5657,
    -249248344360967.72,
    9708622510473064.0,
)
RQ0 = (
    499.563147152651,
    173785.4016763747,
    48440965.83399621,
    11185553704.535683,
    2112775201154.892,
    310518229857422.56,
    3.1812195594320496e16,
    1.7108629408104315e18,
)
YP0 = (
    15592.436785523574,
    -14663929.59039716,
    5435264770.518765,
    -982136065717.9115,
    87590639439536.7,
    -3466283033847297.0,
    4.4273326857256984e16,
    -1.8495080043698668e16,
)
YQ0 = (
    1041.2835366425984,
    626107.330137135,
    268919633.39381415,
    86400248710.3935,
    20297961275010.555,
    3171577528429750.5,
    2.5059625617265306e17,
)
PP1 = (
    0.0007621256162081731,
    0.07313970569409176,
    1.1271960812968493,
    5.112079511468076,
    8.424045901417724,
    5.214515986823615,
    1.0,
)
PQ1 = (
    0.0005713231280725487,
    0.06884559087544954,
    1.105142326340617,
    5.073863861286015,
    8.399855543276042,
    5.209828486823619,
    1.0,
)
QP1 = (
    0.05108625947501766,
    4.982138729512334,
    75.82382841325453,
    366.7796093601508,
    710.8563049989261,
    597.4896124006136,
    211.68875710057213,
    25.207020585802372,
)
QQ1 = (
    74.23732770356752,
    1056.4488603826283,
    4986.410583376536,
    9562.318924047562,
    7997.041604473507,
    2826.1927851763908,
    336.0936078106983,
)
RP1 = (
    -899971225.7055594,
    452228297998.19403,
    -72749424522181.83,
    3682957328638529.0,
)
RQ1 = (
    620.8364781180543,
    256987.25675774884,
    83514679.14319493,
    22151159547.97925,
    4749141220799.914,
    784369607876235.9,
    8.952223361846274e16,
    5.322786203326801e18,
)
YP1 = (
    1263204747.9017804,
    -647355876379.1603,
    114509511541823.73,
    -8127702555013251.0,
    2.024394757135949e17,
    -7.788771962659501e17,
)
YQ1 = (
    594.3015923461282,
    235564.09294306856,
    73481194.44597217,
    18760131610.870617,
    3882312774962.3857,
    620557727146953.8,
    6.871410873553005e16,
    3.9727060811656064e18,
)
AN = (
    0.346538101525629,
    12.007595273964581,
    76.27960536152345,
    168.08922493463058,
    159.75639135016442,
    70.53609068404442,
    14.026469116338967,
    1.0,
)
AD = (
    0.5675945326387702,
    14.75625625848472,
    84.51389701414746,
    177.31808814540045,
    164.2346928715297,
    71.47784008255756,
    14.095913560783403,
    1.0,
)
AFN = (
    -0.1316963234183318,
    -0.6264565444319123,
    -0.6931580360369335,
    -0.2797799815451191,
    -0.04919001326095003,
    -0.004062659235948854,
    -0.0001592764962392621,
    -2.776491081552329e-06,
    -1.6778769848911465e-08,
)
AFD = (
    13.356042070655324,
    32.682503279522464,
    26.736704094149957,
    9.187074029072596,
    1.4752914677166642,
    0.11568717379518804,
    0.004402916416152112,
    7.547203482874142e-05,
    4.5185009297058035e-07,
)
AGN = (
    0.01973399320916857,
    0.39110302961568827,
    1.0657989759959559,
    0.9391692298166502,
    0.35146565610554764,
    0.06338889196289255,
    0.005858041130483885,
    0.000282851600836737,
    6.98793669997261e-06,
    8.117892395543892e-08,
    3.415517847659236e-10,
)
AGD = (
    9.30892908077442,
    19.835292871831214,
    15.564662893286462,
    5.476860694229755,
    0.9542936116189619,
    0.08645808263523921,
    0.004126565238242226,
    0.00010125908511650914,
    1.1716673321441352e-06,
    4.9183457006293e-09,
)


# by order
P = ((PP0, PQ0), (PP1, PQ1))
Q = ((QP0, QQ0), (QP1, QQ1))
R = ((RP0, RQ0), (RP1, RQ1))
Y = ((YP0, YQ0), (YP1, YQ1))


def polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    """Horner's scheme, highest power first."""
    value = lax.full_like(x, 0)
    for c in coefficients:
        value = lax.add(lax.mul(value, x), num(c, x))
    return value


def ratio(coefficients: Sequence[Sequence[float]], x: jax.Array) -> jax.Array:
    """A numerator over a denominator."""
    above, below = coefficients
    return lax.div(polynomial(above, x), polynomial(below, x))


def _near(order: int, x: jax.Array) -> jax.Array:
    square = lax.mul(x, x)
    first, second = (lax.sub(square, num(zero, x)) for zero in ZEROS[order])
    value = lax.mul(lax.mul(first, second), ratio(R[order], square))
    if order:
        return lax.mul(value, x)
    return lax.select(lax.lt(x, num(1e-5, x)), lax.sub(num(1, x), lax.mul(square, num(0.25, x))), value)


def _far(order: int, x: jax.Array, second: bool) -> jax.Array:
    """J (or Y, the ``second`` kind) of large positive x, by its amplitudes."""
    inverse = lax.div(num(5, x), x)
    t = lax.mul(inverse, inverse)
    p, q = ratio(P[order], t), lax.mul(inverse, ratio(Q[order], t))
    phase = lax.sub(x, num((order / 2 + 0.25) * math.pi, x))
    cosine, sine = lax.cos(phase), lax.sin(phase)
    wave = lax.add(lax.mul(p, sine), lax.mul(q, cosine)) if second else lax.sub(lax.mul(p, cosine), lax.mul(q, sine))
    return lax.div(lax.mul(wave, num(math.sqrt(2 / math.pi), x)), lax.sqrt(x))


def bessel_j(order: int) -> Callable[[jax.Array], jax.Array]:
    def j(x: jax.Array) -> jax.Array:
        size = lax.abs(x)
        value = lax.select(lax.le(size, num(NEAR, x)), _near(order, size), _far(order, size, second=False))
        value = lax.select(lax.lt(x, num(0, x)), lax.neg(value), value) if order else value
        return where(is_finite(x), value, math.nan)

    return j


def bessel_y(order: int) -> Callable[[jax.Array], jax.Array]:
    def y(x: jax.Array) -> jax.Array:
        smooth = ratio(Y[order], lax.mul(x, x))
        logarithm = lax.mul(lax.log(x), bessel_j(order)(x))
        if order:
            smooth = lax.mul(smooth, x)
            logarithm = lax.sub(logarithm, lax.div(num(1, x), x))
        near = lax.add(smooth, lax.mul(num(2 / math.pi, x), logarithm))
        value = lax.select(lax.le(x, num(NEAR, x)), near, _far(order, x, second=True))
        value = where(lax.eq(x, num(0, x)), -math.inf, where(is_finite(x), value, math.nan))
        return where(lax.lt(x, num(0, x)), math.nan, value)

    return y


def _airy_series(x: jax.Array) -> jax.Array:
    """The Taylor series of Ai around 0 (Abramowitz and Stegun 10.4.2–5)."""
    cube, f, g = lax.mul(lax.mul(x, x), x), lax.full_like(x, 1), x
    m, n = f, g
    for k in range(3, 3 * TERMS, 3):
        m = lax.div(lax.mul(m, cube), num((k - 1) * k, x))
        n = lax.div(lax.mul(n, cube), num(k * (k + 1), x))
        f, g = lax.add(f, m), lax.add(g, n)
    return lax.sub(lax.mul(num(0.355028053887817239260, x), f), lax.mul(num(0.258819403792806798405, x), g))


def airy_ai(x: jax.Array) -> jax.Array:
    size = lax.max(lax.abs(x), num(AIRY_NEAR, x))
    zeta = lax.mul(num(2 / 3, x), lax.mul(size, lax.sqrt(size)))
    inverse, root = lax.div(num(1, x), zeta), lax.sqrt(lax.sqrt(size))
    scale = lax.div(num(1 / math.sqrt(math.pi), x), root)
    right = lax.div(lax.mul(scale, ratio((AN, AD), inverse)), lax.mul(num(2, x), lax.exp(zeta)))
    square, angle = lax.mul(inverse, inverse), lax.add(zeta, num(math.pi / 4, x))
    p = lax.add(num(1, x), lax.mul(square, ratio((AFN, AFD), square)))
    q = lax.mul(inverse, ratio((AGN, AGD), square))
    left = lax.mul(scale, lax.sub(lax.mul(lax.sin(angle), p), lax.mul(lax.cos(angle), q)))
    value = lax.select(
        lax.ge(x, num(AIRY_NEAR, x)), right, lax.select(lax.lt(x, num(-AIRY_NEAR, x)), left, _airy_series(x))
    )
    value = where(lax.gt(x, num(AIRY_ZERO, x)), 0, value)
    return where(is_finite(x), value, math.nan)
