"""Wrong calls of products, inverse products and solvers: each is refused, in words a user can act on.

One table per public call, (name, call, exception, message); trees, rows and scores have theirs beside their own tests.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_attribution
import test_rows
import torch
from test_tree import TREE_ERRORS

import dattrifunc
from dattrifunc import (
    CompositeLoss,
    DtypeError,
    StructureError,
    fvp,
    fvp_at_x,
    ggnvp,
    ggnvp_at_x,
    hessian_matrix,
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
    spectrum,
)

Case = tuple[str, Callable[[], Any], type[Exception], str]
Named = namedtuple("Named", ["w", "b"])

P = {"w": torch.ones(2, 3), "b": torch.ones(3)}
X = torch.ones(4, 2)
CALLS: list[int] = []


def loss(p, x):
    CALLS.append(1)
    return (x @ p["w"] + p["b"]).pow(2).mean() + p["w"].pow(2).sum()


# ---------------------------------------------------------------------------------------------------------------------
# what can be wrong with each argument: (name, value, exception, message)

GRAD = torch.tensor(0.1, requires_grad=True)
KNOBS = {
    "argnums": [
        (True, TypeError, r"argnums: expected an int or a tuple of ints, got True. Fix: pass the position"),
        (0.0, TypeError, r"argnums: expected an int or a tuple of ints, got 0.0. Fix"),
        ((), TypeError, r"argnums: expected an int or a tuple of ints, got \(\). Fix"),
        ((0, 0), ValueError, r"argnums: expected different positions, got \(0, 0\). Fix: name each argument once"),
    ],
    "mode": [
        ("fwd-rev", ValueError, r"mode: expected 'rev-rev' or 'rev-fwd', got 'fwd-rev'. Fix: pass mode='rev-rev'"),
        (None, ValueError, r"mode: expected 'rev-rev' or 'rev-fwd', got None. Fix"),
    ],
    "regularization": [
        (-1.0, ValueError, r"regularization: expected a finite number >= 0, got -1. Fix: pass lambda >= 0 in units"),
        (float("nan"), ValueError, r"regularization: expected a finite number >= 0, got nan. Fix"),
        ("0.1", TypeError, r"regularization: expected a finite number >= 0, got str. Fix"),
        (GRAD, TypeError, r"regularization: expected a finite number >= 0, got a tensor of shape \(\). Fix"),
    ],
    "chunk_size": [
        (0, ValueError, r"chunk_size: expected an integer >= 1 or None \(all at once\), got 0. Fix: pass a positive"),
        (1.0, TypeError, r"chunk_size: expected an integer >= 1 or None \(all at once\), got 1.0. Fix"),
    ],
    "product": [(3, TypeError, r"product: expected a function, got int. Fix: pass hvp_at_x, or a function with its")],
    "tol": [
        (-1e-7, ValueError, r"tol: expected a finite number >= 0, got -1e-07. Fix: pass a relative tolerance"),
        (None, TypeError, r"tol: expected a finite number >= 0, got NoneType. Fix"),
    ],
    "max_iter": [
        (-1, ValueError, r"max_iter: expected an integer >= 0 or None \(10 p, at most 1000\), got -1. Fix: pass max_"),
        (1.5, TypeError, r"max_iter: expected an integer >= 0 or None \(10 p, at most 1000\), got 1.5. Fix"),
    ],
    "callback": [(3, TypeError, r"callback: expected a function, got int. Fix: pass callback\(iteration, residuals\)")],
    "preconditioner": [
        (
            "newton",
            ValueError,
            r"preconditioner: expected 'jacobi', 'nystrom', a function or None, got 'newton'. Fix: pass 'jac",
        ),
        (3, TypeError, r"preconditioner: expected a function, got int. Fix: pass a function v -> M v .*'jacobi' or"),
    ],
    "rank": [
        (0, ValueError, r"rank: expected an integer >= 1, got 0. Fix: pass how many directions of curvature"),
        (2.5, TypeError, r"rank: expected an integer >= 1, got 2.5. Fix"),
        (None, TypeError, r"rank: expected an integer >= 1, got None. Fix"),
    ],
    "top_k": [
        (0, ValueError, r"top_k: expected an integer >= 1, got 0. Fix: pass how many eigenvalues to keep"),
        (2.5, TypeError, r"top_k: expected an integer >= 1, got 2.5. Fix"),
        (None, TypeError, r"top_k: expected an integer >= 1, got None. Fix"),
    ],
    "max_iter arnoldi": [  # it has no cap of its own
        (0, ValueError, r"max_iter: expected an integer >= 1, got 0. Fix: pass how many products to build the space"),
        (1.5, TypeError, r"max_iter: expected an integer >= 1, got 1.5. Fix"),
        (None, TypeError, r"max_iter: expected an integer >= 1, got None. Fix"),
    ],
    "block": [
        ("yes", ValueError, r"block: expected True, False or 'auto', got 'yes'. Fix: pass block=True to share one Kr"),
        (None, ValueError, r"block: expected True, False or 'auto', got None. Fix"),
        (2, ValueError, r"block: expected True, False or 'auto', got 2. Fix"),
    ],
    "batch_size": [
        (0, ValueError, r"batch_size: expected an integer >= 1, got 0. Fix: pass a positive integer"),
        (2.5, TypeError, r"batch_size: expected an integer >= 1, got 2.5. Fix"),
    ],
    "num_repeat": [(0, ValueError, r"num_repeat: expected an integer >= 1, got 0. Fix: pass a positive integer")],
    "recursion_depth": [(1.5, TypeError, r"recursion_depth: expected an integer >= 0, got 1.5. Fix: pass the number")],
    "damping": [
        (1.0, ValueError, r"damping: expected a number in \[0, 1\), got 1. Fix: pass damping below 1; lambda goes to"),
        (-0.1, ValueError, r"damping: expected a finite number >= 0, got -0.1. Fix"),
    ],
    "scaling": [
        ("big", ValueError, r"scaling: expected a number > 0 or 'auto', got 'big'. Fix: pass scaling='auto', or more"),
        (0, ValueError, r"scaling: expected a finite number > 0, got 0. Fix: pass scaling='auto' to estimate it"),
    ],
    "generator": [(3, TypeError, r"generator: expected a torch.Generator or None, got int. Fix: pass torch.Generator")],
    "collate_fn": [(3, TypeError, r"collate_fn: expected a function, got int. Fix: pass a function of the tuple")],
}
FUNCS = [
    (3, TypeError, r"func: expected a function, got int. Fix: pass the loss itself, func\(\*x\) -> scalar"),
    (None, TypeError, r"func: expected a function, got NoneType. Fix"),
]
VALUES = [  # what func may return
    (
        "vector",
        lambda p, x: (x @ p["w"]).sum(0),
        StructureError,
        r"func: .*, got shape \(3,\). Fix: end func with .mean",
    ),
    (
        "tuple",
        lambda p, _: (p["w"].sum(), 1),
        TypeError,
        r"func: expected a loss that returns a scalar tensor, got tuple",
    ),
    ("number", lambda *_: 1.0, TypeError, r"func: expected a loss that returns a scalar tensor, got float. Fix"),
    ("integer", lambda *_: torch.tensor(1), DtypeError, r"func: expected a real floating point loss, got torch.int64"),
    (
        "random",
        lambda p, _: torch.dropout(p["w"], 0.5, True).pow(2).sum(),
        ValueError,
        r"func: .* random .* module.eval",
    ),
]
ARGUMENTS = [  # func's arguments, as a tuple
    ("none", (), StructureError, r"x: expected at least one argument, got none. Fix: pass the arguments of func"),
    ("too few", (P,), TypeError, r"x: expected the arguments of func\(p, x\), got 1 \(missing .*'x'\). Fix: give one"),
    ("too many", (P, X, X), TypeError, r"x: expected the arguments of func\(p, x\), got 3 \(too many .*\). Fix"),
    ("int", ({**P, "w": torch.ones(2, 3).int()}, X), DtypeError, r"leaf 'w': .* got torch.int32. Fix: .*partition"),
    ("complex", ({**P, "b": P["b"] + 0j}, X), DtypeError, r"leaf 'b': expected a real .* got torch.complex64. Fix"),
    (
        "numpy",
        ({**P, "w": np.ones((2, 3))}, X),
        DtypeError,
        r"leaf 'w': .*got ndarray. Fix: convert it with torch.as_t",
    ),
    ("module", (torch.nn.Linear(2, 3), X), DtypeError, r"x\[0\]: .* got Linear. Fix: pass dict\(module.named_para"),
]
NO_TUPLE = [
    ("tensor", torch.ones(2), TypeError, r"x: expected a tuple of the arguments of func, got Tensor. Fix: wrap"),
    ("dict", P, TypeError, r"x: expected a tuple of the arguments of func, got dict. Fix: wrap a single argument as"),
    ("namedtuple", Named(1, 2), TypeError, r"x: expected a tuple of the arguments of func, got Named. Fix"),
]
V = {"w": torch.ones(2, 3), "b": torch.ones(3)}
VECTORS = [
    ("missing", {"w": V["w"]}, StructureError, r"v: expected the structure \{'w': \*, 'b': \*\}, .*missing 'b'"),
    ("extra", {**V, "c": V["b"]}, StructureError, r"v: expected the structure .*\(unexpected 'c'\)"),
    ("bare", torch.ones(9), StructureError, r"v: expected the structure .*, got \*. Fix: .*missing 'w', 'b'"),
    (
        "shape",
        {**V, "w": V["w"].T},
        StructureError,
        r"v\['w'\]: expected shape \(2, 3\), or \(k, 2, 3\) for .*\(3, 2\)",
    ),
    ("k", {"w": torch.ones(5, 2, 3), "b": torch.ones(4, 3)}, StructureError, r"v\['b'\]: expected shape \(5, 3\), as"),
    ("one k", {"w": torch.ones(5, 2, 3), "b": torch.ones(3)}, StructureError, r"v\['b'\]: expected shape \(5, 3\), as"),
    ("wide", {**V, "w": V["w"].double()}, DtypeError, r"v\['w'\]: expected dtype torch.float32, .* torch.float64. Fix"),
    ("int", {**V, "w": V["w"].int()}, DtypeError, r"v\['w'\]: expected a floating point tensor, got torch.int32. Fix"),
    ("complex", {**V, "b": V["b"] + 0j}, DtypeError, r"v\['b'\]: expected dtype torch.float32, .*complex64"),
    (
        "device",
        {**V, "b": V["b"].to("meta")},
        DtypeError,
        r"v\['b'\]: expected a tensor on cpu, got one on meta. Fix: m",
    ),
    ("numpy", {**V, "b": np.ones(3)}, StructureError, r"v\['b'\]: expected a tensor, got ndarray. Fix: give v one ten"),
    ("number", {**V, "b": 1.0}, StructureError, r"v\['b'\]: expected a tensor, got float. Fix: give v one tensor"),
]
IN_DIMS = [
    (0, StructureError, r"in_dims: expected a tuple of 2 entries, one per argument, got 0. Fix: pass one entry"),
    ((None, 0, 0), StructureError, r"in_dims: expected a tuple of 2 entries, .* got \(None, 0, 0\). Fix"),
    ((0, 0), StructureError, r"in_dims: expected None at argnums \(0,\), got \(0, 0\). Fix"),
    ((None, 2), StructureError, r"in_dims\[1\]: expected an axis of a tensor of shape \(4, 2\), got 2. Fix"),
    ((None, "a"), (StructureError, TypeError), r"in_dims\[1\]: expected .*, got 'a'. Fix"),
    ((None, {"a": 0}), StructureError, r"in_dims\[1\]: expected .*, got \{'a': 0\}. Fix"),
]


def wrong_knobs(call: str, make: Callable[..., Any], *names: str) -> list[Case]:
    return [
        (f"{call} {name} {value!r:.20}", lambda n=keyword, v=value: make(**{n: v}), error, text)
        for name in names
        for keyword in [name.partition(" ")[0]]
        for value, error, text in KNOBS[name]
    ]


def wrong(call: str, what: str, table: list[Any], make: Callable[[Any], Any]) -> list[Case]:
    """Cases of one argument: rows (name, value, error, text) or (value, error, text)."""
    rows = [row if len(row) == 4 else (f"{row[0]!r:.20}", *row) for row in table]
    return [(f"{call} {what} {name}", lambda v=value: make(v), error, text) for name, value, error, text in rows]


POSITIVE = {"regularization": 0.1}
NOT_POSITIVE = [
    (0.0, ValueError, r"regularization: expected a finite number > 0, got 0. Fix: pass lambda > 0 in units of loss"),
    (-1.0, ValueError, r"regularization: expected a finite number > 0, got -1. Fix"),
    (float("inf"), ValueError, r"regularization: expected a finite number > 0, got inf. Fix"),
    ("0.1", TypeError, r"regularization: expected a finite number > 0, got str. Fix"),
]
NO_ROWS = [  # products that are not made of rows
    (hvp_at_x, ValueError, r"product: expected fvp_at_x, the curvature made of rows, got hvp_at_x. Fix: leave it out"),
    (3, TypeError, r"product: expected a function, got int. Fix: pass fvp_at_x, or leave it out"),
]
# Knobs that a call with x and v, and a call without either, take alike.
COMMON = ["argnums", "mode", "regularization", "chunk_size"]
ITERATIVE = ["product", "tol", "max_iter", "callback", "preconditioner", "generator"]
SAMPLING = ["tol", "batch_size", "num_repeat", "recursion_depth", "damping", "scaling", "generator"]
INVERSES: dict[str, tuple[Any, Any, list[str]]] = {
    "explicit": (ihvp_explicit, ihvp_at_x_explicit, [*COMMON, "product"]),
    "cg": (ihvp_cg, ihvp_at_x_cg, [*COMMON, *ITERATIVE, "block"]),
    "minres": (ihvp_minres, ihvp_at_x_minres, [*COMMON, *ITERATIVE]),
    "auto": (ihvp_auto, ihvp_at_x_auto, [*COMMON, "product", "tol", "max_iter"]),
    "lissa": (
        ihvp_lissa,
        ihvp_at_x_lissa,
        [*COMMON, "product", "collate_fn", *SAMPLING],
    ),
    "nystrom": (
        functools.partial(ihvp_nystrom, **POSITIVE),
        functools.partial(ihvp_at_x_nystrom, **POSITIVE),
        ["argnums", "mode", "chunk_size", "product", "rank", "tol", "generator"],
    ),
    "arnoldi": (ihvp_arnoldi, ihvp_at_x_arnoldi, [*COMMON, "product", "max_iter arnoldi", "top_k", "tol", "generator"]),
    "woodbury": (
        functools.partial(ihvp_woodbury, **POSITIVE, in_dims=(None, 0)),
        functools.partial(ihvp_at_x_woodbury, **POSITIVE, in_dims=(None, 0)),
        ["argnums", "mode", "chunk_size"],
    ),
}
OUT = [(n, ValueError, rf"argnums: expected positions among 2 argument\(s\) of func, got {n}. Fix") for n in (2, -3)]

# Raised when the form is made, without x; see test_knobs_are_checked_before_there_is_an_x.
EARLY: list[Case] = [
    *wrong("hvp", "func", FUNCS, hvp),
    *wrong_knobs("hvp", lambda **knobs: hvp(loss, **knobs), *COMMON),
    *[
        case
        for name, (unbound, _, knobs) in INVERSES.items()
        for case in [
            *wrong(f"ihvp_{name}", "func", FUNCS, unbound),
            *wrong_knobs(f"ihvp_{name}", lambda unbound=unbound, **given: unbound(loss, **given), *knobs),
        ]
    ],
]
for name in ("nystrom", "woodbury"):
    unbound = INVERSES[name][0]
    EARLY += wrong(f"ihvp_{name}", "lambda", NOT_POSITIVE, lambda lam, f=unbound: f(loss, regularization=lam))
EARLY += wrong("ihvp_woodbury", "product", NO_ROWS, lambda f: INVERSES["woodbury"][0](loss, product=f))
# Raised before func is called.
DOOR: list[Case] = [
    *wrong("hvp", "x", NO_TUPLE, lambda x: hvp(loss)(x, V)),
    *wrong("hvp", "x", ARGUMENTS, lambda x: hvp(loss)(x, V)),
    *wrong("hvp", "v", VECTORS, lambda v: hvp(loss)((P, X), v)),
    *wrong("hvp", "argnums", OUT, lambda n: hvp(loss, n)((P, X), V)),
    *wrong("hvp_at_x", "func", FUNCS, lambda f: hvp_at_x(f, (P, X))),
    *wrong("hvp_at_x", "x", NO_TUPLE, lambda x: hvp_at_x(loss, x)),
    *wrong("hvp_at_x", "x", ARGUMENTS, lambda x: hvp_at_x(loss, x)),
    *wrong("hvp_at_x", "argnums", OUT, lambda n: hvp_at_x(loss, (P, X), n)),
    *wrong_knobs("hvp_at_x", lambda **knobs: hvp_at_x(loss, (P, X), **knobs), *COMMON),
]
LATE: list[Case] = [
    *wrong("hvp", "func", VALUES, lambda f: hvp(f)((P, X), V)),
    *wrong("hvp", "func", VALUES, lambda f: hvp(f, mode="rev-fwd")((P, X), V)),
    *wrong("hvp_at_x", "func", VALUES, lambda f: hvp_at_x(f, (P, X))),
    *wrong("hvp_at_x", "func", VALUES, lambda f: hvp_at_x(f, (P, X), mode="rev-fwd")),
    *wrong("hvp_at_x", "v", VECTORS, lambda v: hvp_at_x(loss, (P, X))(v)),
]
for name, (unbound, bound, knobs) in INVERSES.items():

    def at(*x, bound=bound, func=loss, **knobs):
        return bound(func, *x, **knobs)

    DOOR += [
        *wrong(f"ihvp_{name}", "x", NO_TUPLE, lambda x, f=unbound: f(loss)(x, V)),
        *wrong(f"ihvp_{name}", "x", ARGUMENTS, lambda x, f=unbound: f(loss)(x, V)),
        *wrong(f"ihvp_{name}", "v", VECTORS, lambda v, f=unbound: f(loss)((P, X), v)),
        *wrong(f"ihvp_{name}", "argnums", OUT, lambda n, f=unbound: f(loss, n)((P, X), V)),
        *wrong(f"ihvp_at_x_{name}", "func", FUNCS, lambda func, at=at: at(P, X, func=func)),
        *wrong(f"ihvp_at_x_{name}", "x", ARGUMENTS, lambda x, at=at: at(*x)),
        (
            f"ihvp_at_x_{name} x tuple",
            lambda at=at: at((P, X)),
            TypeError,
            r"x: .* got 1 .*Fix: .*one by one, f\(func,",
        ),
        *wrong(f"ihvp_at_x_{name}", "argnums", OUT, lambda n, at=at: at(P, X, argnums=n)),
        *wrong_knobs(f"ihvp_at_x_{name}", lambda at=at, **given: at(P, X, **given), *knobs),
    ]
    LATE += [
        # A sum over the first axis of one sample's outputs is a scalar, and no error.
        *wrong(f"ihvp_{name}", "func", VALUES[name == "woodbury" :], lambda func, f=unbound: f(func)((P, X), V)),
        *wrong(f"ihvp_at_x_{name}", "v", VECTORS, lambda v, at=at: at(P, X)(v)),
    ]

# Gauss-Newton and Fisher.
Y = torch.ones(4, 3)
WHOLE = (None, 0)


def predict(p, x):
    CALLS.append(1)
    return x @ p["w"] + p["b"]


COMPOSITE = CompositeLoss(predict, lambda z, y: (z - y).pow(2).mean())
NO_COMPOSITE = [
    (
        "int",
        3,
        TypeError,
        r"loss: expected a CompositeLoss, got int. Fix: pass CompositeLoss\(inner, outer\), with l",
    ),
    (
        "function",
        loss,
        TypeError,
        r"loss: expected a CompositeLoss, got function. Fix: pass CompositeLoss\(inner, outer",
    ),
]
OF_TARGET = [
    (n, ValueError, r"argnums: expected arguments of inner \(0 for params, 1 for inputs\), got .*, a target. Fix: diff")
    for n in (2, -1, (0, 2), (2,))
]
COMPOSITE_ARGUMENTS = [
    ("none", (), StructureError, r"x: expected at least one argument, got none. Fix"),
    ("too few", (P,), TypeError, r"x: expected the arguments of func\(params.*, got 1 \(missing .*'inputs'\). Fix"),
    ("no target", (P, X), TypeError, r"x: expected inner's output and the targets, .*outer\(z, y\), got 1 \(missing"),
    ("targets", (P, X, Y, Y), TypeError, r"x: expected inner's output and the targets, .*, got 3 \(too many"),
    ("int", ({**P, "w": torch.ones(2, 3).int()}, X, Y), DtypeError, r"leaf 'w': .* got torch.int32. Fix: .*partition"),
]
OUTPUTS = [  # what inner may return
    ("none", lambda *_: None, StructureError, r"inner: expected a function that returns floating .*, got one that ret"),
    ("number", lambda *_: 1.0, TypeError, r"inner: expected a function that .*, got one that returns float. Fix: ret"),
    ("int", lambda *_: Y.int(), DtypeError, r"inner: expected .*, got one that returns torch.int32. Fix: return only"),
]
SCALARS = [  # what outer may return
    (
        "vector",
        lambda z, _: z.sum(0),
        StructureError,
        r"outer: expected a loss .*, got shape \(3,\). Fix: end outer with",
    ),
    ("number", lambda *_: 1.0, TypeError, r"outer: expected a loss that returns a scalar tensor, got float. Fix"),
    ("random", lambda z, _: torch.dropout(z, 0.5, True).sum(), ValueError, r"func: .* random .* module.eval"),
]
SAMPLE_DIMS = [
    (0, TypeError, r"in_dims: expected a tuple of 2 entries, got 0. Fix: give one entry per argument of func, param"),
    (None, TypeError, r"in_dims: expected a tuple of 2 entries, got None. Fix"),
    ((None, 0, 0), StructureError, r"in_dims: expected 2 entries, got 3: \(None, 0, 0\). Fix"),
    (
        (0, 0),
        StructureError,
        r"in_dims: expected None at argnums \(0,\), got \(0, 0\). Fix: pass None in in_dims for par",
    ),
    (
        (None, None),
        StructureError,
        r"in_dims: expected a sample axis in at least one argument, got \(None, None\). Fix",
    ),
    ((None, 2), StructureError, r"x\[1\]: expected a tensor with sample axis 2, got shape \(4, 2\). Fix"),
    ((None, "a"), (StructureError, TypeError), r"in_dims\[1\]: expected .*, got 'a'. Fix"),
]
NO_SAMPLES = r"x: expected at least one sample, got 0. Fix: pass data, or check in_dims"
KEEP = r"keep_batch_dim: expected True or False, got 1. Fix"
EARLY += [
    *wrong("ggnvp", "loss", NO_COMPOSITE, ggnvp),
    *wrong_knobs("ggnvp", lambda **knobs: ggnvp(COMPOSITE, **knobs), *COMMON),
    *wrong("fvp", "func", FUNCS, lambda f: fvp(f, in_dims=WHOLE)),
    *wrong_knobs("fvp", lambda **knobs: fvp(loss, in_dims=WHOLE, **knobs), *COMMON),
    *wrong("ihvp_cg", "loss", NO_COMPOSITE, lambda f: ihvp_cg(f, product=ggnvp_at_x)),
    (
        "CompositeLoss inner",
        lambda: CompositeLoss(3, loss),
        TypeError,
        r"inner: expected a function, got int. Fix: pass the model, inner\(params, inputs\) -> output",
    ),
    ("CompositeLoss inner none", lambda: CompositeLoss(None, loss), TypeError, "inner: expected a function, got None"),
    ("CompositeLoss inner dict", lambda: CompositeLoss(P, loss), TypeError, "inner: expected a function, got dict"),
    (
        "CompositeLoss outer",
        lambda: CompositeLoss(loss, 3),
        TypeError,
        r"outer: expected a function, got int. Fix: pass",
    ),
    (
        "CompositeLoss outer x",
        lambda: CompositeLoss(loss, X),
        TypeError,
        r"outer: expected a function, got Tensor. Fix",
    ),
    ("CompositeLoss outer none", lambda: CompositeLoss(loss, None), TypeError, "outer: expected a function, got None"),
]
DOOR += [
    *wrong("ggnvp", "x", NO_TUPLE, lambda x: ggnvp(COMPOSITE)(x, V)),
    *wrong("ggnvp", "x", COMPOSITE_ARGUMENTS, lambda x: ggnvp(COMPOSITE)(x, V)),
    *wrong("ggnvp", "v", VECTORS, lambda v: ggnvp(COMPOSITE)((P, X, Y), v)),
    *wrong("ggnvp", "argnums", OF_TARGET, lambda n: ggnvp(COMPOSITE, n)((P, X, Y), V)),
    *wrong("ggnvp_at_x", "loss", NO_COMPOSITE, lambda f: ggnvp_at_x(f, (P, X, Y))),
    *wrong("ggnvp_at_x", "x", NO_TUPLE, lambda x: ggnvp_at_x(COMPOSITE, x)),
    *wrong("ggnvp_at_x", "x", COMPOSITE_ARGUMENTS, lambda x: ggnvp_at_x(COMPOSITE, x)),
    *wrong("ggnvp_at_x", "argnums", OF_TARGET, lambda n: ggnvp_at_x(COMPOSITE, (P, X, Y), n)),
    *wrong_knobs("ggnvp_at_x", lambda **knobs: ggnvp_at_x(COMPOSITE, (P, X, Y), **knobs), *COMMON),
    *wrong("fvp", "x", NO_TUPLE, lambda x: fvp(loss, in_dims=WHOLE)(x, V)),
    *wrong("fvp", "x", ARGUMENTS, lambda x: fvp(loss, in_dims=WHOLE)(x, V)),
    *wrong("fvp", "v", VECTORS, lambda v: fvp(loss, in_dims=WHOLE)((P, X), v)),
    *wrong("fvp", "in_dims", SAMPLE_DIMS, lambda dims: fvp(loss, in_dims=dims)((P, X), V)),
    *wrong("fvp_at_x", "func", FUNCS, lambda f: fvp_at_x(f, (P, X), in_dims=WHOLE)),
    *wrong("fvp_at_x", "x", NO_TUPLE, lambda x: fvp_at_x(loss, x, in_dims=WHOLE)),
    *wrong("fvp_at_x", "x", ARGUMENTS, lambda x: fvp_at_x(loss, x, in_dims=WHOLE)),
    *wrong("fvp_at_x", "argnums", OUT, lambda n: fvp_at_x(loss, (P, X), n, in_dims=WHOLE)),
    *wrong("fvp_at_x", "in_dims", SAMPLE_DIMS, lambda dims: fvp_at_x(loss, (P, X), in_dims=dims)),
    *wrong("ihvp_at_x_cg", "in_dims", SAMPLE_DIMS, lambda d: ihvp_at_x_cg(loss, P, X, product=fvp_at_x, in_dims=d)),
    *wrong_knobs("fvp_at_x", lambda **knobs: fvp_at_x(loss, (P, X), in_dims=WHOLE, **knobs), *COMMON),
    ("fvp_at_x empty", lambda: fvp_at_x(loss, (P, X[:0]), in_dims=WHOLE), StructureError, NO_SAMPLES),
    ("fvp_at_x keep", lambda: fvp_at_x(loss, (P, X), in_dims=WHOLE, keep_batch_dim=1), TypeError, KEEP),
    *[
        (
            f"{name} {word} {product.__name__}",
            lambda f=f, func=func, x=x, product=product, given=given: f(func, *x, product=product, **given),
            TypeError,
            rf"{word}: expected no {word} for a product that takes func as it stands, got .*Fix: leave it out, or pass",
        )
        for name, f in (("ihvp_at_x_cg", ihvp_at_x_cg), ("ihvp_at_x_explicit", ihvp_at_x_explicit))
        for product, func, x in ((hvp_at_x, loss, (P, X)), (ggnvp_at_x, COMPOSITE, (P, X, Y)))
        for word, given in (
            ("in_dims", {"in_dims": (None, *[0] * (len(x) - 1))}),
            ("keep_batch_dim", {"keep_batch_dim": True}),
        )
    ],
]
LATE += [
    *wrong("ggnvp_at_x", "inner", OUTPUTS, lambda f: ggnvp_at_x(CompositeLoss(f, COMPOSITE.outer), (P, X, Y))),
    *wrong("ggnvp", "outer", SCALARS, lambda f: ggnvp(CompositeLoss(predict, f))((P, X, Y), V)),
    *wrong("ggnvp_at_x", "v", VECTORS, lambda v: ggnvp_at_x(COMPOSITE, (P, X, Y))(v)),
    *wrong("fvp_at_x", "v", VECTORS, lambda v: fvp_at_x(loss, (P, X), in_dims=WHOLE)(v)),
    *wrong("fvp", "func", VALUES[1:4], lambda f: fvp(f, in_dims=WHOLE)((P, X), V)),
    *wrong("fvp_at_x", "func", VALUES[1:], lambda f: fvp_at_x(f, (P, X), in_dims=WHOLE)),
]
for name in ("nystrom", "woodbury"):
    bound = INVERSES[name][1]
    DOOR += wrong(f"ihvp_at_x_{name}", "lambda", NOT_POSITIVE, lambda lam, f=bound: f(loss, P, X, regularization=lam))
for name, f in (
    ("ihvp_woodbury", lambda d: ihvp_woodbury(loss, in_dims=d, **POSITIVE)((P, X), V)),
    ("ihvp_at_x_woodbury", lambda d: ihvp_at_x_woodbury(loss, P, X, in_dims=d, **POSITIVE)),
):
    DOOR += wrong(name, "in_dims", SAMPLE_DIMS, f)
DOOR += wrong("ihvp_at_x_woodbury", "product", NO_ROWS, lambda f: INVERSES["woodbury"][1](loss, P, X, product=f))
STARTS = [
    ("structure", {"w": V["w"]}, StructureError, r"x0: expected the structure \{'w': \*, 'b': \*\}, .*missing 'b'"),
    (
        "shape",
        {**V, "w": V["w"].T},
        StructureError,
        r"x0\['w'\]: expected shape \(2, 3\), or \(k, 2, 3\) for .*\(3, 2\)",
    ),
    ("dtype", {**V, "w": V["w"].double()}, DtypeError, r"x0\['w'\]: expected dtype torch.float32, .*float64. Fix"),
    ("number", {**V, "b": 1.0}, StructureError, r"x0\['b'\]: expected a tensor, got float. Fix"),
    (
        "k",
        {"w": torch.ones(2, 2, 3), "b": torch.ones(2, 3)},
        StructureError,
        r"x0: expected one vector, as v, got k = 2. Fix: start",
    ),
    ("tensor", torch.ones(9), StructureError, r"x0: expected the structure .*, got \*. Fix"),
]
NEAR = [
    ("structure", lambda v: v["w"], StructureError, r"preconditioner\(v\): expected the structure .*'b'"),
    ("shape", lambda v: {**v, "w": v["w"].T}, StructureError, r"preconditioner\(v\)\['w'\]: .*\(3, 2\)"),
    ("k", lambda v: {n: t[None] for n, t in v.items()}, StructureError, r"preconditioner\(v\): expected one .*k = 1"),
    ("dtype", lambda v: {**v, "w": v["w"].double()}, DtypeError, r"preconditioner\(v\)\['w'\]: .*float64. Fix"),
    ("number", lambda v: {**v, "b": 1.0}, StructureError, r"preconditioner\(v\)\['b'\]: expected a tensor, got float"),
    ("none", lambda _: None, StructureError, r"preconditioner\(v\): expected the structure .*, got None. Fix"),
]
for name in ("cg", "minres"):
    unbound, bound, _ = INVERSES[name]
    LATE += [
        *wrong(f"ihvp_{name}", "x0", STARTS, lambda x0, f=unbound: f(loss, x0=x0)((P, X), V)),
        *wrong(f"ihvp_at_x_{name}", "x0", STARTS, lambda x0, f=bound: f(loss, P, X, x0=x0)(V)),
        *wrong(f"ihvp_{name}", "M", NEAR, lambda m, f=unbound: f(loss, preconditioner=m)((P, X), V)),
        *wrong(f"ihvp_at_x_{name}", "M", NEAR, lambda m, f=bound: f(loss, P, X, preconditioner=m)(V)),
    ]

FEW = r"batch_size: expected at most the number of samples \(4\), got 5. Fix: pass batch_size <= 4"
COUNTS = r"x: expected the same number of samples in each .* got .*4.*5.*\. Fix: pass in_dims with None for what holds"
DOOR += [
    *wrong("ihvp_lissa", "in_dims", IN_DIMS, lambda dims: ihvp_lissa(loss)((P, X), V, dims)),
    *wrong("ihvp_at_x_lissa", "in_dims", IN_DIMS, lambda dims: ihvp_at_x_lissa(loss, P, X, in_dims=dims)),
    ("ihvp_lissa batch_size 5", lambda: ihvp_lissa(loss, batch_size=5)((P, X), V), ValueError, FEW),
    ("ihvp_at_x_lissa batch_size 5", lambda: ihvp_at_x_lissa(loss, P, X, batch_size=5), ValueError, FEW),
    ("ihvp_at_x_lissa counts", lambda: ihvp_at_x_lissa(loss, P, {"x": X, "y": torch.ones(5)}), StructureError, COUNTS),
    (
        "ihvp_at_x_lissa counts of equal shapes",
        lambda: ihvp_at_x_lissa(
            loss, P, {"x": torch.ones(4, 5), "y": torch.ones(4, 5)}, in_dims=(None, {"x": 0, "y": 1})
        ),
        StructureError,
        COUNTS,
    ),
    (
        "ihvp_at_x_lissa empty",
        lambda: ihvp_at_x_lissa(loss, P, X[:0]),
        StructureError,
        r"x: expected at least one samp",
    ),
]


def foreign(result: Any) -> Any:
    return lambda func, x, argnums, mode, chunk_size: result  # noqa: ARG005


PRODUCTS = [
    ("none", foreign(None), TypeError, r"product\(func, x\): expected a function, got NoneType. Fix: pass hvp_at_x"),
    ("bare", foreign(lambda v: v["w"]), StructureError, r"product\(func, x\)\(v\): expected the structure .*'b'"),
    (
        "shape",
        foreign(lambda v: {"w": v["w"], "b": v["w"]}),
        StructureError,
        r"product\(func, x\)\(v\)\['b'\]: .*\(2, 3\)",
    ),
    ("number", foreign(lambda v: {**v, "b": 1}), StructureError, r"product\(func, x\)\(v\)\['b'\]: .*got int. Fix"),
]
LATE += [
    *wrong("ihvp_at_x_cg", "product", PRODUCTS, lambda f: ihvp_at_x_cg(loss, P, X, product=f)(V)),
    *wrong("ihvp_explicit", "product", PRODUCTS, lambda f: ihvp_explicit(loss, product=f)((P, X), V)),
]


def dense_of(product: Any = None, like: Any = P, **knobs: Any) -> Any:
    return hessian_matrix(hvp_at_x(loss, (P, X)) if product is None else product, like, **knobs)


LIKE = r"like: expected leaves 'w' float32\[2, 3\], 'b' float32\[3\], got "
LATE += [
    *wrong_knobs("hessian_matrix", dense_of, "chunk_size"),
    (
        "hessian_matrix product",
        lambda: dense_of(3),
        TypeError,
        r"product_at_x: expected a function, got int. Fix: pass a b",
    ),
    (
        "hessian_matrix like few",
        lambda: dense_of(like={"w": P["w"]}),
        StructureError,
        LIKE + r"leaves 'w' float32\[2, 3\]\.",
    ),
    (
        "hessian_matrix like order",
        lambda: dense_of(like=dict(reversed(P.items()))),
        StructureError,
        LIKE + "leaves 'b' ",
    ),
    (
        "hessian_matrix like x",
        lambda: dense_of(like=(P, X)),
        StructureError,
        LIKE + r"leaves '0.w' .* Fix: .*x\[argnums\]",
    ),
    ("hessian_matrix like none", lambda: dense_of(like=None), StructureError, LIKE + "no leaves. Fix"),
    (
        "hessian_matrix like int",
        lambda: dense_of(lambda v: v, torch.ones(3).int()),
        DtypeError,
        r"like: .* got torch.int32",
    ),
    (
        "hessian_matrix one",
        lambda: dense_of(lambda _: V),
        StructureError,
        r"product_at_x\(v\): expected 9 vectors, .* one.",
    ),
    (
        "hessian_matrix less",
        lambda: dense_of(lambda v: {k: a[:2] for k, a in v.items()}),
        StructureError,
        r".*9 .*got 2",
    ),
]

# Spectrum: all take a bound product and a tree, and share a door.
SPECTRUM: dict[str, Any] = {
    "eigsh": lambda f, like, **knobs: spectrum.eigsh(f, like, **{"k": 2, **knobs}),
    "trace": spectrum.trace,
    "diagonal": spectrum.diagonal,
    "suggest_regularization": spectrum.suggest_regularization,
}
KNOBS |= {
    "k": [
        (0, ValueError, r"k: expected an integer >= 1, got 0. Fix: pass how many eigenvalues to return"),
        (1.5, TypeError, r"k: expected an integer >= 1, got 1.5. Fix"),
        (10, ValueError, r"k: expected at most the number of parameters \(9\), got 10. Fix: pass a smaller k; hess"),
    ],
    "which": [
        ("BE", ValueError, r"which: expected 'LA' or 'SA' or 'LM', got 'BE'. Fix"),
        (None, ValueError, r"which: expected 'LA' or 'SA' or 'LM', got None. Fix"),
    ],
    "max_iter eigsh": [
        (0, ValueError, r"max_iter: expected an integer >= 1, got 0. Fix: pass the most products, for example 300"),
        (None, TypeError, r"max_iter: expected an integer >= 1, got None. Fix"),
    ],
    "num_samples": [
        (1, ValueError, r"num_samples: expected an integer >= 2, got 1. Fix: pass how many vectors to multiply C"),
        (2.5, TypeError, r"num_samples: expected an integer >= 2, got 2.5. Fix"),
        (None, TypeError, r"num_samples: expected an integer >= 2, got None. Fix"),
    ],
}
BOUND = [
    (3, TypeError, r"product_at_x: expected a function, got int. Fix: pass a bound product, for example hvp_at_x"),
    (
        "one",
        lambda v: {k: a[0] for k, a in v.items()},
        StructureError,
        r"product_at_x\(v\): expected \d vectors, .*one",
    ),
    ("bare", lambda v: v["w"], StructureError, r"product_at_x\(v\): expected the structure .*'b'"),
    (
        "nan",
        lambda v: {**v, "b": v["b"] * float("nan")},
        ValueError,
        r"product_at_x\(v\): expected finite curvature, got \d+ NaN or inf entries in 'b'. Fix: look for log",
    ),
]
LIKES = [
    ("few", {"w": P["w"]}, StructureError, LIKE + r"leaves 'w' float32\[2, 3\]\."),
    ("order", dict(reversed(P.items())), StructureError, LIKE + "leaves 'b' "),
    ("none", None, StructureError, LIKE + "no leaves. Fix"),
]
EMPTY = r"like: expected at least one number, got a tree without any. Fix: pass the tree"
LATE += [
    case
    for name, f in SPECTRUM.items()
    for case in [
        *wrong(name, "product", BOUND, lambda product, f=f: f(product, P)),
        *wrong(name, "like", LIKES, lambda like, f=f: f(hvp_at_x(loss, (P, X)), like)),
        *wrong(name, "like", [({}, StructureError, EMPTY)], lambda like, f=f: f(lambda v: v, like)),
        *wrong_knobs(
            name,
            lambda f=f, **knobs: f(lambda v: v, P, **knobs),
            "generator",
            *{
                "eigsh": ["k", "which", "tol", "max_iter eigsh"],
                "suggest_regularization": ["tol", "max_iter eigsh"],
            }.get(name, ["num_samples"]),
        ),
        (
            f"{name} transform",
            lambda f=f: torch.func.vmap(lambda _: f(lambda v: v, P))(X),
            RuntimeError,
            r"spectrum: expected a call outside torch.func transforms, got one inside. Fix: call it outside",
        ),
    ]
]
DOOR += [
    *wrong("suggest_scaling", "func", FUNCS, lambda f: spectrum.suggest_scaling(f, P, X)),
    *wrong("suggest_scaling", "x", ARGUMENTS, lambda x: spectrum.suggest_scaling(loss, *x)),
    *wrong("suggest_scaling", "in_dims", IN_DIMS, lambda dims: spectrum.suggest_scaling(loss, P, X, in_dims=dims)),
    *wrong_knobs(
        "suggest_scaling",
        lambda **knobs: spectrum.suggest_scaling(loss, P, X, **knobs),
        *[*COMMON, "product", "collate_fn", "batch_size", "damping", "generator"],
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# solvers

A, B = 2 * torch.eye(3), torch.ones(3)
MATRICES = [
    (
        3,
        TypeError,
        r"matvec: expected a function, got int. Fix: pass a function v -> A v on trees like b, or the matrix",
    ),
    (np.eye(3), TypeError, r"matvec: expected a function, got ndarray. Fix: .*torch.Tensor"),
    (torch.ones(3, 2), StructureError, r"matvec: expected a matrix of shape \(3, 3\), .* got shape \(3, 2\). Fix"),
    (torch.eye(2), StructureError, r"matvec: expected a matrix of shape \(3, 3\), .* got shape \(2, 2\). Fix"),
    (A.double(), DtypeError, r"matvec: expected a matrix of dtype torch.float32, like b, got torch.float64. Fix: conv"),
    (A.int(), DtypeError, r"matvec: expected a matrix of dtype torch.float32, like b, got torch.int32. Fix"),
    ("shape", lambda v: v[:2], StructureError, r"matvec\(v\): expected shape \(3,\), .* got shape \(2,\). Fix"),
    ("more", lambda v: v[None], StructureError, r"matvec\(v\): expected one vector, as v, got k = 1. Fix: return A v"),
    ("tree", lambda v: (v,), StructureError, r"matvec\(v\): expected the structure \*, got \(\*,\). Fix"),
    ("none", lambda _: None, StructureError, r"matvec\(v\): expected the structure \*, got None. Fix"),
    ("dtype", lambda v: v.double(), DtypeError, r"matvec\(v\): expected dtype torch.float32, .*got torch.float64. Fix"),
]
RIGHT = [
    ("numpy", np.ones(3), DtypeError, r"b: expected a real floating point tensor, got ndarray. Fix: convert it"),
    ("list", [1.0, 2.0, 3.0], DtypeError, r"b\['0'\]: expected a real floating point tensor, got float. Fix"),
    ("int", B.int(), DtypeError, r"b: expected a real floating point tensor, got torch.int32. Fix"),
    ("complex", B + 0j, DtypeError, r"b: expected a real floating point tensor, got torch.complex64. Fix"),
    ("rows", torch.ones(4, 3), StructureError, r"matvec: expected a matrix of shape \(12, 12\), .*need batched=True"),
]
BATCHES = [
    (
        "0-d",
        A,
        torch.ones(()),
        StructureError,
        r"b: expected leaves with a leading axis k .* got a 0-d leaf. Fix: give",
    ),
    ("1-d", A, B, StructureError, r"matvec: expected a matrix of shape \(1, 1\), .* got shape \(3, 3\). Fix"),
    (
        "fewer",
        lambda v: v[:1],
        torch.eye(3)[:2],
        StructureError,
        r"matvec\(v\): expected [123] vectors, as v, got k = 1. Fix",
    ),
    (
        "one",
        lambda v: v[0],
        torch.eye(3)[:2],
        StructureError,
        r"matvec\(v\): expected [123] vectors, as v, got one. Fix",
    ),
]
SOLVERS: dict[str, tuple[Any, list[str]]] = {
    "auto": (solvers.auto, ["tol", "max_iter"]),
    "cg": (solvers.cg, [*ITERATIVE[1:], "block"]),
    "minres": (solvers.minres, ITERATIVE[1:]),
    "explicit": (solvers.explicit, []),
    "nystrom": (functools.partial(solvers.nystrom, **POSITIVE), ["rank", "tol", "generator"]),
    "arnoldi": (solvers.arnoldi, ["regularization", "max_iter arnoldi", "top_k", "tol", "generator"]),
    "lissa": (
        solvers.lissa,
        SAMPLING,
    ),
}
for name, (solve, knobs) in SOLVERS.items():
    LATE += [
        *wrong(f"solvers.{name}", "matvec", MATRICES, lambda matvec, f=solve: f(matvec, B)),
        *wrong(f"solvers.{name}", "b", RIGHT, lambda b, f=solve: f(A, b)),
        *[
            (f"solvers.{name} batched {case}", lambda m=m, b=b, f=solve: f(m, b, batched=True), error, text)
            for case, m, b, error, text in BATCHES
        ],
        *wrong_knobs(f"solvers.{name}", lambda f=solve, **given: f(A, B, **given), *knobs),
    ]
G = torch.ones(3, *B.shape)
FACTORS = [
    ("structure", {"w": G}, StructureError, r"factor: expected the structure \*, got .* Fix: build factor like"),
    ("shape", G[..., :1], StructureError, r"factor: expected shape .*, got shape \(3, 1\). Fix"),
    ("one", B, StructureError, r"factor: expected n >= 1 rows, got one vector. Fix: give every leaf a leading axis n"),
    ("none", G[:0], StructureError, r"factor: expected n >= 1 rows, got n = 0. Fix"),
    ("dtype", G.double(), DtypeError, r"factor: expected dtype torch.float32, .* torch.float64. Fix"),
    ("nan", G * float("nan"), ValueError, r"factor: expected finite gradients of all samples, got \d NaN or inf .*Fix"),
]
LATE += [
    *wrong("solvers.woodbury", "factor", FACTORS, lambda factor: solvers.woodbury(factor, B, **POSITIVE)),
    *wrong("solvers.woodbury", "b", RIGHT[:-1], lambda b: solvers.woodbury(G, b, **POSITIVE)),
    *wrong("solvers.woodbury", "lambda", NOT_POSITIVE, lambda lam: solvers.woodbury(G, B, regularization=lam)),
]
LATE += wrong("solvers.nystrom", "lambda", NOT_POSITIVE, lambda lam: solvers.nystrom(A, B, regularization=lam))
SAMPLED = r"matvec: expected a function \(v, index\) -> A_index v, as num_samples is given, got "
LATE += [
    (
        "solvers.lissa num_samples 0",
        lambda: solvers.lissa(A, B, num_samples=0),
        ValueError,
        r"num_samples: .* got 0. Fix",
    ),
    (
        "solvers.lissa matrix",
        lambda: solvers.lissa(A, B, num_samples=3),
        TypeError,
        SAMPLED + "Tensor. Fix: take the ind",
    ),
    (
        "solvers.lissa matvec",
        lambda: solvers.lissa(lambda v: v, B, num_samples=3),
        TypeError,
        SAMPLED + r"one of \(v\)",
    ),
]

CALL_ERRORS = [*EARLY, *DOOR, *LATE]


def cases(table: list[Case]) -> Any:
    return pytest.mark.parametrize(("call", "error", "text"), [pytest.param(*case[1:], id=case[0]) for case in table])


@cases(CALL_ERRORS)
def test_a_wrong_call_says_what_is_wrong(call, error, text):
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert re.match(text, said, flags=re.DOTALL), said
    assert re.fullmatch(r"[^:]+: expected .+, got .+\. Fix: .+\.", said, flags=re.DOTALL), said
    assert type(caught.value) in (error if isinstance(error, tuple) else (error,))


@cases(EARLY)
def test_knobs_are_checked_before_there_is_an_x(call, error, text):
    """These calls give neither x nor v: the form itself refuses."""
    CALLS.clear()
    with pytest.raises(error, match=text):
        call()
    assert not CALLS


@cases(DOOR)
def test_errors_come_before_any_compute(call, error, text):
    CALLS.clear()
    with pytest.raises(error, match=text):
        call()
    assert not CALLS


def test_a_foreign_product_is_matched_by_key():
    swapped = foreign(lambda v: {"b": 4 * v["b"], "w": 2 * v["w"]})
    out = ihvp_at_x_cg(loss, P, X, product=swapped)(V)
    torch.testing.assert_close(out, {"w": V["w"] / 2, "b": V["b"] / 4})
    same = {"a": torch.ones(2), "b": torch.ones(2)}
    swapped = foreign(lambda v: {"b": 4 * v["b"], "a": 2 * v["a"]})
    out = ihvp_explicit(lambda p: p["a"].sum(), product=swapped)((same,), same)
    torch.testing.assert_close(out, {"a": same["a"] / 2, "b": same["b"] / 4})


def test_a_matrix_acts_on_the_flat_vector():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    b = {"b": torch.ones(1, dtype=torch.float64), "a": torch.ones(2)}
    for solve in (solvers.cg, solvers.explicit):
        out = solve(matrix, b).value
        assert out["a"].dtype == torch.float32
        torch.testing.assert_close(out, {"b": b["b"], "a": torch.tensor([0.5, 0.25])})


def test_every_public_call_has_six_wrong_calls():
    """Counted by the first word of a case's name; rows and scores name theirs by argument, and are counted together."""
    names = Counter(re.split(r"[ .]", case[0].removeprefix("solvers."))[0] for case in [*CALL_ERRORS, *TREE_ERRORS])
    here = {
        "hvp",
        "hvp_at_x",
        "ggnvp",
        "ggnvp_at_x",
        "fvp",
        "fvp_at_x",
        "CompositeLoss",
        "hessian_matrix",
        "Layout",
        "ravel",
        "partition",
        "combine",
    }
    here |= set(SPECTRUM) | {"suggest_scaling"}
    here |= {f"{form}{name}" for form in ("ihvp_", "ihvp_at_x_") for name in INVERSES}
    assert {name: names[name] for name in here | {n for n in solvers.__all__ if n.islower()} if names[name] < 6} == {}
    rows = {"RowStore", "grad_rows", "per_sample_grads", "influence", "scores", "self_scores", "top_k"}
    assert len(test_rows.ROW_ERRORS) + len(test_attribution.ROW_ERRORS) >= 6 * len(rows)
    kinds = (dattrifunc.SolveInfo, dattrifunc.SolveResult)
    public = {name: getattr(dattrifunc, name) for name in dattrifunc.__all__}
    calls = {
        name
        for name, value in public.items()
        if callable(value) and value not in kinds and not (isinstance(value, type) and issubclass(value, Exception))
    }
    assert calls <= here | rows, "a new public call needs a table of wrong calls"
