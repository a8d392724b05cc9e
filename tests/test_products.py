"""Hessian products in both modes and both forms, against dense Hessians by torch.autograd alone, in float64."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import warnings
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, quadratics, rebuild, reorder, row, unflat
from torch.testing import assert_close
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dattrifunc import (
    CompositeLoss,
    NonFiniteWarning,
    fvp,
    fvp_at_x,
    ggnvp,
    ggnvp_at_x,
    hessian_matrix,
    hvp,
    hvp_at_x,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unbound(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):
    """The unbound form with the signature of the bound one."""
    f = hvp(func, argnums, mode, regularization, chunk_size=chunk_size)
    return lambda v: f(x, v)


# Every form and mode goes through every test below.
FORMS = {"bound": hvp_at_x, "unbound": unbound}
MODES = ["rev-rev", "rev-fwd"]
every = pytest.mark.parametrize(
    ("form", "mode"), [pytest.param(form, mode, id=f"{name} {mode}") for name, form in FORMS.items() for mode in MODES]
)


def dense(func: Any, x: tuple[Any, ...], argnums: int | tuple[int, ...] = 0) -> torch.Tensor:
    """The Hessian [p, p] in leaf order, by torch.autograd on one flat float64 vector."""
    chosen = tuple(x[i] for i in argnums) if isinstance(argnums, tuple) else (x[argnums],)
    positions = argnums if isinstance(argnums, tuple) else (argnums % len(x),)

    def of(vector: torch.Tensor) -> torch.Tensor:
        filled = list(x)
        parts = torch.split(vector, [flat(part).numel() for part in chosen])
        for i, like, part in zip(positions, chosen, parts, strict=True):
            filled[i] = unflat(part, like)
        return func(*filled)

    return torch.autograd.functional.hessian(of, flat(chosen).detach().double())


# ---------------------------------------------------------------------------------------------------------------------
# drawn trees and losses


@every
@given(quadratics(), st.randoms(use_true_random=False), st.sampled_from([None, 1, 2]), st.sampled_from([0.0, 0.3]))
def test_equals_the_drawn_matrix(form, mode, problem, rng, chunk, lam):
    params, loss, hessian, rhs = problem
    matrix = hessian + lam * torch.eye(len(hessian), dtype=torch.float64)
    f = form(loss, (params,), mode=mode, regularization=lam, chunk_size=chunk)
    out = f(reorder(rhs, rng))  # keys of v in another order: the result has those of x
    assert torch_pytree.tree_structure(out) == torch_pytree.tree_structure(rhs)
    assert_close(flat(out, batch=True), flat(rhs, batch=True) @ matrix)
    for i in range(min(2, len(leaves(rhs)[0]))):
        one = f(row(rhs, i))
        assert [leaf.shape for leaf in leaves(one)] == [leaf.shape for leaf in leaves(params)]
        assert_close(flat(one), matrix @ flat(row(rhs, i)))


@every
@given(nonquadratics())
def test_equals_autograd_on_int_bool_and_float_data(form, mode, problem):
    params, data, loss, hessian, rhs = problem
    out = form(loss, (params, data), mode=mode)(rhs)
    assert_close(flat(out, batch=True), flat(rhs, batch=True) @ hessian)


@given(nonquadratics(), st.sampled_from([1, 2, 3, 100]))
def test_the_dense_matrix_is_symmetric_and_the_same_at_any_chunk_size(problem, chunk):
    params, data, loss, hessian, _ = problem
    f = hvp_at_x(loss, (params, data))
    matrix = hessian_matrix(f, params, chunk_size=chunk)
    assert_close(matrix, hessian)
    assert_close(matrix, matrix.T)
    assert_close(hessian_matrix(lambda v: f(v), params), hessian)  # somebody else's product


@every
@given(nonquadratics(), st.floats(-2, 2))
def test_linear_and_symmetric(form, mode, problem, a):
    params, data, loss, hessian, _ = problem
    f = form(loss, (params, data), mode=mode)
    u, v = (unflat(normal(len(hessian), seed=seed), params) for seed in (1, 2))
    combined = rebuild(u, [a * s + t for s, t in zip(leaves(u), leaves(v), strict=True)])
    assert_close(flat(f(combined)), a * flat(f(u)) + flat(f(v)))
    assert_close(flat(u) @ flat(f(v)), flat(v) @ flat(f(u)))
    assert torch.equal(flat(f(u)), flat(f(u)))


# ---------------------------------------------------------------------------------------------------------------------
# what may stand in x


def three(a, b, c):
    return (a**3).sum() * b["w"].sum() + (torch.sin(b["w"]) * c[0]).sum() + (a.sum() * c[0].sum()) ** 2


THREE = (normal(2), {"w": normal(3)}, [normal(3, seed=1)])


@every
@pytest.mark.parametrize("argnums", [0, 1, 2, -1, -3, (0,), (1,), (0, 1), (2, 0), (-1, 0, 1)])
def test_argnums(form, mode, argnums):
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    want = dense(three, THREE, tuple(i % 3 for i in positions))
    like = tuple(THREE[i] for i in positions) if isinstance(argnums, tuple) else THREE[argnums]
    v = unflat(normal(4, len(want)), like)
    out = form(three, THREE, argnums, mode)(v)
    assert isinstance(out, tuple) == isinstance(argnums, tuple)
    assert_close(flat(out, batch=True), flat(v, batch=True) @ want)


Layer = namedtuple("Layer", ["weight", "bias"])


@dataclasses.dataclass
class Box:
    weight: Any
    note: Any = None


torch.export.register_dataclass(Box)


def around(w, data, power, name, flags):
    assert name == "cubic"
    assert data["none"] is None
    scale = torch.where(data["mask"], data["scale"], 2.0).sum() + data["count"].sum() + data["half"].float().sum()
    return (w**power).sum() * scale * flags[1]


@every
def test_other_arguments_may_be_anything(form, mode):
    """None, numbers, strings, ints, bools and a wider or narrower dtype beside the parameters."""
    data = {
        "mask": torch.tensor([True, False]),
        "none": None,
        "scale": torch.ones(2, dtype=torch.float64),
        "count": torch.tensor([1, 2]),
        "half": torch.ones(1, dtype=torch.bfloat16),
    }
    x = (torch.tensor([1.0, 2.0]), data, 3, "cubic", (True, 0.5))
    out = form(around, x, mode=mode)(torch.ones(2))
    assert_close(out, 6 * x[0] * (1 + 2 + 3 + 1) * 0.5)


CONTAINERS = {
    "namedtuple": (Layer(normal(2, 2), normal(2)), lambda v: v.weight.pow(3).sum() * v.bias.prod()),
    "dataclass": (Box(normal(2), {"b": normal(1)}), lambda v: (v.weight**3).sum() * v.note["b"].sum()),
    "strided": ([normal(3, 2).T, normal(6)[::2]], lambda v: ((v[0] @ v[1]) ** 3).sum()),
    "bare 0-d": (normal(), lambda v: v**4),
    "tied": ([(same := normal(2)), same], lambda v: (v[0] ** 3 * v[1]).sum()),
    "expanded": (normal(1).expand(3), lambda v: (v**3).sum() * v.sum()),
}


@every
@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_and_strides(form, mode, kind):
    tree, loss = CONTAINERS[kind]
    parts, spec = torch_pytree.tree_flatten(tree)
    # The reference sees a list of the same leaves.
    want = dense(lambda p: loss(torch_pytree.tree_unflatten(p, spec)), ([part.clone() for part in parts],))
    v = [normal(2, *part.shape, seed=i) for i, part in enumerate(parts)]
    out = form(loss, (tree,), mode=mode)(torch_pytree.tree_unflatten(v, spec))
    assert type(out) is type(tree)
    assert_close(flat(torch_pytree.tree_leaves(out), batch=True), flat(v, batch=True) @ want)


@every
@pytest.mark.parametrize(
    ("dtypes", "tol"),
    [((torch.float32, torch.float64), 1e-5), ((torch.bfloat16,) * 2, 0.05), ((torch.bfloat16, torch.float32), 0.05)],
)
def test_mixed_dtypes(form, mode, dtypes, tol):
    """Computed in the widest, returned per leaf."""
    params = {"w": normal(3, dtype=dtypes[0]), "b": normal(2, dtype=dtypes[1])}
    wide = {key: leaf.double() for key, leaf in params.items()}

    def loss(p):
        return (p["w"] ** 3).sum() * p["b"].pow(2).sum() + torch.sin(p["b"]).sum()

    v = {key: normal(4, *leaf.shape, seed=1).to(leaf.dtype) for key, leaf in params.items()}
    out = form(loss, (params,), mode=mode)(v)
    assert {key: leaf.dtype for key, leaf in out.items()} == {key: leaf.dtype for key, leaf in params.items()}
    want = flat(v, batch=True).double() @ dense(loss, (wide,))
    got = torch.cat([leaf.double() for leaf in out.values()], dim=1)
    assert_close(got, want, rtol=tol, atol=tol * float(want.abs().max()))
    narrow = {key: leaf.to(torch.bfloat16) for key, leaf in v.items()}
    assert {key: leaf.dtype for key, leaf in form(loss, (params,), mode=mode)(narrow).items()} == {
        key: leaf.dtype for key, leaf in params.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_bound_forms_take_parameters_as_constants_and_unbound_forms_follow_them(mode):
    w, v = torch.nn.Parameter(normal(3)), normal(3, seed=1)

    def loss(w):
        return (w**3).sum()

    f = hvp_at_x(loss, (w,), mode=mode)
    assert not f(v).requires_grad
    v.requires_grad_()
    f(v).sum().backward()
    assert_close(v.grad, 6 * w.detach())
    assert w.grad is None
    hvp(loss, mode=mode)((w,), v.detach()).sum().backward()
    assert_close(w.grad, 6 * v.detach())


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_product_stays_where_it_was_built(mode):
    """An optimizer changes parameters in place: the product must not become a mixture of two points."""
    w, v = torch.nn.Parameter(normal(3)), normal(3, seed=1)
    f = hvp_at_x(lambda w: (w**3).sum() * torch.tanh(w).sum(), (w,), mode=mode)
    want = f(v).clone()
    with torch.no_grad():
        w.add_(1)
    assert torch.equal(f(v), want)


@every
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_under_no_grad_and_inference_mode(form, mode, guard):
    w, x = normal(3), normal(4, 3, seed=1)

    def loss(w, x):
        return torch.tanh(x @ w).pow(2).mean()

    want = dense(loss, (w, x))
    with guard():
        f = form(loss, (w, x), mode=mode)
        inside = f(normal(2, 3, seed=2))
    assert_close(inside, normal(2, 3, seed=2) @ want)
    if form is hvp_at_x:
        assert_close(f(normal(3, seed=3)), want @ normal(3, seed=3))


# ---------------------------------------------------------------------------------------------------------------------
# the work that is done, and what is left behind


@every
def test_a_loss_without_curvature(form, mode):
    assert torch.equal(form(lambda w: 3 * w.sum(), (normal(3),), mode=mode)(normal(2, 3)), torch.zeros(2, 3).double())
    assert torch.equal(form(lambda _: torch.tensor(1.0), (normal(3),), mode=mode)(normal(3)), torch.zeros(3).double())
    assert form(lambda _: torch.tensor(1.0), ({},), mode=mode)({}) == {}


@every
@pytest.mark.parametrize("x", [torch.ones(8), torch.ones(2, 4)])
def test_a_loss_that_draws_masks_is_refused(form, mode, x):
    """One product, a batch of them, and under vmap; nothing is drawn anew in silence."""
    v = torch.ones(3, *x.shape)
    for call in (
        lambda: form(lambda w: F.dropout(w, 0.5).pow(2).sum() / 2, (x,), mode=mode)(v[0]),
        lambda: form(lambda w: F.dropout(w, 0.5).pow(2).sum() / 2, (x,), mode=mode)(v),
        lambda: form(lambda w: (w + torch.randn(())).pow(2).sum(), (x,), mode=mode)(v),
        lambda: torch.func.vmap(lambda v: form(lambda w: F.dropout(w, 0.5).pow(2).sum(), (x,), mode=mode)(v))(v),
    ):
        with pytest.raises(ValueError, match=r"func: .* draws random numbers. Fix: call module.eval"):
            call()
    generator = torch.Generator()  # a source of its own, seeded in the loss, gives one fixed mask
    out = form(
        lambda w: (w * (torch.rand(x.shape, generator=generator.manual_seed(0)) > 0.5)).pow(2).sum(), (x,), mode=mode
    )(v[0])
    mask = (torch.rand(x.shape, generator=generator.manual_seed(0)) > 0.5).float()
    assert_close(out, 2 * mask)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("F38")
def test_one_evaluation_for_one_build_and_twenty_products(mode, chunk):
    """F38: the gradient was computed anew for every product at one point. Right: 1 forward for the fixed-x closure."""
    calls = []

    def loss(w, x):
        calls.append(1)
        return torch.tanh(x @ w).pow(2).mean()

    w, x = normal(3), normal(5, 3)
    want = dense(loss, (w, x))
    calls.clear()
    f = hvp_at_x(loss, (w, x), mode=mode, chunk_size=chunk)
    assert len(calls) == 1
    for i in range(20):
        v = normal(3, seed=i) if i % 2 else normal(i, 3, seed=i)
        assert_close(f(v), v @ want)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_product_frees_its_graph(mode):
    x = normal(50, 3)
    held = weakref.ref(x)
    f = hvp_at_x(lambda w, x: (x @ w).pow(4).mean(), (normal(3), x), mode=mode)
    f(normal(3))
    del x, f
    gc.collect()
    assert held() is None


@every
@pytest.mark.fault("F56")
def test_inputs_are_never_mutated(form, mode):
    """F56: the wrapper wrote into the caller's dict, which then held a leaked tracing tensor. Right: never mutated."""
    inner = {"b": normal(2), "a": [normal(1), None]}
    x = (inner, {"x": normal(2), "n": 3})
    v = {"a": [normal(1), None], "b": normal(2)}
    before, objects = copy.deepcopy((x, v)), [*leaves(inner), *leaves(v)]
    form(lambda p, d: (p["b"] ** 3 * d["x"]).sum() * p["a"][0].sum(), x, mode=mode)(v)
    assert list(inner) == ["b", "a"]
    assert list(v) == ["a", "b"]
    assert all(mine is its for mine, its in zip(objects, [*leaves(inner), *leaves(v)], strict=True))
    assert torch.equal(
        flat([*leaves(inner), x[1]["x"], *leaves(v)]),
        flat([*leaves(before[0][0]), before[0][1]["x"], *leaves(before[1])]),
    )
    assert all(type(leaf) is torch.Tensor and leaf.grad is None for leaf in objects)


