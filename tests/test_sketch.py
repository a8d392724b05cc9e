"""Nystrom sketches, as an inverse and as a preconditioner, against dense float64 algebra by another formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, quadratics, reorder, row

from dattrifunc import (
    ConvergenceWarning,
    fvp_at_x,
    ihvp_at_x_cg,
    ihvp_at_x_minres,
    ihvp_at_x_nystrom,
    ihvp_cg,
    ihvp_nystrom,
    solvers,
)
from dattrifunc.solvers import Status
from dattrifunc.solvers.sketch import by_sketch, directions, sketched

FORMS = {
    "bound": lambda loss, x, knobs: ihvp_at_x_nystrom(loss, *x, **knobs),
    "unbound": lambda loss, x, knobs: lambda v: ihvp_nystrom(loss, **knobs)(x, v),
}
ITERATIVE = ["cg", "minres"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def spectral(seed, values):
    """A matrix with these eigenvalues."""
    basis = torch.linalg.qr(normal(seed, len(values), len(values))).Q
    h = (basis * values) @ basis.T
    return (h + h.T) / 2


def decaying(p, low=-6):
    return spectral(0, 10 ** torch.linspace(2, low, p, dtype=torch.float64))


def approximation(h, rank, seed):
    """C Z (Z'CZ)^-1 Z'C with Z Gaussian: the definition, which knows no orthonormal basis."""
    z = torch.randn(len(h), rank, dtype=torch.float64, generator=seeded(seed))
    return h @ z @ torch.linalg.solve(z.T @ h @ z, z.T @ h)


def divide(matrix, lam, b):
    return b @ torch.linalg.inv(matrix + lam * torch.eye(len(matrix), dtype=torch.float64))


def half(h):
    return lambda t: 0.5 * t @ h.to(t.dtype) @ t


# ---------------------------------------------------------------------------------------------------------------------
# the inverse


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8)
@given(
    problem=st.one_of(quadratics(), nonquadratics()),
    exponent=st.floats(-3, 2),
    rng=st.randoms(use_true_random=False),
    mode=st.sampled_from(["rev-rev", "rev-fwd"]),
)
def test_all_of_the_rank_is_exact(form, problem, exponent, rng, mode):
    """Any tree, both modes, chunks, k vectors or one: with rank >= p this is the dense solve."""
    lam, data = 10**exponent, getattr(problem, "data", None)
    x = (problem.params,) if data is None else (problem.params, data)
    f = FORMS[form](problem.loss, x, {"regularization": lam, "has_aux": True, "mode": mode, "chunk_size": 2})
    u, info = f(reorder(problem.rhs, rng))
    want = divide(problem.hessian, lam, flat(problem.rhs, batch=True))
    torch.testing.assert_close(flat(u, batch=True), want, rtol=1e-7, atol=1e-9)
    assert (info.status == 0).all()
    assert [leaf.shape for leaf in leaves(u)] == [leaf.shape for leaf in leaves(problem.rhs)]
    if len(want):
        one, info = f(row(problem.rhs, 0))
        torch.testing.assert_close(flat(one), flat(row(u, 0)), rtol=1e-8, atol=1e-10)
        assert info.residual.shape == ()
        assert info.method == "nystrom"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_low_rank_is_the_approximation_by_its_definition(rank, dtype):
    """U (L + lambda)^-1 U'v + (v - UU'v) / lambda, lambda on all of the space; the residual is that of C."""
    h, b, lam = decaying(30, -1), normal(1, 4, 30), 0.3
    u, info = solvers.nystrom(
        h.to(dtype), b.to(dtype), regularization=lam, rank=rank, batched=True, generator=seeded(7)
    )
    want = divide(approximation(h, rank, 7), lam, b)
    torch.testing.assert_close(u.double(), want, rtol=0, atol=(1e-10 if dtype == torch.float64 else 3e-4))
    left = torch.linalg.vector_norm(b - want @ h - lam * want, dim=1) / torch.linalg.vector_norm(b, dim=1)
    torch.testing.assert_close(info.residual.double(), left, rtol=1e-2, atol=1e-4)
    assert (info.status == Status.MAX_ITER).all()
    assert not info.converged.any()
    assert f"rank {rank} of 30 ends at curvature" in info.reason
    assert "raise rank" in info.messages()[0]
    loose = solvers.nystrom(h, b, regularization=lam, rank=rank, batched=True, tol=1e4, generator=seeded(7))
    assert loose.info.converged.all()
    torch.testing.assert_close(loose.value, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-25, 1e-13, 1.0, 1e13, 1e25])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_scales(scale, size):
    """Squares of C and of v leave the range of float32; lambda goes with C. Zero and NaN rows stand beside others."""
    h, v = torch.diag(torch.tensor([1.0, 2.0, 4.0]) * size), torch.tensor([2.0, 3.0, 5.0])
    b = torch.stack([v, 0 * v, v * float("nan"), -v]) * scale
    u, info = solvers.nystrom(h, b, regularization=size, rank=2 + (size == 1), batched=True)
    assert (u[1] == 0).all()
    assert u[2].isnan().all()
    assert info.status[1:3].tolist() == [0, Status.NONFINITE]
    assert info.residual[1] == 0
    if size == 1:
        torch.testing.assert_close(u[[0, 3]] / scale, torch.stack([torch.ones(3), -torch.ones(3)]), rtol=1e-5, atol=0)
        assert info.status.tolist() == [0, 0, Status.NONFINITE, 0]
    elif 1e-36 < scale / size < 1e36:
        torch.testing.assert_close(u[0] / (scale / size), -u[3] / (scale / size))
        assert u[0].isfinite().all()
        assert info.residual[0] < 1
    elif not 1e-40 < scale / size < 1e40:
        assert info.status[0] == Status.NONFINITE


def test_products_and_calls():
    """The sketch is one product of all its columns, at build; a call makes none, and one more for the residual."""
    h, lam = decaying(30), 0.3
    shapes, calls = [], []

    def loss(t):
        return half(h)(t)

    def product(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):  # noqa: ARG001
        def f(v):
            calls.append(1)
            return h @ v

        return f

    v = normal(1, 3, 30)
    knobs = {"rank": 5, "regularization": lam, "product": product, "chunk_size": 5}
    solve = ihvp_at_x_nystrom(loss, v[0], **knobs)
    built = len(calls)
    assert built == 1  # under vmap: all columns
    solve(v)
    solve(v[0])
    assert len(calls) == built
    ihvp_at_x_nystrom(loss, v[0], **knobs, has_aux=True)(v)
    assert len(calls) == built + 2

    def matvec(v):
        shapes.append(tuple(v.shape))
        return v @ h

    solvers.nystrom(matvec, v, regularization=lam, rank=7, batched=True)
    assert shapes == [(7, 30), (3, 30)]


@pytest.mark.parametrize("form", FORMS)
def test_seeds(form):
    """Same seed, same bits; None is always the same draw; the global random state is left alone."""
    h, v = decaying(30), normal(1, 30)
    state = torch.get_rng_state()

    def run(generator):
        return FORMS[form](half(h), (v,), {"rank": 5, "regularization": 0.3, "generator": generator})(v)

    assert torch.equal(run(seeded(1)), run(seeded(1)))
    assert torch.equal(run(None), run(None))
    assert torch.equal(run(None), run(seeded(0)))
    assert not torch.equal(run(seeded(1)), run(seeded(2)))
    assert torch.equal(torch.get_rng_state(), state)
    whole = [ihvp_nystrom(half(h), 0, 30, 0.3, generator=seeded(seed))((v,), v) for seed in (1, 2)]
    assert torch.equal(*whole)  # no chance where nothing is left out
    generator = seeded(1)
    first = run(generator)
    assert not torch.equal(first, run(generator))
    knobs = {"rank": 5, "regularization": 0.3, "generator": generator}  # one form, one draw
    f, g = ihvp_at_x_nystrom(half(h), v, **knobs), ihvp_nystrom(half(h), **knobs)
    assert torch.equal(f(v), f(v))
    assert torch.equal(g((v,), v), g((v,), v))


@pytest.mark.parametrize("form", FORMS)
def test_negative_curvature_is_told(form):
    """C must be positive semidefinite: what the sketch sees of negative curvature is said with the lambda that does."""
    h = torch.diag(torch.tensor([3.0, -2.0, 1.0]))
    t = v = torch.ones(3)
    with pytest.warns(
        ConvergenceWarning, match=r"nystrom: 1 of 1 .*curvature <= 0.*curvature -2 in .*regularization=20.2 would"
    ):
        assert FORMS[form](half(h), (t,), {"regularization": 1.0})(v).isfinite().all()
    u, info = FORMS[form](half(h), (t,), {"regularization": 1.0, "has_aux": True})(torch.stack([v, 0 * v]))
    assert info.status.tolist() == [Status.NEGATIVE_CURVATURE, 0]
    assert info.converged.tolist() == [False, True]
    assert u.isfinite().all()
    u = FORMS[form](half(h), (t,), {"regularization": 20.2})(v)  # no warning: the suite makes one an error
    torch.testing.assert_close(u, 1 / (torch.diagonal(h) + 20.2), rtol=0.12, atol=0)
    low = spectral(3, torch.cat([torch.full((2,), -1.0), 10 ** torch.linspace(1, -2, 28)]).double())
    info = solvers.nystrom(low, normal(1, 30), regularization=0.01, rank=20).info
    assert info.status == Status.NEGATIVE_CURVATURE


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_curvature_of_low_rank_or_none(rank):
    """A C of rank 2, or 0: rounding is no negative curvature, and nothing divides by 0."""
    rows = normal(0, 2, 12).float()
    h, v = rows.T @ rows, normal(1, 12).float()
    u, info = solvers.nystrom(h, v, regularization=0.5, rank=rank)
    assert info.converged == (rank >= 2)
    assert info.status == (0 if rank >= 2 else Status.MAX_ITER)
    if rank >= 2:
        torch.testing.assert_close(u.double(), divide(h.double(), 0.5, v.double()), rtol=1e-4, atol=1e-5)
    tiny = solvers.nystrom(h, v, regularization=1e-7, rank=rank).info
    assert tiny.status != Status.NEGATIVE_CURVATURE
    u, info = solvers.nystrom(0 * h, v, regularization=0.5, rank=rank)
    torch.testing.assert_close(u, 2 * v)
    assert info.converged


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_stabilising_shift_is_taken_off(size):
    """Eigenvalues near the rounding of the largest one are those of C, not of C plus the shift; U is orthonormal."""
    values = torch.tensor([1.0, 1e-3, 1e-6])
    sketch = sketched(lambda rows: rows * (values * size), directions(3, 3, None), (), values, 1.2e-7)
    torch.testing.assert_close(sketch.values / size, values.double(), rtol=1e-3, atol=0)
    sketch = sketched(lambda rows: rows @ decaying(300).float(), directions(50, 300, None), (), values, 1.2e-7)
    gram = sketch.vectors.double().mT @ sketch.vectors.double()
    torch.testing.assert_close(gram, torch.eye(50).double(), rtol=0, atol=1e-5)
    none = sketch.spectral(torch.zeros(50))(sketch.vectors.mT)  # what is in the space must not leak to its complement
    assert (none.double() @ sketch.vectors.double()).abs().max() < 1e-11


@pytest.mark.parametrize("form", FORMS)
def test_curvature_that_is_not_finite_is_told(form):
    def loss(t):
        return (t * torch.tensor([1.0, 0.0])).square().sum() + torch.log(t[1]) ** 2

    t = torch.tensor([1.0, 0.0])
    with pytest.warns(ConvergenceWarning, match=r"nystrom: 1 of 1 .*non-finite"):
        assert FORMS[form](loss, (t,), {"regularization": 0.5})(t).isnan().all()
    each = torch.func.vmap(lambda s: ihvp_nystrom(loss, regularization=0.5, has_aux=True)((s,), t))
    u, info = each(torch.stack([t, t + 1]))
    assert info.status.tolist() == [Status.NONFINITE, 0]
    assert u[0].isnan().all()
    assert u[1].isfinite().all()


@pytest.mark.parametrize("rank", [2, 9])
def test_low_rank_through_vmap(rank):
    """Lifted over x, each block has its own sketch with the same test matrix: the loop, and the derivative in v."""
    h, ts, v = decaying(9, 0), normal(1, 3, 9), normal(2, 9)

    def loss(t, s):
        return half(h)(t) + (t**4).mean() + s * t.sum()

    f = ihvp_nystrom(loss, 0, rank, 0.5)
    got = torch.func.vmap(lambda t: torch.func.vmap(lambda s: f((t, s), v))(ts[0]))(ts)
    want = torch.stack([f((t, ts[0, 0]), v) for t in ts])
    torch.testing.assert_close(got, want.unsqueeze(1).expand(3, 9, 9))
    jacobian = torch.func.jacrev(lambda v: f((ts[0], ts[0, 0]), v))(v)
    torch.testing.assert_close(jacobian @ v, want[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arguments(form, dtype):
    """Fisher products of single samples, two arguments at once, empty leaves, dtypes as they came."""
    a, b, x = (t.to(dtype) for t in (normal(0, 3), normal(1, 2), normal(2, 5, 3)))
    knobs = {"regularization": 0.5, "product": fvp_at_x, "in_dims": (None, None, 0), "argnums": (0, 1)}
    u = FORMS[form](lambda a, b, x: (a @ x) * b.sum(), (a, b, x), knobs)((a, b))
    a, b, x = a.double(), b.double(), x.double()
    rows = torch.stack([torch.cat([c * b.sum(), (a @ c).expand(2)]) for c in x])
    want = divide(rows.T @ rows / 5, 0.5, torch.cat([a, b]))
    assert u[0].dtype == u[1].dtype == dtype
    torch.testing.assert_close(torch.cat(u).double(), want, rtol=100 * torch.finfo(dtype).eps, atol=1e-3)
    empty = FORMS[form](lambda p: p["a"].sum(), ({"a": torch.zeros(0)},), {"regularization": 0.5})
    assert empty({"a": torch.zeros(4, 0)})["a"].shape == (4, 0)


# ---------------------------------------------------------------------------------------------------------------------
# the preconditioner


@pytest.mark.parametrize("name", ITERATIVE)
def test_a_sketch_saves_products(name):
    """A spectrum that decays, and a small lambda: fewer steps, setup included; seeds as everywhere."""
    p, lam = 400, 1e-3
    h, v = spectral(0, 1e3 / torch.arange(1, p + 1, dtype=torch.float64) ** 3), normal(1, p)
    a = h + lam * torch.eye(p).double()
    state = torch.get_rng_state()

    def run(near=None, seed=None):
        knobs = {"tol": 1e-8, "preconditioner": near, "generator": None if seed is None else seeded(seed)}
        return getattr(solvers, name)(a, v, max_iter=4000, **knobs)

    plain, u = run().info, run("nystrom")
    assert plain.converged
    assert u.info.converged
    assert 50 + u.info.iterations < 0.7 * plain.iterations
    assert torch.equal(run("nystrom", 1).value, run("nystrom", 1).value)
    assert torch.equal(run("nystrom").value, run("nystrom").value)
    assert not torch.equal(run("nystrom", 1).value, run("nystrom", 2).value)
    assert torch.equal(torch.get_rng_state(), state)
    bound = {"cg": ihvp_at_x_cg, "minres": ihvp_at_x_minres}[name]
    knobs = {"regularization": lam, "tol": 1e-8, "max_iter": 4000, "has_aux": True, "preconditioner": "nystrom"}
    info = bound(half(h), v, **knobs)(v)[1]
    assert info.converged
    assert 50 + info.iterations < 0.7 * plain.iterations


@pytest.mark.parametrize("name", ITERATIVE)
def test_the_sketch_is_made_at_build(name):
    """One product of 50 columns, before the first v, and none later but the iterations'."""
    h, v = decaying(60, 0), normal(1, 60)
    shapes = []

    def product(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):  # noqa: ARG001
        def f(v):
            shapes.append(1)
            return h @ v

        return f

    bound = {"cg": ihvp_at_x_cg, "minres": ihvp_at_x_minres}[name]
    solve = bound(half(h), v, preconditioner="nystrom", regularization=0.1, product=product, has_aux=True)
    assert len(shapes) == 1
    first = solve(v)[1].iterations
    assert len(shapes) == first + 2  # and one for the true residual
    assert solve(v)[1].iterations == first
    assert len(shapes) == 2 * first + 3


