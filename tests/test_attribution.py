"""Scores and influence, against plain algebra and against retraining."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import flat, getters, leaves, nonquadratics, rebuild, trees, unflat
from test_rows import Largest

from dattrifunc import (
    DtypeError,
    Layout,
    SolveInfo,
    StructureError,
    fvp_at_x,
    ggnvp_at_x,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
)
from dattrifunc.attribution import influence, scores, self_scores, top_k
from dattrifunc.rows import RowStore, grad_rows, mean_loss

# ---------------------------------------------------------------------------------------------------------------------
# ridge regression by hand (F72): everything is known in closed form

L2 = 0.1
X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)


def penalised(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ w - y).square() / 2 + L2 / 2 * w.square().sum()


def plain(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ w - y).square() / 2


def fit(x: torch.Tensor, y: torch.Tensor, weight: float, l2: float) -> torch.Tensor:
    """The minimum of weight * sum 1/2 r^2 + l2 / 2 |w|^2."""
    return torch.linalg.solve(weight * x.T @ x + l2 * torch.eye(2, dtype=x.dtype), weight * x.T @ y)


W = fit(X, Y, 1 / 3, L2)
HESSIAN = X.T @ X / 3 + L2 * torch.eye(2, dtype=torch.float64)
# The penalty as regularization: it is in no row. F72's values.
SCORES = torch.tensor(
    [[1.1099, -0.2533, -0.8650], [-0.2533, 0.7044, -0.3162], [-0.8650, -0.3162, 1.0821]], dtype=torch.float64
)
# The penalty inside func: it is in every row.
_ROWS = (X @ W - Y)[:, None] * X + L2 * W
PENALISED = _ROWS @ torch.linalg.solve(HESSIAN, _ROWS.T)
SOLVERS: dict[str, dict[str, Any]] = {
    "explicit": {},
    "cg": {"solver_options": {"tol": 1e-12}},
    "minres": {"solver_options": {"tol": 1e-12}},
    "lissa": {"solver_options": {"scaling": 8.0, "recursion_depth": 2000, "batch_size": 3}},
    "nystrom": {},
    "arnoldi": {},
}


@pytest.mark.fault("F72")
@pytest.mark.parametrize("solver", SOLVERS)
def test_ridge_by_hand(solver):
    """Self-influence took the whole N x N matrix. Right: the closed form of a ridge regression, and its diagonal."""
    torch.testing.assert_close(W, torch.tensor([0.1162, 0.7328], dtype=torch.float64), atol=5e-5, rtol=0)
    options = {"solver": solver, "has_aux": True, "regularization": L2, **SOLVERS[solver]}
    table, info = influence(plain, W, (X, Y), (X, Y), **options)
    torch.testing.assert_close(table, SCORES, atol=1e-4, rtol=0)
    assert isinstance(info, SolveInfo)
    assert info.method == solver
    assert info.residual.shape == (3,)
    rows = grad_rows(plain, W, X, Y, in_dims=(None, 0, 0))
    solve = ihvp_at_x_explicit(mean_loss(plain, (None, 0, 0)), W, X, Y, regularization=L2)
    torch.testing.assert_close(self_scores(rows, solve(rows)), SCORES.diagonal(), atol=1e-4, rtol=0)
    torch.testing.assert_close(table, scores(solve(rows), rows), rtol=1e-6, atol=1e-8)


@pytest.mark.fault("F74")
def test_sign_and_scale_agree_with_retraining():
    """Nobody said what sign and scale scores have. Right: removing j changes loss i by about + score[i, j] / n.

    Taking a small part of sample j's weight 1/n away gives that part of the score, to rounding. Taking all of it, with
    n = 3, is far from small: signs and each query's most helpful sample are still those of the scores.
    """
    table = influence(plain, W, (X, Y), (X, Y), solver="explicit", regularization=L2)

    def change(part):
        """Change of each loss when sample j keeps (1 - part) of its weight, times n / part."""
        columns = []
        for j in range(3):
            weights = torch.full((3,), 1.0, dtype=torch.float64)
            weights[j] -= part
            scale = weights.sqrt()
            columns.append(plain_losses(fit(scale[:, None] * X, scale * Y, 1 / 3, L2)) - plain_losses(W))
        return torch.stack(columns, dim=1) * 3 / part

    torch.testing.assert_close(change(1e-6), table, rtol=1e-4, atol=1e-6)
    assert (change(1.0).sign() == table.sign()).all()
    assert (change(1.0).argmax(dim=1) == table.argmax(dim=1)).all()


def plain_losses(w: torch.Tensor) -> torch.Tensor:
    return torch.stack([plain(w, *sample) for sample in zip(X, Y, strict=True)])


@pytest.mark.parametrize("kind", ["inside func", "regularization"])
def test_the_two_kinds_of_penalty_agree_with_retraining(kind):
    """On many samples 1/n is small, and score / n is the change itself."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=rng, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0], dtype=torch.float64) + torch.randn(300, generator=rng, dtype=torch.float64)
    inside = kind == "inside func"
    w, n, l2 = fit(x, y, 1 / 300, 0.5), 300, 0.5

    def func(w, x, y):
        return plain(w, x, y) + (l2 / 2 * w.square().sum() if inside else 0)

    test = (x[:5], y[:5])
    table = influence(func, w, (x, y), test, query_func=plain, regularization=0.0 if inside else l2, solver="cg")
    changes = []
    for j in range(n):
        keep = [i for i in range(n) if i != j]
        without = fit(x[keep], y[keep], 1 / (n - 1) if inside else 1 / n, l2)
        changes.append([(plain(without, *s) - plain(w, *s)).item() for s in zip(*test, strict=True)])
    measured, predicted = np.array(changes).T.ravel(), (table / n).numpy().ravel()
    assert np.corrcoef(measured, predicted)[0, 1] > 0.999
    assert abs(np.polyfit(predicted, measured, 1)[0] - 1) < 0.02


