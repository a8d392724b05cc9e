"""The inverse on a Krylov space, against dense float64 algebra on the space that it says it has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dattrifunc import ConvergenceWarning, fvp_at_x, ihvp_arnoldi, ihvp_at_x_arnoldi, solvers
from dattrifunc.solvers import Status
from dattrifunc.solvers.krylov import Projection

FORMS = {
    "bound": lambda loss, x, knobs: ihvp_at_x_arnoldi(loss, *x, **knobs),
    "unbound": lambda loss, x, knobs: lambda v: ihvp_arnoldi(loss, **knobs)(x, v),
}
INDEFINITE = torch.tensor([3.0, -2.0, 0.5])  # of F21 and F22


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


def half(h):
    return lambda t: 0.5 * t @ h.to(t.dtype) @ t


def divide(h, lam, b):
    return b @ torch.linalg.inv(h + lam * torch.eye(len(h), dtype=torch.float64))


def operator(h, **knobs):
    """What the solver does to every unit vector."""
    return solvers.arnoldi(h, torch.eye(len(h), dtype=h.dtype), batched=True, **knobs).value.T


# ---------------------------------------------------------------------------------------------------------------------
# faults


@pytest.mark.fault("F19")
@pytest.mark.parametrize("form", FORMS)
def test_repeated_eigenvalues(form):
    """The Krylov space of a random start is tiny, and v is not in it: it goes on with fresh directions."""
    u = FORMS[form](lambda t: t @ t, (torch.zeros(3),), {})(torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(u, torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.fault("F19", "F20")
@pytest.mark.parametrize(
    "values", [torch.arange(1.0, 21.0), torch.cat([torch.ones(15), torch.arange(16.0, 21.0)])], ids=["distinct", "many"]
)
@pytest.mark.parametrize("seed", range(4))
def test_all_digits_of_float32(values, seed):
    """Without a second Gram-Schmidt pass 0.11 of the answer was wrong, and with repeated eigenvalues 7e5 of it."""
    h, b = spectral(seed, values), normal(seed + 10, 20)
    want = divide(h, 0.0, b)
    u, info = solvers.arnoldi(h.float(), b.float(), max_iter=20, generator=seeded(seed))
    assert torch.linalg.vector_norm(u.double() - want) <= 5e-6 * torch.linalg.vector_norm(want)
    assert info.converged
    assert info.iterations == 20


@pytest.mark.fault("F21")
@pytest.mark.parametrize("form", FORMS)
def test_negative_curvature_keeps_its_sign(form):
    """Rows projected by 1 / sqrt(eigenvalue) were NaN: g' H^-1 g = 1/3 - 1/2 + 2, and the reason tells of it."""
    g = torch.ones(3)
    u, info = FORMS[form](half(torch.diag(INDEFINITE)), (g,), {"has_aux": True})(g)
    torch.testing.assert_close(g @ u, torch.tensor(1 / 3 - 1 / 2 + 2))
    assert info.converged
    assert info.reason == "negative curvature, inverted with its sign: smallest Ritz value -2"


@pytest.mark.fault("F22")
def test_one_basis_for_all_calls():
    """The bound form did the whole iteration again at every call, from another start: two equal calls differed."""
    calls = []

    def product(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):  # noqa: ARG001
        def f(v):
            calls.append(1)
            return INDEFINITE * v

        return f

    state, g = torch.get_rng_state(), torch.ones(3)
    solve = ihvp_at_x_arnoldi(half(torch.diag(INDEFINITE)), g, top_k=1, product=product, generator=seeded(0))
    assert len(calls) == 3
    first = solve(g)
    assert torch.equal(first, solve(g))
    assert len(calls) == 3
    torch.testing.assert_close(first, torch.tensor([1 / 3, 0.0, 0.0]))
    again = ihvp_at_x_arnoldi(half(torch.diag(INDEFINITE)), g, top_k=1, product=product, generator=seeded(0))
    assert torch.equal(first, again(g))
    told = ihvp_at_x_arnoldi(half(torch.diag(INDEFINITE)), g, top_k=1, product=product, has_aux=True)
    assert len(calls) == 9
    told(torch.stack([g, -g]))
    assert len(calls) == 10
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------------------------------
# values


