"""Per-sample gradients, rows and the store, against a Python loop with torch.autograd."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import flat, leaves, nonquadratics, rebuild, trees
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dattrifunc import DtypeError, Layout, StructureError
from dattrifunc.rows import RowStore, fingerprint, grad_rows, mean_loss, per_sample_grads

# ---------------------------------------------------------------------------------------------------------------------
# references


def loop(func: Callable[..., Any], params: Any, *samples: tuple[Any, ...]) -> torch.Tensor:
    """Rows [n, p]: torch.autograd on one sample after the other."""
    rows = []
    for sample in samples:
        at = rebuild(params, [leaf.detach().clone().requires_grad_() for leaf in leaves(params)])
        grads = torch.autograd.grad(func(at, *sample), leaves(at), allow_unused=True)
        filled = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves(at), grads, strict=True)]
        rows.append(flat(filled))
    return torch.stack(rows)


def quiet(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(warning.message) for warning in caught]


class Largest(TorchDispatchMode):
    """Records the sizes of all new storages, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.sizes.append(t.untyped_storage().nbytes() // t.element_size())
        return out


def linear(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (params["w"] @ x + params["b"]).square().sum()


PARAMS = {"w": torch.tensor([[1.0, 2.0], [0.5, -1.0]]), "b": torch.tensor([0.1, 0.2])}
X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]])
LAYOUT = Layout.of({"w": torch.zeros(2), "b": torch.zeros(())})


# ---------------------------------------------------------------------------------------------------------------------
# per-sample gradients


@given(nonquadratics(), st.sampled_from([None, 1, 2, 3, 100]))
def test_rows_equal_the_loop(problem, chunk):
    params, data = problem.params, problem.data
    samples = [({name: part[i] for name, part in data.items()},) for i in range(len(data["y"]))]
    want = loop(problem.loss, params, *samples)
    grads = per_sample_grads(problem.loss, params, data, in_dims=(None, 0), chunk_size=chunk)
    torch.testing.assert_close(flat(grads, batch=True), want, rtol=1e-10, atol=1e-12)
    rows = grad_rows(problem.loss, params, data, in_dims=(None, {"mask": 0, "x": 0, "y": 0}), chunk_size=chunk)
    torch.testing.assert_close(rows, want, rtol=1e-10, atol=1e-12)


@given(nonquadratics())
def test_the_sample_axis_may_be_anywhere_and_may_be_kept(problem):
    params, data = problem.params, problem.data
    want = grad_rows(problem.loss, params, data, in_dims=(None, 0))
    moved = {**data, "x": data["x"].T}
    dims = (None, {"y": 0, "mask": 0, "x": -1})
    torch.testing.assert_close(grad_rows(problem.loss, params, moved, in_dims=dims), want)
    kept = grad_rows(problem.loss, params, data, in_dims=(None, 0), keep_batch_dim=True)
    torch.testing.assert_close(kept, want)


@given(nonquadratics())
def test_mean_loss_has_the_mean_row_as_gradient(problem):
    params, data = problem.params, problem.data
    loss = mean_loss(problem.loss, (None, 0))
    torch.testing.assert_close(loss(params, data), problem.loss(params, data))
    layout = Layout.of(params)
    gradient = torch.func.grad(lambda v: loss(layout.unravel(v), data))(flat(params))
    want = grad_rows(problem.loss, params, data, in_dims=(None, 0)).mean(0)
    torch.testing.assert_close(gradient, want)


@given(trees(), st.integers(0, 3))
def test_per_sample_parameters_and_joint_argnums(tree, n):
    scale = torch.arange(1.0, n + 1, dtype=torch.float64)

    def func(s, params):
        return s * sum(leaf.square().sum() for leaf in leaves(params))

    grads = per_sample_grads(func, scale, tree, argnums=(1, 0), in_dims=(0, None))
    assert len(grads) == 2
    want = 2 * scale[:, None] * flat(tree)
    torch.testing.assert_close(flat(grads[0], batch=True), want)
    torch.testing.assert_close(grads[1], flat(tree).square().sum().expand(n))


def test_constants_stay_constants():
    params = {name: torch.nn.Parameter(leaf) for name, leaf in PARAMS.items()}
    before = copy.deepcopy(params)
    rows = grad_rows(linear, params, X, in_dims=(None, 0))
    assert not rows.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(grad_rows(linear, params, X, in_dims=(None, 0)), rows)
    for name in params:
        assert params[name].grad is None
        torch.testing.assert_close(params[name], before[name])


@pytest.mark.parametrize("chunk", [None, 1])
def test_under_transforms(chunk):
    rows = grad_rows(linear, PARAMS, X, in_dims=(None, 0))

    def of_scale(s):
        scaled = {name: s * leaf for name, leaf in PARAMS.items()}
        return grad_rows(linear, scaled, X, in_dims=(None, 0), chunk_size=chunk)

    scales = torch.tensor([1.0, 2.0])
    mapped = torch.func.vmap(of_scale)(scales)
    torch.testing.assert_close(mapped, torch.stack([of_scale(s) for s in scales]))
    torch.testing.assert_close(mapped[0], rows)
    step = 1e-3
    slope = (of_scale(torch.tensor(1 + step)) - of_scale(torch.tensor(1 - step))) / (2 * step)
    tangent = torch.func.jvp(of_scale, (torch.tensor(1.0),), (torch.tensor(1.0),))[1]
    torch.testing.assert_close(tangent, slope, rtol=1e-3, atol=1e-3)
    reverse = torch.func.jacrev(of_scale)(torch.tensor(1.0))
    torch.testing.assert_close(reverse, tangent)

    def tree_of_scale(s):
        scaled = {name: s * leaf for name, leaf in PARAMS.items()}
        return per_sample_grads(linear, scaled, X, in_dims=(None, 0), chunk_size=chunk)

    torch.testing.assert_close(flat(torch.func.jacrev(tree_of_scale)(torch.tensor(1.0)), batch=True), tangent)


