"""Eigenvalues, trace, diagonal and suggestions, against torch.linalg.eigvalsh in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import flat, nonquadratics, quadratics, unflat

from dattrifunc import (
    ConvergenceWarning,
    NonFiniteWarning,
    fvp_at_x,
    hessian_matrix,
    hvp_at_x,
    ihvp_at_x_cg,
    ihvp_at_x_lissa,
    solvers,
    spectrum,
)

DTYPES = [torch.float32, torch.float64]
ORDERS = {
    "LA": lambda values: values.sort(descending=True).values,
    "SA": lambda values: values.sort().values,
    "LM": lambda values: values[values.abs().argsort(descending=True)],
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def spectral(seed, values):
    """A matrix with these eigenvalues."""
    values = values.double()
    basis = torch.linalg.qr(normal(seed, len(values), len(values))).Q
    h = (basis * values) @ basis.T
    return (h + h.T) / 2


def product_of(h):
    return lambda v: v @ h


# ---------------------------------------------------------------------------------------------------------------------
# eigenvalues


@pytest.mark.parametrize("which", ORDERS)
@given(problem=st.one_of(quadratics(kind="indefinite"), nonquadratics()), seed=st.integers(0, 2**31))
def test_eigsh_of_a_loss(which, problem, seed):
    """Any tree, any k up to p: values of torch.linalg.eigvalsh, vectors in the tree's shapes, orthonormal."""
    x = (problem.params,) if not hasattr(problem, "data") else (problem.params, problem.data)
    p = len(problem.hessian)
    k = 1 + seed % p
    product = hvp_at_x(problem.loss, x)
    values, vectors = spectrum.eigsh(product, problem.params, k, which, generator=seeded(seed))
    want = ORDERS[which](torch.linalg.eigvalsh(problem.hessian))[:k]
    torch.testing.assert_close(values.abs(), want.abs(), rtol=1e-8, atol=1e-10)
    rows = flat(vectors, batch=True)
    torch.testing.assert_close(rows @ rows.T, torch.eye(k).double())
    torch.testing.assert_close(rows @ problem.hessian, values[:, None] * rows, rtol=0, atol=1e-8)


SPECTRA = {
    "even": torch.linspace(-1, 3, 300),
    "repeated": torch.cat([torch.full((4,), 5.0), torch.full((6,), 4.0), torch.ones(280), torch.full((10,), -2.0)]),
    "decaying": torch.logspace(2, -8, 300),
    "low rank": torch.cat([torch.tensor([3.0, -4.0]), torch.zeros(298)]),
    "one": torch.ones(300),
    "none": torch.zeros(300),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "which", "most"),
    [
        (name, which, most)
        for name in SPECTRA
        for which in ORDERS
        for most in (64, 512)
        if (name, which, most) != ("decaying", "SA", 64)  # hundreds within 1e-10 of each other
    ],
)
def test_eigsh_of_a_matrix(most, name, which, dtype, monkeypatch):
    """Clusters, multiplicities, low rank: with all of the space, and with so little of it that it starts again."""
    monkeypatch.setattr("dattrifunc.solvers.lanczos.DIRECTIONS", most)
    h = spectral(0, SPECTRA[name])
    values, vectors = spectrum.eigsh(product_of(h.to(dtype)), torch.zeros(300, dtype=dtype), 7, which)
    want = ORDERS[which](SPECTRA[name].double())[:7]
    size, accuracy = float(want.abs().max().clamp(min=SPECTRA[name].abs().max())) or 1.0, 1e-5
    if dtype == torch.float64:
        accuracy = 1e-7
    torch.testing.assert_close(values.double().abs(), want.abs(), rtol=0, atol=accuracy * size)
    torch.testing.assert_close(vectors.double() @ vectors.double().T, torch.eye(7).double(), rtol=0, atol=1e-5)
    left = torch.linalg.vector_norm(vectors.double() @ h - values[:, None].double() * vectors.double(), dim=1)
    assert (left <= 1e-5 * size).all()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_scales(scale):
    """Squares of curvature leave the range of float32."""
    values = torch.linspace(-1, 3, 100)
    h, like = (spectral(0, values) * scale).float(), torch.zeros(100)
    found = spectrum.eigsh(product_of(h), like, 3, "SA")[0]
    torch.testing.assert_close(found.double() / scale, values[:3].double(), rtol=0, atol=1e-4)
    got = spectrum.trace(product_of(h), like, num_samples=60)
    assert abs(got.estimate / scale - 100) < 5 * got.standard_error / scale < 50
    got = spectrum.diagonal(product_of(h), like, num_samples=100)
    torch.testing.assert_close(got.estimate / scale, h.diagonal() / scale)
    lam, least = spectrum.suggest_regularization(product_of(h), like)
    assert 1 < lam / scale < 1.01
    assert abs(least / scale + 1) < 1e-4


