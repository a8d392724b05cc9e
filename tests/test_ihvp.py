"""Inverse products of losses: both forms of every solver, from one table, against dense float64 algebra."""

from __future__ import annotations

import inspect
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, quadratics, rebuild, reorder, row, unflat

import dattrifunc
from dattrifunc import (
    ConvergenceWarning,
    hvp,
    hvp_at_x,
    ihvp_arnoldi,
    ihvp_at_x_arnoldi,
    ihvp_at_x_auto,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
    ihvp_at_x_lissa,
    ihvp_at_x_minres,
    ihvp_at_x_nystrom,
    ihvp_at_x_woodbury,
    ihvp_auto,
    ihvp_cg,
    ihvp_explicit,
    ihvp_lissa,
    ihvp_minres,
    ihvp_nystrom,
    ihvp_woodbury,
    solvers,
)
from dattrifunc.solvers import Status


def half(v):
    """A preconditioner for trees of any kind."""
    return rebuild(v, [leaf / 2 for leaf in leaves(v)])


# name -> (unbound, bound, knobs of a solve that is exact for the drawn problems)
SOLVERS = {
    "explicit": (ihvp_explicit, ihvp_at_x_explicit, {}),
    "cg": (ihvp_cg, ihvp_at_x_cg, {"tol": 1e-12}),
    "minres": (ihvp_minres, ihvp_at_x_minres, {"tol": 1e-12}),
    "auto": (ihvp_auto, ihvp_at_x_auto, {"tol": 1e-12}),
    "cg block": (ihvp_cg, ihvp_at_x_cg, {"tol": 1e-12, "block": True}),
    "cg jacobi": (ihvp_cg, ihvp_at_x_cg, {"tol": 1e-12, "preconditioner": "jacobi"}),
    "minres nystrom": (ihvp_minres, ihvp_at_x_minres, {"tol": 1e-12, "preconditioner": "nystrom"}),
    "minres M": (ihvp_minres, ihvp_at_x_minres, {"tol": 1e-12, "preconditioner": half}),
    "arnoldi": (ihvp_arnoldi, ihvp_at_x_arnoldi, {"tol": 1e-12, "mode": "rev-rev"}),
    "lissa": (ihvp_lissa, ihvp_at_x_lissa, {"scaling": 6.5, "recursion_depth": 400}),
}
FORMS = {
    "bound": lambda _, bound, loss, x, knobs: bound(loss, *x, **knobs),
    "unbound": lambda unbound, _, loss, x, knobs: lambda v: unbound(loss, **knobs)(x, v),
}
TABLE = [pytest.param(s, f, id=f"{s}-{f}") for s in SOLVERS for f in FORMS]


def make(solver, form, loss, *x, **knobs):
    unbound, bound, exact = SOLVERS[solver]
    return FORMS[form](unbound, bound, loss, x, {**exact, **knobs})


def assert_solves(u, v, matrix, rtol=1e-6, atol=1e-8):
    want = torch.linalg.solve(matrix, flat(v, batch=True).T).T
    torch.testing.assert_close(flat(u, batch=True), want, rtol=rtol, atol=atol)


@pytest.mark.fault("F13")
@pytest.mark.parametrize(("solver", "form"), TABLE)
@settings(max_examples=8)
@given(problem=quadratics(), lam=st.floats(0, 1), rng=st.randoms(use_true_random=False))
def test_every_solver_equals_the_dense_solve(solver, form, problem, lam, rng):
    """One lambda, one meaning: each solver and form solves (H + lambda I) u = v, on any tree and number of vectors."""
    f = make(solver, form, problem.loss, problem.params, regularization=lam, has_aux=True)
    matrix = problem.hessian + lam * torch.eye(len(problem.hessian), dtype=torch.float64)
    u, info = f(reorder(problem.rhs, rng))
    assert_solves(u, problem.rhs, matrix)
    k = len(flat(problem.rhs, batch=True))
    assert info.converged.tolist() == [True] * k
    assert (info.residual <= 1e-7).all()
    assert [leaf.shape for leaf in leaves(u)] == [leaf.shape for leaf in leaves(problem.rhs)]
    if k:
        one, info = f(row(problem.rhs, 0))
        torch.testing.assert_close(flat(one), flat(row(u, 0)), rtol=1e-9, atol=1e-11)
        assert info.converged.shape == ()


