"""Gauss-Newton and empirical Fisher products, against linearised models and loops by torch.autograd, in float64."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, quadratics, reorder, row, unflat
from test_ihvp import SOLVERS, TABLE, make
from torch.testing import assert_close

import dattrifunc.curvature
from dattrifunc import (
    CompositeLoss,
    fvp,
    fvp_at_x,
    ggnvp,
    ggnvp_at_x,
    hessian_matrix,
    hvp_at_x,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
    ihvp_at_x_lissa,
    ihvp_cg,
    influence,
)
from dattrifunc.samples import mean_loss

MODES = ["rev-rev", "rev-fwd"]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unbound(product):
    """The unbound form with the signature of the bound one."""

    def form(func, x, argnums=0, mode="rev-rev", regularization=0.0, **knobs):
        f = product(func, argnums, mode, regularization, **knobs)
        return lambda v: f(x, v)

    return form


def streamed(func, x, *args, **knobs):
    """The bound form that holds no rows."""
    before = dattrifunc.curvature._HELD_NUMBERS
    dattrifunc.curvature._HELD_NUMBERS = -1
    try:
        return fvp_at_x(func, x, *args, **knobs)
    finally:
        dattrifunc.curvature._HELD_NUMBERS = before


GGN = {"bound": ggnvp_at_x, "unbound": unbound(ggnvp)}
FISHER = {"bound": fvp_at_x, "streamed": streamed, "unbound": unbound(fvp)}


def forms(table):
    cases = [pytest.param(form, mode, id=f"{name} {mode}") for name, form in table.items() for mode in MODES]
    return pytest.mark.parametrize(("form", "mode"), cases)


def jacobian(function: Any, params: Any) -> torch.Tensor:
    """J [m, p] of a function of the tree, by torch.autograd on one flat vector."""
    at = flat(params).detach().double()
    return torch.autograd.functional.jacobian(lambda t: flat(function(unflat(t, params))), at)


def linearised(loss: CompositeLoss, x: tuple[Any, ...]) -> torch.Tensor:
    """The Hessian of the loss whose inner is replaced by its first order expansion."""
    at = flat(x[0]).detach()
    output = loss.inner(x[0], x[1])
    j = jacobian(lambda q: loss.inner(q, x[1]), x[0])

    def of(t: torch.Tensor) -> torch.Tensor:
        return loss.outer(unflat(flat(output).detach() + j @ (t - at), output), *x[2:])

    return torch.autograd.functional.hessian(of, at)


def loop(func: Any, x: tuple[Any, ...], samples: list[tuple[Any, ...]]) -> torch.Tensor:
    """1/n G^T G, a gradient at a time, by torch.autograd."""
    at = [leaf.detach().clone().requires_grad_() for leaf in leaves(x[0])]
    rows = []
    for sample in samples:
        vector = torch.cat([leaf.reshape(-1) for leaf in at])
        found = torch.autograd.grad(func(unflat(vector, x[0]), *sample), at, allow_unused=True)
        rows.append(flat([torch.zeros_like(a) if g is None else g for a, g in zip(at, found, strict=True)]))
    g = torch.stack(rows)
    return g.T @ g / len(rows)


def assert_product(f: Any, v: Any, matrix: torch.Tensor, **tolerance: float) -> None:
    assert_close(flat(f(v), batch=True), flat(v, batch=True) @ matrix, **tolerance)
    if len(leaves(v)[0]):
        assert_close(flat(f(row(v, 0))), matrix @ flat(row(v, 0)), **tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Gauss-Newton


def composed(problem: Any) -> CompositeLoss:
    """Of a drawn problem: a curved model, an output that is a tree, and two targets of integers and bools."""

    def inner(params: Any, x: torch.Tensor) -> Any:
        t = flat(params)
        z = torch.tanh(x @ t) + 0.3 * (x @ t) ** 2
        return {"z": [z, (x**2 @ t, None)], "a": t.pow(3).sum()}

    def outer(out: Any, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first, (second, _) = out["z"]
        fit = F.cross_entropy(torch.stack([first, second, 0 * first], dim=-1), y, reduction="none")
        return torch.where(mask, fit, 0.5 * fit).mean() + 0.1 * out["a"] ** 2 + 0.1 * torch.sin(second).sum()

    assert problem.data["y"].dtype == torch.int64
    return CompositeLoss(inner, outer)


@forms(GGN)
@given(nonquadratics(), st.randoms(use_true_random=False), st.sampled_from([None, 1, 2]), st.sampled_from([0.0, 0.3]))
def test_ggn_equals_the_hessian_of_the_linearised_model(form, mode, problem, rng, chunk, lam):
    loss, data = composed(problem), problem.data
    x = (problem.params, data["x"], data["y"], data["mask"])
    matrix = linearised(loss, x) + lam * torch.eye(len(problem.hessian), dtype=torch.float64)
    f = form(loss, x, mode=mode, regularization=lam, chunk_size=chunk)
    assert_product(f, problem.rhs, matrix)
    assert_close(f(reorder(problem.rhs, rng)), f(problem.rhs))


@forms(GGN)
@given(quadratics())
def test_ggn_equals_the_hessian_where_inner_is_linear(form, mode, problem):
    loss = CompositeLoss(lambda params, _: params, lambda params: problem.loss(params))
    assert_product(form(loss, (problem.params, None), mode=mode), problem.rhs, problem.hessian)


MLP = {"a": normal(3, 4, seed=1), "b": normal(4, seed=2), "c": normal(4, 3, seed=3)}
X, LABELS = normal(5, 3, seed=4), torch.tensor([0, 2, 1, 1, 2])


def mlp(p, x):
    return torch.tanh(x @ p["a"] + p["b"]) @ p["c"]


@forms(GGN)
def test_ggn_of_cross_entropy_is_the_true_fisher(form, mode):
    """The Fisher matrix by enumerating labels: 1/n sum_i sum_y p(y | x_i) g_iy g_iy^T; positive semi-definite."""
    probabilities = mlp(MLP, X).softmax(-1)
    fisher = torch.zeros(28, 28, dtype=torch.float64)
    for i in range(5):
        for label in range(3):
            g = jacobian(lambda q, i=i, label=label: -mlp(q, X[i]).log_softmax(-1)[label], MLP)[0]
            fisher += probabilities[i, label] * torch.outer(g, g) / 5
    v = unflat(torch.eye(28, dtype=torch.float64), MLP)
    out = flat(form(CompositeLoss(mlp, F.cross_entropy), (MLP, X, LABELS), mode=mode)(v), batch=True)
    assert_close(out, fisher)
    assert torch.linalg.eigvalsh(out).min() > -1e-12


@forms(GGN)
def test_ggn_of_squared_loss_is_twice_the_gram_matrix_of_the_jacobian(form, mode):
    j = jacobian(lambda q: mlp(q, X), MLP)
    v = unflat(normal(40, 28), MLP)
    f = form(CompositeLoss(mlp, F.mse_loss), (MLP, X, normal(5, 3)), mode=mode)
    assert_product(f, v, 2 * j.T @ j / 15)


@forms(GGN)
@pytest.mark.parametrize("argnums", [0, 1, -2, (0,), (1, 0), (-3, 1)])
def test_ggn_argnums(form, mode, argnums):
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    x = (MLP, X, LABELS)
    like = tuple(x[i] for i in positions)

    def inner(chosen: Any) -> torch.Tensor:
        filled = dict(zip((i % 3 for i in positions), chosen, strict=True))
        return mlp(filled.get(0, MLP), filled.get(1, X))

    j = jacobian(inner, like)
    z = mlp(MLP, X)
    h = torch.autograd.functional.hessian(lambda t: F.cross_entropy(t.reshape(5, 3), LABELS), z.reshape(-1))
    v = unflat(normal(4, j.shape[1]), like)
    out = form(CompositeLoss(mlp, F.cross_entropy), x, argnums, mode)(v if isinstance(argnums, tuple) else v[0])
    assert_close(flat(out, batch=True), flat(v, batch=True) @ (j.T @ h @ j))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("mode", MODES)
def test_ggn_evaluates_inner_and_outer_once(mode, chunk):
    calls = []

    def inner(p, x):
        calls.append("inner")
        return mlp(p, x)

    def outer(z, y):
        calls.append("outer")
        return F.cross_entropy(z, y)

    f = ggnvp_at_x(CompositeLoss(inner, outer), (MLP, X, LABELS), mode=mode, chunk_size=chunk)
    want = hessian_matrix(ggnvp_at_x(CompositeLoss(mlp, F.cross_entropy), (MLP, X, LABELS)), MLP)
    assert sorted(calls) == ["inner", "outer"]
    for i in range(20):
        v = unflat(normal(i, 28, seed=i), MLP)
        assert_close(flat(f(v), batch=True), flat(v, batch=True) @ want)
    assert sorted(calls) == ["inner", "outer"]


@forms(GGN)
def test_mixed_dtypes_keep_their_own(form, mode):
    params = {"w": normal(3), "b": normal(2, dtype=torch.float32)}
    loss = CompositeLoss(lambda p, x: torch.tanh(x @ p["w"]).float() * p["b"].sum(), lambda z: (z**4).sum())
    wide = {key: leaf.double() for key, leaf in params.items()}
    matrix = linearised(CompositeLoss(lambda p, x: torch.tanh(x @ p["w"]) * p["b"].sum(), loss.outer), (wide, X))
    v = {"w": normal(4, 3), "b": normal(4, 2, dtype=torch.float32)}
    out = form(loss, (params, X), mode=mode)(v)
    assert [leaf.dtype for leaf in leaves(out)] == [torch.float64, torch.float32]
    wide_v = flat({key: leaf.double() for key, leaf in v.items()}, batch=True)
    assert_close(flat({k: leaf.double() for k, leaf in out.items()}, batch=True), wide_v @ matrix, rtol=1e-4, atol=1e-3)


class _Rounded(torch.autograd.Function):
    """Rounds, and passes derivatives as if it did not: both modes must use what it says."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # noqa: ARG004
        return g

    @staticmethod
    def jvp(ctx, t):  # noqa: ARG004
        return t.clone()