@pytest.mark.parametrize("lam", [0.0, 1e-3, 10.0])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize(
    "values", [[3.0, 2.0, 1.0, 0.5], [0.0] * 4, [5.0, 0.0, 0.0, 0.0], [3.0, -2.0, 1.0, -4.0], [-1.0] * 4]
)
def test_the_preconditioner_is_positive_definite(values, size, lam):
    """Whatever C is: its eigenvalues on the sketched space are (l_r + lambda) / (l + lambda), elsewhere 1."""
    h = spectral(0, torch.tensor(values).double())
    like = torch.empty(4)
    for rank in (1, 2, 4):
        sketch = sketched(lambda rows: rows @ (size * h).float(), directions(rank, 4, None), (), like, 1.2e-7)
        m = by_sketch(sketch, size * lam)(torch.eye(4)).double()
        torch.testing.assert_close(m, m.T, rtol=0, atol=1e-6)
        assert torch.linalg.eigvalsh(m).min() > 1e-8
        if min(values) > 0 and rank == 4:
            want = (min(values) + lam) * torch.linalg.inv(h + lam * torch.eye(4).double())
            torch.testing.assert_close(m, want, rtol=1e-4, atol=1e-5)
        if max(values) <= 0:
            torch.testing.assert_close(m, torch.eye(4).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("near", ["jacobi", "nystrom"])
def test_one_form_for_trees_of_two_sizes(near):
    """What was drawn for one number of parameters is not used for another."""
    solve = ihvp_cg(lambda t: (t**2).sum(), preconditioner=near)
    for p in (100, 70, 100):
        torch.testing.assert_close(solve((torch.ones(p),), torch.ones(p)), torch.full((p,), 0.5))