@given(
    p=st.integers(2, 12),
    m=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    lam=st.sampled_from([0.0, 0.3, 5.0]),
    scale=st.sampled_from([1.0, 1e-25, 1e25]),
)
def test_low_rank_is_the_projection_on_a_krylov_space(p, m, seed, lam, scale):
    """u = V (V'HV + lambda)^-1 V'b + (I - VV') b / lambda, V the space, and H leads out of it by one direction only."""
    h = spectral(seed, 0.1 + torch.rand(p, generator=seeded(seed)).double()) * scale
    m, lam = min(m, p), lam * scale
    knobs = {"max_iter": m, "generator": seeded(seed)}
    basis, size, _ = torch.linalg.svd(operator(h, **knobs) * scale)
    assert (size[m:] < 1e-12).all()
    v = basis[:, :m]
    assert torch.linalg.matrix_rank(torch.cat([v, h @ v / scale], 1), tol=1e-8) <= m + 1
    inside = v @ torch.linalg.inv(v.T @ h @ v + lam * torch.eye(m, dtype=torch.float64)) @ v.T
    outside = (torch.eye(p, dtype=torch.float64) - v @ v.T) / lam if lam else 0
    knobs = {"max_iter": m, "regularization": lam, "generator": seeded(seed)}
    torch.testing.assert_close(operator(h, **knobs) * scale, (inside + outside) * scale, rtol=1e-6, atol=1e-7)
    b = normal(seed, 4, p)
    u, info = solvers.arnoldi(h, b, batched=True, **{**knobs, "generator": seeded(seed)})
    true = torch.linalg.vector_norm(b - u @ h - lam * u, dim=1) / torch.linalg.vector_norm(b, dim=1)
    torch.testing.assert_close(info.residual, true, rtol=1e-6, atol=1e-10)
    assert (info.status == (0 if m == p else Status.MAX_ITER)).all() or (true < 1e-6).any()
    assert m == p or f"{m} of {p} directions kept" in info.reason or (true < 1e-6).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [0.0, 0.5])
