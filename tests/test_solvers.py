"""The solvers as pure functions of (matvec, b): values by dense float64 algebra, and honest facts about every row."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flat, quadratics, row, symmetric, unflat

from dattrifunc import ConvergenceWarning, hvp_at_x, ihvp_at_x_cg, solvers
from dattrifunc.solvers import Status
from dattrifunc.solvers.dense import factorise
from dattrifunc.solvers.precondition import diagonal_of, random_signs
from dattrifunc.solvers.stochastic import draw_batches
from dattrifunc.tree import Layout

D124 = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
V124 = torch.tensor([1.0, 2.0, 4.0])
LISSA = {"scaling": 6.0, "recursion_depth": 400}


def hilbert(p, dtype=torch.float64):
    i = torch.arange(1, p + 1, dtype=torch.float64)
    return (1 / (i[:, None] + i[None, :] - 1)).to(dtype)


def spectral(seed, p, values):
    """A matrix with these eigenvalues, and a generator."""
    rng = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(p, p, generator=rng, dtype=torch.float64)).Q
    h = (basis * values) @ basis.T
    return (h + h.T) / 2, rng


def solve(name, matrix, b, **knobs):
    """Solve by name; b is one vector [p] or rows [k, p]."""
    batched = b.ndim == 2
    return getattr(solvers, name.split()[0])(lambda v: v @ matrix, b, batched=batched, **knobs)


NAMES = {
    "cg": {"tol": 1e-12},
    "minres": {"tol": 1e-12},
    "auto": {"tol": 1e-12},
    "cg block": {"tol": 1e-12, "block": True},
    "cg jacobi": {"tol": 1e-12, "preconditioner": "jacobi"},
    "minres jacobi": {"tol": 1e-12, "preconditioner": "jacobi"},
    "cg nystrom": {"tol": 1e-12, "preconditioner": "nystrom"},
    "minres nystrom": {"tol": 1e-12, "preconditioner": "nystrom"},
    "explicit": {},
    "arnoldi": {"tol": 1e-12},
    "lissa": LISSA,
}
ITERATIVE = ["cg", "minres"]


@pytest.mark.parametrize("name", NAMES)
@given(problem=quadratics())
def test_equals_dense_algebra(name, problem):
    """A matvec on drawn trees, one vector at a time and all k at once."""
    h, rhs = problem.hessian, problem.rhs
    want = torch.linalg.solve(h, flat(rhs, batch=True).T).T

    def matvec(v):
        return unflat(h @ flat(v), v)

    def matmat(v):
        return unflat(flat(v, batch=True) @ h, problem.params)

    u, info = getattr(solvers, name.split()[0])(matmat, rhs, batched=True, **NAMES[name])
    torch.testing.assert_close(flat(u, batch=True), want, rtol=1e-6, atol=1e-8)
    assert info.converged.shape == (len(want),)
    assert info.converged.all()
    assert (info.status == 0).all()
    if len(want):
        u, info = getattr(solvers, name.split()[0])(matvec, row(rhs, 0), **NAMES[name])
        torch.testing.assert_close(flat(u), want[0], rtol=1e-6, atol=1e-8)
        assert info.converged.shape == info.residual.shape == info.status.shape == info.iterations.shape == ()
        true = torch.linalg.vector_norm(flat(row(rhs, 0)) - h @ flat(u)) / flat(row(rhs, 0)).norm()
        torch.testing.assert_close(info.residual, true, rtol=1e-3, atol=1e-14)


@given(st.integers(1, 8), st.integers(0, 2**31), st.sampled_from(["spd", "indefinite"]), st.floats(-25, 25))
def test_a_row_is_solved_or_flagged(p, seed, kind, exponent):
    """What SolveInfo says is the truth, for every row by itself, and a solve of a v is a times the solve of v."""
    rng = torch.Generator().manual_seed(seed)
    h = symmetric(rng, p, kind)
    b = torch.randn(5, p, generator=rng, dtype=torch.float64)
    b[1] = 0
    b[2, 0] = float("nan")
    b[3] *= 10**exponent
    b[4] = b[0] * 2.0 ** round(exponent)
    for name in ("cg", "minres", "explicit"):
        u, info = solve(name, h, b)
        for i in (0, 3, 4):
            true = torch.linalg.vector_norm(b[i] / b[i].norm() - h @ (u[i] / b[i].norm()))
            torch.testing.assert_close(info.residual[i], true, rtol=1e-3, atol=1e-12)
            assert bool(info.converged[i]) == (info.status[i] == 0)
            assert not info.converged[i] or true < 1e-7
            assert info.converged[i] or name == "cg"
        torch.testing.assert_close(u[4], u[0] * 2.0 ** round(exponent), rtol=1e-12, atol=0)
        assert (u[1] == 0).all()
        assert info.converged[1]
        assert u[2].isnan().all()
        assert info.status[2] == Status.NONFINITE
        assert not info.converged[2]


# ---------------------------------------------------------------------------------------------------------------------
# conjugate gradients


@pytest.mark.fault("F1")
@pytest.mark.parametrize("max_iter", [3, 10, 100, 1000])
def test_cg_after_convergence(max_iter):
    """CG that goes on after convergence divides 0 by 0 and returns NaN."""
    torch.testing.assert_close(solve("cg", D124, V124, max_iter=max_iter).value, torch.ones(3), rtol=1e-6, atol=0)
    eye = torch.eye(3)
    u, info = solve("cg", eye, V124, max_iter=max_iter)
    torch.testing.assert_close(u, V124)
    assert info.iterations == 1


@pytest.mark.fault("F2")
@pytest.mark.parametrize("name", NAMES)
def test_zero_right_hand_side(name, recwarn):
    """A zero right-hand side came back as NaN: it is exactly 0, converged, without a warning, beside others too."""
    u, info = solve(name, D124, torch.zeros(3), **NAMES[name])
    assert torch.equal(u, torch.zeros(3))
    assert info.converged
    assert info.residual == 0
    u, info = solve(name, D124, torch.stack([torch.zeros(3), V124]), **NAMES[name])
    assert torch.equal(u[0], torch.zeros(3))
    torch.testing.assert_close(u[1], torch.ones(3))
    assert not recwarn.list


@pytest.mark.fault("F3")
def test_cg_on_indefinite_curvature():
    """Where p'Hp is 0 or negative, CG gave NaN or garbage: here the exact answer, or a flag that says why."""
    h, v = torch.diag(torch.tensor([1.0, -1.0])), torch.ones(2)
    u, info = solve("cg", h, v)
    assert u.isfinite().all()
    assert not info.converged
    assert info.status == Status.NEGATIVE_CURVATURE
    assert "not positive definite" in info.messages()[0]
    torch.testing.assert_close(solve("cg", h + 2 * torch.eye(2), v).value, torch.tensor([1 / 3, 1.0]))
    u, info = solve("cg", torch.diag(torch.tensor([-1.0, -2.0])), v)
    torch.testing.assert_close(u, torch.tensor([-1.0, -0.5]))
    torch.testing.assert_close(solve("explicit", h, v).value, torch.tensor([1.0, -1.0]))
    u, info = solve("cg", torch.diag(torch.tensor([3.0, -2.0, 0.5])), torch.tensor([1.0, 2.0, 1.0]), max_iter=2)
    assert info.status == Status.NEGATIVE_CURVATURE
    assert "regularization must grow by more than" in info.reason