@pytest.mark.parametrize(("solver", "form"), TABLE)
@settings(max_examples=6)
@given(problem=nonquadratics(), lam=st.floats(0, 1), mode=st.sampled_from(["rev-rev", "rev-fwd"]))
def test_losses_on_data(solver, form, problem, lam, mode):
    """Integer and bool data, curvature that depends on x, both modes, chunks."""
    samples = {"batch_size": len(problem.data["y"]), "scaling": 4.0, "recursion_depth": 80} if solver == "lissa" else {}
    f = make(
        solver, form, problem.loss, problem.params, problem.data, regularization=lam, mode=mode, chunk_size=2, **samples
    )
    assert_solves(f(problem.rhs), problem.rhs, problem.hessian + lam * torch.eye(len(problem.hessian)).double())


@pytest.mark.parametrize("solver", ["cg", "minres"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=6)
@given(problem=quadratics())
def test_starts(solver, form, problem):
    """x0 is a tree like v: one for each vector, or one for all."""
    want = torch.linalg.solve(problem.hessian, flat(problem.rhs, batch=True).T).T
    for x0 in (unflat(want, problem.params), problem.params):
        u, info = make(solver, form, problem.loss, problem.params, x0=x0, has_aux=True)(problem.rhs)
        torch.testing.assert_close(flat(u, batch=True), want, rtol=1e-6, atol=1e-8)
        assert (info.status == 0).all()
        assert x0 is problem.params or (info.iterations == 0).all()


def test_both_forms_take_the_same_knobs():
    """The two forms of a solver drifted apart elsewhere: here they have the same keywords and defaults."""
    pairs = [(unbound, bound) for unbound, bound, _ in SOLVERS.values()]
    pairs += [(ihvp_nystrom, ihvp_at_x_nystrom), (ihvp_woodbury, ihvp_at_x_woodbury)]
    for unbound, bound in pairs:
        mine, theirs = (
            {n: p.default for n, p in inspect.signature(f).parameters.items() if n not in ("func", "x", "in_dims")}
            for f in (unbound, bound)
        )
        assert mine == theirs


# ---------------------------------------------------------------------------------------------------------------------
# the published calling convention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [None, 1, 3])
def test_published_calling_convention(dtype, k):
    """A user of dattri.func changes the import: same names, positions, keywords and values."""
    rng = torch.Generator().manual_seed(0)
    x, theta = torch.randn(8, 3, generator=rng).to(dtype), torch.randn(3, generator=rng).to(dtype)

    def target(theta, x):
        return torch.mean((x @ theta) ** 2) + 0.1 * torch.sin(theta).sum()

    h = torch.func.hessian(target)(theta.double(), x.double())
    v = torch.randn(*([k] if k else []), 3, generator=rng).to(dtype)
    lam, eye = 0.5, torch.eye(3, dtype=torch.float64)

    def divided(matrix):
        return torch.linalg.solve(matrix, v.double().reshape(-1, 3).mT).mT.reshape(v.shape)

    product, answer = v.double() @ (h + lam * eye), divided(h + lam * eye)

    def close(got, want, rtol=1e-4):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=1e-5)

    for mode in ("rev-rev", "rev-fwd"):
        close(hvp(target, 0, mode, lam)((theta, x), v), product)
        close(hvp_at_x(target, (theta, x), 0, mode, lam)(v), product)
        close(ihvp_cg(target, 0, 10, 1e-7, mode, lam)((theta, x), v), answer)
        close(
            ihvp_at_x_cg(target, theta, x, argnums=0, max_iter=10, tol=1e-7, mode=mode, regularization=lam)(v), answer
        )
    close(ihvp_explicit(target, 0, lam)((theta, x), v), answer)
    close(ihvp_at_x_explicit(target, theta, x, argnums=0, regularization=lam)(v), answer)
    scale = 20.0
    answer = divided(h + 0.01 * scale * eye)  # damping has its published fixed point
    f = ihvp_lissa(target, 0, 8, 1, 500, 0.01, scale, None, "rev-rev")
    close(f((theta, x), v, in_dims=(None, 0)), answer)
    f = ihvp_at_x_lissa(
        target, theta, x, in_dims=(None, 0), argnums=0, batch_size=8, num_repeat=1, recursion_depth=500, damping=0.01,
        scaling=scale,
    )  # fmt: skip
    close(f(v), answer)


