"""The Fisher's inverse through the Gram matrix: values by dense float64 algebra on rows from torch.autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, reorder, row, unflat

from dattrifunc import ConvergenceWarning, fvp_at_x, ihvp_at_x_explicit, ihvp_at_x_woodbury, ihvp_woodbury, solvers
from dattrifunc.solvers import Status

FORMS = {
    "bound": lambda loss, x, knobs: ihvp_at_x_woodbury(loss, *x, **knobs),
    "unbound": lambda loss, x, knobs: lambda v: ihvp_woodbury(loss, **knobs)(x, v),
}


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(rows, lam):
    return rows.T @ rows / len(rows) + lam * torch.eye(rows.shape[1], dtype=rows.dtype)


def per_sample_rows(problem):
    """The gradients one by one, by torch.autograd."""
    at = [t.clone().requires_grad_() for t in leaves(problem.params)]
    params = unflat(torch.cat([t.reshape(-1) for t in at]), problem.params)
    n = len(problem.data["y"])
    losses = [problem.loss(params, {key: t[i] for key, t in problem.data.items()}) for i in range(n)]
    found = [torch.autograd.grad(one, at, retain_graph=True) for one in losses]
    return torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in found])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(
    problem=nonquadratics(),
    exponent=st.floats(-4, 3),
    chunk=st.sampled_from([None, 1, 2]),
    rng=st.randoms(use_true_random=False),
)
def test_equals_dense_algebra(form, problem, exponent, chunk, rng):
    """Any tree, fewer or more samples than parameters, any chunk, k vectors or one."""
    lam = 10**exponent
    knobs = {"in_dims": (None, 0), "regularization": lam, "chunk_size": chunk, "has_aux": True}
    f = FORMS[form](problem.loss, (problem.params, problem.data), knobs)
    u, info = f(reorder(problem.rhs, rng))
    matrix, b = dense(per_sample_rows(problem), lam), flat(problem.rhs, batch=True)
    torch.testing.assert_close(flat(u, batch=True), torch.linalg.solve(matrix, b.T).T, rtol=1e-8, atol=1e-10)
    assert (info.status == 0).all()
    left = torch.linalg.vector_norm(b - flat(u, batch=True) @ matrix, dim=1)
    torch.testing.assert_close(info.residual, left / torch.linalg.vector_norm(b, dim=1), rtol=0, atol=1e-11)
    if len(b):
        one, info = f(row(problem.rhs, 0))
        torch.testing.assert_close(flat(one), flat(row(u, 0)), rtol=1e-8, atol=1e-11)
        assert info.residual.shape == ()
        assert info.method == "woodbury"


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**31), st.floats(-25, 25))
def test_a_row_is_solved_whatever_stands_beside_it(n, p, seed, exponent):
    """Zero and non-finite right-hand sides, zero and repeated rows of G; the solve of a v is a times that of v."""
    rows, b = normal(seed, n, p), normal(seed + 1, 5, p)
    rows[0] = 0
    rows[-1] = rows[n // 2]
    b[1] = 0
    b[2, 0] = float("nan")
    b[3] = b[0] * 2.0 ** round(exponent)
    u, info = solvers.woodbury(rows, b, regularization=0.1, batched=True)
    assert info.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    assert (u[1] == 0).all()
    assert u[2].isnan().all()
    torch.testing.assert_close(u[3], u[0] * 2.0 ** round(exponent), rtol=1e-12, atol=0)
    torch.testing.assert_close(u[[0, 4]], torch.linalg.solve(dense(rows, 0.1), b[[0, 4]].T).T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-25, 1e-13, 1.0, 1e13, 1e18])
@pytest.mark.parametrize("size", [1e-17, 1.0, 1e17])
def test_scales(scale, size):
    """Squares of the rows and of v leave the range of float32; lambda goes with the square of the rows."""
    rows, v = normal(0, 3, 8).float(), normal(1, 8).float()
    lam = 0.5 * size**2
    u, info = solvers.woodbury(size * rows, scale * v, regularization=lam)
    want = torch.linalg.solve(dense((size * rows).double(), lam), (scale * v).double())
    if 1e-37 < want.abs().min() < want.abs().max() < 1e38:
        torch.testing.assert_close(u.double() / want, torch.ones(8).double(), rtol=1e-5, atol=0)
        assert info.converged
        assert info.residual < 1e-6
    else:
        assert info.status == Status.NONFINITE
    if size < 1:
        u, info = solvers.woodbury(1e-8 * size * rows, scale * v, regularization=2.0)  # no Fisher is left of it
        torch.testing.assert_close(u / scale, v / 2)
        assert info.converged


@pytest.mark.parametrize("n", [3, 8, 20])
@pytest.mark.parametrize("lam", [1e-3, 1e-2])
def test_small_lambda(n, lam):
    """The identity cancels where lambda is small beside F: refinement brings the digits back."""
    rows, b = normal(n, n, 8), normal(1, 50, 8)
    b = b @ rows.T @ rows  # in the range of F, where all of v - G'(...)v cancels
    u, info = solvers.woodbury(rows.float(), b.float(), regularization=lam, batched=True)
    matrix = dense(rows.float().double(), lam)
    want = torch.linalg.solve(matrix, b.float().double().T).T
    error = torch.linalg.vector_norm(u - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
    assert error.max() < 1e-6 * torch.linalg.cond(matrix)
    assert info.residual.max() < 1e-6
    assert info.converged.all()


def test_rows_that_repeat():
    """A Gram matrix that rounding makes indefinite: its eigenvalues are known not to be."""
    rows, v = normal(0, 1, 8).expand(30, 8).float(), normal(1, 8).float()
    rows = rows + 1e-7 * normal(2, 30, 8).float()
    u, _ = solvers.woodbury(rows, v, regularization=2e-6)
    want = torch.linalg.solve(dense(rows.double(), 2e-6), v.double())
    torch.testing.assert_close(u.double(), want, rtol=1e-4, atol=want.abs().max().item() * 1e-5)
    assert u.isfinite().all()


def test_a_lambda_that_rounding_loses_is_told():
    rows, v = normal(0, 8, 3).float(), normal(1, 3).float()
    u, info = solvers.woodbury(rows, v, regularization=1e-9)
    assert u.isfinite().all()
    assert info.status == Status.STAGNATED
    assert "lambda is lost in the rounding of the Fisher matrix; regularization=" in info.reason
    enough = float(info.reason.split("regularization=")[1].split()[0])
    assert solvers.woodbury(rows, v, regularization=enough).info.converged
    with pytest.warns(ConvergenceWarning, match=r"woodbury: 1 of 1 .*stagnated.*regularization=.* would do"):
        ihvp_at_x_woodbury(lambda w, x: w @ x, v, rows, in_dims=(None, 0), regularization=1e-9)(v)
    u, info = solvers.woodbury(1e25 * rows, v, regularization=1e-9)
    assert u.isfinite().all()
    assert info.status == Status.STAGNATED
    assert info.residual == float("inf")


def test_gradients_are_made_once():
    """What hangs on x is done at build; a call touches the held rows alone."""
    calls = []

    def loss(w, x):
        calls.append(1)
        return (w * x).sum().tanh()

    w, x, v = normal(0, 4), normal(1, 6, 4), normal(2, 4)
    solve = ihvp_at_x_woodbury(loss, w, x, in_dims=(None, 0), regularization=0.1)
    built = len(calls)
    assert built == 1  # one vmap over all samples
    first, many = solve(v), solve(torch.stack([v, 2 * v]))
    assert len(calls) == built
    torch.testing.assert_close(many, torch.stack([first, 2 * first]))
    explicit = ihvp_at_x_explicit(loss, w, x, product=fvp_at_x, in_dims=(None, 0), regularization=0.1)
    torch.testing.assert_close(first, explicit(v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_not_finite(form):
    p = {"a": torch.ones(2), "b": torch.zeros(2)}
    knobs = {"in_dims": (None, 0), "regularization": 0.1}
    with pytest.raises(ValueError, match=r"func: expected finite gradients of all samples, got \d NaN .* in 'b'\. Fix"):
        FORMS[form](lambda p, x: p["a"] @ x + p["b"].norm().sqrt(), (p, torch.ones(3, 2)), knobs)(p)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_arguments(form, dtype):
    """A kept batch axis, two arguments at once, data along another axis, dtypes as they came."""
    a, b, x = (t.to(dtype) for t in (normal(0, 3), normal(1, 2), normal(2, 3, 5)))
    knobs = {"in_dims": (None, None, 1), "keep_batch_dim": True, "regularization": 0.5, "argnums": (0, 1)}

    def loss(a, b, x):
        assert x.shape == (3, 1)
        return (a @ x).squeeze(0) * b.sum() + b[0] ** 2

    u = FORMS[form](loss, (a, b, x), knobs)((a, b))
    a, b, x = a.double(), b.double(), x.double()
    rows = torch.stack([torch.cat([c * b.sum(), a @ c + 2 * b * torch.tensor([1, 0])]) for c in x.T])
    want = torch.linalg.solve(dense(rows, 0.5), torch.cat([a, b]))
    assert u[0].dtype == u[1].dtype == dtype
    torch.testing.assert_close(torch.cat(u).double(), want, rtol=100 * torch.finfo(dtype).eps, atol=1e-3)
    empty = FORMS[form](
        lambda p, x: x.sum() + p["a"].sum(), ({"a": a[:0]}, x), {**knobs, "argnums": 0, "in_dims": (None, 1)}
    )
    assert empty({"a": torch.zeros(4, 0).double()})["a"].shape == (4, 0)