def told_eigenvalue(reason):
    """The bound of the smallest eigenvalue, and the lambda that would do, as the reason of CG has them."""
    number = r"(-?[0-9.]+(?:e[+-]?\d+)?)"
    found = re.search(
        rf"smallest eigenvalue at most {number}: .* grow by more than {number}; larger by {number}", reason
    )
    least, more, enough = map(float, found.groups())
    assert least == -more < 0
    return least, enough


@pytest.mark.fault("F3")
@given(st.integers(2, 40), st.integers(0, 2**31), st.sampled_from([1e-25, 1.0, 1e25]), st.integers(1, 3))
def test_cg_tells_the_smallest_eigenvalue(p, seed, scale, k):
    """Not curvature along one direction, which is far above it: the lambda told makes the matrix positive definite."""
    values = torch.linspace(-0.3, 3, p, dtype=torch.float64)
    h, rng = spectral(seed, p, values)
    b = torch.randn(k, p, generator=rng, dtype=torch.float64)
    b[-1] *= 0.5 ** torch.arange(p)
    for dtype, slack in ((torch.float64, 1e-3), (torch.float32, 2e-2)):
        matrix = (h * scale).to(dtype)
        info = solve("cg", matrix, b.to(dtype), tol=1e-10, max_iter=3 * p).info
        least, enough = told_eigenvalue(info.reason)
        assert abs(least / scale + 0.3) < slack
        assert 0.3 < enough / scale < 0.4
        info = solve("cg", matrix + enough * torch.eye(p, dtype=dtype), b.to(dtype), tol=1e-4).info
        assert (info.status == 0).all()
        assert not info.reason
        near = solve("cg", matrix, b.to(dtype), max_iter=3 * p, preconditioner="jacobi").info
        assert told_eigenvalue(near.reason)[0] / scale >= -0.3 - slack


@given(st.integers(3, 12), st.integers(1, 4), st.integers(0, 2**31), st.booleans())
def test_cg_tells_the_smallest_eigenvalue_however_early_it_stops(p, steps, seed, negative):
    """The steps taken show one direction of negative curvature; what is told was sought from there, by products."""
    values = torch.linspace(-1, 2, p, dtype=torch.float64) - 1.5 * negative
    h, rng = spectral(seed, p, values)
    b = torch.randn(2, p, generator=rng, dtype=torch.float64)
    info = solve("cg", h, b, max_iter=steps, tol=0).info
    if (info.status == Status.NEGATIVE_CURVATURE).any():
        assert abs(told_eigenvalue(info.reason)[0] - float(values[0])) < 1e-3 * abs(float(values[0]))


@pytest.mark.parametrize("seed", range(12))
def test_cg_s_estimate_survives_rounding(seed):
    """After restarts and lost orthogonality the recursion's coefficients give -43 and -156 for seeds 1 and 7."""
    h, rng = spectral(seed, 30, torch.cat([torch.tensor([-1e-3]), torch.logspace(-7, 0, 29)]).double())
    b = torch.randn(2, 30, generator=rng, dtype=torch.float64)
    info = solve("cg", h.float(), b.float(), tol=1e-6, max_iter=2000).info
    assert (info.status == Status.NEGATIVE_CURVATURE).all()
    assert -1.02e-3 < told_eigenvalue(info.reason)[0] < -0.98e-3


def plain_cg(h, b, tol, max_iter):
    """Conjugate gradients as in a textbook: u and the steps taken."""
    u, r, p = torch.zeros_like(b), b.clone(), b.clone()
    for step in range(max_iter):
        if r.norm() <= tol * b.norm():
            return u, step
        hp = h @ p
        alpha = (r @ r) / (p @ hp)
        u, left = u + alpha * p, r - alpha * hp
        p, r = left + (left @ left) / (r @ r) * p, left
    return u, max_iter


@settings(max_examples=30)
@given(
    p=st.integers(2, 80),
    seed=st.integers(0, 2**31),
    decades=st.floats(0, 11),
    kind=st.sampled_from(["log", "even", "two", "hilbert", "diagonal"]),
    smooth=st.booleans(),
    tol=st.sampled_from([1e-7, 1e-10]),
)
def test_cg_is_patient(p, seed, decades, kind, smooth, tol):
    """Residuals may rise and stay for long: what textbook CG solves is solved, in as many steps and a look or two."""
    if kind == "hilbert":
        p = min(p, 20)
        h, rng = hilbert(p), torch.Generator().manual_seed(seed)
    elif kind == "diagonal":  # products that are exact: what rounding allows elsewhere is no limit here
        p = min(p, 30)
        h, rng = torch.diag(torch.logspace(-decades, 0, p).double()), torch.Generator().manual_seed(seed)
    else:
        values = {
            "log": torch.logspace(-decades, 0, p, dtype=torch.float64),
            "even": torch.linspace(10**-decades, 1, p, dtype=torch.float64),
            "two": torch.where(torch.arange(p) % 2 == 0, 10**-decades, 1.0).double() * torch.linspace(1, 1.01, p),
        }[kind]
        h, rng = spectral(seed, p, values.double())
    b = torch.randn(p, generator=rng, dtype=torch.float64)
    b = h @ b if smooth else b
    u, steps = plain_cg(h, b, tol, 10 * p)
    if torch.linalg.vector_norm(b - h @ u) <= tol * b.norm():
        info = solve("cg", h, b, tol=tol).info
        assert info.status == 0
        assert info.residual <= 2 * tol
        assert info.iterations <= 1.1 * steps + 3


def test_cg_stops_where_rounding_stops_it():
    """float32 at condition 1e8 and a tolerance out of reach: CG went on to max_iter, and away from what it had."""
    h, rng = spectral(0, 60, torch.linspace(1e-8, 1, 60, dtype=torch.float64))
    b = torch.randn(3, 60, generator=rng, dtype=torch.float64)
    calls = []

    def matvec(v):
        calls.append(1)
        return v @ h.float()

    info = solvers.cg(matvec, (b @ h).float(), batched=True, tol=1e-12).info
    assert (info.iterations < 250).all()
    assert info.converged.all()  # to what rounding allows
    assert (info.residual < 5e-6).all()
    assert int(info.iterations.max()) < len(calls) <= 1.3 * int(info.iterations.max())  # looks are counted
    info = solve("cg", h.float() + 1e-6 * torch.eye(60), b.float(), tol=1e-12).info
    assert (info.iterations < 400).all()
    assert ((info.status == Status.STAGNATED) | info.converged).all()
    assert (info.status == Status.STAGNATED).any()
    h, rng = spectral(0, 12, torch.logspace(-8, 0, 12).double())
    info = solve("cg", h.float(), torch.randn(20, 12, generator=rng), tol=1e-12, max_iter=600).info
    assert (info.status == Status.STAGNATED).any()
    assert "symmetric" not in info.reason  # noise is not taken for that
    assert info.iterations.median() < 400
    h = torch.diag(torch.logspace(-9, 0, 20).double())  # products that are exact: nothing stops it
    assert solve("cg", h, torch.ones(20).double(), tol=1e-12, max_iter=1000).info.residual <= 1e-12
    two = (1e-12 + torch.arange(12) % 2 * (1 + 1e-2 * torch.arange(12) / 12)).double()
    h, rng = spectral(12, 12, two)
    b = torch.randn(3, 12, generator=rng, dtype=torch.float64) @ h
    assert solve("cg", h.float(), b.float(), tol=1e-12).info.converged.all()