@pytest.mark.fault("F85")
def test_derivatives_outside_the_rows_are_exact_through_a_layer_norm():
    """torch 2.13 differentiates vmap(grad(layer_norm loss)) wrongly, without a word. Right: equal to a loop."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)  # noqa: E731
    params = {"a": draw(4, 3), "weight": draw(4), "bias": draw(4), "out": draw(2, 4)}
    x, tangents = draw(5, 3), {name: torch.ones_like(leaf) for name, leaf in params.items()}

    def loss(p, x):
        return (F.layer_norm(p["a"] @ x, (4,), p["weight"], p["bias"]).tanh() @ p["out"].T).square().sum()

    def by_library(p):
        return grad_rows(loss, p, x, in_dims=(None, 0))

    def by_loop(p):
        return torch.stack([flat(torch.func.grad(loss)(p, one)) for one in x])

    got = torch.func.jvp(by_library, (params,), (tangents,))[1]
    want = torch.func.jvp(by_loop, (params,), (tangents,))[1]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    got = torch.func.grad(lambda p: by_library(p).square().sum())(params)
    want = torch.func.grad(lambda p: by_loop(p).square().sum())(params)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    # The mean loss is differentiated outside vmap(func), which is exact in any order.
    layout, vector = Layout.of(params), flat(params)
    mean = mean_loss(loss, (None, 0))
    gradient = torch.func.grad(lambda v: mean(layout.unravel(v), x))
    eye = torch.eye(len(vector), dtype=torch.float64)
    pull = torch.func.vjp(gradient, vector)[1]
    hessian = torch.stack([pull(unit)[0] for unit in eye])
    forward = torch.stack([torch.func.jvp(gradient, (vector,), (unit,))[1] for unit in eye])
    exact = torch.autograd.functional.hessian(
        lambda v: torch.stack([loss(layout.unravel(v), one) for one in x]).mean(), vector
    )
    torch.testing.assert_close(forward, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(hessian, exact, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# where vmap cannot go


class Cube(torch.autograd.Function):
    """Without setup_context: torch.func refuses it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def branch(p, x):
    return (p * x).sum() if x.sum() > 0 else (p**2).sum()


def checkpointed(p, x):
    return torch.utils.checkpoint.checkpoint(lambda z: (z**3).sum(), p * x, use_reentrant=False)