@pytest.mark.fault("F71")
def test_damping_is_added_once_however_often_a_solve_is_called():
    """Damping was added in place to the eigenvalues (1, 3): the second call divided by (3, 5). Right: (2, 4) always."""
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)

    def func(w, x):
        return (scale * w.square()).sum() / 2 + w @ x

    w, x = torch.zeros(2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    solve = ihvp_at_x_explicit(mean_loss(func, (None, 0)), w, x, regularization=1.0)
    for solver, options in ((solve, {}), (solve, {}), ("cg", {"regularization": 1.0})):
        for _ in range(2):
            table = influence(func, w, (x,), (torch.eye(2, dtype=torch.float64),), solver=solver, **options)
            torch.testing.assert_close(table, torch.tensor([[1 / 2], [1 / 4]], dtype=torch.float64))


@pytest.mark.fault("F76")
def test_another_loss_for_the_queries():
    """Queries had to use the training loss. Right: any loss of the same parameters, and no test data in the solver."""

    def margin(w, x, y):
        return -(x @ w) * y

    solve = ihvp_at_x_cg(mean_loss(penalised, (None, 0, 0)), W, X, Y, tol=1e-12)
    table = influence(penalised, W, (X, Y), (X[:2], Y[:2]), query_func=margin, solver=solve)
    want = -(X * Y[:, None])[:2] @ torch.linalg.solve(HESSIAN, _ROWS.T)
    torch.testing.assert_close(table, want)


# ---------------------------------------------------------------------------------------------------------------------
# influence on drawn problems


@given(nonquadratics(), st.sampled_from(["explicit", "cg"]), st.floats(0, 1), st.sampled_from([None, 1, 2]))
def test_influence_equals_dense_algebra(problem, solver, lam, chunk):
    params, data = problem.params, problem.data
    picked = {name: part.flip(0)[:2] for name, part in data.items()}
    table = influence(
        problem.loss, params, (data,), (picked,), solver=solver, regularization=lam, chunk_size=chunk,
        solver_options={"tol": 1e-12} if solver == "cg" else None,
    )  # fmt: skip
    rows, queries = (
        torch.stack(
            [_gradient(problem.loss, params, {k: v[i] for k, v in part.items()}) for i in range(len(part["y"]))]
        )
        for part in (data, picked)
    )
    curvature = problem.hessian + lam * torch.eye(len(problem.hessian), dtype=torch.float64)
    torch.testing.assert_close(table, queries @ torch.linalg.solve(curvature, rows.T), rtol=1e-8, atol=1e-10)


@given(nonquadratics(), st.floats(1e-3, 1), st.sampled_from([None, 1, 2]), st.booleans())
def test_influence_by_the_fisher_equals_dense_algebra(problem, lam, chunk, said):
    """Woodbury takes the loss of one sample, and C is the Fisher without asking."""
    params, data = problem.params, problem.data
    options = {"product": fvp_at_x} if said else {}
    table, info = influence(
        problem.loss, params, (data,), (data,), solver="woodbury", regularization=lam, chunk_size=chunk, has_aux=True,
        **options,
    )  # fmt: skip
    rows = torch.stack(
        [_gradient(problem.loss, params, {k: v[i] for k, v in data.items()}) for i in range(len(data["y"]))]
    )
    curvature = rows.T @ rows / len(rows) + lam * torch.eye(rows.shape[1], dtype=torch.float64)
    torch.testing.assert_close(table, rows @ torch.linalg.solve(curvature, rows.T), rtol=1e-8, atol=1e-10)
    assert info.method == "woodbury"
    assert info.converged.all()


@pytest.mark.parametrize(("solver", "options"), [("nystrom", {"rank": 4}), ("arnoldi", {"max_iter": 4})])
def test_the_generator_reaches_the_solver(solver, options):
    w, data = torch.randn(9, generator=torch.Generator().manual_seed(0)).double(), (torch.eye(9).double(),)

    def run(seed, **more):
        generator = torch.Generator().manual_seed(seed)
        return influence(
            lambda w, x: (w @ x) ** 4, w, data, data, solver=solver, regularization=0.1, generator=generator,
            solver_options=options, **more,
        )  # fmt: skip

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    torch.testing.assert_close(run(1, product=fvp_at_x), run(1, product=fvp_at_x, in_dims=(None, 0)))


def _gradient(loss: Callable[..., Any], params: Any, sample: Any) -> torch.Tensor:
    at = rebuild(params, [leaf.detach().clone().requires_grad_() for leaf in leaves(params)])
    return flat(rebuild(at, torch.autograd.grad(loss(at, sample), leaves(at), materialize_grads=True)))


@given(nonquadratics())
def test_argnums_in_dims_and_a_dense_solver_of_ones_own(problem):
    params, data = problem.params, problem.data
    want = influence(problem.loss, params, (data,), (data,), solver="explicit")

    def func(mask, rest, at):
        return problem.loss(at, {"y": rest["y"], "x": rest["x"], "mask": mask[0]})

    split = (data["mask"][:, None], {"y": data["y"], "x": data["x"].T})
    dims = (0, {"x": 1, "y": 0}, None)
    seen: list[tuple[int, int]] = []
    tell = lambda done, total: seen.append((done, total))  # noqa: E731
    options = {"argnums": -1, "in_dims": dims, "progress": tell, "chunk_size": 2}
    torch.testing.assert_close(influence(func, params, split, split, **options), want, rtol=1e-5, atol=1e-6)
    n = len(data["y"])
    assert seen == [(min(i + 2, n), n) for i in range(0, n, 2)]
    inverse = torch.linalg.inv(problem.hessian)
    dense = lambda v: unflat(flat(v, batch=True) @ inverse, params)  # noqa: E731
    table, info = influence(func, params, split, split, solver=dense, has_aux=True, **options)
    torch.testing.assert_close(table, want)
    assert info is None
    pairs = lambda a, b, data: problem.loss(a, data) + b * b  # noqa: E731
    joint = (params, torch.tensor(0.0, dtype=torch.float64))
    table = influence(pairs, joint, (data,), (data,), argnums=(0, 1), solver="explicit")
    torch.testing.assert_close(table, want)


def test_a_loss_written_for_batches_and_a_constant_argument():
    def func(w, x, y, scale):
        return ((x @ w - y).square() / 2 * scale).mean() + L2 / 2 * w.square().sum()

    dims = (None, 0, 0, None)
    data = (X, Y, torch.tensor(1.0))
    table = influence(func, W, data, data, in_dims=dims, keep_batch_dim=True, solver="explicit")
    torch.testing.assert_close(table, PENALISED)


def test_a_loss_that_vmap_cannot_take():
    def func(w, x, y):
        return penalised(w, x, y) if x.sum() > 0 else y * 0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = influence(func, W, (X, Y), (X, Y), solver="explicit")
    torch.testing.assert_close(table, PENALISED)
    assert all("vmap" in str(warning.message) for warning in caught)


@pytest.mark.fault("F54")
@pytest.mark.parametrize("solver", ["explicit", "cg", "lissa", "minres"])
def test_nothing_to_score(solver, tmp_path):
    """A batch of 0 divided by zero. Right: results of shape (m, n)."""
    for m, n in ((0, 3), (2, 0), (0, 0)):
        train, test = (X[:n], Y[:n]), (X[:m], Y[:m])
        table = influence(penalised, W, train, test, solver=solver, store=tmp_path / "store")
        assert table.shape == (m, n)
        assert influence(penalised, W, train, test, solver=solver, has_aux=True)[1] is None
    rows = torch.ones(3, 2)
    for a, b in ((rows[:0], rows), (rows, rows[:0]), (rows[:0], rows[:0]), (rows[:, :0], rows[:, :0])):
        for metric in ("dot", "cosine"):
            assert torch.equal(scores(a, b, metric=metric), torch.zeros(len(a), len(b)))
    assert self_scores(rows[:0], rows[:0]).shape == (0,)
    values, ids = top_k(rows[:0], rows, 2)
    assert values.shape == ids.shape == (0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# training rows on disk


@pytest.mark.fault("F67")
def test_training_rows_are_made_once(tmp_path):
    """Training gradients were made again for every test set. Right: none on the second run, also in a new process."""
    path, calls = tmp_path / "rows", []

    def watched(done, total):
        calls.append((done, total))

    def run(w=W, x=X, func=penalised, **options):
        before = (path / "header.json").stat().st_mtime_ns if path.exists() else 0
        options = {"solver": dense, **options}
        table = influence(func, w, (x, Y), (X, Y), query_func=penalised, store=path, progress=watched, **options)
        return table, (path / "header.json").stat().st_mtime_ns != before

    inverse = torch.linalg.inv(HESSIAN)
    dense = lambda v: v @ inverse  # noqa: E731
    table, made = run()
    torch.testing.assert_close(table, PENALISED)
    assert made
    again, made = run(chunk_size=1)
    torch.testing.assert_close(again, table)
    assert not made
    assert run(solver="cg")[1] is False
    torch.testing.assert_close(run(w=W + 1e-9)[0], table)
    assert run()[1]
    assert run(x=X * 2)[1]
    assert run(func=plain)[1]
    assert run(func=plain)[1] is False
    assert [item.name for item in tmp_path.iterdir()] == ["rows"]
    assert RowStore.open(path).verify() == 3


STORED = """
import sys, torch
from dattrifunc import rows
from dattrifunc.attribution import influence

def loss(w, x, y):
    return (x @ w - y).square() / 2 + 0.05 * w.square().sum()

x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
y, w = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64), torch.tensor([0.1162, 0.7328], dtype=torch.float64)
made = []
real = rows.RowStore.append
rows.RowStore.append = lambda self, *args: (made.append(1), real(self, *args))
influence(loss, w, (x, y), (x, y), store=sys.argv[1], solver="explicit")
print(len(made))
"""


def test_another_process_reuses_the_rows(tmp_path):
    command = [sys.executable, "-c", STORED, str(tmp_path / "rows")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)]
    assert runs == ["1", "0"]


def test_an_unfinished_store_of_influence_is_made_again_and_other_stores_are_refused(tmp_path):
    path = tmp_path / "rows"
    run = lambda: influence(penalised, W, (X, Y), (X, Y), store=path, solver="explicit")  # noqa: E731
    run()
    RowStore.open(path, mode="a")  # never closed
    assert not RowStore.open(path).complete
    torch.testing.assert_close(run(), PENALISED)
    assert RowStore.open(path).complete

    def failing(w, x, y):
        return penalised(w, x, y) / y

    other = tmp_path / "other"
    with pytest.raises(ValueError, match=r"rows: expected finite rows"):
        influence(failing, W, (X, Y), (X, Y), query_func=penalised, store=other, solver=lambda v: v)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["rows"]


# ---------------------------------------------------------------------------------------------------------------------
# scores


def _draw(data: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


@given(st.data(), trees(), st.sampled_from([None, 1, 2, 5]), st.sampled_from(["dot", "cosine"]))
def test_scores_equal_the_product(tmp_path_factory, data, tree, block, metric):
    layout = Layout.of(tree)
    m, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    queries, rows = _draw(data, (m, layout.size)), _draw(data, (n, layout.size))
    want = queries @ rows.T
    if metric == "cosine":
        want = want / queries.norm(dim=1)[:, None] / rows.norm(dim=1)
    path = tmp_path_factory.mktemp("rows")
    with RowStore.create(path, layout) as store:
        store.append(rows)
    stored = RowStore.open(path)
    file = np.lib.format.open_memmap(path.parent / f"{path.name}.npy", "w+", np.float64, (m, n))
    options = {"block_size": block, "metric": metric}
    as_tree, tree_of_rows = layout.unravel_rows(queries), layout.unravel_rows(rows)
    for result in (
        scores(queries, rows, **options),
        scores(as_tree, stored, **options),
        scores(as_tree, tree_of_rows, layout=layout, **options),
        scores(queries.numpy(), rows.numpy(), **options),
        torch.from_numpy(scores(queries, rows, out=file, **options)),
        torch.func.vmap(lambda q: scores(q[None], rows, **options)[0])(queries),
    ):
        torch.testing.assert_close(result, want)
    np.testing.assert_allclose(np.load(path.parent / f"{path.name}.npy", mmap_mode="r"), want)


@pytest.mark.fault("F73")
@given(st.data(), trees(min_size=2), st.sampled_from(["dot", "cosine"]))
def test_groups_add_up_to_the_total(data, tree, metric):
    """Scores per layer were asked for. Right: the pieces of groups of columns add up to the total."""
    layout = Layout.of(tree)
    queries, rows = _draw(data, (2, layout.size)), _draw(data, (3, layout.size))
    names = [path[:1] for path in layout.paths]
    groups = {f"{i}": [prefix] for i, prefix in enumerate(dict.fromkeys(names))}
    pieces = scores(queries, rows, groups=groups, layout=layout, block_size=2, metric=metric)
    assert list(pieces) == list(groups)
    torch.testing.assert_close(sum(pieces.values()), scores(queries, rows, metric=metric))
    get = getters(tree)[0]
    if metric == "dot":
        first = scores(queries, rows, groups={"leaf": [layout.paths[0]]}, layout=layout)["leaf"]
        a, b = (get(layout.unravel_rows(side)).reshape(len(side), -1) for side in (queries, rows))
        torch.testing.assert_close(first, a @ b.T)


def test_groups_by_name_and_overlapping():
    layout = Layout.of({"body": {"w": torch.zeros(2), "b": torch.zeros(())}, "head": torch.zeros(1)})
    queries, rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.eye(4)
    pieces = scores(queries, rows, groups=["body", "head"], layout=layout)
    assert pieces["body"].tolist() == [[1, 2, 3, 0]]
    assert pieces["head"].tolist() == [[0, 0, 0, 4]]
    pieces = scores(queries, rows, groups={"ends": ["body.w", "head"], "twice": ["body", "body.b"]}, layout=layout)
    assert pieces["ends"].tolist() == [[1, 2, 0, 4]]
    assert pieces["twice"].tolist() == [[1, 2, 3, 0]]


@pytest.mark.fault("F68")
def test_a_large_product_goes_block_by_block_into_a_memory_map(tmp_path):
    """1M x 50K scores were one product. Right: the blocked one equals G H^-1 Q', and may go to a memory map."""
    rng = torch.Generator().manual_seed(0)
    rows, queries = torch.randn(2000, 100, generator=rng), torch.randn(500, 100, generator=rng)
    out = np.lib.format.open_memmap(tmp_path / "scores.npy", "w+", np.float32, (500, 2000))
    with Largest() as seen:
        assert scores(queries, rows, block_size=100, out=out) is out
    assert max(seen.sizes) <= 500 * 100
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "scores.npy")), queries @ rows.T)