@pytest.mark.parametrize("name", ["cg", "cg jacobi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cg_says_that_a_product_is_not_symmetric(name, dtype):
    """It wandered to max_iter; now a product now and then finds out, and it stops. A symmetric one is never blamed."""
    rng = torch.Generator().manual_seed(0)
    noise, b = torch.randn(100, 100, generator=rng).to(dtype), torch.randn(3, 100, generator=rng).to(dtype)
    knobs = {key: value for key, value in NAMES[name].items() if key != "tol"}
    for h, twisted in ((noise, True), (noise + noise.T, False)):
        matrix = 2 * torch.eye(100, dtype=dtype) + 0.1 * h
        info = solvers.cg(lambda v, matrix=matrix: v @ matrix, b, batched=True, max_iter=1000, **knobs).info
        assert ("is not symmetric" in info.reason) == twisted
        if twisted:
            assert (info.status == Status.STAGNATED).all()
            assert (info.iterations < 400).all()


@pytest.mark.fault("F4")
@pytest.mark.parametrize("name", ITERATIVE)
def test_a_hilbert_matrix(name):
    """Loss of conjugacy: the recursive residual lied. The residual told is the true one, and restarts bring it down."""
    h = hilbert(6)
    u, info = solve(name, h, h @ torch.ones(6, dtype=torch.float64), max_iter=60, tol=1e-12)
    assert (u - 1).abs().max() < 1e-3
    h = hilbert(6, torch.float32)
    v = h @ torch.ones(6)
    u, info = solve(name, h, v, max_iter=60)
    true = torch.linalg.vector_norm(v - h @ u) / v.norm()
    assert true <= 1e-5
    torch.testing.assert_close(info.residual, true, rtol=0.5, atol=1e-7)


@pytest.mark.fault("F5")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-25, 1e-13, 1e25])
def test_scale_of_the_right_hand_side(name, scale):
    """Inner products of tiny right-hand sides underflow in float32, of huge ones overflow: solves scale with v."""
    u, info = solve(name, D124, scale * V124, **NAMES[name])
    torch.testing.assert_close(u / scale, torch.ones(3), rtol=1e-6, atol=0)
    assert info.converged


@pytest.mark.parametrize("name", ["cg", "minres", "explicit"])
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e18, 1e25])
def test_scale_of_the_curvature(name, scale):
    """Curvature whose squares leave the range of float32 is solved all the same."""
    u, info = solve(name, scale * D124, torch.stack([V124, -V124]))
    torch.testing.assert_close(u * scale, torch.stack([torch.ones(3), -torch.ones(3)]), rtol=1e-6, atol=0)
    assert info.converged.all()
    assert (info.status == 0).all()


@pytest.mark.fault("F6")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 9])
def test_number_of_right_hand_sides(name, k):
    """With more right-hand sides than parameters, the tolerance was taken over the wrong axis and rows came back 0."""
    h = torch.diag(torch.tensor([1.0, 4.0]))
    u, info = solve(name, h, torch.tensor([1.0, 4.0]).expand(k, 2), **NAMES[name])
    torch.testing.assert_close(u, torch.ones(k, 2))
    assert info.residual.shape == (k,)
    assert info.converged.all()


@pytest.mark.fault("F7")
@pytest.mark.parametrize("name", ITERATIVE)
def test_a_truncated_solve_says_so(name):
    """The solver's flag was thrown away, so that a truncated solve looked finished."""
    h = hilbert(6)
    b = torch.stack([h @ torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), h[0]])
    info = solve(name, h, b, max_iter=2).info
    assert info.converged.tolist() == [False, True, False]
    assert info.status.tolist() == [Status.MAX_ITER, 0, Status.MAX_ITER]
    assert info.iterations.tolist() == [2, 0, 2]
    assert "raise max_iter" in info.messages()[0]
    residual = solve(name, h, b, max_iter=0).info.residual
    torch.testing.assert_close(residual, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("name", ITERATIVE)
def test_one_batched_product_per_iteration(name):
    """k right-hand sides: one call per iteration for all, one more for the true residual, each row its own count."""
    shapes = []

    def matvec(v):
        shapes.append(tuple(v.shape))
        return v @ D124

    b = torch.stack([torch.tensor([1.0, 0, 0]), V124])
    info = getattr(solvers, name.split()[0])(matvec, b, batched=True).info
    assert info.iterations.tolist() == [1, 3]
    assert shapes == [(2, 3)] * 4


@pytest.mark.fault("F80")
@pytest.mark.parametrize("name", ITERATIVE)
def test_callback(name):
    seen = []
    info = solve(name, D124.double(), V124.double(), callback=lambda i, r: seen.append((i, r))).info
    assert [i for i, _ in seen] == [1, 2, 3]
    assert all(r.shape == () for _, r in seen)
    assert seen[-1][1] < 1e-7 < seen[0][1]
    torch.testing.assert_close(seen[-1][1], info.residual, rtol=0, atol=1e-12)
    seen.clear()
    solve(name, D124, torch.stack([V124, 0 * V124]), callback=lambda i, r: seen.append((i, r)))
    assert all(r.shape == (2,) and r[1] == 0 for _, r in seen)


def test_cg_on_singular_curvature():
    """v outside the range: flagged, finite. v inside: solved."""
    h = torch.diag(torch.tensor([1.0, 2.0, 0.0]))
    u, info = solve("cg", h, torch.ones(3))
    assert info.status == Status.SINGULAR
    assert u.isfinite().all()
    u, info = solve("cg", h, torch.tensor([1.0, 2.0, 0.0]))
    torch.testing.assert_close(u, torch.tensor([1.0, 1.0, 0.0]))
    assert info.converged


@pytest.mark.parametrize("name", NAMES)
def test_a_product_that_is_not_finite(name):
    """NaN or inf from a product never goes unflagged."""

    def matvec(v):
        return v * torch.tensor([1.0, float("inf")])

    if name == "explicit":
        with pytest.raises(ValueError, match=r"expected finite curvature, got \d NaN or inf entries"):
            solvers.explicit(matvec, torch.ones(2))
    else:
        u, info = getattr(solvers, name.split()[0])(matvec, torch.ones(2), **NAMES[name])
        assert info.status == Status.NONFINITE
        assert not info.converged
        assert u.isnan().all()


def test_attainable_accuracy_is_no_failure():
    """A float32 solve of a fair matrix does not warn at the default tol of 1e-7, and its residual is told as it is."""
    rng = torch.Generator().manual_seed(3)
    h = symmetric(rng, 200, "spd").float()
    info = solve("cg", h, torch.randn(8, 200, generator=rng)).info
    assert info.converged.all()
    assert info.residual.max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# starts


@pytest.mark.parametrize("name", ITERATIVE)
@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-25, 25), st.sampled_from([0, 1e-3, 1, 1e30, float("nan")]))
def test_any_start_leads_to_the_solution(name, p, seed, exponent, error):
    """A good start saves steps, a bad one costs a product; v, x0 and the matrix may have any scale."""
    rng = torch.Generator().manual_seed(seed)
    h, b = symmetric(rng, p, "spd"), torch.randn(3, p, generator=rng, dtype=torch.float64)
    b[1] = 0
    want = torch.linalg.solve(h, b.T).T
    scale = 10**exponent
    x0 = (want + error * torch.randn(3, p, generator=rng, dtype=torch.float64)) * scale
    u, info = solve(name, h, b * scale, x0=x0, tol=1e-11)
    torch.testing.assert_close(u / scale, want, rtol=1e-8, atol=1e-8)
    assert (info.status == 0).all()
    assert (u[1] == 0).all()
    assert error or (info.iterations == 0).all()
    u, info = solve(name, h * scale, b, x0=x0 / scale / scale, tol=1e-11)
    torch.testing.assert_close(u * scale, want, rtol=1e-8, atol=1e-8)
    one = solve(name, h, b * scale, x0=x0[0], tol=1e-11)  # one start for all
    torch.testing.assert_close(one.value / scale, want, rtol=1e-8, atol=1e-8)