# ---------------------------------------------------------------------------------------------------------------------
# faults


def d124(t):
    return 0.5 * (torch.tensor([1.0, 2.0, 4.0]) * t**2).sum()


@pytest.mark.fault("F1", "F2", "F5", "F6")
@pytest.mark.parametrize("form", FORMS)
def test_cg_values(form, recwarn):
    """NaN after convergence, NaN for zero, under- and overflow with the scale of v, wrong rows for k > p."""
    t, v = torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])
    for max_iter in (3, 10, 100, 1000):
        batch = torch.stack([v, 0 * v, 1e-25 * v, 1e-13 * v, 1e25 * v])
        u = make("cg", form, d124, t, max_iter=max_iter)(batch)
        want = torch.stack([torch.ones(3) * s for s in (1, 0, 1e-25, 1e-13, 1e25)])
        torch.testing.assert_close(u, want, rtol=1e-6, atol=0)
    assert not recwarn.list


@pytest.mark.fault("F7")
@pytest.mark.parametrize("form", FORMS)
def test_truncated_solves_warn_once(form):
    """A truncated solve looked finished: it warns, once per call, with counts, residual and cure."""
    f = make("cg", form, d124, torch.zeros(3), max_iter=1, tol=1e-7)
    v = torch.tensor([[1.0, 2, 4], [1, 0, 0], [1, 1, 1]])
    with pytest.warns(ConvergenceWarning, match=r"cg: 2 of 3 right-hand sides not solved.*2 ran out of steps") as seen:
        f(v)
    assert len(seen) == 1
    info = make("cg", form, d124, torch.zeros(3), max_iter=1, has_aux=True)(v)[1]
    assert info.converged.tolist() == [False, True, False]


def ten(t):
    return 5 * t**2


@pytest.mark.fault("F10")
@pytest.mark.parametrize("form", FORMS)
def test_lissa_divergence_is_said(form):
    """The series grew to 1e36 and then NaN without a word."""
    one = torch.tensor(1.0)
    with pytest.warns(ConvergenceWarning, match=r"lissa: 1 of 1 .*diverged.*raise scaling.*scaling 1 is too small"):
        u = make("lissa", form, ten, one, scaling=1.0, recursion_depth=5)(one)
    assert u == -53144
    with pytest.warns(ConvergenceWarning, match="diverged"):
        u = make("lissa", form, ten, one, scaling=1.0, recursion_depth=50)(one)
    assert u.isfinite()
    torch.testing.assert_close(make("lissa", form, ten, one, scaling=10.0, recursion_depth=1)(one), torch.tensor(0.1))


@pytest.mark.fault("F13")
@pytest.mark.parametrize("form", FORMS)
def test_damping_and_lambda(form):
    """Damping d solves (H + d scale) u = v, so it is not the lambda of the other solvers: both exist, both exact."""
    one = torch.tensor(1.0)
    u = make("lissa", form, ten, one, scaling=50.0, damping=0.1, recursion_depth=500)(one)
    torch.testing.assert_close(u, torch.tensor(1 / 15))
    for solver in SOLVERS:
        knobs = {"scaling": 12.0} if solver == "lissa" else {}
        u = make(solver, form, ten, one, regularization=0.1, **knobs)(one)
        torch.testing.assert_close(u, torch.tensor(1 / 10.1), rtol=1e-4, atol=0)


@pytest.mark.fault("F14")
def test_lissa_calls_the_loss_once_per_step():
    """Repeat count and batch size were swapped on the way to the solver: 200 calls of one sample, not 50 of four."""
    x = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).double()

    def run(form):
        shapes = []

        def loss(t, x):
            shapes.append(tuple(x.shape))
            return 0.5 * (x * t).pow(2).mean()

        t, generator = torch.ones(1, dtype=torch.float64), torch.Generator().manual_seed(1)
        f = make("lissa", form, loss, t, x, batch_size=4, num_repeat=1, recursion_depth=50, generator=generator)
        return f(t), shapes

    (bound, shapes), (unbound, others) = run("bound"), run("unbound")
    assert shapes == others == [(4, 1)] * 50
    assert torch.equal(bound, unbound)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("form", FORMS)