def test_eigsh_takes_as_many_products_as_it_may():
    """Each has k + 2 vectors, one more has k; where that is too few, it says by how much."""
    h, shapes = spectral(0, torch.linspace(0, 1, 500) ** 0.1), []

    def product(v):
        shapes.append(tuple(v.shape))
        return v @ h

    like = torch.zeros(500, dtype=torch.float64)
    with pytest.warns(
        ConvergenceWarning, match=r"eigsh: [1-4] of 4 .*worst relative residual .* \(tol 1e-07\).*raise max_iter"
    ) as seen:
        values, _ = spectrum.eigsh(product, like, 4, max_iter=5)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert shapes == [(6, 500)] * 5 + [(4, 500)]
    assert (values < 1).all()
    values, _ = spectrum.eigsh(product, like, 4, max_iter=1000)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(h).flip(0)[:4], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, t, g: spectrum.eigsh(f, t, 2, max_iter=50, generator=g),
        lambda f, t, g: spectrum.trace(f, t, num_samples=20, generator=g),
        lambda f, t, g: spectrum.diagonal(f, t, num_samples=20, generator=g),
        lambda f, t, g: [torch.tensor(a) for a in spectrum.suggest_regularization(f, t, generator=g)],
        lambda _, t, g: [
            torch.tensor(spectrum.suggest_scaling(lambda t, x: (x * t**2).mean(), t, normal(0, 90, 1), generator=g))
        ],
    ],
    ids=["eigsh", "trace", "diagonal", "suggest_regularization", "suggest_scaling"],
)
def test_seeds(call):
    """Same seed, same bits; None is always the same draw; the global random state is left alone."""
    f, like = product_of(spectral(0, torch.linspace(1, 2, 90))), torch.zeros(90, dtype=torch.float64)
    state = torch.get_rng_state()

    def same(first, second):
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    assert same(call(f, like, seeded(1)), call(f, like, seeded(1)))
    assert same(call(f, like, None), call(f, like, None))
    assert torch.equal(torch.get_rng_state(), state)
    generator = seeded(1)
    call(f, like, generator)
    assert not torch.equal(generator.get_state(), seeded(1).get_state())


# ---------------------------------------------------------------------------------------------------------------------
# trace and diagonal


@given(problem=quadratics(kind="indefinite"), more=st.integers(0, 3))
def test_all_vectors_are_exact(problem, more):
    """From p samples on there is no chance in it, and the standard errors are 0."""
    product, p = hvp_at_x(problem.loss, (problem.params,)), len(problem.hessian)
    got = spectrum.trace(product, problem.params, num_samples=max(p + more, 2))
    torch.testing.assert_close(got.estimate, problem.hessian.trace())
    assert got.standard_error == 0
    got = spectrum.diagonal(product, problem.params, num_samples=max(p + more, 2))
    torch.testing.assert_close(flat(got.estimate), problem.hessian.diagonal())
    assert (flat(got.standard_error) == 0).all()


@pytest.mark.parametrize("name", ["even", "decaying", "low rank"])
def test_standard_errors_are_right(name):
    """Over 300 seeds: no bias, and errors of the size that they are said to have, for the trace and each entry."""
    h, like = spectral(1, SPECTRA[name][::5]), torch.zeros(60, dtype=torch.float64)
    for call, truth in ((spectrum.trace, h.trace()[None]), (spectrum.diagonal, h.diagonal())):
        runs = [call(product_of(h), like, num_samples=47, generator=seeded(seed)) for seed in range(300)]
        estimates, errors = (torch.stack([run[i].reshape(-1) for run in runs]) for i in (0, 1))
        noise = 1e-12 * float(h.abs().max())
        true = (estimates - truth).square().mean(0).sqrt()
        bias = (estimates.mean(0) - truth).abs()
        assert (bias <= 5 * true / 300**0.5 + noise).all()
        told = errors.square().mean(0).sqrt()
        assert (true <= 1.4 * told + noise).all()
        assert (told <= 1.4 * true + noise).all()
        if name == "even":  # 17 signs, so few that a t-distribution has wider tails than 4 standard errors
            assert ((estimates - truth).abs() <= 4 * errors + noise).double().mean() > 0.98


def test_errors_fall_as_stated():
    """With 1 / n where eigenvalues decay; a plain Hutchinson estimate would fall with 1 / sqrt(n)."""
    h, like = spectral(0, 1 / torch.arange(1.0, 301.0) ** 2), torch.zeros(300, dtype=torch.float64)

    def error(count, call):
        runs = [
            flat(call(product_of(h), like, num_samples=count, generator=seeded(s)).standard_error) for s in range(9)
        ]
        return float(torch.stack(runs).square().mean().sqrt())

    for call in (spectrum.trace, spectrum.diagonal):
        assert error(80, call) < error(20, call) / 4
        assert error(260, call) < error(80, call) / 3
    h = spectral(0, torch.cat([torch.ones(150), -torch.ones(150)]))  # no decay: with 1 / sqrt(n)
    assert error(180, spectrum.trace) < 0.7 * error(60, spectrum.trace)


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=nonquadratics(), count=st.integers(2, 6))
def test_trees(dtype, problem, count):
    """Leaves keep their dtypes and shapes; Fisher products of single samples."""
    problem_params = unflat(flat(problem.params).to(dtype), problem.params)
    dims = (None, {"y": 0, "x": 0, "mask": 0})
    data = {**problem.data, "x": problem.data["x"].to(dtype)}
    product = fvp_at_x(problem.loss, (problem_params, data), in_dims=dims)
    dense = hessian_matrix(product, problem_params).double()
    got = spectrum.diagonal(product, problem_params, num_samples=count)
    assert all(flat(part).dtype == dtype for part in got)
    miss = (flat(got.estimate) - dense.diagonal()).abs()
    assert len(dense) > count or (miss < 1e-4 * dense.abs().max()).all()
    total = spectrum.trace(product, problem_params, num_samples=count)
    torch.testing.assert_close(total.estimate, flat(got.estimate).sum(), rtol=1e-4, atol=1e-4)
    assert total.estimate.dtype == dtype