@pytest.mark.fault("F69")
def test_no_product_by_broadcasting():
    """The product was made as n x m x p and then summed: 40 GB. Right: nothing larger than rows or scores."""
    rows = torch.ones(1000, 10_000)
    with Largest() as seen:
        table = scores(rows, rows)
    assert torch.equal(table, torch.full((1000, 1000), 10_000.0))
    assert max(seen.sizes) <= 1000 * 10_000


@pytest.mark.fault("F70")
def test_self_scores_allocate_no_square_matrix():
    """A diagonal was built as N x N. Right: N = 50k takes N p."""
    rows = torch.ones(50_000, 4)
    with Largest() as seen:
        diagonal = self_scores(rows, 2 * rows)
    assert torch.equal(diagonal, torch.full((50_000,), 8.0))
    assert max(seen.sizes) <= rows.numel()


@given(st.data(), st.integers(1, 6), st.sampled_from([None, 1, 2]), st.booleans(), st.sampled_from(["dot", "cosine"]))
def test_top_k_equals_a_stable_sort(tmp_path_factory, data, k, block, largest, metric):
    queries = _draw(data, (3, 2)).round()
    rows = _draw(data, (6, 2)).round()  # many ties
    table = scores(queries, rows, metric=metric)
    want = table.sort(dim=1, descending=largest, stable=True)
    options = {"block_size": block, "metric": metric}
    values, ids = top_k(queries, rows, k, largest, **options)
    assert torch.equal(ids, want.indices[:, :k])
    assert torch.equal(values, want.values[:, :k])
    for names in ([f"n{i}" for i in range(6)], [10 * i for i in range(6)]):
        path = tmp_path_factory.mktemp("rows")
        with RowStore.create(path, Layout.of(torch.zeros(2)), dtype="float64") as store:
            store.append(rows, names)
        _, ids = top_k(queries, RowStore.open(path), k, largest, **options)
        assert ids.tolist() == [[names[i] for i in row] for row in want.indices[:, :k].tolist()]
        assert isinstance(ids, np.ndarray if isinstance(names[0], str) else torch.Tensor)