def test_lissa_seeds(form):
    """Rows and repeats drew batches of their own, and no seed could be given: same seed, same bits; rows share."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(16, 2, generator=rng, dtype=torch.float64)
    t = torch.zeros(2, dtype=torch.float64)

    def loss(t, x):
        return 0.5 * ((x * t) ** 2).sum(-1).mean() + 0.5 * (t**2).sum()

    def run(seed, repeats=3, k=2, depth=60, batch=4):
        generator = torch.Generator().manual_seed(seed)
        f = make(
            "lissa", form, loss, t, x, batch_size=batch, num_repeat=repeats, recursion_depth=depth, generator=generator,
            scaling=3.0,
        )  # fmt: skip
        return f(torch.ones(k, 2, dtype=torch.float64))

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(run(0)[0], run(0)[1])
    assert torch.equal(torch.get_rng_state(), state)
    full = run(0, batch=16)[0]
    singles = torch.stack([run(seed, repeats=1, k=1, depth=200)[0] for seed in range(20)])
    error = (singles.mean(0) - full).abs() / (singles.std(0) / 20**0.5)
    assert (error < 4).all()
    many = run(0, repeats=400, k=1)[0]
    assert ((many - full).abs() < 4 * singles.std(0) / 400**0.5).all()


def resident():
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.fault("F17")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("solver", ["lissa", "cg"])
def test_memory_is_flat_in_depth(solver, form):
    """The estimate kept its graph, so that memory grew with depth: flat, for parameters that require grad as well."""
    p, peaks = 100_000, {}
    t, v = torch.nn.Parameter(torch.linspace(1, 2, p)), torch.ones(p)
    hidden, seen = [torch.nn.Parameter(torch.ones(p))], []

    def product(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):
        inner = hvp_at_x(func, x, argnums, mode, regularization, chunk_size=chunk_size)

        def f(v):
            seen.append(resident())
            return inner(v) * hidden[0].clone()

        return f

    for depth in (10, 30, 200):
        seen.clear()
        knobs = {"scaling": 3000.0, "recursion_depth": depth} if solver == "lissa" else {"max_iter": depth, "tol": 0.0}
        scale = torch.linspace(1, 1000, p)
        f = make(solver, form, lambda t, s=scale: (s * t**2).sum(), t, product=product, has_aux=True, **knobs)
        u, info = f(v)
        assert info.iterations == depth
        assert u.requires_grad == (form == "unbound")
        peaks[depth] = max(seen)
    assert peaks[200] - peaks[30] < 100 * p  # 400 kB a vector: a graph keeps hundreds of them
    with torch.no_grad():
        assert not f(v)[0].requires_grad


@pytest.mark.fault("F18")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_inverse_of_a_total_is_no_sum_of_inverses(solver, form):
    """Inverses of batches were added up (1.333 here): curvature is added up first, 1 / (1 + 3) or 1 / ((1 + 3) / 2)."""
    one, batches = torch.tensor(1.0), [torch.tensor([1.0]), torch.tensor([3.0])]

    def summed(t, batches):
        return sum((0.5 * h * t**2).mean() for h in batches)

    knobs = {"scaling": 5.0} if solver == "lissa" else {}
    u = make(solver, form, summed, one, batches, **knobs)(one)
    torch.testing.assert_close(u, torch.tensor(0.25))
    u = make(solver, form, lambda t, batches: summed(t, batches) / 2, one, batches, **knobs)(one)
    torch.testing.assert_close(u, torch.tensor(0.5))
    if solver == "lissa":  # one batch a step, drawn
        f = make(
            solver, form, lambda t, h: 0.5 * (h * t**2).mean(), one, torch.tensor([1.0, 3.0]), scaling=5.0,
            recursion_depth=60, num_repeat=400, generator=torch.Generator().manual_seed(0), has_aux=True,
        )  # fmt: skip
        u, info = f(one)
        assert 0 < info.standard_error < 0.1
        assert abs(u - 0.5) < 4 * info.standard_error * u


def test_lissa_axes_of_samples():
    """in_dims as in vmap, trees of them, negative axes; what holds no samples is passed whole."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 6, generator=rng), torch.randn(6, generator=rng)
    table, shapes = torch.ones(3), []

    def loss(w, d, table, flag):
        shapes.append((tuple(d["x"].shape), tuple(d["y"].shape), tuple(table.shape)))
        assert flag == "on"
        return ((w @ d["x"] - d["y"]) ** 2).mean() + (w**2).sum() * table.sum()

    w = torch.zeros(2)
    args = (w, {"x": x, "y": y, "scale": torch.tensor(2.0)}, table, "on")
    f = ihvp_lissa(loss, batch_size=2, recursion_depth=1)
    f(args, torch.ones(2), in_dims=(None, {"x": -1, "y": 0, "scale": None}, None, None))
    assert shapes == [((2, 2), (2,), (3,))]
    shapes.clear()
    in_dims = (None, {"x": 1, "y": 0, "scale": None}, None, None)
    ihvp_at_x_lissa(loss, *args, in_dims=in_dims, batch_size=3, recursion_depth=1)(torch.ones(2))
    assert shapes == [((2, 3), (3,), (3,))]