@pytest.mark.parametrize("top_k", [1, 3, 6, 9])
def test_the_largest_eigenvalues_are_kept(top_k, lam, dtype):
    """By size, of both signs; with lambda the others count as 0, without they are dropped, and the status says so."""
    values = torch.tensor([9.0, -8.0, 7.0, -6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    h, b = spectral(1, values), normal(2, 3, 9)
    found, vectors = torch.linalg.eigh(h)
    order = found.abs().argsort(descending=True)
    kept, dropped = order[:top_k], order[top_k:]
    factors = torch.zeros(9).double()
    factors[kept] = 1 / (found[kept] + lam)
    factors[dropped] = 1 / lam if lam else 0.0
    u, info = solvers.arnoldi(h.to(dtype), b.to(dtype), batched=True, top_k=top_k, regularization=lam)
    torch.testing.assert_close(u.double(), b @ (vectors * factors) @ vectors.T, rtol=1e-4, atol=1e-5)
    assert (info.status == (0 if top_k == 9 else Status.NEGATIVE_CURVATURE)).all()
    assert "smallest Ritz value -8" in info.reason
    assert top_k == 9 or "raise max_iter and top_k, or use ihvp_minres" in info.reason
    info = solvers.arnoldi(h.to(dtype), b.to(dtype), batched=True, top_k=top_k, regularization=8.5).info
    assert (info.status == (0 if top_k == 9 else Status.MAX_ITER)).all()  # then C + lambda I is definite
    assert top_k == 9 or "or use ihvp_cg" in info.reason
    assert top_k == 9 or f"{top_k} of 9 directions kept" in info.reason
    loose = solvers.arnoldi(h.to(dtype), b.to(dtype), batched=True, top_k=top_k, regularization=lam, tol=0.1).info
    assert torch.equal(loose.converged, loose.residual <= 0.1)


@pytest.mark.parametrize("form", FORMS)
def test_directions_without_curvature(form):
    """Dropped and counted, or divided by lambda; a v outside the range is flagged, one inside is solved."""
    h = spectral(3, torch.tensor([4.0, 3.0, 2.0, 0.0, 0.0]))
    t, v = normal(4, 5), normal(5, 5)
    inside = h @ v
    solve = FORMS[form](half(h), (t,), {"has_aux": True})
    u, info = solve(torch.stack([v, inside, 0 * v, v * float("nan")]))
    torch.testing.assert_close(u[:2], torch.stack([v, inside]) @ torch.linalg.pinv(h, rtol=1e-8), rtol=1e-8, atol=1e-8)
    assert info.status.tolist() == [Status.SINGULAR, 0, 0, Status.NONFINITE]
    assert "2 null directions dropped" in info.reason
    assert (u[2] == 0).all()
    assert u[3].isnan().all()
    with pytest.warns(ConvergenceWarning, match=r"arnoldi: 1 of 1 .*singular.*2 null directions dropped; no curvature"):
        FORMS[form](half(h), (t,), {})(v)
    FORMS[form](half(h), (t,), {})(inside)  # no warning
    u, info = FORMS[form](half(h), (t,), {"regularization": 0.5, "has_aux": True})(v)
    torch.testing.assert_close(u, divide(h, 0.5, v), rtol=1e-8, atol=1e-8)
    assert info.converged
    assert info.reason == "2 null directions divided by lambda"
    u, info = FORMS[form](half(h), (t,), {"regularization": 1e-30, "has_aux": True})(v)  # no more than 0
    torch.testing.assert_close(u, v @ torch.linalg.pinv(h, rtol=1e-8), rtol=1e-8, atol=1e-8)
    assert info.status == Status.SINGULAR
    u, info = FORMS[form](half(0 * h), (t,), {"has_aux": True})(v)
    assert (u == 0).all()
    assert info.status == Status.SINGULAR


@pytest.mark.parametrize("seed", range(12))
def test_an_eigenvalue_of_minus_lambda(seed):
    """C + lambda I is singular though C is not: that direction is left out, and the status says so."""
    h = spectral(seed, torch.tensor([3.0, -2.0, 0.5]))
    v = normal(1, 3)
    u, info = solvers.arnoldi(h, v, regularization=2.0)
    shifted = h + 2 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(u, v @ torch.linalg.pinv(shifted, rtol=1e-8), rtol=1e-8, atol=1e-8)
    assert info.status == Status.SINGULAR
    assert "curvature" in info.reason


def test_ritz_values_near_0_of_indefinite_curvature_are_left_out():
    """Half-found eigenvalues of both signs average to any number near 0, whose inverse would be all there is of u."""
    values = torch.cat([torch.linspace(1, 2, 100), -torch.linspace(1, 2, 100)])
    h, v, left_out = spectral(0, values), normal(1, 200), 0
    for seed in range(20):
        u, info = solvers.arnoldi(h, v, max_iter=9, generator=seeded(seed))
        assert torch.linalg.vector_norm(u) < 2 * torch.linalg.vector_norm(v)
        left_out += "left out" in info.reason
    assert left_out > 10


@pytest.mark.parametrize("form", FORMS)
def test_curvature_that_is_not_finite_is_told(form):
    def loss(t):
        return (t * torch.tensor([1.0, 0.0])).square().sum() + torch.log(t[1]) ** 2

    t = torch.tensor([1.0, 0.0])
    with pytest.warns(ConvergenceWarning, match=r"arnoldi: 1 of 1 .*non-finite"):
        assert FORMS[form](loss, (t,), {"regularization": 0.5})(t).isnan().all()
    each = torch.func.vmap(lambda s: ihvp_arnoldi(loss, regularization=0.5, has_aux=True)((s,), t))
    u, info = each(torch.stack([t, t + 1]))
    assert info.status.tolist() == [Status.NONFINITE, 0]
    assert u[0].isnan().all()
    torch.testing.assert_close(u[1], ihvp_arnoldi(loss, regularization=0.5)((t + 1,), t))


@pytest.mark.parametrize("lam", [0.0, 0.4])
def test_low_rank_through_vmap(lam):
    """Lifted over x, each block has a space of its own, from the same draws: the loop, restarts and all."""
    h, ts, v = spectral(0, torch.tensor([2.0] * 4 + [1.0, 3.0, 5.0, 6.0, 7.0])), normal(1, 3, 9), normal(2, 9)

    def loss(t, s):
        return half(h)(t) + s * (t**4).mean()

    f = ihvp_arnoldi(loss, 0, 7, regularization=lam, mode="rev-rev", top_k=6)
    scales = torch.tensor([0.0, 1.0, 3.0]).double()
    got = torch.func.vmap(lambda t: torch.func.vmap(lambda s: f((t, s), v))(scales))(ts)
    want = torch.stack([torch.stack([f((t, s), v) for s in scales]) for t in ts])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    jacobian = torch.func.jacrev(lambda v: f((ts[0], scales[1]), v))(v)
    torch.testing.assert_close(jacobian @ v, want[0, 1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_arguments(form, dtype):
    """Fisher products of single samples, two arguments at once, dtypes as they came."""
    a, b, x = (t.to(dtype) for t in (normal(0, 3), normal(1, 2), normal(2, 5, 3)))
    knobs = {"regularization": 0.5, "product": fvp_at_x, "in_dims": (None, None, 0), "argnums": (0, 1)}
    u = FORMS[form](lambda a, b, x: (a @ x) * b.sum(), (a, b, x), knobs)((a, b))
    a, b, x = a.double(), b.double(), x.double()
    rows = torch.stack([torch.cat([c * b.sum(), (a @ c).expand(2)]) for c in x])
    want = divide(rows.T @ rows / 5, 0.5, torch.cat([a, b]))
    assert u[0].dtype == dtype
    torch.testing.assert_close(torch.cat(u).double(), want, rtol=(0.1 if dtype == torch.bfloat16 else 1e-4), atol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_seeds(form):
    """Same seed, same bits; None is always the same draw; one form, one draw."""
    h, v = spectral(0, torch.logspace(0, -2, 30)), normal(1, 30)

    def run(generator):
        return FORMS[form](half(h), (v,), {"max_iter": 5, "mode": "rev-rev", "generator": generator})(v)

    assert torch.equal(run(seeded(1)), run(seeded(1)))
    assert torch.equal(run(None), run(None))
    assert not torch.equal(run(seeded(1)), run(seeded(2)))
    generator = seeded(1)
    first = run(generator)
    assert not torch.equal(first, run(generator))
    f = ihvp_arnoldi(half(h), 0, 5, mode="rev-rev", generator=generator)
    assert torch.equal(f((v,), v), f((v,), v))


@pytest.mark.fault("F20")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_basis_is_orthonormal(dtype):
    """To rounding, and H is Q A Q': after hundreds of steps, most of them in a space that is all but invariant."""
    h, like = spectral(0, torch.logspace(0, -12, 250)).to(dtype), torch.zeros(1, 250, dtype=dtype)
    space = Projection(lambda rows: rows @ h, 240, like)
    while space.size < 240:
        space.add(space.follow(1, 1e-7, lambda step, count: normal(step, count, 250)))
    q, eps = space.basis[0].double(), torch.finfo(dtype).eps
    assert (q @ q.T - torch.eye(240)).abs().max() < 20 * eps
    values = space.ritz()[0][0]
    torch.testing.assert_close(values, torch.linalg.eigvalsh(q @ h.double() @ q.T), rtol=0, atol=20 * eps)