@pytest.mark.fault("F9")
@pytest.mark.parametrize("name", ITERATIVE)
def test_a_start_saves_products(name):
    """One product for the residual of x0, none more where it solves; the residual told is relative to v."""
    calls = []

    def matvec(v):
        calls.append(1)
        return v @ D124

    info = getattr(solvers, name.split()[0])(matvec, V124, x0=torch.ones(3)).info
    assert info.iterations == 0
    assert len(calls) == 2
    near = torch.tensor([1.0, 1.0, 1.1])
    info = getattr(solvers, name.split()[0])(matvec, V124, x0=near).info
    assert info.iterations == 1
    for scale in (1e-25, 1e25):  # curvature whose squares leave the range of float32
        u, info = solve(name, scale * D124, V124, x0=near / scale)
        torch.testing.assert_close(u * scale, torch.ones(3))
        assert info.iterations == 1
    info = getattr(solvers, name.split()[0])(matvec, V124, x0=near, max_iter=0).info
    torch.testing.assert_close(info.residual, torch.tensor(0.4) / V124.norm())


@pytest.mark.parametrize("name", ITERATIVE)
def test_a_start_is_a_constant(name):
    """Neither a derivative nor a map of v sees it, and one that is mapped is refused."""
    f = getattr(solvers, name)
    h, inverse = D124.double(), torch.linalg.inv(D124.double())
    v = V124.double()
    for x0 in (lambda u: 2 * u, lambda _: torch.ones(3, dtype=torch.float64)):
        for jacobian in (torch.func.jacrev, torch.func.jacfwd):
            got = jacobian(lambda u, x0=x0: f(h, u, x0=x0(u), tol=1e-13).value)(v)
            torch.testing.assert_close(got, inverse)
    rows = torch.stack([v, -v, 3 * v])
    torch.testing.assert_close(torch.func.vmap(lambda u: f(h, u, x0=v).value)(rows), rows @ inverse)
    both = torch.func.vmap(lambda u: f(h, u, x0=rows @ inverse, batched=True).info.iterations)(
        torch.stack([rows, -rows])
    )
    assert both[0].tolist() == [0] * 3
    assert (both[1] > 0).all()
    with pytest.raises(
        ValueError, match=r"x0: expected the same start for all that vmap maps, got a mapped tensor. Fix"
    ):
        torch.func.vmap(lambda u, x0: f(h, u, x0=x0).value)(rows, rows)
    x0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert not f(h, v, x0=x0).value.requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# preconditioners

DIAGONAL = torch.tensor([1.0, 100.0, 1e4])
UNFIT = {
    "negative": lambda v: -v,
    "indefinite": lambda v: v * torch.tensor([1.0, -1.0, 1.0]),
    "zero": lambda v: 0 * v,
    "nan": lambda v: v * float("nan"),
    "inf": lambda v: v * float("inf"),
}


@pytest.mark.fault("F9")
@pytest.mark.parametrize("name", ITERATIVE)
@pytest.mark.parametrize("near", ["jacobi", lambda v: v / DIAGONAL, lambda v: 1e30 * (v / DIAGONAL)], ids=str)
def test_a_preconditioned_step(name, near):
    """The inverse itself, at any scale: one step, and the answer without it is the same."""
    h, v = torch.diag(DIAGONAL).double(), torch.tensor([3.0, -2.0, 5.0]).double()
    u, info = solve(name, h, v, preconditioner=near)
    torch.testing.assert_close(u, v / DIAGONAL, rtol=1e-6, atol=0)
    assert info.iterations == 1
    plain = solve(name, h, v, tol=1e-10)
    torch.testing.assert_close(plain.value, u, rtol=1e-6, atol=0)
    assert plain.info.iterations >= 3


@pytest.mark.parametrize("name", ITERATIVE)
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_preconditioner_that_is_not_positive_definite(name, unfit):
    """Flagged with a reason, finite; rows that do not meet the trouble are solved."""
    h, b = torch.diag(DIAGONAL), torch.tensor([[1.0, 1, 1], [0, 0, 2], [0, 0, 0]])
    u, info = solve(name, h, b, preconditioner=UNFIT[unfit])
    assert u.isfinite().all()
    assert info.status[0] == Status.SINGULAR
    assert info.status[2] == 0
    assert info.status[1] == (0 if unfit == "indefinite" else Status.SINGULAR)
    assert "the preconditioner is not positive definite" in info.reason
    assert not info.converged[0]


@pytest.mark.parametrize("name", ITERATIVE)
@given(
    st.integers(1, 20), st.integers(0, 2**31), st.sampled_from(["spd", "indefinite", "singular"]), st.floats(-25, 25)
)
def test_any_preconditioner_leads_to_the_solution(name, p, seed, kind, exponent):
    """A random positive definite M of any scale, batched and not; the residual told is v - A u, whatever M."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.linspace(1, 3, p, dtype=torch.float64)
    if name == "minres" and kind != "spd":
        values[::2] *= -1
        values[: (p + 2) // 3] *= kind != "singular"
    h, rng = spectral(seed, p, values)
    factor = torch.randn(p, p, generator=rng, dtype=torch.float64)
    m = (factor @ factor.T + torch.eye(p)) * 10**exponent
    b = torch.randn(3, p, generator=rng, dtype=torch.float64)
    b[1] = 0
    f = getattr(solvers, name)
    u, info = f(lambda v: v @ h, b, batched=True, preconditioner=lambda v: v @ m, tol=1e-9)
    one = f(lambda v: h @ v, b[0], preconditioner=lambda v: m @ v, tol=1e-9)
    torch.testing.assert_close(one.value, u[0], rtol=1e-5, atol=1e-5)
    left = b - u @ h
    torch.testing.assert_close(
        info.residual * torch.linalg.vector_norm(b, dim=1), torch.linalg.vector_norm(left, dim=1), rtol=1e-3, atol=1e-8
    )
    if name == "minres" and kind == "singular":
        assert info.status.tolist() == [Status.SINGULAR, 0, Status.SINGULAR]
        assert torch.linalg.vector_norm(left @ h) < 1e-5
    else:
        assert (info.status == 0).all()


@pytest.mark.parametrize("name", ITERATIVE)
@pytest.mark.parametrize("max_iter", [1, 2, 5, 9])
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_a_preconditioned_row_is_judged_by_its_residual(name, max_iter, exponent):
    """What is called back on the way is |b - A u| / |b|, in no norm of M's, and M may have any scale in float32."""
    rng = torch.Generator().manual_seed(0)
    h = symmetric(rng, 12, "spd")
    factor = torch.randn(12, 12, generator=rng, dtype=torch.float64)
    m = factor @ factor.T + torch.eye(12)
    b, told = torch.randn(12, generator=rng, dtype=torch.float64), []
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        near = (m * 10.0**exponent).to(dtype)
        info = solve(
            name, h.to(dtype), b.to(dtype), preconditioner=lambda v, near=near: near @ v, max_iter=max_iter,
            callback=lambda _, r: told.append(r),
        ).info  # fmt: skip
        torch.testing.assert_close(told[-1], info.residual, rtol=rtol, atol=0)
        assert info.status == Status.MAX_ITER


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e35])
def test_diagonal_by_probes(scale):
    """Within 5 standard errors where p > 64, exact by unit vectors; positive in any case."""
    rng = torch.Generator().manual_seed(0)
    h = symmetric(rng, 100, "spd") + torch.diag(10 * torch.rand(100, generator=rng, dtype=torch.float64))
    h[3], h[:, 3] = 0, 0
    want = torch.diagonal(h) / torch.diagonal(h).max()
    want[3] = 1
    matrix = (h * scale).float()
    exact = diagonal_of(lambda v: v @ matrix, (), None, matrix[0])
    torch.testing.assert_close(exact, want.float())
    got = diagonal_of(lambda v: v @ matrix, (), random_signs(4096, 100, rng), matrix[0]).double()
    off = torch.linalg.vector_norm(h - torch.diag(torch.diagonal(h)), dim=1) / 4096**0.5 / torch.diagonal(h).max()
    got[3] = 1
    peak = got[torch.diagonal(h).argmax()]
    assert ((got / peak - want).abs() <= 6 * off + 0.01).all()
    assert (diagonal_of(lambda v: -v @ matrix, (), None, matrix[0]) > 0).all()