def test_lissa_collate():
    """collate_fn sees the tuple of sampled arguments."""
    x = torch.tensor([1, 2, 3])
    f = ihvp_lissa(
        lambda t, x: 0.5 * (x * t**2).mean(), batch_size=3, scaling=4.0, recursion_depth=100,
        collate_fn=lambda args: (args[0], args[1].float()),
    )  # fmt: skip
    torch.testing.assert_close(f((torch.tensor(0.0), x), torch.tensor(1.0)), torch.tensor(0.5))


def test_lissa_repeats_run_side_by_side():
    """Repeats are a vmap, so that a step is one call of the loss, whatever their number."""
    calls = []

    def loss(t, x):
        calls.append(tuple(x.shape))
        return 0.5 * (x * t).pow(2).mean()

    x = torch.rand(10, 1)
    ihvp_at_x_lissa(loss, torch.ones(1), x, batch_size=2, num_repeat=5, recursion_depth=7)(torch.ones(3, 1))
    assert calls == [(2, 1)] * 7


def test_lissa_memory_of_an_estimated_scale():
    """scaling='auto' is estimated once per bound form."""
    calls = []

    def loss(t, x):
        calls.append(1)
        return 0.5 * (x * t).pow(2).mean()

    f = ihvp_at_x_lissa(loss, torch.ones(1), torch.rand(10, 1), batch_size=2, recursion_depth=7, scaling="auto")
    f(torch.ones(1))
    first = len(calls)
    f(torch.ones(1))
    assert len(calls) - first == 7