def test_no_graph_and_no_second_warning():
    """A product that hides a parameter leaves no graph behind, and NaN is told by the error alone."""
    scale = torch.nn.Parameter(torch.tensor(2.0))
    like = torch.zeros(5)
    values, vectors = spectrum.eigsh(lambda v: scale * v, like, 2)
    assert not values.requires_grad
    assert not vectors.requires_grad
    product = hvp_at_x(lambda t: torch.linalg.vector_norm(t) ** 2, (like,))
    with pytest.raises(ValueError, match=r"expected finite curvature, got \d+ NaN or inf entries"):
        spectrum.trace(product, like)
    with pytest.warns(NonFiniteWarning):
        product(torch.ones(5))


# ---------------------------------------------------------------------------------------------------------------------
# suggestions


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    p=st.integers(1, 90),
    seed=st.integers(0, 2**31),
    least=st.sampled_from([-3.0, -1e-3, 0.0, 1e-9, 0.5]),
    scale=st.sampled_from([1e-10, 1.0, 1e10]),
)
def test_suggested_lambda(dtype, p, seed, least, scale):
    """C + lambda I has a Cholesky factor and is well enough conditioned for half the digits; half as much is not."""
    values = least + 2 * torch.rand(p, generator=seeded(seed)).double()
    values[0] = least
    h = (spectral(seed, values) * scale).to(dtype)
    lam, eigenvalue = spectrum.suggest_regularization(product_of(h), torch.zeros(p, dtype=dtype))
    true = torch.linalg.eigvalsh(h.double())
    size, eps = float(true.abs().max()) or 1.0, torch.finfo(dtype).eps
    assert abs(eigenvalue - float(true[0])) <= 30 * eps**0.5 * 1e-2 * size
    after = float(true[0]) + lam
    assert after >= 0.3 * eps**0.5 * size
    assert lam == 0 or after <= 3 * eps**0.5 * size
    assert (lam == 0) == (least == 0.5) or least == 1e-9
    torch.linalg.cholesky(h + lam * torch.eye(p, dtype=dtype))
    v = normal(seed, p).to(dtype)
    info = solvers.cg(h + lam * torch.eye(p, dtype=dtype), v, tol=1e-4, max_iter=5000).info
    assert info.status != solvers.Status.NEGATIVE_CURVATURE


def test_suggested_lambda_makes_cg_solve():
    def loss(p):
        return (p["a"] ** 3).sum() + (p["b"] * p["a"][0]).sum()

    p = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}
    lam, eigenvalue = spectrum.suggest_regularization(hvp_at_x(loss, (p,)), p)
    assert abs(eigenvalue + 12) < 1e-4
    assert "negative curvature" in ihvp_at_x_cg(loss, p, has_aux=True)(p)[1].reason
    ihvp_at_x_cg(loss, p, regularization=1.01 * lam)(p)  # no warning
    lam, _ = spectrum.suggest_regularization(hvp_at_x(loss, (p,), regularization=lam), p)
    assert lam < 0.1  # a lambda of the product's own is part of C


@pytest.mark.fault("F11")
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_suggested_scaling(damping):
    """LiSSA needs a scale above half the largest curvature of any batch, not of the mean: here 20, mean 10."""

    def loss(t, x):
        return (0.5 * x * t**2).mean()

    x, t = torch.tensor([0.0, 20.0]), torch.tensor(1.0)
    scale = spectrum.suggest_scaling(loss, t, x, damping=damping)
    assert scale == pytest.approx(22 / (1 - damping))
    assert spectrum.suggest_scaling(loss, t, x, batch_size=2) == pytest.approx(11)
    assert spectrum.suggest_scaling(loss, t, x, regularization=3.0) == pytest.approx(1.1 * 23)
    assert spectrum.suggest_scaling(loss, t, 0 * x) == 0
    assert spectrum.suggest_scaling(lambda t: 5 * t**2, t) == pytest.approx(11)
    knobs = {"scaling": scale, "recursion_depth": 200, "damping": damping, "has_aux": True}
    info = ihvp_at_x_lissa(loss, t, x, generator=seeded(0), **knobs)(t)[1]
    assert info.status != solvers.Status.DIVERGED