@forms({**GGN, **FISHER})
def test_derivatives_that_a_function_defines_itself(form, mode):
    w, x = normal(3), normal(6, 3, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode='rev-fwd'")  # torch cannot trace them
        if form in GGN.values():
            f = form(CompositeLoss(lambda w, x: _Rounded.apply(4 * x @ w), lambda z: (z**2).sum()), (w, x), mode=mode)
            assert_product(f, normal(4, 3, seed=2), 2 * 16 * x.T @ x)
        else:
            f = form(lambda w, x: _Rounded.apply(4 * (x * w).sum()), (w, x), mode=mode, in_dims=(None, 0))
            assert_product(f, normal(4, 3, seed=2), 16 * x.T @ x / 6)


class _Cubed(torch.autograd.Function):
    """An operator with a backward and no forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


@pytest.mark.fault("F35")
@pytest.mark.parametrize("form", [*GGN.values(), *FISHER.values()], ids=[*GGN, *[f"fisher {name}" for name in FISHER]])
def test_operators_without_forward_mode_fall_back_with_one_warning(form):
    """F35: forward mode is missing for some operators. Right: rev-rev with one notice that names the operator."""
    w, x = normal(3), normal(5, 3, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if form in GGN.values():
            loss = CompositeLoss(lambda w, x: _Cubed.apply(x @ w), lambda z: (z**2).sum())
            out = form(loss, (w, x), mode="rev-fwd")(normal(2, 3))
            want = linearised(CompositeLoss(lambda w, x: (x @ w) ** 3, loss.outer), (w, x))
        else:
            out = form(lambda w, x: _Cubed.apply(torch.sin(w * x)).sum(), (w, x), 0, "rev-fwd", in_dims=(None, 0))(
                normal(2, 3)
            )
            want = loop(lambda w, x: (torch.sin(w * x) ** 3).sum(), (w,), [(one,) for one in x])
    told = [str(warning.message) for warning in caught]
    assert len(told) == (form is not fvp_at_x)  # which holds rows, and needs no forward mode
    for text in told:
        assert "has no forward mode here; used mode='rev-rev'" in text
    assert_close(out, normal(2, 3) @ want)


# ---------------------------------------------------------------------------------------------------------------------
# empirical Fisher


def samples_of(data: Any) -> list[tuple[Any]]:
    return [({key: leaf[i] for key, leaf in data.items()},) for i in range(len(data["y"]))]


@forms(FISHER)
@given(
    nonquadratics(), st.randoms(use_true_random=False), st.sampled_from([None, 1, 2, 100]), st.sampled_from([0.0, 0.3])
)
def test_fisher_equals_the_loop(form, mode, problem, rng, chunk, lam):
    params, data = problem.params, problem.data
    matrix = loop(problem.loss, (params,), samples_of(data)) + lam * torch.eye(len(problem.hessian)).double()
    f = form(problem.loss, (params, data), 0, mode, lam, in_dims=(None, 0), chunk_size=chunk)
    assert_product(f, problem.rhs, matrix)
    assert_close(f(reorder(problem.rhs, rng)), f(problem.rhs))


def vision(p, image, label):
    """Convolution, batch norm with fixed statistics, layer norm, softmax."""
    h = F.conv2d(image[None], p["conv"])
    mean, variance = torch.full((2,), 0.1).double(), torch.full((2,), 1.5).double()
    h = F.batch_norm(h, mean, variance, p["scale"], p["shift"], training=False)
    h = F.layer_norm(torch.tanh(h).flatten(1), (8,), p["gain"], p["bias"])
    return F.cross_entropy(h @ p["out"], label[None])


def language(p, tokens, label):
    """An embedding, attention over it, and layer norm."""
    h = F.layer_norm(F.embedding(tokens, p["table"]), (4,), p["gain"], p["bias"])
    h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
    return F.cross_entropy(h.mean(0)[None] @ p["out"], label[None])


NETWORKS = {
    "vision": (
        vision,
        {
            "conv": normal(2, 1, 2, 2), "scale": normal(2), "shift": normal(2), "gain": 1 + normal(8),
            "bias": normal(8), "out": normal(8, 3),
        },
        (normal(4, 1, 3, 3, seed=1), torch.tensor([0, 1, 2, 1])),
    ),
    "language": (
        language,
        {"table": normal(7, 4), "gain": 1 + normal(4), "bias": normal(4, seed=1), "out": normal(4, 3)},
        (torch.tensor([[0, 1, 2], [3, 3, 1], [6, 0, 0], [1, 2, 3]]), torch.tensor([0, 1, 2, 1])),
    ),
}  # fmt: skip


@pytest.mark.fault("F85")
@forms(FISHER)
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_fisher_of_networks_with_norm_layers_is_exact(form, mode, name, chunk):
    """F85: derivatives outside vmap(grad) through layer_norm are wrong, silently. Right: equal to the loop."""
    func, params, data = NETWORKS[name]
    matrix = loop(func, (params,), list(zip(*data, strict=True)))
    v = unflat(normal(len(matrix) + 1, len(matrix)), params)
    f = form(func, (params, *data), mode=mode, in_dims=(None, 0, 0), chunk_size=chunk)
    assert_product(f, v, matrix)


@pytest.mark.fault("F85")
@forms(GGN)
def test_ggn_of_layer_norm_is_exact(form, mode):
    """F85, for the Gauss-Newton product: also of an inner that is itself a vmap over samples."""
    p = {"l": normal(3, 2), "g": 1 + normal(3, seed=1), "b": normal(3, seed=2)}
    x, y = normal(4, 2, seed=4), normal(4, 3, seed=5)

    def one(p, x):
        return torch.tanh(F.layer_norm(x @ p["l"].T, (3,), p["g"], p["b"]))

    loss = CompositeLoss(one, lambda z, y: (z - y).pow(4).mean())
    matrix = linearised(loss, (p, x, y))
    v = unflat(normal(13, 12, seed=6), p)
    assert_product(form(loss, (p, x, y), mode=mode), v, matrix)
    each = CompositeLoss(lambda p, x: torch.func.vmap(lambda one_x: one(p, one_x))(x), loss.outer)
    assert_product(form(each, (p, x, y), mode=mode), v, matrix)


@forms(FISHER)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_branch_on_data_is_looped_over_with_one_warning(form, mode, chunk):
    w, x = normal(3), normal(5, 3, seed=1)

    def func(w, x):
        z = torch.sin(w @ x)
        return z * z if z > 0 else 3 * z

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        f = form(func, (w, x), mode=mode, in_dims=(None, 0), chunk_size=chunk)
        out = f(normal(2, 3, seed=2))
    told = [str(warning.message) for warning in caught if "took a loop over the samples" in str(warning.message)]
    assert len(told) == 1
    assert told[0].startswith("fvp_at_x: vmap cannot batch this loss")
    assert_close(out, normal(2, 3, seed=2) @ loop(func, (w,), [(one,) for one in x]))


@forms(FISHER)
def test_fisher_in_dims_argnums_and_batch_axis(form, mode):
    """Samples on another axis, in a part of a tree, differentiated arguments in any place, a loss for batches."""
    w, b, x, y = normal(3), normal(1, seed=1), normal(3, 5, seed=2), normal(5, seed=3)

    def func(data, b, w):
        return ((w @ data["x"] * data["scale"] + b - data["y"]) ** 2).sum()

    scale = torch.tensor(0.5).double()
    data = {"x": x, "y": y, "scale": scale}
    dims = ({"x": 1, "y": -1, "scale": None}, None, None)
    want = loop(
        lambda p, one, y: func({"x": one, "y": y, "scale": scale}, p[1], p[0]),
        ((w, b),),
        list(zip(x.T, y, strict=True)),
    )
    for keep in (False, True):
        out = form(func, (data, b, w), (-1, 1), mode, in_dims=dims, keep_batch_dim=keep)((normal(7, 3), normal(7, 1)))
        assert_close(flat(out, batch=True), flat((normal(7, 3), normal(7, 1)), batch=True) @ want)


@forms(FISHER)
def test_fisher_refuses_masks_and_keeps_narrow_dtypes(form, mode):
    w, x = normal(4, dtype=torch.bfloat16), normal(5, 4, seed=1, dtype=torch.bfloat16)
    out = form(lambda w, x: torch.tanh(w @ x), (w, x), mode=mode, in_dims=(None, 0))(w)
    assert out.dtype == torch.bfloat16
    want = loop(lambda w, x: torch.tanh(w @ x), (w.double(),), [(one.double(),) for one in x]) @ w.double()
    assert_close(out.double(), want, rtol=0.05, atol=0.05 * float(want.abs().max()))
    with pytest.raises(ValueError, match=r"func: .* draws random numbers. Fix: call module.eval"):
        form(lambda w, x: F.dropout(w * x, 0.5).sum(), (w, x), mode=mode, in_dims=(None, 0))(w)
    out = form(lambda w, x: x.sum(), (w, x), mode=mode, in_dims=(None, 0))(w)  # noqa: ARG005
    assert torch.equal(out, torch.zeros_like(w))


def test_rows_are_held_only_where_they_pay(monkeypatch):
    """With rows held a product calls no loss; beyond the bound it still does not, unless chunk_size is asked for."""
    calls = []

    def func(w, x):
        calls.append(1)
        return torch.tanh(w @ x)

    w, x = normal(3), normal(6, 3, seed=1)
    for bound, chunk, later in ((1 << 24, None, 0), (1 << 24, 2, 0), (17, None, 0), (17, 4, 2)):
        monkeypatch.setattr(dattrifunc.curvature, "_HELD_NUMBERS", bound)
        f = fvp_at_x(func, (w, x), in_dims=(None, 0), chunk_size=chunk)
        calls.clear()
        f(normal(3, seed=2))
        assert len(calls) == later, (bound, chunk)


def test_bound_products_stay_where_they_were_built():
    w = torch.nn.Parameter(normal(3))
    x = normal(5, 3, seed=1)
    products = [
        fvp_at_x(lambda w, x: torch.tanh(w @ x), (w, x), in_dims=(None, 0)),
        streamed(lambda w, x: torch.tanh(w @ x), (w, x), in_dims=(None, 0), chunk_size=2),
        ggnvp_at_x(CompositeLoss(lambda w, x: torch.tanh(x @ w), lambda z: (z**2).sum()), (w, x)),
    ]
    v = normal(3, seed=2)
    before = [f(v).clone() for f in products]
    with torch.no_grad():
        w.add_(1)
    for f, want in zip(products, before, strict=True):
        assert torch.equal(f(v), want)
        assert not want.requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# inverse products and influence


@pytest.mark.parametrize("product", ["ggnvp", "fvp"])
@pytest.mark.parametrize(("solver", "form"), TABLE)
@settings(max_examples=5)
@given(problem=nonquadratics(), lam=st.floats(0.8, 2), chunk=st.sampled_from([None, 2]))
def test_every_solver_with_these_products_equals_the_dense_solve(solver, form, product, problem, lam, chunk):
    params, data = problem.params, problem.data
    knobs: dict[str, Any] = {"regularization": lam, "chunk_size": chunk}
    if solver == "lissa":
        knobs |= {"batch_size": len(data["y"]), "scaling": "auto", "recursion_depth": 300}
    if product == "ggnvp":

        def outer(z: torch.Tensor, data: Any) -> torch.Tensor:
            fit = F.binary_cross_entropy_with_logits(z, data["mask"].double(), reduction="none")
            return (fit * (1 + data["y"])).mean()

        loss: Any = CompositeLoss(lambda p, data: torch.tanh(data["x"] @ flat(p)), outer)
        x: tuple[Any, ...] = (params, data, data)
        matrix = linearised(loss, x)
        f = make(solver, form, loss, *x, product=ggnvp_at_x, **knobs)
    else:

        def loss(p: Any, data: Any) -> torch.Tensor:
            return 0.3 * problem.loss(p, data)

        matrix = loop(loss, (params,), samples_of(data))
        knobs |= {} if solver == "lissa" else {"in_dims": (None, 0)}
        f = make(solver, form, loss, params, data, product=fvp_at_x, **knobs)
    want = torch.linalg.solve(matrix + lam * torch.eye(len(matrix)).double(), flat(problem.rhs, batch=True).T).T
    assert_close(flat(f(problem.rhs), batch=True), want, rtol=1e-6, atol=1e-8)


def test_lissa_draws_samples_for_the_fisher_and_collates_for_ggn():
    """Batches of a sum over samples average to the whole: with many repeats the estimate comes near the solution."""
    w, x, y = normal(2), normal(6, 2, seed=1), normal(6, seed=2)
    v, lam = normal(2, seed=3), 1.0

    def one(w, x, y):
        return (w @ x - y) ** 2 / 2

    want = torch.linalg.solve(loop(one, (w,), list(zip(x, y, strict=True))) + lam * torch.eye(2).double(), v)
    sampling = {"num_repeat": 200, "recursion_depth": 200, "scaling": "auto", "regularization": lam}
    for dims, x_given in (((None, 1, 0), x.T), (None, x)):
        g = torch.Generator().manual_seed(0)
        f = ihvp_at_x_lissa(one, w, x_given, y, in_dims=dims, batch_size=3, product=fvp_at_x, generator=g, **sampling)
        assert_close(f(v), want, rtol=0.1, atol=0.05)
    loss = CompositeLoss(lambda w, x: x @ w, lambda z, y: (z - y).square().mean())
    g = torch.Generator().manual_seed(0)
    f = ihvp_at_x_lissa(
        loss, w, {"x": x, "y": y}, product=ggnvp_at_x, batch_size=6, generator=g, recursion_depth=300, scaling="auto",
        regularization=lam, collate_fn=lambda args: (args[0], args[1]["x"], args[1]["y"]),
    )  # fmt: skip
    assert_close(f(v), torch.linalg.solve(2 * x.T @ x / 6 + lam * torch.eye(2).double(), v))
    with pytest.raises(ValueError, match="collate_fn: expected None for a product that takes samples one by one"):
        ihvp_at_x_lissa(one, w, x, y, product=fvp_at_x, collate_fn=lambda args: args)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("solver", [name for name in SOLVERS if " " not in name])
@pytest.mark.parametrize("product", ["ggn", "fisher"])
def test_influence_takes_the_curvature_of_the_mean(product, solver, keep):
    loss = CompositeLoss(mlp, lambda z, y: F.cross_entropy(z, y))
    table_of = functools.partial(
        influence, loss, MLP, (X, LABELS), (X[:2], LABELS[:2]), solver=solver, keep_batch_dim=keep, regularization=0.5
    )
    options = {"batch_size": 5, "recursion_depth": 300, "scaling": "auto"} if solver == "lissa" else {}
    got = table_of(product=ggnvp_at_x if product == "ggn" else fvp_at_x, solver_options=options)
    samples = list(zip(X, LABELS, strict=True))
    rows = torch.cat([jacobian(lambda q, s=s: loss(q, *s).reshape(1), MLP) for s in samples])
    matrix = linearised(loss, (MLP, X, LABELS)) if product == "ggn" else rows.T @ rows / 5
    want = rows[:2] @ torch.linalg.solve(matrix + 0.5 * torch.eye(28).double(), rows.T)
    assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_solvers_that_hold_a_product_call_the_loss_at_build_only():
    calls = []

    def func(w, x):
        calls.append(1)
        return torch.tanh(w @ x)

    w, x = normal(3), normal(6, 3, seed=1)
    for bind in (ihvp_at_x_cg, ihvp_at_x_explicit):
        solve = bind(func, w, x, product=fvp_at_x, in_dims=(None, 0), regularization=0.1)
        calls.clear()
        solve(normal(3))
        assert not calls
    assert_close(
        hessian_matrix(hvp_at_x(lambda w: (w**3).sum(), (w,)), w), torch.diag(6 * w)
    )  # the Hessian product is not changed by its neighbours


def test_a_wrapped_bound_product_is_no_silent_constant():
    """It solves, but holds x constant: a derivative with respect to x would leave out the curvature's part."""
    w, v = normal(3), normal(3, seed=2)

    def solve(w, product):
        return ihvp_cg(lambda w: (w**4).sum(), product=product, regularization=0.1)((w,), v)

    for wrapped in (functools.partial(hvp_at_x), lambda *args, **knobs: hvp_at_x(*args, **knobs)):
        assert_close(solve(w, wrapped), solve(w, hvp_at_x))
        with pytest.raises(TypeError, match=r"product: expected one that depends on x, .* Fix: pass hvp_at_x, ggnvp"):
            torch.func.grad(lambda w, wrapped=wrapped: solve(w, wrapped).sum())(w)


def test_the_mean_of_a_loss_that_draws_masks_is_refused_in_its_own_words():
    loss = mean_loss(lambda w, x: F.dropout(w * x, 0.5).sum(), (None, 0))
    with pytest.raises(ValueError, match=r"func: expected a loss with one fixed value at x, .* Fix: call module.eval"):
        loss(normal(3), normal(5, 3))
