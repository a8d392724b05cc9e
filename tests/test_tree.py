"""Trees and flat vectors: against the plain references of strategies.py, and against torch's own pytrees."""

import copy
import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Layer, flat, leaves, rebuild, reorder, row, trees, unflat
from torch.testing import assert_close
from torch.utils import _pytree as torch_pytree

from dattrifunc import DtypeError, Layout, StructureError, combine, partition, ravel
from dattrifunc import tree as module
from dattrifunc.tree import (
    bind,
    check_argnums,
    check_args,
    check_callable,
    check_choice,
    check_chunk,
    check_count,
    check_generator,
    check_number,
    check_scalar,
    flatten_dims,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass
class ByTorch:
    """Known to torch's registry only, fields out of alphabetical order."""

    weight: Any
    bias: Any = None


@dataclasses.dataclass
class ByOptree:
    """Known to optree's global registry only."""

    weight: Any
    bias: Any = None


@dataclasses.dataclass
class Unknown:
    weight: Any


class Pair:
    """Known to torch's registry without names for its parts."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


torch.export.register_dataclass(ByTorch)
torch_pytree.register_pytree_node(Pair, lambda p: ([p.left, p.right], None), lambda parts, _: Pair(*parts))
optree.register_pytree_node(
    ByOptree,
    lambda node: ((node.weight, node.bias), None, ("weight", "bias")),
    lambda _, parts: ByOptree(*parts),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def same(got: Any, want: Any) -> None:
    """Assert equal containers, key order, None, dtypes, shapes and bits."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert getattr(got, "default_factory", None) == getattr(want, "default_factory", None)
        for key in want:
            same(got[key], want[key])
    elif want is not None:
        assert len(got) == len(want)
        for mine, its in zip(got, want, strict=True):
            same(mine, its)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# ravel and unravel


@given(trees(FLOATS))
def test_round_trip_is_exact(tree):
    vector, unravel = ravel(tree)
    same(unravel(vector), tree)
    assert vector.dtype == Layout.of(tree).dtype
    for dtype in {leaf.dtype for leaf in leaves(tree)}:
        assert torch.promote_types(dtype, vector.dtype) == vector.dtype


@given(trees(torch.int64))
def test_round_trip_of_integers_is_exact(tree):
    big = rebuild(tree, [leaf + 2**62 for leaf in leaves(tree)])  # float64 could not hold these
    vector, unravel = ravel(big)
    assert vector.dtype == torch.int64
    same(unravel(vector), big)


@given(trees())
def test_leaf_order_is_that_of_the_plain_reference_and_of_torch(tree):
    vector, _ = ravel(tree)
    assert torch.equal(vector, flat(tree))
    by_torch = [leaf for leaf in torch_pytree.tree_leaves(tree) if leaf is not None]
    assert all(mine is its for mine, its in zip(module.flatten(tree)[0], by_torch, strict=True))


@given(trees(), st.randoms(use_true_random=False))
def test_dicts_that_differ_in_key_order_only_are_matched_by_key(tree, rng):
    layout, other = Layout.of(tree), reorder(tree, rng)
    assert torch.equal(layout.ravel(other), flat(tree))
    stacked = rebuild(other, [torch.stack([leaf, 2 * leaf]) for leaf in leaves(other)])
    assert torch.equal(layout.ravel_rows(stacked), torch.stack([flat(tree), 2 * flat(tree)]))
    point = bind(lambda p: flat(p).sum(), (tree,), 0, detach=True)
    got, single = point.rows(other)
    assert single
    assert torch.equal(got, flat(tree)[None])
    got, single = point.rows(stacked)
    assert not single
    assert torch.equal(got, torch.stack([flat(tree), 2 * flat(tree)]))
    same(point.tree(got, single=False), rebuild(tree, [torch.stack([leaf, 2 * leaf]) for leaf in leaves(tree)]))


def test_every_kind_of_dict_matches_every_other():
    kinds = [dict, OrderedDict, lambda **items: defaultdict(list, items)]
    for mine in kinds:
        for other in kinds:
            layout = Layout.of(mine(b=ones(1), a=2 * ones(2)))
            assert layout.ravel(other(a=2 * ones(2), b=ones(1))).tolist() == [1, 2, 2]


@given(trees(), st.integers(0, 3))
def test_rows_round_trip(tree, n):
    rows = torch.randn(n, flat(tree).numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    layout = Layout.of(tree)
    batch = layout.unravel_rows(rows)
    same(batch, unflat(rows, tree))
    assert torch.equal(layout.ravel_rows(batch), rows)
    for i in range(n):
        same(row(batch, i), layout.unravel(rows[i]))


def test_a_vector_never_shares_memory_with_the_tree():
    for tree in ({"a": ones(2)}, ones(2), {"a": ones(2), "b": ones(1)}):
        vector, _ = ravel(tree)
        rows = Layout.of(tree).ravel_rows(rebuild(tree, [leaf[None] for leaf in leaves(tree)]))
        vector.zero_()
        rows.zero_()
        assert all(bool((leaf == 1).all()) for leaf in leaves(tree))


def test_numbers_are_leaves_and_a_float_keeps_its_digits():
    vector, unravel = ravel({"a": 0.1, "b": ones(1)})
    assert vector.tolist() == [0.1, 1.0]
    assert unravel(vector)["a"].shape == ()
    assert unravel(vector)["a"].dtype == torch.float64
    assert ravel({"n": 2**62, "flag": True})[0].tolist() == [2**62, 1]
    assert ravel(3.0)[0].tolist() == [3.0]
    assert Layout.of({"a": 0.1, "b": ones(1)}).ravel({"b": ones(1), "a": 1}).tolist() == [1.0, 1.0]


def test_tied_and_strided_leaves():
    weight = torch.arange(6.0).reshape(2, 3)
    assert ravel({"encoder": weight, "decoder": weight})[0].tolist() == [*range(6), *range(6)]
    assert ravel(weight.T)[0].tolist() == [0, 3, 1, 4, 2, 5]
    expanded = torch.ones(1).expand(3)
    assert ravel([expanded, weight[:, 1]])[0].tolist() == [1, 1, 1, 1, 4]


def test_leaves_that_require_grad_stay_in_the_graph():
    params = {"w": ones(2).requires_grad_(), "b": ones(1).requires_grad_()}
    vector, unravel = ravel(params)
    grads = torch.autograd.grad(unravel(vector**2)["w"].sum(), list(params.values()))
    assert [grad.tolist() for grad in grads] == [[2, 2], [0]]
    (alone,) = torch.autograd.grad((ravel(params["w"])[0] ** 3).sum(), params["w"])
    assert alone.tolist() == [3, 3]


# ---------------------------------------------------------------------------------------------------------------------
# under transforms


@given(trees())
def test_ravel_and_unravel_under_every_transform(tree):
    layout, at = Layout.of(tree), flat(tree)
    p = at.numel()

    def cubes(tree: Any) -> torch.Tensor:
        return (ravel(tree)[0] ** 3).sum()

    grad = torch.func.grad(lambda v: cubes(layout.unravel(v)))(at)
    assert_close(grad, 3 * at**2)
    assert_close(torch.func.hessian(lambda v: cubes(layout.unravel(v)))(at), torch.diag(6 * at))
    assert_close(torch.func.jacrev(lambda v: layout.ravel(layout.unravel(v)))(at), torch.eye(p, dtype=at.dtype))
    value, tangent = torch.func.jvp(lambda v: layout.ravel(layout.unravel(v)), (at,), (2 * at,))
    assert torch.equal(value, at)
    assert torch.equal(tangent, 2 * at)
    rows = torch.stack([at, -at, 2 * at])
    assert torch.equal(torch.func.vmap(lambda v: ravel(layout.unravel(v))[0])(rows), rows)
    assert torch.equal(torch.func.vmap(lambda v: layout.ravel_rows(layout.unravel_rows(v)))(rows[None]), rows[None])
    leaf = at.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(cubes(layout.unravel(leaf)), leaf)
    assert_close(by_autograd, 3 * at**2)


def test_grad_and_vmap_over_a_tree():
    tree = {"b": ones(2), "a": (torch.tensor(2.0, dtype=torch.float64), ones(1, 2))}
    grad = torch.func.grad(lambda t: (ravel(t)[0] ** 2).sum())(tree)
    same(grad, rebuild(tree, [2 * leaf for leaf in leaves(tree)]))
    batch = rebuild(tree, [torch.stack([leaf, 3 * leaf]) for leaf in leaves(tree)])
    got = torch.func.vmap(lambda t: ravel(t)[0])(batch)
    assert torch.equal(got, torch.stack([flat(tree), 3 * flat(tree)]))
    jacobian = torch.func.jacrev(lambda t: ravel(t)[0])(tree)
    assert torch.equal(flat(jacobian, batch=True), torch.eye(5, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# layout


@given(trees(FLOATS))
def test_layout_is_metadata_that_adds_up(tree):
    layout, found = Layout.of(tree), leaves(tree)
    assert layout.shapes == tuple(tuple(leaf.shape) for leaf in found)
    assert layout.dtypes == tuple(leaf.dtype for leaf in found)
    assert layout.sizes == tuple(leaf.numel() for leaf in found)
    assert layout.offsets == tuple(sum(layout.sizes[:i]) for i in range(len(found)))
    assert layout.size == sum(layout.sizes) == ravel(tree)[0].numel()
    assert layout.names == tuple(".".join(map(str, path)) for path in layout.paths)
    for path, leaf in zip(layout.paths, found, strict=True):
        node = tree
        for key in path:
            node = getattr(node, key) if hasattr(node, "_fields") else node[key]
        assert node is leaf
    assert len(set(layout.paths)) == len(found)


@given(trees(FLOATS))
def test_json_round_trip(tree):
    layout = Layout.of(tree)
    back = Layout.from_json(layout.to_json())
    assert back == layout
    assert hash(back) == hash(layout)
    assert back.fingerprint == layout.fingerprint
    assert (back.names, back.offsets, back.size, back.dtype) == (
        layout.names,
        layout.offsets,
        layout.size,
        layout.dtype,
    )
    assert Layout.from_json(back.to_json()) == back
    vector, _ = ravel(tree)
    plain = back.unravel(vector)
    assert torch.equal(ravel(plain)[0], vector)
    for path, leaf in zip(layout.paths, leaves(tree), strict=True):
        node = plain
        for key in path:
            assert type(node) in (dict, list)
            node = node[key]
        same(node, leaf.contiguous())


@given(trees(FLOATS), st.randoms(use_true_random=False))
def test_fingerprint_tells_layouts_apart(tree, rng):
    layout = Layout.of(tree)
    assert re.fullmatch("[0-9a-f]{64}", layout.fingerprint)
    assert Layout.of(rebuild(tree, [leaf + 1 for leaf in leaves(tree)])).fingerprint == layout.fingerprint
    others = [
        {"more": tree},
        rebuild(tree, [leaf.reshape(1, *leaf.shape) for leaf in leaves(tree)]),
        rebuild(
            tree, [leaf.to(torch.float64 if leaf.dtype != torch.float64 else torch.float32) for leaf in leaves(tree)]
        ),
    ]
    assert layout.fingerprint not in {Layout.of(other).fingerprint for other in others}
    moved = Layout.of(reorder(tree, rng))
    assert (moved.fingerprint == layout.fingerprint) == (moved.paths == layout.paths)


def test_fingerprint_is_the_same_in_another_process():
    code = (
        "import torch; from dattrifunc import Layout;"
        "print(Layout.of({'b': torch.zeros(2, 3), 'a': [torch.zeros(1)], ('t', 1): torch.zeros(0)}).fingerprint)"
    )
    layout = Layout.of({"b": torch.zeros(2, 3), "a": [torch.zeros(1)], ("t", 1): torch.zeros(0)})
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == layout.fingerprint


def test_layout_travels_by_pickle_and_deepcopy():
    tree = {"b": ones(1), "a": Layer(ones(2), None)}
    layout = Layout.of(tree)
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert other == layout
        same(other.unravel(ravel(tree)[0]), tree)


@given(trees())
def test_slices_cover_and_add_up(tree):
    layout = Layout.of(tree)
    columns = list(range(layout.size))

    def picked(prefix: Any) -> list[int]:
        return [i for part in layout.slices(prefix) for i in columns[part]]

    assert picked("") == picked(()) == columns
    for path, offset, size in zip(layout.paths, layout.offsets, layout.sizes, strict=True):
        assert picked(path) == columns[offset : offset + size]
    tops = dict.fromkeys(path[:1] for path in layout.paths)
    assert [i for top in tops for i in picked(top)] == columns


def test_slices_by_dotted_name():
    layout = Layout.of({"layer.0.weight": ones(2, 2), "layer.0.bias": ones(2), "layer.01": ones(1), "head": [ones(3)]})
    assert layout.slices("layer.0") == [slice(0, 6)]
    assert layout.slices("layer.0.bias") == [slice(4, 6)]
    assert layout.slices("layer") == [slice(0, 7)]
    assert layout.slices("head.0") == layout.slices(("head", 0)) == layout.slices(["head"]) == [slice(7, 10)]
    apart = Layout.of({"a.x": ones(1), "b": ones(2), "a.y": ones(1)})
    assert apart.slices("a") == [slice(0, 1), slice(3, 4)]


def test_ten_thousand_leaves_in_linear_time():
    tree = {str(i): torch.zeros(i % 3) for i in range(10_000)}
    layout = Layout.of(tree)
    assert layout.offsets[-1] + layout.sizes[-1] == layout.size == 9999
    assert layout.offsets[:5] == (0, 0, 1, 3, 3)
    assert Layout.from_json(layout.to_json()) == layout
    with pytest.raises(StructureError) as caught:
        layout.ravel({"0": torch.zeros(0)})
    assert len(str(caught.value)) < 2000
    assert "missing '1', '2'" in str(caught.value)
    with pytest.raises(StructureError, match=r"and .* more, got 'q'") as caught:
        layout.slices("q")
    assert len(str(caught.value)) < 1000


# ---------------------------------------------------------------------------------------------------------------------
# partition and combine


@given(trees((torch.float32, torch.int64)), st.randoms(use_true_random=False))
def test_partition_and_combine_round_trip(tree, rng):
    kept = {id(leaf) for leaf in leaves(tree) if rng.random() < 0.5}
    first, second = partition(tree, lambda _, leaf: id(leaf) in kept)
    assert {id(leaf) for leaf in leaves(first)} == kept
    assert {id(leaf) for leaf in leaves(second)} == {id(leaf) for leaf in leaves(tree)} - kept
    for whole in (combine(first, second), combine(second, first), combine(first, reorder(second, rng))):
        same(whole, tree)
        assert all(mine is its for mine, its in zip(leaves(whole), leaves(tree), strict=True))


@pytest.mark.parametrize("cls", [ByTorch, ByOptree])
@pytest.mark.parametrize("bias", [None, torch.zeros(3)])
def test_registered_dataclasses(cls, bias):
    tree = {"z": cls(torch.ones(2), bias), "a": torch.tensor(5.0)}
    layout = Layout.of(tree)
    assert layout.names == (("z.weight", "z.bias", "a") if bias is not None else ("z.weight", "a"))
    vector, unravel = ravel(tree)
    back = unravel(2 * vector)
    assert type(back["z"]) is cls
    assert back["z"].weight.tolist() == [2, 2]
    assert (back["z"].bias is None) == (bias is None)
    plain = Layout.from_json(layout.to_json()).unravel(vector)
    assert plain["z"]["weight"].tolist() == [1, 1]
    first, second = partition(tree, lambda name: name.endswith("weight"))
    assert first["z"].bias is None
    assert first["a"] is None
    assert second["z"].weight is None
    whole = combine(first, second)
    assert whole["z"].weight is tree["z"].weight
    assert whole["z"].bias is bias
    assert whole["a"] is tree["a"]


def test_class_without_names_for_its_parts():
    tree = Pair(torch.ones(2), {"b": torch.zeros(1)})
    assert Layout.of(tree).names == ("0", "1.b")
    back = ravel(tree)[1](torch.arange(3.0))
    assert type(back) is Pair
    assert back.left.tolist() == [0, 1]
    whole = combine(*partition(tree, lambda name: name == "0"))
    assert whole.left is tree.left


def test_predicates():
    tree = {"body": torch.ones(2, requires_grad=True), "head": torch.zeros(1), "step": torch.tensor(3)}
    cases: list[tuple[Callable[..., Any], list[str]]] = [
        (lambda name: name.startswith("head"), ["head"]),
        (lambda name, leaf: leaf.is_floating_point() and name != "head", ["body"]),
        (lambda leaf: leaf.requires_grad, ["body"]),
        (torch.is_floating_point, ["body", "head"]),
        (lambda name, keep=("step",): name in keep, ["step"]),
        (lambda *args: args[1].ndim == 0, ["step"]),
        (lambda name: re.match("b|h", name), ["body", "head"]),
        (lambda _, leaf: (leaf == 0).all(), ["head"]),
    ]
    for predicate, want in cases:
        first, second = partition(tree, predicate)
        assert [name for name in tree if first[name] is not None] == want
        assert [name for name in tree if second[name] is None] == want


# ---------------------------------------------------------------------------------------------------------------------
# optree and torch stay as they are


def test_optree_is_left_as_it_was():
    tree = {"b": 1, "a": 2}
    module.flatten(tree)
    assert optree.tree_leaves(tree) == [2, 1]
    assert optree.tree_leaves(tree, namespace="somebody") == [2, 1]
    with optree.dict_insertion_ordered(True, namespace="somebody"):
        assert module.flatten(tree)[0] == [1, 2]
        assert optree.tree_leaves(tree, namespace="somebody") == [1, 2]
    assert optree.tree_leaves(tree, namespace="somebody") == [2, 1]
    assert module.flatten(tree)[0] == [1, 2]
    assert torch_pytree.tree_leaves(tree) == [1, 2]
    # a class that only torch knows is a leaf to optree, before and after we met it
    Layout.of(ByTorch(torch.ones(1)))
    assert len(optree.tree_leaves(ByTorch(1, 2))) == 1


def test_order_outlives_a_second_copy_of_the_module():
    code = (
        "import gc, sys, optree, dattrifunc.tree as first\n"
        "for name in [name for name in sys.modules if name.startswith('dattrifunc')]: del sys.modules[name]\n"
        "import dattrifunc.tree as second\n"
        "assert second is not first\n"
        "del first; gc.collect()\n"
        "assert second.flatten({'b': 1, 'a': 2})[0] == [1, 2]\n"
        "assert optree.tree_leaves({'b': 1, 'a': 2}) == [2, 1]"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_threads_flatten_and_adopt_at_once():
    classes = [dataclasses.make_dataclass(f"Drawn{i}", ["b", "a"]) for i in range(20)]
    for cls in classes:
        torch.export.register_dataclass(cls)
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        try:
            for cls in classes:
                vector, unravel = ravel({"z": cls(torch.ones(1), torch.zeros(2)), "a": torch.full((1,), 2.0)})
                if vector.tolist() != [1, 0, 0, 2] or type(unravel(vector)["z"]) is not cls:
                    wrong.append(vector)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------------------------------------------------------------
# faults known in this field


@pytest.mark.fault("F47")
def test_frozen_leaves_do_not_shift_the_others():
    """Flatten took all parameters and unflatten the trainable ones only, so that every later leaf was shifted."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    params = dict(model.named_parameters())
    vector, unravel = ravel(params)
    for name, leaf in unravel(vector).items():
        assert torch.equal(leaf, params[name])
    trainable, frozen = partition(params, lambda leaf: leaf.requires_grad)
    vector, unravel = ravel(trainable)
    assert vector.numel() == 5
    whole = combine(unravel(vector + 1), frozen)
    assert list(whole) == list(params)
    for name, leaf in whole.items():
        assert torch.equal(leaf, params[name] + (name != "0.weight"))


@pytest.mark.fault("F50")
def test_integer_only_trees():
    """An integer-only tree crashed, or was differentiated."""
    vector, unravel = ravel({"n": torch.tensor([1, 2, 3])})
    assert vector.dtype == torch.int64
    assert not vector.requires_grad
    assert vector.tolist() == [1, 2, 3]
    assert unravel(vector)["n"].tolist() == [1, 2, 3]
    assert ravel({"m": torch.tensor([True, False]), "n": torch.tensor([7])})[1](torch.tensor([1, 0, 7]))[
        "m"
    ].tolist() == [
        True,
        False,
    ]
    with pytest.raises(DtypeError, match=r"leaf 'n': expected a real floating point tensor, got torch.int64. Fix: .*"):
        bind(lambda p: p["n"].sum(), ({"n": torch.tensor([1, 2, 3])},), 0, detach=True)


@pytest.mark.fault("F51")
def test_unravel_never_recasts_in_silence():
    """A bool mask came back as float, and float64 was cut to float32."""
    vector, unravel = ravel({"a": torch.tensor([0.2, 0.7]), "b": torch.tensor(0.9)})
    mask = unravel(vector > 0.5)
    assert mask["a"].dtype == mask["b"].dtype == torch.bool
    assert mask["a"].tolist() == [False, True]
    fine = torch.tensor([1 / 3, 2 / 3, 1e-300], dtype=torch.float64)
    assert torch.equal(ravel(unravel(fine))[0], fine)
    rows = Layout.of({"a": torch.zeros(2), "b": torch.tensor(0.0)}).unravel_rows(fine[None])
    assert rows["b"].dtype == torch.float64
    with pytest.raises(DtypeError, match=r"got torch.float64"):
        bind(lambda p: p.sum(), (torch.zeros(3),), 0, detach=True).rows(fine)


@pytest.mark.fault("F52")
def test_one_order_for_vector_paths_and_rows():
    """torch keeps the order of insertion, optree and JAX sort keys, and None counts as a leaf for torch only."""
    tree = {"b": torch.tensor(1.0), "a": torch.tensor(2.0), "none": None}
    layout = Layout.of(tree)
    other = {"a": torch.tensor(2.0), "none": None, "b": torch.tensor(1.0)}
    assert ravel(tree)[0].tolist() == layout.ravel(other).tolist() == [1, 2]
    assert layout.names == ("b", "a")
    assert layout.ravel_rows({"a": torch.tensor([2.0]), "none": None, "b": torch.tensor([1.0])}).tolist() == [[1, 2]]
    assert layout.size == 2
    assert layout.unravel(torch.zeros(2))["none"] is None


@pytest.mark.fault("F54")
def test_empty_leaves_empty_trees_no_samples():
    """An empty dict raised StopIteration, and no samples divided by zero."""
    assert Layout.of({"a": torch.zeros(0), "b": torch.ones(2)}).size == 2
    for empty in ({}, [], (), None, {"a": None}, {"a": {}}):
        vector, unravel = ravel(empty)
        assert tuple(vector.shape) == (0,)
        same(unravel(vector), empty)
        assert Layout.of(empty).size == 0
        assert Layout.from_json(Layout.of(empty).to_json()) == Layout.of(empty)
        assert tuple(Layout.of(empty).ravel_rows(empty).shape) == (0, 0)
        same(Layout.of(empty).unravel_rows(torch.zeros(3, 0)), empty)
        assert Layout.of(empty).slices("") == []
    layout = Layout.of({"a": torch.zeros(2, 2), "b": torch.zeros(0), "c": torch.tensor(0.0)})
    rows = layout.ravel_rows({"a": torch.zeros(0, 2, 2), "b": torch.zeros(0, 0), "c": torch.zeros(0)})
    assert tuple(rows.shape) == (0, 5)
    assert layout.unravel_rows(rows)["a"].shape == (0, 2, 2)


@pytest.mark.fault("F56")
@given(trees(), st.randoms(use_true_random=False))
def test_inputs_are_never_mutated(tree, rng):
    """A wrapper wrote into the caller's dict, which held a leaked tracing tensor after a gradient."""
    before, version = copy.deepcopy(tree), [leaf._version for leaf in leaves(tree)]
    ids = [id(leaf) for leaf in leaves(tree)]
    other = reorder(tree, rng)
    data = {"y": torch.tensor([1, 2]), "x": ones(2)}

    def loss(tree: Any, data: Any) -> torch.Tensor:
        value = (ravel(tree)[0] ** 2).sum() * data["x"].sum()
        for node in (tree, data):  # a loss that writes into its arguments writes into copies
            if isinstance(node, dict):
                node.clear()
        return value

    point = bind(loss, (tree, data), 0, detach=True)
    torch.func.grad(lambda leaves: point.loss(leaves, point.rest))(point.leaves)
    point.rows(other)
    torch.func.grad(lambda v: (Layout.of(tree).unravel(v), ravel(tree)[0] @ v)[1])(flat(tree))
    Layout.of(tree).ravel(other)
    partition(tree, lambda name: "w" in name)
    same(tree, before)
    assert [id(leaf) for leaf in leaves(tree)] == ids
    assert [leaf._version for leaf in leaves(tree)] == version
    assert list(data) == ["y", "x"]
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves((tree, other, data)))


# ---------------------------------------------------------------------------------------------------------------------
# bind, Point and in_dims


def test_sample_axes_match_by_key_and_may_end_early():
    data = {"mask": ones(1), "x": {"ids": ones(1), "kind": ones(2)}, "none": None}
    cases = [
        (0, [0, 0, 0]),
        (None, [None, None, None]),
        ({"x": -1, "none": None, "mask": None}, [None, -1, -1]),
        ({"x": {"kind": 1, "ids": None}, "mask": 0, "none": 0}, [0, None, 1]),
    ]
    for in_dims, want in cases:
        assert flatten_dims(in_dims, data, "in_dims") == want
    assert flatten_dims(ByTorch(0, None), ByTorch(ones(1), [ones(2), ones(3)]), "in_dims") == [0, None, None]
    assert flatten_dims(0, {}, "in_dims") == []


@given(trees(), trees(), st.randoms(use_true_random=False))
def test_arguments_taken_apart_and_put_together(params, data, rng):
    point = bind(lambda *_: ones(), (data, params, "text"), 1, detach=True)
    whole = point.arguments(point.leaves, point.rest)
    same(whole[0], data)
    same(whole[1], params)
    for arguments in (whole, (reorder(data, rng), reorder(params, rng), "text")):
        chosen, rest = point.take(arguments)
        assert torch.equal(flat(list(chosen)), flat(params))
        assert torch.equal(flat(list(rest)), flat(data))


def test_bind_joins_arguments_and_leaves_the_rest_alone():
    x = (
        {"w": ones(2), "n": None},
        {"ids": torch.tensor([0, 1]), "name": "text", "scale": 2.0},
        [ones(1, dtype=torch.float32)],
    )

    def loss(p: Any, data: Any, q: Any) -> torch.Tensor:
        assert data["name"] == "text"
        assert data["ids"].dtype == torch.int64
        assert p["n"] is None
        return data["scale"] * (p["w"] * q[0]).sum()

    point = bind(loss, x, (0, -1), detach=True)
    assert point.argnums == (0, 2)
    assert point.layout.names == ("0.w", "1.0")
    assert point.layout.dtype == point.work_dtype == torch.float64
    assert point.eps == torch.finfo(torch.float32).eps
    assert len(point.rest) == 1
    assert point.loss(point.leaves, point.rest) == 4.0
    rows, single = point.rows(({"w": ones(3, 2), "n": None}, [ones(3, 1, dtype=torch.float32)]))
    assert rows.shape == (3, 3)
    assert rows.dtype == torch.float64
    back = point.tree(rows, single)
    assert type(back) is tuple
    assert back[1][0].dtype == torch.float32
    half = bind(lambda p: p.sum(), (ones(2, dtype=torch.float16),), 0, detach=True)
    assert half.work_dtype == torch.float32
    assert half.rows(ones(2, dtype=torch.float16))[0].dtype == torch.float32
    assert half.tree(torch.ones(1, 2), single=True).dtype == torch.float16


def test_bind_detaches_or_not():
    w = ones(2).requires_grad_()
    x = ones(2).requires_grad_()
    kept = bind(lambda w, x: (w * x).sum(), (w, x), 0, detach=False)
    assert kept.loss(kept.leaves, kept.rest).requires_grad
    bound = bind(lambda w, x: (w * x).sum(), (w, x), 0, detach=True)
    assert not bound.loss(bound.leaves, bound.rest).requires_grad


@given(trees(), st.integers(0, 3))
def test_point_rows_and_back(tree, k):
    point = bind(lambda p: flat(p).sum(), (tree,), 0, detach=True)
    batch = unflat(torch.randn(k, flat(tree).numel(), dtype=torch.float64), tree)
    rows, single = point.rows(batch)
    assert not single
    assert torch.equal(rows, flat(batch, batch=True))
    same(point.tree(rows, single), batch)
    rows, single = point.rows(tree)
    assert single
    assert torch.equal(rows, flat(tree)[None])
    same(point.tree(rows, single), tree)


# ---------------------------------------------------------------------------------------------------------------------
# wrong calls: argument, expected, got and fix are all in the message

PARAMS = {"w": ones(2, 3), "b": ones(3)}
LAYOUT = Layout.of(PARAMS)
WHERE = "'w', 'b'"
ENDLESS: list[Any] = []
ENDLESS.append({"again": ENDLESS})
DEEP = ones(1)
for _ in range(20_000):
    DEEP = [DEEP]
TEXT = LAYOUT.to_json()
NEST = r"expected containers nested at most .*, none inside itself, got a deeper or endless nest. Fix: look for a list"
LEAF = r"expected a tensor or a number, got"
DENSE = r"expected a dense tensor, got one that is"
META = {"w": ones(2, 3), "b": torch.ones(3, device="meta")}


def damaged(**changes: Any) -> str:
    text = json.loads(TEXT)
    text["leaves"][0].update(changes)
    return json.dumps(text)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


JSON = r"text: expected the JSON of Layout.to_json\(\), got"
SAME = r"Fix: pass the text that to_json\(\) returned, unchanged"
LEAVES = [  # what is wrong with any tree of values, for ravel and for Layout.of
    (
        "array",
        lambda f: f({"w": np.ones(2)}),
        DtypeError,
        rf"leaf 'w': {LEAF} ndarray. Fix: convert it with torch.as_te",
    ),
    ("bare array", lambda f: f(np.ones(2)), DtypeError, rf"tree: {LEAF} ndarray. Fix: convert it with torch.as_tensor"),
    (
        "text",
        lambda f: f([{"x": "hi"}]),
        DtypeError,
        rf"leaf '0.x': {LEAF} str. Fix: keep it out of the tree, .* partition",
    ),
    ("size", lambda f: f(torch.Size([2])), DtypeError, rf"tree: {LEAF} Size. Fix: convert it with torch.as_tensor"),
    (
        "module",
        lambda f: f(torch.nn.ReLU()),
        DtypeError,
        rf"tree: {LEAF} ReLU. Fix: pass dict\(module.named_parameters",
    ),
    (
        "iterator",
        lambda f: f(iter([ones(1)])),
        DtypeError,
        rf"tree: {LEAF} list_iterator. Fix: put the tensors in a dict",
    ),
    (
        "set",
        lambda f: f({ones(1)}),
        DtypeError,
        rf"tree: {LEAF} set. Fix: put the tensors in a dict, a list or a tuple",
    ),
    (
        "class",
        lambda f: f(Unknown(ones(1))),
        DtypeError,
        rf"tree: {LEAF} Unknown. Fix: register the class with torch.export",
    ),
    (
        "mixed",
        lambda f: f({"w": ones(1), "n": torch.ones(1).long()}),
        DtypeError,
        r"leaf 'n': expected a floating point tensor like the other leaves, got torch.int64. Fix: keep it out of the",
    ),
    ("int first", lambda f: f({"n": 3, "w": ones(1)}), DtypeError, r"leaf 'n': .* got torch.int64. Fix: keep it out"),
    (
        "complex",
        lambda f: f({"w": ones(1), "z": torch.ones(1) * 1j}),
        DtypeError,
        r"leaf 'z': .* got torch.complex64. Fix",
    ),
    (
        "widest",
        lambda f: f([torch.zeros(1), torch.zeros(1).to(torch.float8_e5m2)]),
        DtypeError,
        r"leaf '1': .* got torch.float8_e5m2 beside torch.float32, .* no common dtype. Fix: convert one of",
    ),
    (
        "sparse",
        lambda f: f({"w": ones(2, 2).to_sparse()}),
        DtypeError,
        rf"leaf 'w': {DENSE} sparse_coo. Fix: .*to_dense",
    ),
    (
        "lazy",
        lambda f: f([torch.nn.LazyLinear(1).weight]),
        DtypeError,
        rf"leaf '0': {DENSE} uninitialized. Fix: run the mod",
    ),
    (
        "quantized",
        lambda f: f([quantized()]),
        DtypeError,
        rf"leaf '0': {DENSE} quantized. Fix: convert it with .dequantize",
    ),
    ("endless", lambda f: f(ENDLESS), StructureError, rf"tree: {NEST}"),
    ("deep", lambda f: f(DEEP), StructureError, rf"tree: {NEST}"),
]
STRUCTURE = r"tree: expected the structure \{'w': \*, 'b': \*\}, got"
POINT = bind(lambda p: p["w"].sum(), (PARAMS,), 0, detach=True)
TREES = [  # what is wrong with a tree that a layout, or a vector that a loss, is to take
    ("missing", {"w": ones(2, 3)}, r"got \{'w': \*\}. Fix: .* \(missing 'b'\)"),
    ("renamed", {"w": ones(2, 3), "c": ones(3)}, r"got \{'w': \*, 'c': \*\}. Fix: .* \(missing 'b', unexpected 'c'\)"),
    ("more", {**PARAMS, "c": ones(1)}, r"'c': \*\}. Fix: .* \(unexpected 'c'\)"),
    ("none", {"w": ones(2, 3), "b": None}, r"got \{'w': \*, 'b': None\}. Fix: .* \(missing 'b'\)"),
    ("deeper", {"w": ones(2, 3), "b": [ones(3)]}, r"got \{'w': \*, 'b': \[\*\]\}. Fix: .* unexpected 'b.0'\)"),
    ("bare", ones(9), r"got \*. Fix: .* \(missing 'w', 'b', unexpected a leaf without a key\)"),
    ("list", [ones(2, 3), ones(3)], r"got \[\*, \*\]. Fix: .* \(missing 'w', 'b', unexpected '0', '1'\)"),
]

TREE_ERRORS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    *[(f"ravel {i}", lambda call=call: call(ravel), error, text) for i, call, error, text in LEAVES],
    *[(f"Layout.of {i}", lambda call=call: call(Layout.of), error, text) for i, call, error, text in LEAVES],
    (
        "ravel meta",
        lambda: ravel(META),
        DtypeError,
        r"leaf 'b': expected leaves that all have values, got some on device meta. Fix: give every leaf its",
    ),
    *[
        (f"Layout.ravel {i}", lambda t=t: LAYOUT.ravel(t), StructureError, rf"tree: expected the structure .*{text}")
        for i, t, text in TREES
    ],
    *[
        (
            f"Layout.ravel_rows {i}",
            lambda t=t: LAYOUT.ravel_rows(t),
            StructureError,
            rf"tree: expected the structure .*{text}",
        )
        for i, t, text in TREES
    ],
    *[
        (f"Point.rows {i}", lambda t=t: POINT.rows(t), StructureError, rf"v: expected the structure .*{text}")
        for i, t, text in TREES
    ],
    (
        "Layout.ravel tuple",
        lambda: Layout.of([ones(1)]).ravel((ones(1),)),
        StructureError,
        r"tree: expected the structure \[\*\], got \(\*,\). Fix: .* same names, a container is of another type",
    ),
    (
        "Layout.ravel shape",
        lambda: LAYOUT.ravel({"w": ones(3, 2), "b": ones(3)}),
        StructureError,
        r"leaf 'w': expected shape \(2, 3\), got shape \(3, 2\). Fix: pass one vector's tree",
    ),
    (
        "Layout.ravel batch",
        lambda: LAYOUT.ravel({"w": ones(5, 2, 3), "b": ones(5, 3)}),
        StructureError,
        r"leaf 'w': expected shape \(2, 3\), got shape \(5, 2, 3\). Fix",
    ),
    (
        "Layout.ravel array",
        lambda: LAYOUT.ravel({"w": np.ones((2, 3)), "b": ones(3)}),
        DtypeError,
        rf"leaf 'w': {LEAF} nda",
    ),
    (
        "Layout.ravel integer",
        lambda: LAYOUT.ravel({"w": ones(2, 3), "b": ones(3).long()}),
        DtypeError,
        r"leaf 'b': expected a floating point tensor like the other leaves, got torch.int64. Fix",
    ),
    (
        "Layout.ravel sparse",
        lambda: LAYOUT.ravel({"w": ones(2, 3).to_sparse(), "b": ones(3)}),
        DtypeError,
        rf"leaf 'w': {DENSE}",
    ),
    ("Layout.ravel endless", lambda: LAYOUT.ravel(ENDLESS), StructureError, rf"tree: {NEST}"),
    (
        "Layout.ravel_rows vector",
        lambda: LAYOUT.ravel_rows(PARAMS),
        StructureError,
        r"leaf 'w': expected shape \(n, 2, 3\), got shape \(2, 3\). Fix: give every leaf one leading axis n before",
    ),
    (
        "Layout.ravel_rows count",
        lambda: LAYOUT.ravel_rows({"w": ones(4, 2, 3), "b": ones(5, 3)}),
        StructureError,
        r"leaf 'b': expected 4 rows, as on leaf 'w', got 5 rows. Fix: stack the same samples",
    ),
    (
        "Layout.unravel list",
        lambda: LAYOUT.unravel([1.0] * 9),
        StructureError,
        r"vector: expected a dense tensor of shape \(9,\), got list. Fix: pass one vector .*, as a torch.Tensor",
    ),
    (
        "Layout.unravel array",
        lambda: LAYOUT.unravel(np.ones(9)),
        StructureError,
        r"vector: .* got ndarray. Fix: .*torch.Ten",
    ),
    (
        "Layout.unravel short",
        lambda: LAYOUT.unravel(ones(8)),
        StructureError,
        r"vector: .*\(9,\), got shape \(8,\). Fix: pass",
    ),
    (
        "Layout.unravel rows",
        lambda: LAYOUT.unravel(ones(2, 9)),
        StructureError,
        r"vector: .*\(9,\), got shape \(2, 9\). Fix: pass one vector of this layout, or call unravel_rows for rows",
    ),
    (
        "Layout.unravel scalar",
        lambda: LAYOUT.unravel(ones()),
        StructureError,
        r"vector: .*\(9,\), got shape \(\). Fix: pass",
    ),
    (
        "Layout.unravel tree",
        lambda: LAYOUT.unravel(PARAMS),
        StructureError,
        r"vector: .*\(9,\), got dict. Fix: pass one",
    ),
    (
        "Layout.unravel sparse",
        lambda: LAYOUT.unravel(ones(9).to_sparse()),
        StructureError,
        r"vector: .* got a tensor that is sparse_coo. Fix: .* made dense with .to_dense\(\)",
    ),
    (
        "Layout.unravel_rows list",
        lambda: LAYOUT.unravel_rows([ones(9)]),
        StructureError,
        r"rows: expected a dense tensor of shape \(n, 9\), got list. Fix: pass rows of this layout, as a torch.Tensor",
    ),
    (
        "Layout.unravel_rows array",
        lambda: LAYOUT.unravel_rows(np.ones((2, 9))),
        StructureError,
        r"rows: .* got ndarray. Fix",
    ),
    (
        "Layout.unravel_rows vector",
        lambda: LAYOUT.unravel_rows(ones(9)),
        StructureError,
        r"rows: .* got shape \(9,\). Fix: pass rows of this layout, or call unravel for one vector",
    ),
    (
        "Layout.unravel_rows wide",
        lambda: LAYOUT.unravel_rows(ones(2, 10)),
        StructureError,
        r"rows: .* got shape \(2, 10\). Fix",
    ),
    (
        "Layout.unravel_rows turned",
        lambda: LAYOUT.unravel_rows(ones(9, 2)),
        StructureError,
        r"rows: .* shape \(9, 2\). Fix",
    ),
    (
        "Layout.unravel_rows deep",
        lambda: LAYOUT.unravel_rows(ones(1, 2, 9)),
        StructureError,
        r"rows: .* \(1, 2, 9\). Fix",
    ),
    (
        "Layout.unravel_rows sparse",
        lambda: LAYOUT.unravel_rows(ones(2, 9).to_sparse()),
        StructureError,
        r"rows: .* sparse_coo",
    ),
    (
        "Layout.slices unknown",
        lambda: LAYOUT.slices("head"),
        StructureError,
        rf"prefix: expected the start of one of {WHERE}, got 'head'. Fix: take a name from layout.names",
    ),
    ("Layout.slices part", lambda: LAYOUT.slices("w."), StructureError, rf"prefix: .*{WHERE}, got 'w.'. Fix"),
    ("Layout.slices path", lambda: LAYOUT.slices(("w", 0)), StructureError, rf"prefix: .*{WHERE}, got \('w', 0\). Fix"),
    (
        "Layout.slices None",
        lambda: LAYOUT.slices(None),
        TypeError,
        r"prefix: expected a dotted name or a tuple of keys, got NoneType. Fix: pass one of layout.names or",
    ),
    ("Layout.slices index", lambda: LAYOUT.slices(0), TypeError, r"prefix: .* got int. Fix: .* such as \(0,\)"),
    ("Layout.slices bytes", lambda: LAYOUT.slices(b"w"), TypeError, r"prefix: .* got bytes. Fix"),
    (
        "Layout.slices empty tree",
        lambda: Layout.of({}).slices("w"),
        StructureError,
        r"prefix: .* no leaves\), got 'w'. Fix",
    ),
    (
        "Layout.to_json key",
        lambda: Layout.of({1.5: ones(1)}).to_json(),
        StructureError,
        r"tree: expected dict keys that are strings, integers or tuples of those, got 1.5. Fix: rename the key",
    ),
    (
        "Layout.fingerprint key",
        lambda: Layout.of({True: ones(1)}).fingerprint,
        StructureError,
        r"tree: .* got True. Fix",
    ),
    ("Layout.from_json number", lambda: Layout.from_json(3), StructureError, rf"{JSON} 3 .*{SAME}"),
    (
        "Layout.from_json no JSON",
        lambda: Layout.from_json("layout"),
        StructureError,
        rf"{JSON} 'layout' \(Expecting value.*{SAME}",
    ),
    ("Layout.from_json cut", lambda: Layout.from_json(TEXT[:50]), StructureError, rf"{JSON} '.*{SAME}"),
    (
        "Layout.from_json other",
        lambda: Layout.from_json("{}"),
        StructureError,
        rf"{JSON} '{{}}' \(no 'leaves' in it\). {SAME}",
    ),
    ("Layout.from_json list", lambda: Layout.from_json("[1]"), StructureError, rf"{JSON} '\[1\]' .*{SAME}"),
    ("Layout.from_json deep", lambda: Layout.from_json("[" * 10**5), StructureError, rf"{JSON} '\[\[.*{SAME}"),
    (
        "Layout.from_json shape",
        lambda: Layout.from_json(damaged(shape=[-1])),
        StructureError,
        rf"{JSON} .*\[-1\] is no sh.*{SAME}",
    ),
    (
        "Layout.from_json bool",
        lambda: Layout.from_json(damaged(shape=[True])),
        StructureError,
        rf"{JSON} .*is no shape.*{SAME}",
    ),
    (
        "Layout.from_json dtype",
        lambda: Layout.from_json(damaged(dtype="nn")),
        StructureError,
        rf"{JSON} .*'nn' is no dtype.*{SAME}",
    ),
    (
        "Layout.from_json step",
        lambda: Layout.from_json(damaged(path=[["q", "w"]])),
        StructureError,
        rf"{JSON} .*no step.*{SAME}",
    ),
    (
        "Layout.from_json index",
        lambda: Layout.from_json(damaged(path=[["i", 10**9]])),
        StructureError,
        rf"{JSON} .*no step.*{SAME}",
    ),
    (
        "Layout.from_json twice",
        lambda: Layout.from_json(damaged(path=[["k", "b"]])),
        StructureError,
        rf"{JSON} .*path of another.*{SAME}",
    ),
    (
        "Layout.from_json kinds",
        lambda: Layout.from_json(damaged(path=[["f", "b"]])),
        StructureError,
        rf"{JSON} .*same path.*{SAME}",
    ),
    (
        "Layout.from_json keys",
        lambda: Layout.from_json(damaged(path=[["k", ["w"]]])),
        StructureError,
        rf"{JSON} .*{SAME}",
    ),
    (
        "partition None",
        lambda: partition(PARAMS, None),
        TypeError,
        r"predicate: expected a function of a leaf's name, got NoneType. Fix: pass lambda name: name == 'head'",
    ),
    ("partition name", lambda: partition(PARAMS, "w"), TypeError, r"predicate: .* got str. Fix: pass lambda name"),
    (
        "partition mask",
        lambda: partition(PARAMS, {"w": True, "b": False}),
        TypeError,
        r"predicate: .* got dict. Fix: pass lam",
    ),
    (
        "partition no argument",
        lambda: partition(PARAMS, lambda: True),
        TypeError,
        r"predicate: expected a function of a leaf's name, or of \(name, leaf\), got one of \(\). Fix: pass lambda",
    ),
    (
        "partition three",
        lambda: partition(PARAMS, lambda a, b, c: a in b or c),
        TypeError,
        r"predicate: .*got one of \(a, b, c\). Fix",
    ),
    (
        "partition keyword",
        lambda: partition(PARAMS, lambda n, *, k: n in k),
        TypeError,
        r"predicate: .*got one of \(n, \*, k\). Fix",
    ),
    (
        "partition tensor",
        lambda: partition(PARAMS, lambda _, leaf: leaf > 0),
        TypeError,
        r"predicate: expected True or False for leaf 'w', got shape \(2, 3\). Fix: reduce it with .all\(\) or .any\(\)",
    ),
    ("partition endless", lambda: partition(ENDLESS, bool), StructureError, rf"tree: {NEST}"),
    (
        "combine both",
        lambda: combine(PARAMS, PARAMS),
        StructureError,
        r"leaf 'w': expected a value in one half, None in the other, got two. Fix: set it to None in one of them",
    ),
    (
        "combine bare",
        lambda: combine(ones(1), ones(1)),
        StructureError,
        r"tree: expected a value in one half, .* got two",
    ),
    (
        "combine missing",
        lambda: combine({"w": None, "b": ones(3)}, {"w": ones(1)}),
        StructureError,
        r"second: expected the structure \{'w': \*, 'b': \*\}, got \{'w': \*\}. Fix: combine the two .*missing 'b'",
    ),
    (
        "combine more",
        lambda: combine({"w": None}, PARAMS),
        StructureError,
        r"second: .*Fix: combine .*\(unexpected 'b'\)",
    ),
    (
        "combine None",
        lambda: combine(PARAMS, None),
        StructureError,
        r"second: .* got \*. Fix: combine .*missing 'w', 'b'",
    ),
    ("combine deeper", lambda: combine({"w": None}, {"w": [ones(1)]}), StructureError, r"second: .*unexpected 'w.0'"),
    (
        "combine other type",
        lambda: combine([None], (ones(1),)),
        StructureError,
        r"second: .*container is of another type",
    ),
    ("combine endless", lambda: combine(ENDLESS, PARAMS), StructureError, rf"first: {NEST}"),
    ("combine endless second", lambda: combine(PARAMS, ENDLESS), StructureError, rf"second: {NEST}"),
    ("Point.rows endless", lambda: POINT.rows(ENDLESS), StructureError, rf"v: {NEST}"),
    (
        "Point.rows shape",
        lambda: POINT.rows({"w": ones(3, 2), "b": ones(3)}),
        StructureError,
        r"v\['w'\]: expected shape \(2, 3\), or \(k, 2, 3\) for k vectors, got shape \(3, 2\). Fix: give every leaf",
    ),
    (
        "Point.rows counts",
        lambda: POINT.rows({"w": ones(4, 2, 3), "b": ones(5, 3)}),
        StructureError,
        r"v\['b'\]: expected shape \(4, 3\), as the leaves before it, got shape \(5, 3\). Fix",
    ),
    (
        "Point.rows half batch",
        lambda: POINT.rows({"w": ones(2, 3), "b": ones(5, 3)}),
        StructureError,
        r"v\['b'\]: expected shape \(3,\), as the leaves before it, got shape \(5, 3\). Fix",
    ),
    (
        "Point.rows number",
        lambda: POINT.rows({"w": 1.0, "b": ones(3)}),
        StructureError,
        r"v\['w'\]: expected a tensor, got float. Fix: give v one tensor per parameter",
    ),
    (
        "Point.rows integer",
        lambda: POINT.rows({"w": ones(2, 3).long(), "b": ones(3)}),
        DtypeError,
        r"v\['w'\]: expected a floating point tensor, got torch.int64. Fix: convert v with .to\(torch.float64\)",
    ),
    (
        "Point.rows complex",
        lambda: POINT.rows({"w": ones(2, 3) * 1j, "b": ones(3)}),
        DtypeError,
        r"v\['w'\]: expected dtype torch.float64, or a narrower float, got torch.complex128. Fix: convert v",
    ),
    (
        "Point.rows sparse",
        lambda: POINT.rows({"w": ones(2, 3).to_sparse(), "b": ones(3)}),
        DtypeError,
        r"v\['w'\]: expected a dense tensor, got a tensor that is sparse_coo. Fix: convert it with .to_dense",
    ),
    (
        "Point.rows device",
        lambda: POINT.rows({"w": torch.ones(2, 3, device="meta").double(), "b": ones(3)}),
        DtypeError,
        r"v\['w'\]: expected a tensor on cpu, got one on meta. Fix: move v with .to\('cpu'\)",
    ),
    (
        "bind func",
        lambda: bind(None, (PARAMS,), 0, True),
        TypeError,
        r"func: expected a function, got NoneType. Fix: pass the l",
    ),
    (
        "bind no x",
        lambda: bind(sum, (), 0, True),
        StructureError,
        r"x: expected at least one argument, got none. Fix: pass",
    ),
    (
        "bind array",
        lambda: bind(sum, (np.ones(2),), 0, True),
        DtypeError,
        r"x\[0\]: expected a floating point tensor, got ndarray. Fix: convert it with torch.as_tensor",
    ),
    (
        "bind number",
        lambda: bind(sum, ([1.0],), 0, True),
        DtypeError,
        r"leaf '0': .* got float. Fix: differentiate only float",
    ),
    (
        "bind integer",
        lambda: bind(sum, (PARAMS, ones(1).long()), 1, True),
        DtypeError,
        r"x\[1\]: .* got torch.int64. Fix",
    ),
    (
        "bind complex",
        lambda: bind(sum, ({"w": ones(1) * 1j},), 0, True),
        DtypeError,
        r"leaf 'w': expected a real floating point tensor, got torch.complex128. Fix: differentiate only float leaves",
    ),
    (
        "bind sparse",
        lambda: bind(sum, ([ones(2).to_sparse()],), 0, True),
        DtypeError,
        rf"leaf '0': {DENSE} sparse_coo. Fix",
    ),
    (
        "argnums high",
        lambda: bind(sum, (PARAMS,), 1, True),
        ValueError,
        r"argnums: expected positions among 1 argument\(s\) of func, got 1. Fix: pass the position of the parameters",
    ),
    ("argnums low", lambda: check_argnums(-3, 2), ValueError, r"argnums: expected positions among 2 .* got -3. Fix"),
    (
        "argnums name",
        lambda: check_argnums("w", 1),
        TypeError,
        r"argnums: expected an int or a tuple of ints, got 'w'. Fix",
    ),
    (
        "argnums list",
        lambda: check_argnums([0], 1),
        TypeError,
        r"argnums: expected an int or a tuple of ints, got \[0\]. Fix",
    ),
    (
        "argnums bool",
        lambda: check_argnums(True, 2),
        TypeError,
        r"argnums: expected an int or a tuple of ints, got True. Fix",
    ),
    (
        "argnums none",
        lambda: check_argnums((), 2),
        TypeError,
        r"argnums: expected an int or a tuple of ints, got \(\). Fix",
    ),
    (
        "argnums twice",
        lambda: check_argnums((0, -2), 2),
        ValueError,
        r"argnums: expected different positions, got \(0, -2\)",
    ),
    (
        "x bare",
        lambda: check_args(ones(2)),
        TypeError,
        r"x: expected a tuple of the arguments of func, got Tensor. Fix: wrap",
    ),
    (
        "x dict",
        lambda: check_args(PARAMS),
        TypeError,
        r"x: expected a tuple of the arguments of func, got dict. Fix: wrap",
    ),
    (
        "x namedtuple",
        lambda: check_args(Layer(1, 2)),
        TypeError,
        r"x: .* got Layer. Fix: wrap a single argument as \(par",
    ),
    (
        "number text",
        lambda: check_number("1", "tol", fix="pass tol=1e-7"),
        TypeError,
        r"tol: expected a finite number >= 0, got str. Fix: pass tol=1e-7\.",
    ),
    ("number bool", lambda: check_number(True, "tol", fix="pass"), TypeError, r"tol: .* got bool. Fix"),
    (
        "number tensor",
        lambda: check_number(ones(2), "tol", fix="pass"),
        TypeError,
        r"tol: .* got a tensor of shape \(2,\). Fix",
    ),
    (
        "number graph",
        lambda: check_number(ones().requires_grad_(), "tol", fix="pass"),
        TypeError,
        r"tol: .* got a tensor of",
    ),
    (
        "number low",
        lambda: check_number(-1, "tol", fix="pass"),
        ValueError,
        r"tol: expected a finite number >= 0, got -1. Fix",
    ),
    (
        "number strict",
        lambda: check_number(0, "lam", strict=True, fix="pass"),
        ValueError,
        r"lam: .* number > 0, got 0. Fix",
    ),
    ("number nan", lambda: check_number(math.nan, "tol", fix="pass"), ValueError, r"tol: .* got nan. Fix"),
    ("number huge", lambda: check_number(10**400, "tol", fix="pass"), ValueError, r"tol: .* got inf. Fix"),
    (
        "count float",
        lambda: check_count(2.0, "k", fix="pass k=2"),
        TypeError,
        r"k: expected an integer >= 1, got 2.0. Fix: pa",
    ),
    (
        "count bool",
        lambda: check_count(True, "k", fix="pass k=2"),
        TypeError,
        r"k: expected an integer >= 1, got True. Fix",
    ),
    ("count low", lambda: check_count(0, "k", fix="pass k=2"), ValueError, r"k: expected an integer >= 1, got 0. Fix"),
    (
        "chunk zero",
        lambda: check_chunk(0),
        ValueError,
        r"chunk_size: expected an integer >= 1 or None \(all at once\), got 0.",
    ),
    (
        "chunk text",
        lambda: check_chunk("all"),
        TypeError,
        r"chunk_size: .* got 'all'. Fix: pass a positive integer, or None",
    ),
    (
        "choice",
        lambda: check_choice("fwd", "mode", ("rev-rev", "rev-fwd")),
        ValueError,
        r"mode: expected 'rev-rev' or 'rev-fwd', got 'fwd'. Fix: pass mode='rev-rev'",
    ),
    (
        "choice type",
        lambda: check_choice(1, "mode", ("rev-rev",)),
        ValueError,
        r"mode: expected 'rev-rev', got 1. Fix: pass",
    ),
    (
        "callable",
        lambda: check_callable(3, "func", "a function"),
        TypeError,
        r"func: expected a function, got int. Fix: pass",
    ),
    (
        "generator",
        lambda: check_generator(0),
        TypeError,
        r"generator: expected a torch.Generator or None, got int. Fix: pass torch.Generator\(\).manual_seed\(seed\)",
    ),
    (
        "in_dims key",
        lambda: flatten_dims({"w": 0}, PARAMS, "in_dims[1]"),
        StructureError,
        r"in_dims\[1\]: expected a part of \{'w': \*, 'b': \*\}, got \{'w': 0\}. Fix: give an int or None for the",
    ),
    (
        "in_dims list",
        lambda: flatten_dims([0], PARAMS, "in_dims"),
        StructureError,
        r"in_dims: .* got \[0\]. Fix: give an",
    ),
    ("in_dims deep", lambda: flatten_dims({"w": [0], "b": 0}, PARAMS, "in_dims"), StructureError, r"in_dims: .*\[0\]"),
    (
        "in_dims text",
        lambda: flatten_dims("0", PARAMS, "in_dims"),
        TypeError,
        r"in_dims: expected int or None .* got '0'",
    ),
    (
        "in_dims bool",
        lambda: flatten_dims(True, PARAMS, "in_dims"),
        TypeError,
        r"in_dims: .* got True. Fix: give an int",
    ),
    ("in_dims endless", lambda: flatten_dims(ENDLESS, PARAMS, "in_dims"), StructureError, rf"in_dims: {NEST}"),
    (
        "scalar number",
        lambda: check_scalar(1.0),
        TypeError,
        r"func: .* returns a scalar tensor, got float. Fix: end func with",
    ),
    (
        "scalar shape",
        lambda: check_scalar(ones(2)),
        StructureError,
        r"func: .* got shape \(2,\). Fix: end func with .mean",
    ),
    ("scalar integer", lambda: check_scalar(torch.tensor(1)), DtypeError, r"func: .* got torch.int64. Fix: convert it"),
]


@pytest.mark.parametrize(("call", "error", "text"), [pytest.param(*case[1:], id=case[0]) for case in TREE_ERRORS])
def test_wrong_calls_say_what_to_do(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    said = str(caught.value)
    assert re.match(text, said), said
    assert re.fullmatch(r"[^:]+: expected .+, got .+\. Fix: .+\.", said, flags=re.DOTALL), said
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "functorch" not in said
    assert "namespace" not in said


def test_right_calls_of_the_checks():
    assert check_number(torch.tensor(0.5), "tol", fix="") == 0.5
    assert check_number(np.float32(0.5), "tol", fix="") == 0.5
    assert check_number(0, "tol", fix="") == 0.0
    assert check_count(np.int64(3), "k", fix="") == 3
    assert check_count(0, "k", low=0, fix="") == 0
    assert check_chunk(None) is None
    assert check_chunk(4) == 4
    assert check_argnums(-1, 3) == (2,)
    assert check_argnums((2, 0), 3) == (2, 0)
    assert check_args([1, 2]) == (1, 2)
    assert check_choice("b", "mode", ("a", "b")) == "b"
    assert check_generator(None) is None
    check_callable(print, "func", "")
    assert check_scalar(ones()) == 1


def test_meta_trees_have_layouts_and_vectors_without_values():
    tree = {"b": torch.ones(2, 2, device="meta"), "a": torch.ones(1, device="meta")}
    assert Layout.of(tree) == Layout.of({"b": torch.zeros(2, 2), "a": torch.zeros(1)})
    assert ravel(tree)[0].shape == (5,)
    assert ravel(tree)[0].is_meta


def test_a_deep_tree_that_can_be_walked_is():
    tree: Any = ones(2)
    for _ in range(300):
        tree = [tree]
    vector, unravel = ravel(tree)
    assert vector.tolist() == [1, 1]
    assert leaves(unravel(vector))[0].tolist() == [1, 1]
    assert Layout.of(tree).paths == ((0,) * 300,)


def test_reference_reorder_changes_every_order():
    got = reorder({"b": {"y": ones(1), "x": ones(2)}, "a": ones(3)}, Random(0))
    assert list(got) == ["a", "b"]
    assert list(got["b"]) == ["x", "y"]