@pytest.mark.parametrize("name", ITERATIVE)
def test_jacobi_pays_and_repeats(name):
    """More parameters than probes: fewer steps, same seed same bits, the global random state is left alone."""
    rng = torch.Generator().manual_seed(0)
    p = 150
    scale = 10 ** torch.linspace(-1.5, 1.5, p, dtype=torch.float64)
    h = symmetric(rng, p, "spd") * scale * scale[:, None]
    v = torch.randn(p, generator=rng, dtype=torch.float64)
    state = torch.get_rng_state()

    def run(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return solve(name, h, v, preconditioner="jacobi", generator=generator, tol=1e-6)

    assert run(0).info.converged
    assert torch.equal(run(0).value, run(0).value)
    assert torch.equal(run(None).value, run(None).value)
    assert not torch.equal(run(0).value, run(1).value)
    assert torch.equal(torch.get_rng_state(), state)
    plain = solve(name, h, v, tol=1e-6, max_iter=1000).info
    assert 3 * run(0).info.iterations < plain.iterations


@pytest.mark.parametrize("name", ITERATIVE)
def test_a_preconditioner_is_a_constant(name):
    """Derivatives do not see it; one that vmap maps is refused."""
    h, v = D124.double(), V124.double()
    f = getattr(solvers, name)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        got = jacobian(lambda u: f(h, u, preconditioner=lambda w: w / (1 + u**2), tol=1e-13).value)(v)
        torch.testing.assert_close(got, torch.linalg.inv(h))
    rows = torch.stack([v, -v, 3 * v])
    got = torch.func.vmap(lambda u: f(h, u, preconditioner=lambda w: w / v, tol=1e-13).value)(rows)
    torch.testing.assert_close(got, rows @ torch.linalg.inv(h))
    with pytest.raises(ValueError, match=r"preconditioner: expected the same function for all that vmap maps"):
        torch.func.vmap(lambda u: f(h, u, preconditioner=lambda w: w * u**2).value)(rows)


# ---------------------------------------------------------------------------------------------------------------------
# minimal residuals


@pytest.mark.fault("F3")
def test_minres_on_indefinite_curvature():
    """Where p'Hp is 0 at the first step, or everything is negative, minres has the exact answer."""
    h, v = torch.diag(torch.tensor([1.0, -1.0])), torch.ones(2)
    for matrix, want in (
        (h, [1, -1]),
        (h + 2 * torch.eye(2), [1 / 3, 1]),
        (torch.diag(torch.tensor([-1.0, -2.0])), [-1, -0.5]),
    ):
        u, info = solve("minres", matrix, v)
        torch.testing.assert_close(u, torch.tensor(want, dtype=torch.float32))
        assert info.status == 0
        assert info.iterations <= 2


def test_block_never_denies_negative_curvature():
    """Solved or not, in however large a space and with v^T A v > 0 throughout, negative curvature in it is told."""
    values = torch.cat([torch.tensor([-0.07]), torch.logspace(-2, 1, 599)]).double()
    h, rng = spectral(0, 600, values)
    b = torch.randn(8, 600, generator=rng, dtype=torch.float64)
    u, info = solve("cg", h, b, tol=1e-5, block=True)
    assert info.converged.all()
    assert ((b - u @ h).norm(dim=-1) <= 1.01e-5 * b.norm(dim=-1)).all()
    least = re.fullmatch(r"negative curvature: smallest eigenvalue at most (-[0-9.]+): .*", info.reason)
    assert least
    assert -0.0701 < float(least[1]) < -0.0699
    info = solve("auto", h, b, tol=1e-5).info
    assert info.converged.all()
    assert info.method == "block minres"
    assert f"negative curvature: smallest eigenvalue at most {least[1]}" in info.reason
    assert " no negative curvature" not in info.reason


def test_minres_cut_short_says_so():
    """A limit that ends the solve is named, with its cure, for the rows it left and for no other."""
    h, v = torch.diag(torch.linspace(-1, 3, 50).double()), torch.ones(2, 50).double()
    v[1, 1:] = 0  # an eigenvector: solved in one step
    info = solve("minres", h, v, max_iter=3).info
    assert info.status.tolist() == [Status.MAX_ITER, Status.CONVERGED]
    assert info.iterations[0] == 3
    assert re.match(r"ran out of steps .* raise max_iter", info.messages()[0])
    assert info.messages()[1].startswith("converged")
    assert solve("minres", h, v, max_iter=200).info.converged.all()


@given(quadratics(kind="indefinite"))
def test_minres_equals_dense_algebra_on_indefinite_systems(problem):
    want = torch.linalg.solve(problem.hessian, flat(problem.rhs, batch=True).T).T
    u, info = solvers.minres(
        lambda v: unflat(flat(v, batch=True) @ problem.hessian, problem.params), problem.rhs, batched=True, tol=1e-12
    )
    torch.testing.assert_close(flat(u, batch=True), want, rtol=1e-8, atol=1e-9)
    assert (info.status == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(p=st.integers(1, 30), seed=st.integers(0, 2**31), exponent=st.floats(-25, 25), scale=st.floats(-8, 8))
def test_minres_on_singular_systems(dtype, p, seed, exponent, scale):
    """v in the range: the solution of least norm. v outside: the least-squares solution of least norm, and a flag.

    Signs alternate, so that the null space is in the middle of the spectrum; v and the matrix have any scale.
    """
    values = torch.linspace(1, 3, p, dtype=torch.float64) * (1 - 2 * (torch.arange(p) % 2))
    values[: (p + 2) // 3] = 0
    h, rng = spectral(seed, p, values)
    b = torch.randn(3, p, generator=rng, dtype=torch.float64)
    b[1], b[2] = b[1] @ h, 0
    matrix, rows = (h * 10**scale).to(dtype), (b * 10**exponent).to(dtype)
    u, info = solve("minres", matrix, rows)
    want = b @ torch.linalg.pinv(h, hermitian=True, rtol=1e-9) * 10 ** (exponent - scale)
    error = torch.linalg.vector_norm(u.double() - want, dim=1)
    accuracy = 20 * torch.finfo(dtype).eps ** 0.5
    assert (error <= accuracy * torch.linalg.vector_norm(b, dim=1) * 10 ** (exponent - scale)).all()
    assert info.status.tolist() == [Status.SINGULAR, 0, 0]
    assert info.converged.tolist() == [False, True, True]
    assert "v is not in the range" in info.reason
    left = rows[0].double() / 10**exponent - h @ (u[0].double() / 10 ** (exponent - scale))
    torch.testing.assert_close(info.residual[0].double(), left.norm() / b[0].norm(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(p=st.integers(2, 30), seed=st.integers(0, 2**31), decades=st.floats(0, 8))
def test_minres_where_no_answer_is_good(dtype, p, seed, decades):
    """Singular, badly conditioned, v outside the range: the residual told is that of u, and u is never worse than 0."""
    rng = torch.Generator().manual_seed(seed)
    values = 10 ** (-decades * torch.rand(p, generator=rng, dtype=torch.float64)) * (1 - 2 * (torch.arange(p) % 2))
    values[: (p + 2) // 3] = 0
    h = spectral(seed, p, values)[0].to(dtype)
    b = torch.randn(2, p, generator=rng, dtype=torch.float64).to(dtype)
    u, info = solve("minres", h, b)
    length = torch.linalg.vector_norm(b.double(), dim=1)
    true = torch.linalg.vector_norm(b.double() - u.double() @ h.double(), dim=1) / length
    noise = torch.finfo(dtype).eps * (1 + torch.linalg.vector_norm(u.double(), dim=1) * h.abs().max() / length)
    assert ((info.residual - true).abs() <= 1e-3 * true + 20 * noise).all()
    assert (info.residual <= 1.02).all()
    assert ((info.status == Status.SINGULAR) | (info.status == Status.STAGNATED) | (info.status == 1)).all()


@given(st.integers(2, 12), st.integers(0, 2**31))
def test_minres_takes_small_curvature_for_what_it_is(p, seed):
    """An eigenvalue of 1e-5, along which most of v lies, is no null space; one of 1e-20 is, to rounding."""
    values = torch.linspace(1, 3, p, dtype=torch.float64)
    for least, status in ((1e-5, 0), (1e-20, Status.SINGULAR)):
        values[0] = least
        h, rng = spectral(seed, p, values)
        b = torch.linalg.eigh(h).eigenvectors[:, 0] + 0.1 * torch.randn(p, generator=rng, dtype=torch.float64)
        assert solve("minres", h, b).info.status == status


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_minres_ends_with_the_krylov_space(p, seed):
    """Three different eigenvalues: three steps, whatever p."""
    h, rng = spectral(seed, p, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)[torch.arange(p) % 3])
    info = solve("minres", h, torch.randn(4, p, generator=rng, dtype=torch.float64)).info
    assert (info.status == 0).all()
    assert (info.iterations <= 3).all()


def test_minres_says_when_it_stagnates():
    """A product that is not symmetric: the recursion goes down, the truth does not, and minres says so."""
    rng = torch.Generator().manual_seed(0)
    u, info = solve("minres", torch.randn(20, 20, generator=rng), torch.randn(3, 20, generator=rng))
    assert u.isfinite().all()
    assert (info.residual <= 1).all()
    assert not info.converged.any()
    assert set(info.status.tolist()) <= {Status.STAGNATED, Status.MAX_ITER}


# ---------------------------------------------------------------------------------------------------------------------
# explicit


@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from(["spd", "indefinite"]))
def test_factor_kinds(p, seed, kind):
    rng = torch.Generator().manual_seed(seed)
    h = symmetric(rng, p, kind)
    layout = Layout.of(torch.zeros(p))
    factor = factorise(h, layout, 1e-16)
    assert factor.kind == ("cholesky" if kind == "spd" else "ldl")
    b = torch.randn(3, p, generator=rng, dtype=torch.float64)
    raw = factor.solve(b, 1e-7, 2e-16)
    torch.testing.assert_close(raw.value, torch.linalg.solve(h, b.T).T, rtol=1e-9, atol=1e-10)


@given(st.integers(2, 10), st.integers(0, 2**31))
def test_explicit_on_singular_curvature(p, seed):
    """Least-norm answer, flagged 3 with the lambda that would do; never garbage along the null space."""
    rng = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(p, p, generator=rng, dtype=torch.float64)).Q
    values = torch.linspace(1, 3, p, dtype=torch.float64)
    values[0] = 0
    h = (basis * values) @ basis.T
    b = torch.randn(p, generator=rng, dtype=torch.float64)
    u, info = solve("explicit", (h + h.T) / 2, b)
    torch.testing.assert_close(u, torch.linalg.pinv(h, hermitian=True) @ b, rtol=1e-8, atol=1e-9)
    assert info.status == Status.SINGULAR
    assert not info.converged
    assert "regularization larger by" in info.reason
    assert solve("explicit", (h + h.T) / 2, torch.zeros(p, dtype=torch.float64)).info.status == 0
    inside = solve("explicit", (h + h.T) / 2, h @ b)
    assert inside.info.status == Status.SINGULAR
    assert inside.info.converged


# ---------------------------------------------------------------------------------------------------------------------
# LiSSA


@pytest.mark.fault("F10")
def test_lissa_with_too_small_a_scale():
    """The series grew to 1e36 and then NaN without a word: flagged, the last finite value, and scaling named."""
    ten, one = torch.tensor([[10.0]]), torch.ones(1)
    u, info = solve("lissa", ten, one, scaling=1.0, recursion_depth=5)
    assert u.item() == -53144
    assert info.status == Status.DIVERGED
    assert not info.converged
    assert "raise scaling" in info.messages()[0]
    assert "scaling 1 is too small" in info.messages()[0]
    u, info = solve("lissa", ten, one, scaling=1.0, recursion_depth=50)
    assert u.isfinite().all()
    assert info.status == Status.DIVERGED
    u, info = solve("lissa", ten, one, scaling=10.0, recursion_depth=1)
    torch.testing.assert_close(u, torch.tensor([0.1]))
    assert info.converged


def per_sample(x):
    """Curvature of the mean of 1/2 x_i t^2 over a batch."""
    return lambda v, index: x[index].mean() * v


@pytest.mark.fault("F11")
def test_lissa_needs_the_largest_batch_curvature():
    """Scale 6 is enough for the mean curvature 10, not for the batch with curvature 20."""
    x = torch.tensor([0.0, 20.0])
    knobs = {"num_samples": 2, "generator": torch.Generator().manual_seed(0)}
    u, info = solvers.lissa(per_sample(x), torch.ones(1), scaling=6.0, recursion_depth=200, **knobs)
    assert u.isfinite().all()
    assert info.status == Status.DIVERGED
    u, info = solvers.lissa(per_sample(x), torch.ones(1), scaling="auto", recursion_depth=500, num_repeat=800, **knobs)
    assert info.status != Status.DIVERGED
    assert abs(u.item() - 0.1) < 0.02


@pytest.mark.fault("F12")
def test_lissa_truncation_is_told():
    """The truncation bias went unsaid: the value is (1 - (1 - h/s)^(T+1)) / h, and the residual says how far it got."""
    u, info = solve("lissa", torch.tensor([[0.01]]), torch.ones(1), scaling=50.0, recursion_depth=5000)
    left = (1 - 0.01 / 50) ** 5001
    assert abs(u.item() - (1 - left) / 0.01) < 0.01
    assert abs(info.residual.item() - 0.368) < 1e-3
    assert not info.converged
    assert info.status == Status.MAX_ITER


@pytest.mark.fault("F16")
def test_lissa_stops_by_norm():
    """The early stop divided by each coordinate, so that a coordinate of 0 made it NaN and it never stopped."""
    calls = []

    def matvec(v):
        calls.append(1)
        return v

    u, info = solvers.lissa(matvec, torch.tensor([1.0, 0.0]), scaling=1.0, recursion_depth=1000, tol=1e-6)
    assert torch.equal(u, torch.tensor([1.0, 0.0]))
    assert info.iterations == 1
    assert len(calls) < 5


@pytest.mark.fault("F3")
@pytest.mark.parametrize("depth", [1, 20, 100, 3000])
@pytest.mark.parametrize("damping", [0.0, 0.03])
def test_lissa_on_negative_curvature_is_flagged(depth, damping):
    """No scaling and no depth make the series converge; it said so of neither, and told to raise both."""
    h = torch.diag(torch.tensor([1.0, 0.5, -0.1]))
    u, info = solve("lissa", h, torch.ones(2, 3), scaling=2.0, recursion_depth=depth, damping=damping)
    assert u.isfinite().all()
    assert (info.status == Status.NEGATIVE_CURVATURE).all()
    least, enough = told_eigenvalue(info.reason)
    assert abs(least - (damping * 2 - 0.1)) < 1e-4
    assert "scaling" not in info.reason
    assert "add regularization" in info.messages()[0]
    b = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    info = solve("lissa", h, b, scaling=2.0, recursion_depth=depth, damping=damping).info  # the first row is solvable
    good = [] if depth < 100 else [0]
    assert info.converged.nonzero().flatten().tolist() == good
    h = h + enough * torch.eye(3)
    info = solve("lissa", h, torch.ones(3), scaling=2.0, recursion_depth=depth, damping=damping).info
    assert info.status in (Status.MAX_ITER, Status.CONVERGED)
    assert "eigenvalue" not in info.reason


@pytest.mark.parametrize("depth", [3, 8, 20, 200])
@pytest.mark.parametrize("factor", [1.02, 1.3, 3.0])
def test_lissa_slow_divergence_is_flagged(depth, factor):
    """With all samples in a step, growth of the steps is enough to tell."""
    info = solve("lissa", torch.tensor([[1 + factor]]), torch.ones(1), scaling=1.0, recursion_depth=depth).info
    assert info.status == Status.DIVERGED


def noisy(seed, p=4, n=12):
    """Curvature of samples, and of their mean."""
    rng = torch.Generator().manual_seed(seed)
    samples = torch.stack([symmetric(rng, p, "spd") for _ in range(n)]) / 5
    return samples, samples.mean(0), torch.randn(3, p, generator=rng, dtype=torch.float64)


def test_lissa_tells_its_standard_error():
    """Over many seeds, the error of the mean over repeats has the size that each run tells, and falls as 1/sqrt(R)."""
    samples, mean, b = noisy(0)
    exact = torch.linalg.solve(mean, b.T).T
    told = {}
    for repeats, seeds in ((4, 50), (16, 25), (64, 12)):
        errors, variances = [], []
        for seed in range(seeds):
            u, info = solvers.lissa(
                lambda v, index: v @ samples[index].mean(0), b, num_samples=12, batch_size=2, num_repeat=repeats,
                recursion_depth=60, scaling=1.5, batched=True, generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            assert info.standard_error.shape == (3,)
            errors.append((u - exact).square().sum(-1))
            variances.append((info.standard_error * torch.linalg.vector_norm(u, dim=-1)).square())
        told[repeats] = torch.stack(variances).mean(0)
        ratio = torch.stack(errors).mean(0) / told[repeats]
        assert (ratio > 0.5).all()
        assert (ratio < 1.8).all()
    for repeats in (16, 64):
        scaled = told[repeats] * repeats / (4 * told[4])
        assert (scaled > 0.75).all()
        assert (scaled < 1.33).all()


@pytest.mark.parametrize("batched", [False, True])
def test_a_standard_error_that_is_not_known_is_nan(batched):
    samples, mean, b = noisy(1)
    b = torch.cat([b, 0 * b[:1], b[:1] * torch.nan]) if batched else b[0]
    knobs = {"num_samples": 12, "batch_size": 2, "recursion_depth": 30, "batched": batched}

    def run(**more):
        f = lambda v, index: v @ samples[index].mean(0)  # noqa: E731
        return solvers.lissa(f, b, **{**knobs, "scaling": 1.5, **more}).info.standard_error

    error = run(num_repeat=3)
    assert error.shape == b.shape[:-1]
    assert error.isfinite().tolist() == ([True] * 4 + [False] if batched else True)
    assert not batched or error[3] == 0
    for unknown in (run(num_repeat=1), run(num_repeat=3, scaling=0.01), run(num_repeat=3, batch_size=12)):
        assert (unknown.isnan() | (unknown == 0)).all()
        assert unknown.isnan().any()
    for name in ("cg", "minres", "explicit"):
        assert solve(name, mean, b).info.standard_error.isnan().all()
    vector = noisy(1)[2]

    def through(v):
        return solvers.lissa(
            lambda v, index: v @ samples[index].mean(0), v, num_samples=12, num_repeat=4, scaling=1.5,
            recursion_depth=20, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

    one = torch.stack([through(v).info.standard_error for v in vector])
    assert (one > 0).all()
    torch.testing.assert_close(torch.func.vmap(lambda v: through(v).info.standard_error)(vector), one)
    _, slope = torch.func.jvp(lambda v: through(v).value, (vector[0],), (vector[1],))
    torch.testing.assert_close(slope, through(vector[1]).value)
    torch.func.grad(lambda v: through(v).value.sum())(vector[0])


def test_info_can_be_made_by_hand():
    """Four facts in order; the rest by name."""
    facts = torch.tensor([True]), torch.tensor([0]), torch.tensor([3]), torch.tensor([1e-9])
    info = solvers.SolveInfo(*facts, method="mine", reason="none")
    assert (info.method, info.reason) == ("mine", "none")
    assert info.standard_error.shape == (1,)
    assert info.standard_error.isnan().all()


def test_same_seed_same_bits():
    x = torch.rand(20, generator=torch.Generator().manual_seed(5))
    state = torch.get_rng_state()

    def run(seed, k=1):
        generator = torch.Generator().manual_seed(seed)
        b = torch.ones(k, 1)
        return solvers.lissa(
            per_sample(x), b, num_samples=20, batch_size=3, num_repeat=4, recursion_depth=50, scaling="auto",
            generator=generator, batched=True,
        ).value  # fmt: skip

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert (run(0, k=3) == run(0)).all()  # all right-hand sides share the batches
    assert torch.equal(torch.get_rng_state(), state)


@given(st.integers(1, 12), st.data())
def test_batches_without_replacement(n, data):
    b = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**31))
    drawn = draw_batches(n, b, (40, 2), torch.Generator().manual_seed(seed))
    assert drawn.shape == (40, 2, b)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < n
    assert all(len(set(batch)) == b for batch in drawn.reshape(-1, b).tolist())


@pytest.mark.parametrize(("n", "b"), [(5, 2), (5, 3), (6, 1), (4, 4)])
def test_every_batch_is_equally_likely(n, b):
    drawn = draw_batches(n, b, (20000,), torch.Generator().manual_seed(0)).sort(dim=1)[0]
    _, counts = torch.unique(drawn, dim=0, return_counts=True)
    expected = torch.combinations(torch.arange(n), b).shape[0]
    assert len(counts) == expected
    share = counts / 20000
    assert (share - 1 / expected).abs().max() < 5 * (1 / expected / 20000) ** 0.5


# ---------------------------------------------------------------------------------------------------------------------
# the door


def test_trees_of_mixed_dtypes():
    """Computed in the widest dtype, returned per leaf."""
    b = {"x": torch.ones(2, dtype=torch.float32), "y": torch.ones((), dtype=torch.float64)}
    u, info = solvers.cg(lambda v: {"y": 4 * v["y"], "x": 2 * v["x"]}, b)
    assert u["x"].dtype == torch.float32
    assert u["y"].dtype == torch.float64
    assert list(u) == ["x", "y"]
    torch.testing.assert_close(u["x"], torch.full((2,), 0.5))
    assert info.residual.dtype == torch.float64
    b = torch.ones(3, dtype=torch.bfloat16)
    u, info = solvers.cg(lambda v: 2 * v, b)
    assert torch.equal(u, b / 2)
    assert info.converged


@pytest.mark.parametrize("name", NAMES)
def test_empty_trees(name):
    for b in ({}, {"a": torch.zeros(0)}, torch.zeros(0)):
        u, info = getattr(solvers, name.split()[0])(lambda v: v, b, **NAMES[name])
        assert info.converged
        assert (u == {}) if b == {} else True


def test_info_reads_well():
    info = solve("cg", D124, torch.stack([V124, torch.full((3,), float("nan"))])).info
    texts = info.messages()
    assert texts[0].startswith("converged")
    assert texts[1].startswith("non-finite")
    assert len(solve("cg", D124, V124).info.messages()) == 1
    leaves, spec = torch.utils._pytree.tree_flatten(info)
    assert len(leaves) == 5
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert again.method == "cg"


def test_warnings_come_from_the_product_forms_only():
    """The solvers return facts, so they do not warn; the inverse products do, unless has_aux asks for the facts."""
    h = hilbert(6)
    solve("cg", h, h[0], max_iter=2)
    loss = lambda t: 0.5 * t @ h @ t  # noqa: E731
    with pytest.warns(ConvergenceWarning, match=r"cg: 1 of 2 right-hand sides not solved; worst .*tol"):
        ihvp_at_x_cg(loss, h[0], max_iter=2)(torch.stack([h[0], 0 * h[0]]))


@pytest.mark.parametrize("name", ["cg", "explicit", "minres"])
@pytest.mark.parametrize(("curvature", "v"), [(1e-10, 1e30), (1e25, 1e-30)])
def test_an_answer_beyond_the_dtype_is_flagged(name, curvature, v):
    """The unit problem is solved, but u overflows or vanishes when it is scaled back."""
    u, info = solve(name, torch.eye(2) * curvature, torch.full((2,), v))
    assert not info.converged
    assert info.status == Status.NONFINITE
    assert u.isnan().all()
    u, info = solve(name, torch.eye(2, dtype=torch.float16) * 1e-3, torch.full((2,), 3e4, dtype=torch.float16))
    assert info.status == Status.NONFINITE


@pytest.mark.parametrize("name", ["cg", "explicit", "minres"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_residual_is_that_of_the_rounded_answer(name, dtype):
    h, b = torch.diag(torch.tensor([3.0, 7.0], dtype=dtype)), torch.ones(2, dtype=dtype)
    u, info = solve(name, h, b)
    true = torch.linalg.vector_norm(b.float() - (h @ u).float()) / b.float().norm()
    torch.testing.assert_close(info.residual, true, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_that_are_not_symmetric_are_refused(name):
    h = torch.tensor([[2.0, 1.0], [0.0, 2.0]])
    with pytest.raises(ValueError, match=r"matvec: expected a symmetric matrix, got one that differs .*Fix:"):
        getattr(solvers, name.split()[0])(h, torch.ones(2), **NAMES[name])
    with pytest.raises(ValueError, match="expected a symmetric matrix"):
        solvers.explicit(lambda v: h @ v, torch.ones(2))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_lissa_auto_scaling_at_any_scale(scale):
    u = solvers.lissa(lambda v: scale * v, torch.full((2,), scale), scaling="auto", recursion_depth=50).value
    torch.testing.assert_close(u, torch.ones(2))


def test_lissa_auto_scaling_without_curvature():
    u, info = solvers.lissa(lambda v: 0 * v, torch.ones(2), scaling="auto", recursion_depth=50)
    assert info.status == Status.SINGULAR
    assert not info.converged
    assert u.isfinite().all()


def test_lissa_auto_scaling_sees_every_sample():
    """With batches that do not divide the data, the samples left over may be those that matter."""
    x = torch.ones(7)
    x[3] = 100.0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        knobs = {"num_samples": 7, "batch_size": 4, "scaling": "auto", "recursion_depth": 200, "generator": generator}
        info = solvers.lissa(per_sample(x), torch.ones(1), **knobs).info
        assert info.status != Status.DIVERGED


def test_lissa_with_all_samples_in_a_batch():
    f = lambda v, index: v * torch.tensor([1.0, 3.0])[index].mean()  # noqa: E731
    u = solvers.lissa(f, torch.ones(2), num_samples=2, batch_size=2, scaling=4.0, recursion_depth=100).value
    torch.testing.assert_close(u, torch.full((2,), 0.5))


# ---------------------------------------------------------------------------------------------------------------------
# products that hold a graph


def held_products(w):
    """Name -> v -> H v, all that depends on w done beforehand."""

    def loss(w):
        return torch.tanh(w).square().sum() + w.prod() + (w**4).sum()

    pull = torch.func.vjp(torch.func.grad(loss), w)[1]
    bound = hvp_at_x(loss, (w,))
    leaf = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    hessian = torch.func.hessian(loss)(w)
    return hessian, {
        "vjp": lambda v: pull(v)[0],
        "bound": bound,
        "closure": lambda v: bound(v),
        "autograd": lambda v: torch.autograd.grad(slope, leaf, v, retain_graph=True)[0],
    }


@pytest.mark.parametrize("product", ["vjp", "bound", "closure", "autograd"])
@pytest.mark.parametrize("name", ["cg", "minres", "explicit"])
def test_a_matvec_that_holds_a_graph(name, product):
    """What the graph of a held vjp was made of is no tensor to exchange: its product would be zero."""
    w, v = torch.tensor([0.5, -1.0, 1.5, 0.7]).double(), torch.tensor([1.0, 2.0, -1.0, 0.5]).double()
    hessian, products = held_products(w)
    u, info = getattr(solvers, name)(products[product], v)
    torch.testing.assert_close(u, torch.linalg.solve(hessian, v), rtol=1e-6, atol=1e-8)
    assert info.converged


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_graph_inside_a_transform_is_refused(transform):
    """A vjp made inside a transform hides what it was made of: said, where an answer would be wrong."""

    def f(w):
        pull = torch.func.vjp(torch.func.grad(lambda w: (w**4).sum()), w)[1]
        return solvers.minres(lambda v: pull(v)[0], torch.ones(4).double()).value.sum()

    w = torch.tensor([0.5, -1.0, 1.5, 0.7]).double()
    with pytest.raises(RuntimeError, match=r"hides a tensor of a running torch.func transform"):
        torch.func.grad(f)(w) if transform == "grad" else torch.func.vmap(f)(torch.stack([w, w]))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("second", [2.0, -1.0])
def test_auto_without_room_for_a_basis(monkeypatch, batched, second):
    """Short recurrences: CG, and MINRES for the rows on which p'Ap vanished."""
    monkeypatch.setattr(solvers, "fits", lambda *_: False)
    diagonal = torch.tensor([1.0, second] * 4)
    b = torch.ones(8).expand(3, 8).clone() if batched else torch.ones(8)
    u, info = solvers.auto(lambda v: v * diagonal, b, batched=batched)
    assert info.method == ("cg" if second > 0 else "cg, then minres")
    assert info.converged.all()
    torch.testing.assert_close(u * diagonal, b)
