"""Linear algebra agrees with eager: factors, LAPACK's info, and the errors."""

from __future__ import annotations

import pytest
import torch

import portable
from portable.errors import UnsupportedOpError
from portable.lowering import lapack
from portable.testing import lowered

L = torch.linalg
NAN = float("nan")
EMPTY = [(0, 0), (0, 3, 3), (2, 0, 0)]


def agrees(function, *args, tolerance=1e-4):
    torch.testing.assert_close(
        lowered(function, *args), function(*args), rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
    )


def positive(*batch, n=4, dtype=torch.float32):
    x = torch.randn(*batch, n, n, dtype=dtype)
    return x @ x.mH + n * torch.eye(n, dtype=dtype)


def solves(x, b):
    return L.solve(x, b), L.solve(x.mT, b), L.solve(x, b.mT, left=False), L.inv(x), L.lu_solve(*L.lu_factor(x), b)


FUNCTIONS = {
    "cholesky": lambda x: (L.cholesky(x), L.cholesky(x, upper=True), *L.cholesky_ex(x)),
    "cholesky_inverse": lambda x: (
        torch.cholesky_inverse(L.cholesky(x)),
        torch.cholesky_inverse(L.cholesky(x, upper=True), upper=True),
    ),
    "cholesky_solve": lambda x: (
        torch.cholesky_solve(x, L.cholesky(x)),
        torch.cholesky_solve(x, L.cholesky(x, upper=True), upper=True),
    ),
    "lu": lambda x: (*L.lu(x), *L.lu_factor_ex(x), *torch.lu_unpack(*L.lu_factor(x))),
    "solve": lambda x: solves(x, x[..., :2]),
    "determinant": lambda x: (L.det(x), *L.slogdet(x), torch.logdet(x), L.det(x.mT)),
    "qr": lambda x: (*L.qr(x[..., :2]), *L.qr(x[..., :2], mode="complete"), L.qr(x[..., :2, 1:], mode="r")[1]),
    "reflections": lambda x: (*torch.geqrf(x), L.householder_product(*torch.geqrf(x[..., :2]))),
    "triangular": lambda x: (
        L.solve_triangular(x, x, upper=True),
        L.solve_triangular(x, x, upper=False, left=False, unitriangular=True),
        *torch.triangular_solve(x, x, transpose=True),
    ),
    "values": lambda x: (L.eigvalsh(x), L.eigvalsh(x, UPLO="U"), L.svdvals(x), L.matrix_rank(x), L.pinv(x)),
    "power": lambda x: (L.matrix_power(x, 3), L.matrix_power(x / 10, -3)),
    "norms": lambda x: (L.matrix_norm(x), L.matrix_norm(x, 2), L.matrix_norm(x, "nuc"), L.cond(x)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_factors_and_solutions(name, dtype):
    agrees(FUNCTIONS[name], positive(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_exponential(dtype):
    agrees(lambda x: (torch.matrix_exp(x / 10), torch.matrix_exp(-x)), positive(2, dtype=dtype))


@pytest.mark.parametrize("shape", EMPTY)
def test_empty_matrices(shape):
    x = torch.zeros(shape)
    for name in ("cholesky", "lu", "determinant"):
        agrees(FUNCTIONS[name], x)
    agrees(lambda x: (L.inv(x), L.solve(x, x), *L.qr(x), L.svdvals(x), L.eigvalsh(x), torch.matrix_exp(x)), x)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_the_named_triangle_alone_is_read(n):
    x = positive(n=n)
    poisoned = x + torch.full((n, n), NAN).triu(1).nan_to_num(0).fill_(1e6).triu(1)
    agrees(lambda x: (L.cholesky(x), L.eigvalsh(x), L.cholesky(x.mT, upper=True), L.eigvalsh(x.mT, UPLO="U")), poisoned)


def test_info_names_the_first_failure_of_each_matrix():
    x = torch.stack(
        [torch.diag(torch.tensor(d)) for d in ([1.0, 2.0, 3.0], [0.0, 1.0, 1.0], [1.0, 2.0, -1.0], [1.0, NAN, 1.0])]
    )
    agrees(lambda x: (L.cholesky_ex(x).info, L.lu_factor_ex(x).info, L.inv_ex(x).info), x)


SINGULAR = {
    "inv": L.inv,
    "solve": lambda x: L.solve(x, x),
    "lu_factor": L.lu_factor,
    "cholesky": L.cholesky,
    "checked": lambda x: L.cholesky_ex(x, check_errors=True),
    "cholesky_inverse": torch.cholesky_inverse,
}


@pytest.mark.parametrize(
    "run", [lowered, lambda f, x: portable.compile(f, backend="xla")(x)], ids=["lowered", "compile"]
)
@pytest.mark.parametrize("name", SINGULAR)
def test_a_singular_matrix_raises_what_eager_raises(name, run):
    with pytest.raises(RuntimeError) as expected:
        SINGULAR[name](torch.zeros(2, 2))
    with pytest.raises(type(expected.value)) as raised:
        run(SINGULAR[name], torch.zeros(2, 2))
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_ldl_pivots_as_lapack(dtype, hermitian):
    def factors(x, b):
        ld, pivots, info = L.ldl_factor_ex(x, hermitian=hermitian)
        return ld, pivots, info, L.ldl_solve(ld, pivots, b, hermitian=hermitian)

    def indefinite(*shape):  # a small diagonal, so that there are 2×2 blocks
        x = torch.randn(shape, dtype=dtype)
        x.diagonal(dim1=-2, dim2=-1).mul_(0.2)
        return x

    batch = indefinite(2, 3, 5, 5)
    assert (L.ldl_factor_ex(batch, hermitian=hermitian)[1] < 0).any()
    agrees(factors, batch, torch.randn(3, 5, 2, dtype=dtype), tolerance=1e-8)
    agrees(factors, indefinite(1, 1), torch.randn(2, 1, 3, dtype=dtype), tolerance=1e-8)
    for shape in EMPTY:
        agrees(factors, torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 2, dtype=dtype))


@pytest.mark.parametrize("hermitian", [False, True])
def test_ldl_of_ties_and_singular_matrices(hermitian):
    x = torch.randint(-1, 2, (20, 5, 5)).to(torch.complex128)
    assert L.ldl_factor_ex(x, hermitian=hermitian)[2].any()
    agrees(lambda x: tuple(L.ldl_factor_ex(x, hermitian=hermitian)), x, tolerance=1e-8)
    with pytest.raises(RuntimeError, match="ldl_factor"):
        lowered(lambda x: L.ldl_factor(x, hermitian=hermitian), torch.zeros(2, 2))


def test_svd_of_nan_raises_as_in_eager():
    with pytest.raises(L.LinAlgError, match="non-finite"):
        lowered(L.svdvals, torch.full((2, 2), NAN))


def test_singular_systems_without_a_check_give_what_eager_gives():
    agrees(lambda x: (L.det(x), *L.slogdet(x), torch.logdet(x), L.inv_ex(x), L.solve_ex(x, x)), torch.zeros(2, 2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["solve", "determinant", "cholesky", "qr"])
def test_gradients(name, transposed):
    functions = {
        "solve": lambda x: L.solve(x, x[..., :2]).sum() + L.inv(x).sum(),
        "determinant": lambda x: L.det(x).sum() + L.slogdet(x).logabsdet.sum(),
        "cholesky": lambda x: L.cholesky(x).sum(),
        "qr": lambda x: L.qr(x).R.sum(),
    }

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(functions[name](x), x)

    x = positive(2, dtype=torch.float64)
    agrees(gradient, x.mT if transposed else x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 5, 5), (2, 3), (3, 6), (6, 3), (2, 2, 3, 40), (30, 30)], ids=str)
def test_signs_and_phases_of_vectors_are_eagers(shape, dtype):
    def factors(x):
        square = x @ x.mH if x.shape[-2] <= x.shape[-1] else x.mH @ x
        return *L.eigh(square), *L.eigh(square, UPLO="U"), *L.svd(x), *L.svd(x, full_matrices=False)

    torch.manual_seed(0)
    agrees(factors, torch.randn(shape, dtype=dtype))


def test_the_basis_of_a_space_of_several_eigenvectors_is_eagers():
    agrees(lambda x: (*L.eigh(x), *L.svd(x)), torch.diag(torch.tensor([2.0, 1, 1, 1, 0, 0])))


def test_eigh_of_what_does_not_converge_raises_as_in_eager():
    x = torch.full((3, 3), NAN)
    with pytest.raises(torch.linalg.LinAlgError, match="linalg.eigh"):
        L.eigh(x)
    with pytest.raises(torch.linalg.LinAlgError, match="linalg.eigh"):
        lowered(L.eigh, x)


def test_without_a_compiler_jaxlibs_lapack_has_to_do(monkeypatch):
    monkeypatch.setattr(lapack, "_usable", lambda: False)
    x = torch.randn(3, 3, dtype=torch.float64)
    values, vectors = lowered(L.eigh, x + x.mT)
    torch.testing.assert_close(vectors @ values.diag() @ vectors.mT, x + x.mT)


def test_eigenvectors_and_singular_vectors_rebuild_the_matrix():
    def rebuilt(x):
        u, s, vh = L.svd(x, full_matrices=False)
        values, vectors = L.eigh(x @ x.mT)
        roots, right = L.eig(x @ x.mT)
        return (u * s) @ vh, (vectors * values) @ vectors.mT, (right * roots) @ L.inv(right)

    x = torch.randn(3, 4, dtype=torch.float64)
    got = lowered(rebuilt, x)
    for value, want in zip(got, (x, x @ x.mT, x @ x.mT), strict=True):
        torch.testing.assert_close(value.real.to(x.dtype), want)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (5, 3)])