def test_top_k_never_holds_all_scores():
    queries, rows = torch.ones(100, 5), torch.ones(10_000, 5)
    with Largest() as seen:
        top_k(queries, rows, 3)
    assert max(seen.sizes) < 100 * 10_000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    rows = torch.full((1, 4096), 1.0, dtype=dtype)
    assert scores(16 * rows, 16 * rows).item() == 4096 * 256
    assert scores(rows, rows).dtype == torch.float32
    assert self_scores(16 * rows, 16 * rows).item() == 4096 * 256


def test_cosine_of_tiny_and_zero_rows():
    rows = torch.tensor([[3e-25, 4e-25], [0.0, 0.0], [3e25, 4e25]])
    table = scores(rows, rows, metric="cosine")
    torch.testing.assert_close(table, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 0, 1]]))


@pytest.mark.fault("F75")
@pytest.mark.parametrize("block", [None, 1, 2])
def test_bad_rows_are_counted_and_named_before_the_product(tmp_path, block):
    """All scores came out NaN or 0. Right: non-finite rows and queries are counted and named."""
    rows = torch.full((5, 2), 1e5).half()
    rows[0] = rows[2] = 1
    queries = torch.ones(1, 2)
    text = r"rows_or_store: expected finite rows, got NaN or inf in 3 of 5 rows, first ids \[1, 3, 4\]. Fix: look"
    out = torch.zeros(1, 5)
    for function in (scores, lambda *x, **y: top_k(*x, 2, **y)):
        with pytest.raises(ValueError, match=text):
            function(queries, rows, block_size=block)
        with pytest.raises(ValueError, match=r"queries: expected finite rows, got NaN or inf in 3 of 5 rows"):
            function(rows, torch.ones(2, 2), block_size=block)
    with pytest.raises(ValueError, match=r"preconditioned_rows: expected finite rows, got NaN or inf in 3 of 5"):
        self_scores(torch.ones(5, 2), rows)
    with pytest.raises(ValueError, match=r"queries: expected products that torch.float32 can hold, got an overflow"):
        scores(torch.full((1, 2), 1e30), torch.full((1, 2), 1e30), out=out[:, :1])
    path = tmp_path / "rows"
    with RowStore.create(path, Layout.of(torch.zeros(2)), dtype="float16") as store:
        store.append(torch.ones(3, 2), ["a", "b", "c"])
    data = bytearray((path / "rows.npy").read_bytes())
    data[132:134] = b"\x00\x7c"  # inf
    (path / "rows.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"in 1 of 3 rows, first ids \['b'\]"):
        scores(queries, RowStore.open(path), block_size=block)


@pytest.mark.fault("F85")
def test_scores_can_be_differentiated():
    """Derivatives outside per-sample gradients of a layer norm were wrong. Right: they are exact, of scores too."""

    def loss(w, x):
        return torch.nn.functional.layer_norm(w * x, (3,), w).square().sum()

    w, x = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def total(w):
        rows = grad_rows(loss, w, x, in_dims=(None, 0))
        return scores(rows[:2], rows, block_size=3).square().sum()

    def by_hand(w):
        rows = torch.stack([torch.func.grad(loss)(w, one) for one in x])
        return (rows[:2] @ rows.T).square().sum()

    torch.testing.assert_close(torch.func.grad(total)(w), torch.func.grad(by_hand)(w))


# ---------------------------------------------------------------------------------------------------------------------
# wrong calls

ONES, LAYOUT = torch.ones(2, 3), Layout.of({"w": torch.zeros(2), "b": torch.zeros(())})


def run(**changed: Any) -> Callable[[Any], Any]:
    options = {"func": penalised, "params": W, "train": (X, Y), "test": (X, Y), "solver": "explicit", **changed}
    return lambda tmp_path: influence(**options)  # noqa: ARG005


def stored(prepare: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def go(tmp_path: Path) -> None:
        prepare(tmp_path / "store")
        influence(penalised, W, (X, Y), (X, Y), solver="explicit", store=tmp_path / "store")

    return go


def _foreign(path: Path) -> None:
    with RowStore.create(path, LAYOUT) as store:
        store.append(ONES)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


def _mismatch(tmp_path: Path) -> None:
    _foreign(tmp_path / "store")
    scores(ONES, RowStore.open(tmp_path / "store"), layout=Layout.of(torch.zeros(3)))


def both(function: Callable[..., Any], name: str) -> list[tuple[str, Any, type[Exception], str]]:
    """Wrong calls that scores and top_k have in common."""
    return [
        (
            f"{name}-kind",
            lambda _: function([1.0], ONES),
            StructureError,
            r"queries: expected rows \[n, p\].*list. Fix",
        ),
        (
            f"{name}-int",
            lambda _: function(ONES, ONES.int()),
            DtypeError,
            r"rows_or_store: .*got torch.int32. Fix: pass",
        ),
        (
            f"{name}-1d",
            lambda _: function(ONES[0], ONES),
            StructureError,
            r"queries: .*got shape \(3,\). Fix: pass rows",
        ),
        (
            f"{name}-width",
            lambda _: function(ONES[:, :2], ONES),
            StructureError,
            r"queries: .*p = 3.*width 2. Fix: use",
        ),
        (f"{name}-block", lambda _: function(ONES, ONES, block_size=0), ValueError, r"block_size: .*>= 1.*got 0. Fix:"),
        (
            f"{name}-float",
            lambda _: function(ONES, ONES, block_size=1.5),
            TypeError,
            r"block_size: .*got 1.5. Fix: pass",
        ),
        (
            f"{name}-metric",
            lambda _: function(ONES, ONES, metric="l2"),
            ValueError,
            r"metric: expected 'dot'.*'l2'. Fix:",
        ),
    ]


def grouped(groups: Any, layout: Any = LAYOUT) -> Callable[[Any], Any]:
    return lambda tmp_path: scores(ONES, ONES, groups=groups, layout=layout)  # noqa: ARG005


ROW_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    *both(scores, "scores"),
    *both(lambda *x, **y: top_k(*x, 1, **y), "top_k"),
    (
        "scores-layout",
        lambda _: scores(ONES, ONES, layout=3),
        TypeError,
        r"layout: expected a Layout, got int. Fix: pass",
    ),
    (
        "scores-store",
        _mismatch,
        StructureError,
        r"layout: expected the store's layout, got one of .*Fix: leave layout=None",
    ),
    (
        "scores-tree",
        lambda _: scores({"w": ONES}, ONES, layout=LAYOUT),
        StructureError,
        r"queries: .*leaves.*Fix: pass a",
    ),
    (
        "scores-out",
        lambda _: scores(ONES, ONES, out=3),
        TypeError,
        r"out: expected a tensor or a NumPy.*got int. Fix: pass",
    ),
    (
        "scores-shape",
        lambda _: scores(ONES, ONES, out=ONES),
        StructureError,
        r"out: expected shape \(2, 2\), got.*Fix: pass",
    ),
    (
        "scores-both",
        lambda _: scores(ONES, ONES, out=ONES, groups=["w"], layout=LAYOUT),
        ValueError,
        r"out: .*None.*Fix",
    ),
    (
        "scores-progress",
        lambda _: scores(ONES, ONES, progress=1),
        TypeError,
        r"progress: expected a function.*int. Fix:",
    ),
    (
        "groups-layout",
        grouped(["w"], None),
        StructureError,
        r"layout: expected a Layout where groups.*got None. Fix: pass",
    ),
    (
        "groups-type",
        grouped("w"),
        TypeError,
        r"groups: expected a list of prefixes or a dict, got 'w'. Fix: pass a list",
    ),
    (
        "groups-part",
        grouped({"a": 3}),
        TypeError,
        r"groups\['a'\]: expected a prefix or a list of them, got 3. Fix: pass",
    ),
    ("groups-name", grouped(["v"]), StructureError, r"prefix: expected the start of one of.*got 'v'. Fix:"),
    (
        "self-count",
        lambda _: self_scores(ONES, ONES[:1]),
        StructureError,
        r"preconditioned_rows: .*2 rows, got 1.*Fix: pre",
    ),
    (
        "self-width",
        lambda _: self_scores(ONES, ONES[:, :1]),
        StructureError,
        r"rows: expected width p = 1.*got width 3. Fix",
    ),
    (
        "self-kind",
        lambda _: self_scores(3, ONES),
        StructureError,
        r"rows: expected rows \[n, p\].*got int. Fix: pass layout",
    ),
    (
        "self-int",
        lambda _: self_scores(ONES.int(), ONES),
        DtypeError,
        r"rows: expected floating.*got torch.int32. Fix: pass",
    ),
    (
        "self-1d",
        lambda _: self_scores(ONES, ONES[0]),
        StructureError,
        r"preconditioned_rows: .*got shape \(3,\). Fix: pass",
    ),
    (
        "self-nan",
        lambda _: self_scores(ONES * float("nan"), ONES),
        ValueError,
        r"rows: .*NaN or inf in 2 of 2 rows.*Fix",
    ),
    ("top_k-large", lambda _: top_k(ONES, ONES, 3), ValueError, r"k: expected at most 2, the number.*got 3. Fix: pass"),
    (
        "top_k-zero",
        lambda _: top_k(ONES, ONES, 0),
        ValueError,
        r"k: expected an integer >= 1, got 0. Fix: pass how many",
    ),
    (
        "top_k-kind",
        lambda _: top_k(ONES, ONES, 1.5),
        TypeError,
        r"k: expected an integer >= 1, got 1.5. Fix: pass how many",
    ),
    ("train-type", run(train=X), TypeError, r"train: expected a tuple of arguments.*got Tensor. Fix: pass train="),
    ("test-type", run(test=X), TypeError, r"test: expected a tuple of arguments of func, got Tensor. Fix: pass test="),
    ("test-count", run(test=(X,)), StructureError, r"test: expected 2 arguments.*got 1. Fix: pass test="),
    (
        "params-tuple",
        run(argnums=(0, 1)),
        StructureError,
        r"params: expected a tuple of 2 trees, got Tensor. Fix: pass one",
    ),
    ("influence-argnums", run(argnums=7), ValueError, r"argnums: expected positions among 3.*got 7. Fix: pass"),
    ("influence-func", run(func=3), TypeError, r"func: expected a function, got int. Fix: pass"),
    ("influence-query", run(query_func=3), TypeError, r"query_func: expected a function, got int. Fix: pass the loss"),
    (
        "influence-dims",
        run(in_dims=(0, 0, 0)),
        StructureError,
        r"in_dims: expected None at argnums \(0,\), got .*Fix: pass None",
    ),
    ("influence-short", run(in_dims=(None, 0)), StructureError, r"in_dims: expected 3 entries, got 2.*Fix: give one"),
    (
        "influence-solver",
        run(solver="newton"),
        ValueError,
        r"solver: expected 'arnoldi' or 'auto' or 'cg' or 'explicit' or 'lissa' or .*'woodbury', got 'newton'",
    ),
    ("influence-nystrom", run(solver="nystrom"), ValueError, r"regularization: .*> 0, got 0. Fix: pass lambda > 0"),
    ("influence-woodbury", run(solver="woodbury"), ValueError, r"regularization: .*> 0, got 0. Fix: pass lambda > 0"),
    (
        "influence-rows",
        run(solver="woodbury", regularization=0.1, product=ggnvp_at_x),
        ValueError,
        r"product: expected fvp_at_x, the curvature made of rows, got ggnvp_at_x. Fix: leave it out",
    ),
    ("influence-lambda", run(regularization=-1), ValueError, r"regularization: .*>= 0, got -1. Fix: pass lambda"),
    ("influence-chunk", run(chunk_size=0), ValueError, r"chunk_size: expected an integer >= 1.*got 0. Fix: pass"),
    (
        "influence-generator",
        run(generator=3),
        TypeError,
        r"generator: expected a torch.Generator or None, got int. Fix",
    ),
    ("influence-options", run(solver_options=[1]), TypeError, r"solver_options: expected a dict, got list. Fix: pass"),
    (
        "influence-bound",
        run(solver=lambda v: v, regularization=1.0),
        ValueError,
        r"regularization: expected nothing beside a bound inverse product.*Fix: bind",
    ),
    ("influence-progress", run(progress=3), TypeError, r"progress: expected a function, got int. Fix: pass"),
    ("influence-store", run(store=3), TypeError, r"store: expected a path, got int. Fix: pass"),
    ("influence-device", run(train=(X, Y[:2])), StructureError, r"x: expected one number of samples, got .*Fix: pass"),
    ("store-foreign", stored(_foreign), ValueError, r"store: expected a store that influence wrote, got .*Fix: choose"),
    ("store-folder", stored(_folder), ValueError, r"path: expected a folder with header.json.*no RowStore. Fix: check"),
    ("store-file", stored(lambda path: path.write_text("x")), ValueError, r"path: .*not there. Fix: check the path"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), [pytest.param(*case[1:], id=case[0]) for case in ROW_ERRORS])
def test_a_wrong_call_says_what_is_wrong(tmp_path, wrong, error, text):
    with pytest.raises(error, match="(?s)" + text):
        wrong(tmp_path)