@every
def test_compiled_code_may_call_a_product(form, mode):
    """The graph breaks at the door: a product looks at transforms and values, which the compiler cannot trace."""
    w, x, v = normal(3), normal(4, 3, seed=1), normal(3, seed=2)

    def loss(w, x):
        return torch.tanh(x @ w).pow(2).mean()

    want = dense(loss, (w, x)) @ v
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        f = form(loss, (w, x), mode=mode)
        assert_close(torch.compile(lambda v, f=f: 2 * f(v) + 1, backend=backend)(v), 2 * want + 1)
        assert_close(torch.compile(lambda v: 2 * form(loss, (w, x), mode=mode)(v), backend=backend)(v), 2 * want)
        assert_close(torch.compile(f, backend=backend)(v), want)


FALLS_BACK = {
    "huber_loss": lambda w: F.huber_loss(w, torch.zeros_like(w), reduction="sum"),
    "mse_loss": lambda w: F.mse_loss(torch.sin(w), torch.ones_like(w), reduction="sum"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", FALLS_BACK)
@pytest.mark.fault("F35", "F84")
def test_an_operator_without_forward_mode_falls_back_with_one_warning(form, name):
    """F35: forward AD is missing for some operators. Right: rev-rev with one notice; huber at (0.5, 2) gives (1, 0).

    F84: tracing forward over reverse of mse_loss kills the process (torch 2.13). Right: not traced; rev-rev's value.
    """
    loss, w, v = FALLS_BACK[name], torch.tensor([0.5, 2.0]), torch.tensor([[1.0, 1.0], [2.0, -1.0], [0.0, 0.0]])
    want = v @ dense(loss, (w.double(),)).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        out = form(loss, (w,), mode="rev-fwd")(v)
    told = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(told) == 1 or (name == "mse_loss" and form is unbound and not told)  # that one has a forward mode there
    for text in told:
        assert re.search(rf"mode='rev-fwd': operator '{name}' has no forward mode here; used mode='rev-rev'", text)
    assert_close(out, want)
    if name == "huber_loss":
        assert_close(out[0], torch.tensor([1.0, 0.0]))


@every
@pytest.mark.fault("F85")
def test_layer_norm_is_exact(form, mode):
    """F85: derivatives taken outside a vmap through layer_norm are wrong, silently. Right: a loop over samples."""
    n, width = 4, 3
    p = {"l": normal(width, 2), "g": 1 + normal(width, seed=1), "b": normal(width, seed=2), "o": normal(width, seed=3)}
    x, y = normal(n, 2, seed=4), normal(n, seed=5)

    def one(p, x, y):
        z = x @ p["l"].T
        return (F.layer_norm(z, (width,), p["g"], p["b"]) @ p["o"] - y).pow(2).mean()

    def by_vmap(p, x, y):
        return torch.func.vmap(one, (None, 0, 0))(p, x, y).mean()

    want = sum(dense(one, (p, x[i], y[i])) for i in range(n)) / n
    v = unflat(normal(len(want) + 1, len(want), seed=6), p)
    assert_close(flat(form(one, (p, x, y), mode=mode)(v), batch=True), flat(v, batch=True) @ want)
    assert_close(flat(form(by_vmap, (p, x, y), mode=mode)(v), batch=True), flat(v, batch=True) @ want)


# ---------------------------------------------------------------------------------------------------------------------
# known faults


class Pushed(TorchDispatchMode):
    """Watch how many vectors are pushed at once: the largest [k, width], or [width, k], of any operator, but [., p]."""

    def __init__(self, width, p):
        super().__init__()
        self.width, self.p, self.most = width, p, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch_pytree.tree_leaves(out):
            shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
            if self.width in shape and self.p not in shape:
                self.most = max(self.most, tensor.numel() // self.width)
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("F26")
def test_chunks_bound_what_is_pushed_at_once(mode):
    """F26: all vectors went through autodiff at once. Right: values equal, the peak falls as the chunk does."""
    p, k, width = 2000, 512, 37
    w, x = normal(p) / p**0.5, normal(width, p, seed=1)
    v = normal(k, p, seed=2)

    def loss(w, x):
        return torch.tanh(x @ w).square().sum()

    seen, outs = {}, {}
    for chunk in (None, 64, 1):
        f = hvp_at_x(loss, (w, x), mode=mode, chunk_size=chunk)
        with Pushed(width, p) as pushed:
            outs[chunk] = f(v)
        seen[chunk] = pushed.most
        assert_close(outs[chunk], outs[None])
    assert seen == {None: k, 64: 64, 1: 1}
    w, x = w[:50].clone(), x[:, :50].clone()
    with Pushed(width, 50) as pushed:
        matrix = ihvp_at_x_explicit(loss, w, x, mode=mode, chunk_size=8, regularization=1.0).matrix
    assert pushed.most == 8
    assert_close(matrix, ihvp_at_x_explicit(loss, w, x, mode=mode, regularization=1.0).matrix)


@every
@pytest.mark.fault("F30")
def test_a_no_grad_block_in_the_loss(form, mode):
    """F30: a no_grad block stops reverse mode, not forward mode. Right: documented; detach is the same in both."""
    t, v = torch.tensor([1.0, 2.0]), torch.ones(2)

    def blocked(t):
        with torch.no_grad():
            c = t**2
        return (c * t).sum()

    assert_close(form(blocked, (t,), mode=mode)(v), torch.zeros(2) if mode == "rev-rev" else torch.tensor([2.0, 4.0]))
    assert_close(form(lambda t: ((t**2).detach() * t).sum(), (t,), mode=mode)(v), torch.zeros(2))
    assert "torch.no_grad" in hvp_at_x.__doc__


@every
@pytest.mark.fault("F31")
def test_a_straight_through_estimator(form, mode):
    """F31: detach with second order. Right: (-0.5159, -0.6720) in both modes."""
    t = torch.tensor([0.6, 1.4])

    def loss(t):
        return (torch.tanh(t) + (torch.round(t) - torch.tanh(t)).detach()).square().sum()

    assert_close(form(loss, (t,), mode=mode)(torch.ones(2)), torch.tensor([-0.5159, -0.6720]), rtol=0, atol=5e-5)


def squared_norm(p):
    return torch.linalg.vector_norm(p["t"]) ** 2 + (p["u"] ** 2).sum()


AT_ZERO = {"t": torch.zeros(3), "u": torch.ones(2)}
SQUARE = CompositeLoss(lambda p, x: torch.stack([torch.linalg.vector_norm(p["t"]), p["u"].sum()]) * x, lambda z: z @ z)
SAMPLES = {"in_dims": (None, 0)}
NOT_FINITE = {
    "hvp_at_x": lambda: hvp_at_x(squared_norm, (AT_ZERO,)),
    "hvp": lambda: lambda v: hvp(squared_norm)((AT_ZERO,), v),
    "ggnvp_at_x": lambda: ggnvp_at_x(SQUARE, (AT_ZERO, torch.inf)),
    "ggnvp": lambda: lambda v: ggnvp(SQUARE)((AT_ZERO, torch.inf), v),
    "fvp_at_x": lambda: fvp_at_x(
        lambda p, x: x * p["t"].sqrt().sum() + p["u"].sum(), (AT_ZERO, torch.ones(4)), **SAMPLES
    ),
    "fvp": lambda: (
        lambda v: fvp(lambda p, x: x * p["t"].sqrt().sum() + p["u"].sum(), **SAMPLES)((AT_ZERO, torch.ones(4)), v)
    ),
}


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.fault("F32")
def test_a_product_that_is_not_finite_is_flagged(name):
    """F32: the product of norm(t)^2 at 0 was NaN without a word. Right: flagged, with the leaves and what to write."""
    v = {"t": torch.ones(2, 3), "u": torch.ones(2, 2)}
    with pytest.warns(
        NonFiniteWarning, match=r"func: .* got NaN or inf for 2 of 2 vectors, in 't'.* sum of squares"
    ) as seen:
        out = NOT_FINITE[name]()(v)
    assert len(seen) == 1
    assert not out["t"].isfinite().all()


@every
@pytest.mark.fault("F32")
def test_what_is_not_flagged(form, mode, recwarn):
    """Vectors that are not finite themselves, huge products that are finite, products inside transforms and solvers."""
    x = torch.tensor([1.0, 2.0])
    v = torch.stack([x, x * torch.nan, x])
    out = form(lambda t: t.pow(3).sum(), (x,), mode=mode)(v)
    assert out.isnan().any(1).tolist() == [False, True, False]
    big = torch.full((3,), 1.5e38)
    assert_close(form(lambda t: t.square().sum() / 2, (big,), mode=mode)(big), big)  # its sum is inf
    torch.func.vmap(form(lambda p: squared_norm(p), (AT_ZERO,), mode=mode))(
        {"t": torch.ones(2, 3), "u": torch.ones(2, 2)}
    )

    def mine(func, x, argnums=0, mode="rev-rev", regularization=0.0, *, chunk_size=None):
        return form(func, x, argnums, mode, regularization, chunk_size=chunk_size)

    ones = {"t": torch.ones(3), "u": torch.ones(2)}
    assert ihvp_at_x_cg(squared_norm, AT_ZERO, mode=mode, product=mine, has_aux=True)(ones)[1].status != 0
    assert not recwarn.list


@every
@pytest.mark.fault("F27")
def test_integer_data_is_not_differentiated(form, mode):
    """F27: integer data was differentiated or given float tangents. Right: [[0.125, -0.125], [0, 0]]."""
    x = (torch.zeros(2, 2), torch.eye(2), torch.tensor([0, 1]))
    out = form(lambda w, x, y: F.cross_entropy(x @ w.T, y), x, mode=mode)(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert_close(out, torch.tensor([[0.125, 0.0], [-0.125, 0.0]]))
    out = form(lambda w, x, y: F.cross_entropy(x @ w, y), x, mode=mode)(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert_close(out, torch.tensor([[0.125, -0.125], [0.0, 0.0]]))


@every
@pytest.mark.fault("F28")
def test_float64_data_needs_no_tangent(form, mode):
    """F28: zero tangents for the data were built in the default dtype. Right: 2 x'x v in float64."""
    x, t = normal(4, 3), normal(3)
    out = form(lambda t, x: ((x @ t) ** 2).sum(), (t, x), mode=mode)(normal(3, seed=1))
    assert out.dtype == torch.float64
    assert_close(out, 2 * x.T @ x @ normal(3, seed=1))


@every
@pytest.mark.fault("F29")
def test_a_narrower_v_is_promoted_in_every_mode(form, mode):
    """F29: float64 parameters with a float32 v worked in one mode only. Right: the same behaviour in all."""
    w, t, v = normal(2, 3), normal(3), normal(3, seed=1, dtype=torch.float32)
    out = form(lambda t: (torch.tanh(w @ t) ** 2).sum(), (t,), mode=mode)(v)
    assert out.dtype == torch.float64
    assert_close(out, dense(lambda t: (torch.tanh(w @ t) ** 2).sum(), (t,)) @ v.double())


@every
@pytest.mark.fault("F39")
def test_tuple_argnums(form, mode):
    """F39: a tuple of argnums crashed. Right: the product of ones is ((3, 3), (1, 1)), H being [[2I, I], [I, 0]]."""
    a = torch.ones(2)
    out = form(lambda a, b: (a * b).sum() + (a**2).sum(), (a, a.clone()), (0, 1), mode)((a, a))
    assert_close(out, (torch.full((2,), 3.0), torch.ones(2)))


@every
@pytest.mark.fault("F40")
def test_curvature_is_fixed_or_refused(form, mode):
    """F40: each evaluation drew a new dropout mask, so that CG solved a moving system. Right: H fixed, or refused."""
    with pytest.raises(ValueError, match="draws random numbers"):
        form(lambda t: F.dropout(t, 0.5).pow(2).sum() / 2, (torch.ones(8),), mode=mode)(torch.ones(8))


@every
@pytest.mark.fault("F47")
def test_frozen_parameters_are_passed_apart(form, mode):
    """F47: flatten took all parameters, unflatten the trainable ones, and all leaves shifted. Right: no leaf moves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    model[0].weight.requires_grad_(False)
    every_one = dict(model.named_parameters())
    trained = {name: p for name, p in every_one.items() if p.requires_grad}
    frozen = {name: p for name, p in every_one.items() if not p.requires_grad}
    x = normal(5, 2)

    def loss(params, frozen, x):
        return torch.func.functional_call(model, {**params, **frozen}, (x,)).pow(2).mean()

    want = dense(loss, ({k: p.detach() for k, p in trained.items()}, frozen, x))
    v = unflat(normal(2, len(want)), {k: p.detach() for k, p in trained.items()})
    out = form(loss, (trained, frozen, x), mode=mode)(v)
    assert list(out) == ["0.bias", "2.weight", "2.bias"]
    assert_close(flat(out, batch=True), flat(v, batch=True) @ want)
    assert all(p.grad is None for p in model.parameters())


@every
@pytest.mark.fault("F48")
def test_a_subset_of_the_parameters_gives_its_block(form, mode):
    """F48: frozen leaves crashed. Right: the block of the full Hessian; the rest is not differentiated at all."""
    body, head, x = normal(3, 2), normal(3, seed=1), normal(4, 2, seed=2)

    def loss(head, body):
        return (torch.tanh(x @ body["w"].T) @ head["w"]).pow(4).mean()

    full = dense(lambda p: loss({"w": p["h"]}, {"w": p["b"]}), ({"b": body, "h": head},))
    out = form(loss, ({"w": head}, {"w": body}), mode=mode)({"w": normal(5, 3, seed=3)})
    assert_close(out["w"], normal(5, 3, seed=3) @ full[6:, 6:])


@every
@pytest.mark.fault("F49")
def test_an_unused_leaf_has_no_curvature(form, mode):
    """F49: a parameter that the loss does not use gave None. Right: its block of the product is 0 (or lambda v)."""
    x, v = {"a": torch.ones(2), "u": torch.ones(3)}, {"a": torch.ones(2), "u": torch.ones(3)}
    out = form(lambda p: (p["a"] ** 2).sum(), (x,), mode=mode)(v)
    assert_close(out, {"a": torch.full((2,), 2.0), "u": torch.zeros(3)})
    out = form(lambda p: (p["a"] ** 2).sum(), (x,), mode=mode, regularization=0.5)(v)
    assert_close(out, {"a": torch.full((2,), 2.5), "u": torch.full((3,), 0.5)})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("F53")
def test_the_dense_matrix_of_a_square_leaf(mode):
    """F53: flattening added a dimension, H was 1 x p x p. Right: p x p."""
    t = normal(2, 2)
    matrix = hessian_matrix(hvp_at_x(lambda t: t.pow(3).sum() * t.sum(), (t,), mode=mode), t, chunk_size=3)
    assert matrix.shape == (4, 4)
    assert_close(matrix, dense(lambda t: t.pow(3).sum() * t.sum(), (t,)))


def test_the_dense_matrix_of_other_products():
    like = {"b": torch.zeros(1, 2, dtype=torch.bfloat16), "a": torch.zeros(0)}
    assert torch.equal(hessian_matrix(lambda v: {"a": v["a"], "b": 2 * v["b"]}, like), 2 * torch.eye(2))
    assert hessian_matrix(lambda v: v, {}).shape == (0, 0)