@pytest.mark.fault("F23")
@pytest.mark.parametrize("form", FORMS)
def test_explicit_with_a_curvature_that_is_not_finite(form):
    """A NaN in the matrix made the factorisation hang or return rubbish: refused before factoring, leaf named."""
    x = torch.tensor([1.0, 0.0])

    def loss(p, x):
        return (torch.log(x * p["scale"]) ** 2).sum() + (p["shift"] ** 2).sum()

    p = {"shift": torch.ones(2), "scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"func: expected finite curvature, got \d+ .* in 'scale'\. Fix:"):
        make("explicit", form, loss, p, x)(p)
    with pytest.warns(ConvergenceWarning, match="non-finite"):
        u = make("cg", form, loss, p, x)(p)
    assert u["scale"].isnan().all()


@pytest.mark.fault("F24")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_device_follow_the_parameters(solver, form, dtype):
    """Identity matrices were built in the default dtype, on the CPU."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        t = torch.ones(2, dtype=dtype, device=device)
        knobs = {"scaling": 8.0, "recursion_depth": 200} if solver == "lissa" else {"regularization": 0.0}
        u = make(solver, form, lambda t: (t**2).sum(), t, **knobs)(t)
        assert u.dtype == dtype
        assert u.device == t.device
        torch.testing.assert_close(u, t / 2)


@pytest.mark.fault("F25")
def test_explicit_builds_the_matrix_once():
    """Factor once, solve many; the matrix can be read, and a given one can be solved with."""
    calls = []

    def loss(t):
        calls.append(1)
        return d124(t) + (t**4).sum()

    t = torch.ones(3)
    solve = ihvp_at_x_explicit(loss, t, regularization=0.5)
    built = len(calls)
    batches = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    answers = [solve(v) for v in batches]
    assert len(calls) == built == 1
    want = torch.diag(torch.tensor([1.0, 2.0, 4.0]) + 12 + 0.5)
    torch.testing.assert_close(solve.matrix, want)
    for v, u in zip(batches, answers, strict=True):
        torch.testing.assert_close(u, solvers.explicit(want, v, batched=True).value)


@pytest.mark.fault("F39")
@pytest.mark.parametrize(("solver", "form"), [p for p in TABLE if "lissa" not in p.id])
def test_joint_curvature(solver, form, recwarn):
    """Tuple argnums crashed: the joint system of two arguments, indefinite, is solved by all but LiSSA."""
    a = torch.ones(2)
    v = (torch.full((2,), 3.0), torch.ones(2))
    u = make(solver, form, lambda a, b: (a * b).sum() + (a**2).sum(), a, a, argnums=(0, 1))(v)
    torch.testing.assert_close(u, (a, a))
    assert not recwarn.list


@pytest.mark.fault("F49")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_unused_parameter(solver, form):
    """A parameter that the loss does not use: v_u / lambda, and without lambda a message that names it."""
    p = {"a": torch.ones(2), "u": torch.ones(3)}
    v = {"a": torch.ones(2), "u": torch.tensor([1.0, 2.0, 3.0])}
    knobs = {"scaling": 3.0, "recursion_depth": 400} if solver == "lissa" else {}
    u = make(solver, form, lambda p: (p["a"] ** 2).sum(), p, regularization=0.5, **knobs)(v)
    torch.testing.assert_close(u, {"a": v["a"] / 2.5, "u": v["u"] / 0.5})
    if solver == "lissa":
        info = make(solver, form, lambda p: (p["a"] ** 2).sum(), p, has_aux=True, **knobs)(v)[1]
        assert not info.converged
        return
    with pytest.warns(
        ConvergenceWarning, match=rf"{solver.split()[0]}( \(block cg\))?: 1 of 1 .*singular.*no curvature in 'u'"
    ):
        u = make(solver, form, lambda p: (p["a"] ** 2).sum(), p)(v)
    assert all(leaf.isfinite().all() for leaf in u.values())


@pytest.mark.fault("F54")
@pytest.mark.parametrize(("solver", "form"), TABLE)
def test_empty_parameters(solver, form):
    """Empty leaves and empty trees crashed."""
    p = {"a": torch.zeros(0), "b": torch.ones(2)}
    u = make(solver, form, lambda p: (p["b"] ** 2).sum() + p["a"].sum(), p)(p)
    torch.testing.assert_close(u, {"a": torch.zeros(0), "b": torch.full((2,), 0.5)})
    assert make(solver, form, lambda _: torch.tensor(1.0), {})({}) == {}
    empty = make(solver, form, lambda p: p["a"].sum(), {"a": torch.zeros(0)}, has_aux=True)({"a": torch.zeros(4, 0)})
    assert empty[0]["a"].shape == (4, 0)
    assert empty[1].converged.tolist() == [True] * 4


@pytest.mark.fault("F56")
@pytest.mark.parametrize(("solver", "form"), TABLE)
def test_inputs_are_never_mutated(solver, form):
    """A wrapper wrote into the caller's dict and left a tracing tensor there."""
    p = {"w": torch.ones(2), "b": [torch.ones(())]}
    v = {"b": [torch.ones(())], "w": torch.ones(2)}
    before = {**p}, {**v}
    torch.func.grad(lambda q: make(solver, form, lambda p: (p["w"] ** 2).sum() + p["b"][0] ** 2, q)(v)["w"].sum())(p)
    torch.func.vmap(make(solver, form, lambda p: (p["w"] ** 2).sum() + p["b"][0] ** 2, p))(
        {"b": [torch.ones(3)], "w": torch.ones(3, 2)}
    )
    assert all(p[key] is before[0][key] and v[key] is before[1][key] for key in p)
    assert list(p) == ["w", "b"]
    assert torch.equal(p["w"], torch.ones(2))
    assert torch.equal(v["w"], torch.ones(2))


@pytest.mark.fault("F3")
def test_indefinite_curvature_is_solved_or_flagged():
    """CG and LiSSA gave garbage on an indefinite Hessian; explicit and minres solve it, others say what they met."""

    def loss(t):
        return 0.5 * (t[0] ** 2 - t[1] ** 2)

    t = v = torch.ones(2)
    torch.testing.assert_close(ihvp_at_x_explicit(loss, t)(v), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(ihvp_at_x_minres(loss, t)(v), torch.tensor([1.0, -1.0]))
    with pytest.warns(ConvergenceWarning, match="curvature <= 0.*ihvp_minres"):
        assert ihvp_at_x_cg(loss, t)(v).isfinite().all()
    with pytest.warns(ConvergenceWarning, match="diverged"):
        assert ihvp_at_x_lissa(loss, t, scaling=2.0, recursion_depth=50)(v).isfinite().all()
    flagging = [
        (ihvp_at_x_cg, {}),
        (ihvp_at_x_lissa, {"scaling": 2.0, "recursion_depth": 50}),
        (ihvp_at_x_arnoldi, {"top_k": 1}),
        (ihvp_at_x_nystrom, {"regularization": 0.1}),
    ]
    for transform, knobs in flagging:
        info = transform(loss, t, has_aux=True, **knobs)(v)[1]
        assert info.status == Status.NEGATIVE_CURVATURE
        assert re.search(r"curvature.* -(1|0\.\d+)", info.reason)
    torch.testing.assert_close(ihvp_at_x_cg(loss, t, regularization=2.0)(v), torch.tensor([1 / 3, 1.0]))


def test_results_do_not_hang_on_to_graphs():
    """Bound forms of nn.Parameters give plain tensors; unbound ones are differentiable in x."""
    module = torch.nn.Linear(2, 1)
    params = dict(module.named_parameters())
    v = {k: torch.ones_like(p) for k, p in params.items()}

    def loss(p, x):
        return (torch.func.functional_call(module, p, (x,)) ** 2).mean() + sum((t**2).sum() for t in p.values())

    x = torch.ones(3, 2)
    assert not any(u.requires_grad for u in ihvp_at_x_cg(loss, params, x)(v).values())
    assert all(u.requires_grad for u in ihvp_cg(loss)((params, x), v).values())
    with torch.no_grad():
        assert not any(u.requires_grad for u in ihvp_cg(loss)((params, x), v).values())


@pytest.mark.parametrize("form", FORMS)
def test_a_derivative_that_fails_says_so(form):
    """The solve behind a derivative has no SolveInfo to speak through: it warns even with has_aux."""
    h = torch.diag(torch.tensor([1.0, 1e-9, 1.0, 0.5], dtype=torch.float64))

    def loss(t):
        return 0.5 * t @ h @ t + (t**3).sum()

    v = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64, requires_grad=True)
    f = make("cg", form, loss, torch.zeros(4, dtype=torch.float64), has_aux=True, max_iter=1, tol=1e-12)
    u, info = f(v)
    assert info.converged
    with pytest.warns(ConvergenceWarning, match="cg: 1 of 1"):
        u.pow(2).sum().add((u * torch.arange(4.0)).sum()).backward()


def test_threads_keep_their_facts_apart():
    """Two threads that use one bound solve at once each get their own shapes and reasons."""
    solve = ihvp_at_x_cg(lambda t: 0.5 * (t[0] ** 2 - t[1] ** 2), torch.ones(2), has_aux=True, max_iter=5)
    good, bad = torch.tensor([1.0, 0.0]), torch.ones(3, 2)

    def run(v):
        return [solve(v)[1] for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, [good, bad])
    assert all(info.converged.shape == () and info.converged and not info.reason for info in first)
    assert all(info.converged.shape == (3,) and "curvature" in info.reason for info in second)


def test_product_may_be_anybody_s():
    """``product`` is any function with the signature of hvp_at_x: trees in, trees out."""

    def twice(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):
        inner = hvp_at_x(func, x, argnums, mode, regularization, chunk_size=chunk_size)
        return lambda v: {key: 2 * leaf for key, leaf in inner(v).items()}

    p = {"b": torch.ones(2), "a": torch.ones(())}
    v = {"a": torch.ones(3), "b": torch.ones(3, 2)}
    for solver in SOLVERS:
        for form in FORMS:
            knobs = {"scaling": 6.0, "recursion_depth": 200} if solver == "lissa" else {}
            u = make(solver, form, lambda p: (p["b"] ** 2).sum() + p["a"] ** 2, p, product=twice, **knobs)(v)
            torch.testing.assert_close(u, {"b": torch.full((3, 2), 0.25), "a": torch.full((3,), 0.25)})
            assert list(u) == ["b", "a"]


def test_names_are_exported_once():
    for name in dattrifunc.__all__:
        assert hasattr(dattrifunc, name)