UNBATCHED = {
    "branch": (branch, r"__bool__.*reads the value of a tensor"),
    "item": (lambda p, x: (p * x).sum() * x.sum().item(), r"item.*reads the value"),
    "mask": (lambda p, x: (p * x)[x > 0].sum(), r"__getitem__.*shape of its result depends on the data"),
    "nonzero": (lambda p, x: (p * x)[torch.nonzero(x > 0)[:, 0]].sum(), r"nonzero.*depends on the data"),
    "autograd.Function": (lambda p, x: Cube.apply(p * x).sum(), r"autograd.Function without setup_context"),
    "checkpoint": (checkpointed, r"saved tensor hooks"),
    "numpy": (lambda p, x: (p * float(x.numpy().sum())).sum(), r"numpy.*reads the memory"),
    "in place": (lambda p, x: torch.zeros_like(p).add_(p * x).square().sum(), r"add_.*writes in place"),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_a_loop_where_vmap_cannot_go(name):
    func, reason = UNBATCHED[name]
    p, x = torch.tensor([1.0, -2.0], dtype=torch.float64), X.double()
    want = loop(func, p, *((one,) for one in x))
    with pytest.warns(UserWarning, match=r"grad_rows: vmap cannot batch this loss \(.*" + reason) as caught:
        rows = grad_rows(func, p, x, in_dims=(None, 0), chunk_size=2)
    assert len(caught) == 1
    torch.testing.assert_close(rows, want)
    mean, texts = quiet(lambda: mean_loss(func, (None, 0))(p, x))
    torch.testing.assert_close(mean, torch.stack([func(p, one) for one in x]).mean())
    assert len(texts) <= 1


@pytest.mark.fault("F59")
def test_recurrent_layers_go_through_the_loop():
    """Rows of a GRU fail under vmap. Right: equal to 4 single backward passes, one warning that names the operator."""
    module = torch.nn.GRU(2, 3).double()
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    x = torch.randn(4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(p, x):
        return torch.func.functional_call(module, p, (x,))[0].square().sum()

    with pytest.warns(UserWarning, match=r"vmap cannot batch this loss \(.*gru: it writes in place") as caught:
        rows = grad_rows(loss, params, x, in_dims=(None, 0), chunk_size=2)
    assert len(caught) == 1
    torch.testing.assert_close(rows, loop(loss, params, *((one,) for one in x)))


@pytest.mark.fault("F63")
def test_a_missing_batching_rule_is_noted_once():
    """An operator without batching rule runs slowly, with torch's warning per call. Right: one note that names it."""

    def loss(p, x):
        return (p * torch.bincount((x > 0).long(), minlength=2)).sum()

    with pytest.warns(UserWarning, match=r"per_sample_grads: aten::bincount has no batching rule") as caught:
        per_sample_grads(loss, torch.ones(2), X, in_dims=(None, 0), chunk_size=1)
    assert len(caught) == 1


def test_a_mistake_in_the_loss_comes_up_as_itself():
    with pytest.raises(RuntimeError, match="size of tensor"):
        grad_rows(lambda p, x: (p[:1] * x).sum() + (torch.ones(3) * x).sum(), torch.ones(2), X, in_dims=(None, 0))


@pytest.mark.fault("F41")
def test_randomness_is_passed_on():
    """Dropout raises under vmap. Right: a choice is asked for by name; 'same' is one mask, whatever chunk_size."""
    p, x = torch.ones(8), torch.ones(6, 8)

    def loss(p, x):
        return F.dropout(p * x, 0.5).sum()

    with pytest.raises(ValueError, match=r"randomness: expected 'different' or 'same'.*module.eval"):
        grad_rows(loss, p, x, in_dims=(None, 0))
    torch.manual_seed(0)
    rows = grad_rows(loss, p, x, in_dims=(None, 0), randomness="same", chunk_size=2)
    assert (rows == rows[0]).all()
    assert 0 < rows[0].count_nonzero() < 8
    different = grad_rows(loss, p, x, in_dims=(None, 0), randomness="different")
    assert not (different == different[0]).all()

    def branching(p, x):
        return loss(p, x) if x.sum() > 0 else p.sum()

    torch.manual_seed(0)
    looped, _ = quiet(lambda: grad_rows(branching, p, x, in_dims=(None, 0), randomness="same"))
    torch.testing.assert_close(looped, rows)


@pytest.mark.fault("F44", "F58")
def test_a_loss_that_expects_a_batch_axis():
    """The loss indexes x[:, 0], but vmap took that axis. Right: keep_batch_dim, row mean = gradient of the mean."""

    def loss(p, x):
        return (x[:, 0] * p[0] + x[:, 1] * p[1] ** 2).square().mean()

    p, x = torch.tensor([1.0, 2.0], dtype=torch.float64), X.double()
    rows = grad_rows(loss, p, x, in_dims=(None, 0), keep_batch_dim=True)
    torch.testing.assert_close(rows.mean(0), torch.func.grad(loss)(p, x))
    mean = mean_loss(loss, (None, 0), keep_batch_dim=True)
    torch.testing.assert_close(mean(p, x), loss(p, x))


# ---------------------------------------------------------------------------------------------------------------------
# empty things, and where rows are written


@pytest.mark.fault("F54")
def test_empty_leaves_trees_and_sample_sets():
    """{} raised StopIteration and a batch of 0 divided by zero. Right: sizes 2 and 0, and rows of shape (0, p)."""
    params = {"a": torch.zeros(0), "b": torch.ones(2)}
    func = lambda p, x: (p["b"] * x).sum() + p["a"].sum()  # noqa: E731
    assert grad_rows(func, params, X, in_dims=(None, 0)).shape == (3, 2)
    for chunk in (None, 1):
        assert grad_rows(func, params, X[:0], in_dims=(None, 0), chunk_size=chunk).shape == (0, 2)
        grads = per_sample_grads(func, params, X[:0], in_dims=(None, 0), chunk_size=chunk)
        assert (grads["a"].shape, grads["b"].shape) == ((0, 0), (0, 2))
        assert grad_rows(lambda p, x: x.sum(), {}, X, in_dims=(None, 0), chunk_size=chunk).shape == (3, 0)  # noqa: ARG005
        assert per_sample_grads(lambda p, x: x.sum(), {}, X, in_dims=(None, 0), chunk_size=chunk) == {}  # noqa: ARG005


def test_rows_go_where_out_says(tmp_path):
    want = grad_rows(linear, PARAMS, X, in_dims=(None, 0))
    seen: list[tuple[int, int]] = []
    target = torch.empty(3, 6)
    tell = lambda done, total: seen.append((done, total))  # noqa: E731
    out = grad_rows(linear, PARAMS, X, in_dims=(None, 0), chunk_size=2, out=target, progress=tell)
    assert out is target
    assert seen == [(2, 3), (3, 3)]
    torch.testing.assert_close(target, want)
    file = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float64, (3, 6))
    assert grad_rows(linear, PARAMS, X, in_dims=(None, 0), out=file) is file
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy", mmap_mode="r"), want)
    with RowStore.create(tmp_path / "store", Layout.of(PARAMS)) as store:
        assert grad_rows(linear, PARAMS, X, in_dims=(None, 0), chunk_size=2, out=store) is store
    torch.testing.assert_close(RowStore.open(tmp_path / "store")[:], want)
    assert grad_rows(linear, PARAMS, X, in_dims=(None, 0), dtype="float16").dtype == torch.float16


@pytest.mark.fault("F60", "F61")
def test_one_block_beside_the_target():
    """Joining row blocks doubled memory. Right: one target, and beside it never more than a block."""
    p = {"w": torch.ones(50), "b": torch.ones(50)}
    x = torch.ones(64, 50)
    with Largest() as seen:
        grad_rows(lambda p, x: ((p["w"] + p["b"]) * x).square().sum(), p, x, in_dims=(None, 0), chunk_size=4)
    large = [size for size in seen.sizes if size > 4 * 100]
    assert large == [64 * 100]


# ---------------------------------------------------------------------------------------------------------------------
# the store


def fill(path: Any, *blocks: int, ids: str | None = None, **options: Any) -> torch.Tensor:
    """Write blocks of rows 0, 1, 2, ... and return them."""
    start, written = 0, []
    with RowStore.create(path, LAYOUT, **options) as store:
        for size in blocks:
            rows = torch.arange(3 * start, 3 * (start + size), dtype=torch.float32).reshape(size, 3)
            names = None if ids is None else [f"{ids}{i}" for i in range(start, start + size)]
            store.append(rows, names)
            written.append(rows)
            start += size
    return torch.cat(written)


@given(st.data(), st.sampled_from(["float64", "float32", "float16", "bfloat16"]), st.sampled_from([None, int, str]))
def test_what_is_appended_is_read_back(tmp_path_factory, data, dtype, kind):
    path = tmp_path_factory.mktemp("store") / "rows"
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=4))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tree = data.draw(trees([torch.float64, torch.float32]))
    layout = Layout.of(tree)
    rows = torch.randn(sum(sizes), layout.size, generator=rng, dtype=torch.float64).to(getattr(torch, dtype))
    names = [kind(i // 2) for i in range(len(rows))] if kind else list(range(len(rows)))
    with RowStore.create(path, layout, dtype=dtype, attrs={"name": "é", "list": [1, 2.5]}) as store:
        for i in range(len(sizes)):
            at = slice(sum(sizes[:i]), sum(sizes[: i + 1]))
            store.append(rows[at], names[at] if kind else None)
            assert torch.equal(store[:], rows[: at.stop])
    store = RowStore.open(path)
    assert store.complete
    assert (len(store), store.dtype, store.layout) == (len(rows), rows.dtype, layout)
    assert store.attrs == {"name": "é", "list": [1, 2.5]}
    assert store.ids.tolist() == names
    assert torch.equal(store[:], rows)
    assert torch.equal(torch.cat([rows[:0], *store.blocks(3)]), rows)
    assert store.verify() == len(rows)
    assert sorted(item.name for item in path.iterdir())[0] == "header.json"
    if layout.size and len(rows):
        plain = np.load(path / "rows.npy", mmap_mode="r")
        assert plain.shape == tuple(rows.shape)
        assert plain.dtype == ("uint16" if dtype == "bfloat16" else dtype)


@pytest.mark.fault("F64")
def test_the_layout_keeps_the_dtype_of_each_leaf(tmp_path):
    """Only the last leaf's dtype was kept. Right: one declared dtype for the rows, and each leaf gets its own back."""
    params = {"a": torch.tensor([1.25, -2.0]), "b": torch.tensor([0.5, 3.0], dtype=torch.float16)}
    with RowStore.create(tmp_path / "store", Layout.of(params)) as store:
        store.append(Layout.of(params).ravel(params)[None])
        store.append({"b": params["b"][None], "a": params["a"][None]})
    store = RowStore.open(tmp_path / "store")
    assert store.dtype == torch.float32
    for row in store:
        back = store.layout.unravel(row)
        assert {name: leaf.dtype for name, leaf in back.items()} == {"a": torch.float32, "b": torch.float16}
        assert all(torch.equal(back[name], params[name]) for name in params)


def test_reading(tmp_path):
    rows = fill(tmp_path / "store", 3, 2)
    store = RowStore.open(tmp_path / "store")
    assert torch.equal(store[-1], rows[-1])
    assert torch.equal(store[1:4:2], rows[1:4:2])
    assert torch.equal(store[[4, 0]], rows[[4, 0]])
    assert torch.equal(store[torch.tensor([4, 0])], rows[[4, 0]])
    assert torch.equal(torch.stack(list(store)), rows)
    batches = list(torch.utils.data.DataLoader(store, batch_size=2))
    assert torch.equal(torch.cat(batches), rows)
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again[:], rows)
    store[0].fill_(7)
    assert torch.equal(store[0], rows[0])
    assert "rows=5" in repr(store)


@pytest.mark.fault("F65")
def test_equal_samples_and_equal_ids_are_all_kept(tmp_path):
    """Samples with an id seen before were skipped, so rows slipped. Right: 2 rows, in the order of the data."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    with RowStore.create(tmp_path / "store", Layout.of(PARAMS)) as store:
        store.append(grad_rows(linear, PARAMS, x, in_dims=(None, 0)), ids=[7, 7, 3])
    store = RowStore.open(tmp_path / "store")
    assert store.ids.tolist() == [7, 7, 3]
    assert torch.equal(store[0], store[1])
    assert not torch.equal(store[0], store[2])


@pytest.mark.fault("F66")
def test_a_read_only_folder_twice_at_once(tmp_path):
    """A store on a read-only disk could not be opened, nor twice. Right: a mapping that only reads."""
    rows = fill(tmp_path / "store", 4)
    code = (
        "import os, sys\n"
        "from dattrifunc.rows import RowStore\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: open(os.path.join(sys.argv[1], 'x'), 'w')\n"
        "except OSError: pass\n"
        "else: sys.exit('the folder can be written')\n"
        "a, b = RowStore.open(sys.argv[1]), RowStore.open(sys.argv[1])\n"
        "assert a[:].tolist() == b[:].tolist() and a.verify() == 4\n"
    )
    for folder in [tmp_path, *list(tmp_path.parents)[:2]]:
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "store").chmod(0o555)
    for item in (tmp_path / "store").iterdir():
        item.chmod(0o444)
    try:
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True)
    finally:
        (tmp_path / "store").chmod(0o755)
    assert done.returncode == 0, done.stderr
    first, second = RowStore.open(tmp_path / "store"), RowStore.open(tmp_path / "store")
    assert torch.equal(first[:], rows)
    assert torch.equal(second[:], rows)


KILLS = """
import os, random, signal, sys, time, torch
from dattrifunc.rows import RowStore
from dattrifunc.tree import Layout

def write(path, told):
    store, start = RowStore.create(path, Layout.of(torch.zeros(50))), 0
    while True:
        size = 1 + start % 7
        numbers = torch.arange(start, start + size)
        store.append(numbers[:, None].float().expand(size, 50), [f"n{i}" for i in numbers.tolist()])
        start += size
        os.write(told, f"{start} ".encode())

torch.set_num_threads(1)
chance = random.Random(0)
for path in sys.argv[1:]:
    listen, told = os.pipe()
    child = os.fork()
    if not child:
        write(path, told)
    first = os.read(listen, 100)
    time.sleep(0.05 * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    print((first + os.read(listen, 1 << 20)).decode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked, and killed by a POSIX signal")
def test_a_killed_writer_leaves_whole_blocks(tmp_path):
    paths = [tmp_path / str(trial) for trial in range(8)]
    done = subprocess.run([sys.executable, "-c", KILLS, *map(str, paths)], capture_output=True, text=True, check=True)
    for path, told in zip(paths, done.stdout.splitlines(), strict=True):
        store = RowStore.open(path)
        assert not store.complete
        n = len(store)
        assert n >= int(told.split()[-1])
        assert n in np.cumsum([0] + [1 + s % 7 for s in _starts(n)])
        assert torch.equal(store[:], torch.arange(n)[:, None].float().expand(n, 50))
        assert store.ids.tolist() == [f"n{i}" for i in range(n)]
        assert store.verify() == n
        with RowStore.open(path, mode="a") as store:
            store.append(torch.full((1, 50), -1.0), ["last"])
        assert RowStore.open(path).verify() == n + 1


def _starts(n: int) -> list[int]:
    starts, start = [], 0
    while start < n:
        starts.append(start)
        start += 1 + start % 7
    return starts


@pytest.mark.parametrize("ids", [None, "a"])
def test_every_torn_byte_of_the_last_append_is_left_out(tmp_path, ids):
    fill(tmp_path / "one", 2, ids=ids)
    store = RowStore.open(tmp_path / "one", mode="a")
    sizes = {item.name: item.stat().st_size for item in (tmp_path / "one").iterdir()}
    store.append(torch.ones(1, 3), None if ids is None else ["z"])
    del store
    full = {item.name: item.read_bytes() for item in (tmp_path / "one").iterdir()}
    order = [name for name in full if name.startswith("ids")] + ["rows.npy", "journal.part"]
    for stage, name in enumerate(order):
        for cut in range(sizes[name], len(full[name]), 1 if name == "rows.npy" else 5):
            torn = tmp_path / "torn"
            shutil.rmtree(torn, ignore_errors=True)
            torn.mkdir()
            for other in order[:stage]:
                (torn / other).write_bytes(full[other])
            (torn / name).write_bytes(full[name][:cut])
            for other in order[stage + 1 :]:
                (torn / other).write_bytes(full[other][: sizes[other]])
            found = RowStore.open(torn)
            assert (len(found), found.verify()) == (2, 2)
            with RowStore.open(torn, mode="a") as resumed:
                resumed.append(torch.full((1, 3), 5.0), None if ids is None else ["y"])
            assert RowStore.open(torn).verify() == 3
            assert torch.equal(RowStore.open(torn)[2], torch.full((3,), 5.0))


def test_a_failed_append_leaves_nothing(tmp_path, monkeypatch):
    store = RowStore.create(tmp_path / "store", LAYOUT)
    store.append(torch.ones(2, 3))
    before = {item.name: item.read_bytes() for item in (tmp_path / "store").iterdir()}
    for fail_at in (1, 2, 3):
        calls = []

        def failing(fd, *, fail_at=fail_at, calls=calls, real=os.fsync):
            calls.append(fd)
            if len(calls) == fail_at:
                raise OSError("disk full")
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(OSError, match="disk full"):
                store.append(torch.full((1, 3), 9.0))
        assert {item.name: item.read_bytes() for item in (tmp_path / "store").iterdir()} == before
        assert len(store) == 2
    store.append(torch.zeros(1, 3))
    store.close()
    assert RowStore.open(tmp_path / "store").verify() == 3


def test_an_append_costs_the_same_however_many_came_before(tmp_path, monkeypatch):
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or real(fd, data))
    costs = []
    with RowStore.create(tmp_path / "store", LAYOUT) as store:
        for _ in range(100):
            written.clear()
            store.append(torch.ones(1, 3))
            costs.append(sum(written))
    assert max(costs[1:]) <= costs[1] + 8


def test_an_error_in_the_with_block_leaves_it_unfinished(tmp_path):
    def interrupted():
        with RowStore.create(tmp_path / "store", LAYOUT) as store:
            store.append(torch.ones(2, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    store = RowStore.open(tmp_path / "store")
    assert (store.complete, len(store)) == (False, 2)
    assert not (tmp_path / "store" / "header.json").exists()
    with RowStore.open(tmp_path / "store", mode="a") as store:
        store.append(torch.zeros(1, 3))
    assert RowStore.open(tmp_path / "store").complete


@pytest.mark.parametrize("ids", [None, "name"])
def test_verify_finds_a_changed_byte_anywhere(tmp_path, ids):
    fill(tmp_path / "store", 2, 2, ids=ids)
    for item in sorted((tmp_path / "store").iterdir()):
        whole = item.read_bytes()
        for at in {0, 5, 60, len(whole) // 2, len(whole) - 2}:
            changed = bytearray(whole)
            changed[min(at, len(whole) - 2)] ^= 1
            item.write_bytes(changed)
            with pytest.raises(ValueError, match=rf"{item.name}: expected .*Fix: restore the file"):
                RowStore.open(tmp_path / "store").verify()
        item.write_bytes(whole)
        item.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=rf"{item.name}: expected"):
            RowStore.open(tmp_path / "store")
        item.write_bytes(whole)
    assert RowStore.open(tmp_path / "store").verify() == 4


@pytest.mark.fault("F75")
def test_bad_rows_are_counted_and_named_before_anything_is_written(tmp_path):
    """All scores came out NaN or 0 on large sets. Right: one value too large for fp16 (1e5) is named at once."""
    with RowStore.create(tmp_path / "store", LAYOUT, dtype="float16") as store:
        rows = torch.ones(4, 3)
        rows[2, 1] = 1e5
        with pytest.raises(
            ValueError, match=r"can hold \(up to 6.55e\+04\), got up to 1e\+05 in 1 of 4 rows, first ids \['c'\]"
        ):
            store.append(rows, ["a", "b", "c", "d"])
        rows[:2, 0] = torch.tensor([float("nan"), float("inf")])
        with pytest.raises(ValueError, match=r"NaN or inf in 2 of 4 rows, first ids \['a', 'b'\]"):
            store.append(rows, ["a", "b", "c", "d"])
        assert len(store) == 0
    assert len(RowStore.open(tmp_path / "store")) == 0


# ---------------------------------------------------------------------------------------------------------------------
# fingerprints


SCALE = 2.0


def helper(w: torch.Tensor) -> torch.Tensor:
    return SCALE * w


def make(scale: float, data: torch.Tensor, module: torch.nn.Module) -> Callable[..., Any]:
    return lambda w, k=1: scale * module(helper(w) + data).sum() * k


def test_fingerprints_tell_things_apart(monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    base = fingerprint(make(1.0, torch.ones(2), module))
    assert base == fingerprint(make(1.0, torch.ones(2), copy.deepcopy(module)))
    other = copy.deepcopy(module)
    other[0].weight.data[0, 0] += 1e-6
    dropped = copy.deepcopy(module)
    dropped[1].p = 0.4
    different = [
        make(1.5, torch.ones(2), module),
        make(1.0, torch.ones(2, dtype=torch.float64), module),
        make(1.0, torch.ones(1, 2), module),
        make(1.0, torch.ones(2), other),
        make(1.0, torch.ones(2), dropped),
        make(1.0, torch.ones(2), copy.deepcopy(module).eval()),
    ]
    marks = {fingerprint(function) for function in different} | {base}
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SCALE", 3.0)
        marks.add(fingerprint(make(1.0, torch.ones(2), module)))
    assert len(marks) == len(different) + 2


@given(trees([torch.float32, torch.float64, torch.bfloat16]))
def test_fingerprints_see_every_value(tree):
    mark = fingerprint(tree)
    assert mark == fingerprint(copy.deepcopy(tree))
    for i, leaf in enumerate(leaves(tree)):
        if leaf.numel():
            new = [part.clone() for part in leaves(tree)]
            new[i] = new[i] * 2 + 1
            assert fingerprint(rebuild(tree, new)) != mark or torch.equal(new[i], leaf)


def test_fingerprints_are_the_same_in_another_process(tmp_path):
    code = (
        "import functools, torch, numpy as np\n"
        "from dattrifunc.rows import fingerprint\n"
        "class Loss:\n"
        "    __slots__ = ('scale', 'again')\n"
        "    def __init__(self): self.scale, self.again = 2, self\n"
        "    def __call__(self, w): return torch.nn.functional.relu(w) * self.scale\n"
        "    @staticmethod\n"
        "    def s(): return {1, 'a'}\n"
        "    @property\n"
        "    def size(self): return 3\n"
        "def recursive(n): return recursive(n - 1) if n in (1, 2) else np.ones(n)\n"
        "print(fingerprint(Loss(), recursive, functools.partial(recursive, 2), {'a', 'b', 'c'}, Loss().__call__,\n"
        "    torch.relu, np.array([1, 'x'], dtype=object), torch.float32, slice(1, 2), torch.nn.Tanh(),\n"
        "    torch.Generator().manual_seed(1)))\n"
    )
    (tmp_path / "script.py").write_text(code)
    runs = [
        subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 64


# ---------------------------------------------------------------------------------------------------------------------
# wrong calls


def call(function: Callable[..., Any], *x: Any, func: Any = linear, **options: Any) -> Callable[[Any], Any]:
    return lambda tmp_path: function(func, *(x or (PARAMS, X)), **{"in_dims": (None, 0), **options})  # noqa: ARG005


def shared(function: Callable[..., Any]) -> list[tuple[str, Any, type[Exception], str]]:
    """Wrong calls that per_sample_grads and grad_rows have in common."""
    name = function.__name__
    long = (PARAMS, X, X[:2])
    ints = ({"w": torch.ones(2, dtype=torch.int64)}, X)
    return [
        (f"{name}-func", call(function, func=3), TypeError, r"func: expected a function, got int. Fix: pass"),
        (f"{name}-argnums", call(function, argnums=5), ValueError, r"argnums: expected positions.*got 5. Fix:"),
        (f"{name}-in_dims", call(function, in_dims=0), TypeError, r"in_dims: expected a tuple of 2.*got 0. Fix: give"),
        (f"{name}-short", call(function, in_dims=(None,)), StructureError, r"in_dims: expected 2.*got 1.*Fix: give"),
        (
            f"{name}-none",
            call(function, in_dims=(None, None)),
            StructureError,
            r"in_dims: expected a sample axis.*Fix:",
        ),
        (
            f"{name}-kind",
            call(function, in_dims=(None, "x")),
            TypeError,
            r"in_dims\[1\]: expected int or None.*'x'. Fix:",
        ),
        (
            f"{name}-tree",
            call(function, in_dims=(None, {"a": 0})),
            StructureError,
            r"in_dims\[1\]: expected .*Fix: give",
        ),
        (
            f"{name}-axis",
            call(function, in_dims=(None, 4)),
            StructureError,
            r"x\[1\]: .*axis 4, got shape \(3, 2\). Fix:",
        ),
        (f"{name}-number", call(function, PARAMS, 3.0), StructureError, r"x\[1\]: .*axis 0, got float. Fix: pass None"),
        (
            f"{name}-counts",
            call(function, *long, in_dims=(None, 0, 0)),
            StructureError,
            r"x: expected one number of samples, got \{'x\[1\]': 3, 'x\[2\]': 2\}. Fix: pass",
        ),
        (f"{name}-dtype", call(function, *ints), DtypeError, r"leaf 'w': expected a real floating.*int64. Fix:"),
        (
            f"{name}-chunk",
            call(function, chunk_size=0),
            ValueError,
            r"chunk_size: expected an integer >= 1.*got 0. Fix:",
        ),
        (f"{name}-random", call(function, randomness="yes"), ValueError, r"randomness: expected 'error'.*'yes'. Fix:"),
        (
            f"{name}-keep",
            call(function, keep_batch_dim=1),
            TypeError,
            r"keep_batch_dim: expected True or False, got 1. Fix:",
        ),
        (
            f"{name}-scalar",
            call(function, func=lambda p, x: p["b"] * x),
            StructureError,
            r"func: expected a loss that returns a scalar.*got shape \(2,\). Fix: end func",
        ),
    ]


def _inside(tmp_path: Any) -> Any:  # noqa: ARG001
    return torch.func.vmap(lambda x: grad_rows(linear, PARAMS, x, in_dims=(None, 0), out=torch.empty(3, 6)))(X[None])


def _store(tmp_path: Any, **options: Any) -> RowStore:
    return RowStore.create(tmp_path / "store", LAYOUT, **options)


def _locked(tmp_path: Any) -> None:
    store = _store(tmp_path)
    try:
        RowStore.open(store.path, mode="a")
    finally:
        store.close()


def append(rows: Any, ids: Any = None, before: Any = None) -> Callable[[Any], Any]:
    def go(tmp_path: Any) -> None:
        with _store(tmp_path) as store:
            if before is not None:
                store.append(torch.ones(2, 3), before)
            store.append(rows, ids)

    return go


def opened(change: Callable[[Any], Any], mode: str = "r") -> Callable[[Any], Any]:
    def go(tmp_path: Any) -> None:
        fill(tmp_path / "store", 2)
        change(tmp_path / "store")
        RowStore.open(tmp_path / "store", mode=mode)

    return go


def indexed(index: Any) -> Callable[[Any], Any]:
    def go(tmp_path: Any) -> None:
        fill(tmp_path / "store", 2)
        RowStore.open(tmp_path / "store")[index]

    return go


def _rewritten(path: Any) -> None:
    header = json.loads((path / "header.json").read_text())
    (path / "header.json").write_text(json.dumps({**header, "rows": 3}))


def _journal_only(path: Any) -> None:
    RowStore.open(path, mode="a")
    (path / "journal.part").write_text("[]\n{}\n")


ONES, OPAQUE = torch.ones(2, 3), object()
ROW_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    *shared(per_sample_grads),
    *shared(grad_rows),
    ("out-type", call(grad_rows, out=[1]), TypeError, r"out: expected a tensor or a NumPy array, got list. Fix: pass"),
    (
        "out-shape",
        call(grad_rows, out=torch.ones(3, 5)),
        StructureError,
        r"out: expected shape \(3, 6\), got .*5\). Fix:",
    ),
    ("out-int", call(grad_rows, out=torch.ones(3, 6).int()), DtypeError, r"out: expected a floating.*int32. Fix: pass"),
    ("out-array", call(grad_rows, out=np.ones((3, 6), int)), DtypeError, r"out: expected a floating.*int64. Fix: pass"),
    (
        "out-fixed",
        call(grad_rows, out=np.broadcast_to(np.ones(6), (3, 6))),
        ValueError,
        r"out: expected an array that may be written, got a read-only one. Fix: open",
    ),
    ("out-dtype", call(grad_rows, out=torch.ones(3, 6), dtype="float64"), DtypeError, r"dtype: .*float64. Fix: leave"),
    (
        "out-layout",
        lambda tmp_path: grad_rows(linear, PARAMS, X, in_dims=(None, 0), out=_store(tmp_path)),
        StructureError,
        r"out: expected a store of the layout \('w', 'b'\), got .*Fix: create the store with",
    ),
    ("out-inside", _inside, ValueError, r"out: expected None inside a torch.func transform, got Tensor. Fix: leave"),
    ("rows-dtype", call(grad_rows, dtype="int8"), DtypeError, r"dtype: expected one of .*got 'int8'. Fix: pass"),
    ("rows-progress", call(grad_rows, progress=3), TypeError, r"progress: expected a function, got int. Fix: pass"),
    ("mean-func", lambda _: mean_loss(3, (None, 0)), TypeError, r"func: expected a function, got int. Fix: pass"),
    ("mean-short", lambda _: mean_loss(linear, (0,))(PARAMS, X), StructureError, r"in_dims: expected 2 .*got 1.*Fix:"),
    ("mean-type", lambda _: mean_loss(linear, 0)(PARAMS, X), TypeError, r"in_dims: expected a tuple of 2.*got 0. Fix:"),
    (
        "mean-none",
        lambda _: mean_loss(linear, (None, None))(PARAMS, X),
        StructureError,
        r"in_dims: expected a sample.*Fix",
    ),
    (
        "mean-empty",
        lambda _: mean_loss(linear, (None, 0))(PARAMS, X[:0]),
        StructureError,
        r"x: .*got 0 samples. Fix: pass",
    ),
    (
        "mean-axis",
        lambda _: mean_loss(linear, (None, 3))(PARAMS, X),
        StructureError,
        r"x\[1\]: .*axis 3, got shape.*Fix:",
    ),
    (
        "create-layout",
        lambda p: RowStore.create(p / "s", {"w": 1}),
        TypeError,
        r"layout: expected a Layout, got dict. Fix",
    ),
    ("create-path", lambda _: RowStore.create(3, LAYOUT), TypeError, r"path: expected a path, got int. Fix: pass"),
    (
        "create-full",
        lambda p: (_store(p), _store(p)),
        FileExistsError,
        r"path: expected a new or empty folder.*Fix: choose",
    ),
    (
        "create-value",
        lambda p: (_store(p), _store(p)),
        ValueError,
        r"path: expected a new or empty folder.*Fix: choose",
    ),
    (
        "create-dtype",
        lambda p: _store(p, dtype=torch.int8),
        DtypeError,
        r"dtype: expected one of.*torch.int8. Fix: pass",
    ),
    ("create-attrs", lambda p: _store(p, attrs=[1]), TypeError, r"attrs: expected a dict, got list. Fix: pass a dict"),
    (
        "create-json",
        lambda p: _store(p, attrs={"a": torch}),
        TypeError,
        r"attrs: .*JSON can hold, got .*module.*Fix: pass",
    ),
    (
        "open-missing",
        lambda p: RowStore.open(p / "no"),
        FileNotFoundError,
        r"path: expected the folder of a.*Fix: check",
    ),
    (
        "open-other",
        lambda p: RowStore.open(p),
        ValueError,
        r"path: expected a folder with header.json.*no RowStore. Fix:",
    ),
    (
        "open-append",
        lambda p: RowStore.open(p, mode="a"),
        ValueError,
        r"path: expected a folder with header.json.*Fix:",
    ),
    ("open-mode", lambda p: RowStore.open(p, mode="w"), ValueError, r"mode: expected 'r' or 'a', got 'w'. Fix: pass"),
    ("open-locked", _locked, ValueError, r"path: expected a store that nobody is writing, got .*in use. Fix: close"),
    (
        "open-header",
        opened(_rewritten),
        ValueError,
        r"header.json: expected the header as it was written.*Fix: restore",
    ),
    ("open-journal", opened(lambda p: _journal_only(p) or (p / "journal.part")), ValueError, r"journal.part: expected"),
    (
        "open-no-rows",
        opened(lambda p: (p / "rows.npy").unlink()),
        ValueError,
        r"rows.npy: expected 152 bytes for 2 rows, got 0 bytes in .*Fix: restore",
    ),
    (
        "append-width",
        append(torch.ones(2, 4)),
        StructureError,
        r"rows: expected shape \[b, 3\], got shape \(2, 4\). Fix:",
    ),
    (
        "append-vector",
        append(torch.ones(3)),
        StructureError,
        r"rows: expected shape \[b, 3\], got shape \(3,\). Fix: pass",
    ),
    ("append-int", append(ONES.int()), DtypeError, r"rows: expected floating point rows, got torch.int32. Fix: pass"),
    (
        "append-array",
        append(np.ones((2, 3), int)),
        DtypeError,
        r"rows: expected floating point rows, got int64. Fix: pass",
    ),
    (
        "append-nan",
        append(ONES * float("nan")),
        ValueError,
        r"rows: expected finite rows, got NaN.*2 of 2.*\[0, 1\]. Fix",
    ),
    (
        "append-tree",
        append({"w": torch.ones(2, 2)}),
        StructureError,
        r"rows: expected the leaves \['w', 'b'\], .*Fix: pass",
    ),
    (
        "append-large",
        append(ONES.double() * 1e39),
        ValueError,
        r"rows: expected values that torch.float32 can.*1e\+39.*Fix",
    ),
    ("ids-count", append(ONES, [1]), StructureError, r"ids: expected 2 ids, one per row, got 1. Fix: pass a list"),
    ("ids-type", append(ONES, "ab"), TypeError, r"ids: expected a list, an array or a tensor, got str. Fix: pass"),
    ("ids-float", append(ONES, [1.0, 2.0]), DtypeError, r"ids: expected all integers or all strings, got float. Fix:"),
    ("ids-mixed", append(ONES, [1, "a"]), DtypeError, r"ids: expected all integers.*got int and str. Fix: pass"),
    ("ids-other", append(ONES, ["a", "b"], before=[1, 2]), DtypeError, r"ids: expected int64, as.*got str. Fix: pass"),
    (
        "ids-missing",
        append(ONES, before=["a", "b"]),
        DtypeError,
        r"ids: expected strings, as.*got None. Fix: pass ids=",
    ),
    ("ids-large", append(ONES, [1, 2**64]), ValueError, r"ids: expected integers of 64 bits, got 1844.*Fix: pass"),
    (
        "append-closed",
        lambda p: (fill(p / "store", 1), RowStore.open(p / "store").append(ONES)),
        ValueError,
        r"store: expected a store that is open for writing, got one that is not. Fix: open it",
    ),
    ("index-high", indexed(2), IndexError, r"index: expected positions among 2 rows, got 2. Fix: pass an int"),
    ("index-low", indexed([-3]), IndexError, r"index: expected positions among 2 rows, got \[-3\]. Fix: pass"),
    ("index-type", indexed("a"), TypeError, r"index: expected an int, a slice or a list of ints, got 'a'. Fix: pass"),
    ("index-bool", indexed([True, False]), TypeError, r"index: expected an int, a slice or.*True, False.*Fix: pass"),
    (
        "fingerprint",
        lambda _: fingerprint(object()),
        TypeError,
        r"fingerprint: expected a value.*got.*object.*Fix: close",
    ),
    (
        "fingerprint-2",
        lambda _: fingerprint(iter([1])),
        TypeError,
        r"fingerprint: expected a value.*iterator.*Fix: close",
    ),
    ("fingerprint-3", lambda _: fingerprint([zip("a")]), TypeError, r"fingerprint: expected.*zip.*Fix: close"),
    (
        "fingerprint-4",
        lambda _: fingerprint({"a": memoryview(b"")}),
        TypeError,
        r"fingerprint: expected.*memoryview.*Fix",
    ),
    (
        "fingerprint-5",
        lambda _: fingerprint(i for i in [1]),
        TypeError,
        r"fingerprint: expected.*generator.*Fix: close",
    ),
    (
        "fingerprint-6",
        lambda _: fingerprint(lambda: OPAQUE),
        TypeError,
        r"fingerprint: expected.*object.*Fix: close",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), [pytest.param(*case[1:], id=case[0]) for case in ROW_ERRORS])
def test_a_wrong_call_says_what_is_wrong(tmp_path, wrong, error, text):
    with pytest.raises(error, match="(?s)" + text):
        wrong(tmp_path)


def test_blocks_sizes_are_checked(tmp_path):
    fill(tmp_path / "store", 2)
    with pytest.raises(ValueError, match=r"size: expected an integer >= 1, got 0. Fix: pass"):
        RowStore.open(tmp_path / "store").blocks(0)


def test_an_unfinished_or_unknown_store_says_so(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "header.json").write_text("{")
    with pytest.raises(ValueError, match=r"header.json: expected the header of a RowStore"):
        RowStore.open(tmp_path / "a")