def test_least_squares(shape):
    drivers = ["gelsy", "gels", "gelsd"]
    x, b = torch.randn(2, *shape, dtype=torch.float64), torch.randn(2, shape[0], 2, dtype=torch.float64)
    agrees(lambda x, b: [tuple(L.lstsq(x, b, driver=d)) for d in drivers], x, b)


def test_least_squares_of_deficient_rank_have_no_residuals():
    x, b = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 2, dtype=torch.float64)
    x[1, :, 2] = 2 * x[1, :, 1]
    agrees(lambda x, b: [tuple(L.lstsq(x, b, driver=d)) for d in ("gelss", "gelsd")], x, b)


def test_covariance_and_correlation():
    def both(x, f, a):
        weighted = torch.cov(x, fweights=f, aweights=a), torch.cov(x[0], correction=0), torch.cov(x[:, :1])
        return *weighted, torch.corrcoef(x), torch.corrcoef(x[0])

    agrees(both, torch.randn(3, 5), torch.tensor([1, 2, 0, 4, 1]), torch.rand(5))


def test_negative_weights_raise_as_in_eager():
    with pytest.raises(RuntimeError, match="fweights cannot be negative"):
        lowered(lambda x, f: torch.cov(x, fweights=f), torch.randn(3, 2), torch.tensor([1, -1]))


def test_cross_product_broadcasts():
    agrees(
        lambda x, y: (torch.linalg.cross(x, y, dim=0), torch.cross(x, y, dim=-2)),
        torch.randn(3, 3, 1),
        torch.randn(3, 3, 4),
    )


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.matrix_exp(x.float())],
)
def test_refused_by_name(function):
    with pytest.raises(UnsupportedOpError):
        lowered(function, positive())


@pytest.mark.parametrize(
    "run", [lowered, lambda f, x: portable.compile(f, backend="xla")(x)], ids=["lowered", "compile"]
)
def test_assertions_on_data_raise(run):
    def positive_sum(x):
        torch._assert_async(x.sum() > 0, "a positive sum")
        return x + 1

    assert run(positive_sum, torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="a positive sum"):
        run(positive_sum, -torch.ones(2))
