"""What a solve costs in products: ``python -m benchmarks.solvers --products [--json PATH]``.

The unit is a column product, one vector times the curvature, however many vectors go through autodiff at once. All
products count: set-up, iterations, and those spent on the true residual. Every answer's residual is recomputed before
it is told. The first table is the Gauss-Newton matrix of an MLP on digits; the second asks on a grid of problems how
far ``ihvp_auto`` is from the best solver that could have been chosen by hand; the third shows one indefinite Hessian.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

import dattrifunc
from benchmarks.products import digits, problem
from dattrifunc import CompositeLoss, Layout, SolveInfo, ggnvp_at_x, hvp_at_x
from dattrifunc.curvature import Curvature
from dattrifunc.solvers import Status

TOL = 1e-5
TARGETS = {1e-1: 1 / 4, 1e-2: 1 / 5, 1e-3: 1 / 8}  # of the products of CG row by row


class Counter:
    """Column products made so far, and the most that are allowed."""

    def __init__(self) -> None:
        self.products, self.most = 0, float("inf")

    def add(self, count: int) -> None:
        """Count products; raise StopIteration beyond the most allowed."""
        self.products += count
        if self.products > self.most:
            raise OverflowError


COUNTER = Counter()


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Count the column products of every curvature."""
    unshifted = Curvature.unshifted

    def counted(self: Curvature, tensors: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        product = unshifted(self, tensors)

        def call(rows: torch.Tensor) -> torch.Tensor:
            COUNTER.add(len(rows))
            return product(rows)

        return call

    Curvature.unshifted = counted  # type: ignore[method-assign]
    try:
        yield COUNTER
    finally:
        Curvature.unshifted = unshifted  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------------
# the problems


@dataclass(frozen=True)
class Task:
    """(C + lambda I) u = v for k vectors v."""

    name: str
    loss: Any
    x: tuple[Any, ...]
    product: Callable[..., Any]
    k: int
    lam: float

    @property
    def p(self) -> int:
        """Number of parameters."""
        return Layout.of(self.x[0]).size

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return k normal vectors."""
        g = torch.Generator().manual_seed(1)
        return {n: torch.randn(self.k, *leaf.shape, generator=g, dtype=leaf.dtype) for n, leaf in self.x[0].items()}

    def residual(self, u: dict[str, torch.Tensor]) -> float:
        """Return the largest relative residual, recomputed."""
        layout, v = Layout.of(self.x[0]), self.vectors()
        again = self.product(self.loss, self.x, regularization=self.lam)(u)
        left, right = layout.ravel_rows(v) - layout.ravel_rows(again), layout.ravel_rows(v)
        return float((left.norm(dim=1) / right.norm(dim=1)).max())


def composite(*widths: int) -> CompositeLoss:
    """Return an MLP of these widths with cross-entropy."""
    layers: list[torch.nn.Module] = []
    for i, o in pairwise(widths):
        layers += [torch.nn.Tanh(), torch.nn.Linear(i, o)]
    model = torch.nn.Sequential(*layers[1:])
    return CompositeLoss(lambda params, x: functional_call(model, params, (x,)), torch.nn.functional.cross_entropy)


def gauss_newton(
    lam: float, k: int, widths: tuple[int, ...] = (64, 128, 64, 10), dtype: torch.dtype = torch.float32
) -> Task:
    """Return the Gauss-Newton matrix of a trained MLP on digits."""
    found, (x, y) = problem("mlp", *widths), digits()
    params, x = {n: leaf.to(dtype) for n, leaf in found.params.items()}, x.to(dtype)
    return Task(f"ggn {'-'.join(map(str, widths))}", composite(*widths), (params, x, y), ggnvp_at_x, k, lam)


def grid() -> list[Task]:
    """Return problems of 50 to 20,000 parameters, 1 to 256 right-hand sides, lambda from 1e-4 to 1."""
    x, y = (digits()[0].double(), digits()[1])
    small = torch.nn.functional.avg_pool2d(x.reshape(-1, 1, 8, 8), 4).flatten(1)
    tasks = []
    for features, points in (
        (small, [(1, 1.0), (1, 1e-4), (8, 1e-2), (256, 1e-4)]),
        (x, [(1, 1.0), (1, 1e-4), (8, 1e-3), (256, 1e-2), (256, 1.0)]),
    ):
        params = {"w": torch.zeros(features.shape[1], 10).double(), "b": torch.zeros(10).double()}

        def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(x @ params["w"] + params["b"], y)

        at = (params, features, y)
        tasks += [Task("softmax", loss, at, hvp_at_x, k, lam) for k, lam in points]
    for widths, points in (
        ((64, 32, 10), [(1, 1e-2), (8, 1e-4), (256, 1e-1)]),
        ((64, 128, 64, 10), [(1, 1e-3), (8, 1e-1), (256, 1.0)]),
        ((64, 149, 64, 10), [(1, 1.0), (8, 1e-2)]),
    ):
        tasks += [gauss_newton(lam, k, widths, torch.float64) for k, lam in points]
    return tasks


# ---------------------------------------------------------------------------------------------------------------------
# the solvers


def solving(task: Task, name: str, **knobs: Any) -> Callable[[], Any]:
    """Return what solves the task with this solver and these knobs, built anew by each call."""
    bind = getattr(dattrifunc, f"ihvp_at_x_{name}")
    given = {"regularization": task.lam, "product": task.product, "has_aux": True, **knobs}
    return lambda: bind(task.loss, *task.x, **given)(task.vectors())


def choices(task: Task) -> dict[str, Callable[[], Any]]:
    """Return what a user could choose by hand."""
    form = partial(solving, task)
    return {
        "cg": form("cg", tol=TOL),
        "minres": form("minres", tol=TOL),
        "cg, jacobi": form("cg", tol=TOL, preconditioner="jacobi"),
        "cg, nystrom": form("cg", tol=TOL, preconditioner="nystrom"),
        "block cg": form("cg", tol=TOL, block=True),
        "explicit": form("explicit", chunk_size=256),
        "auto": form("auto", tol=TOL),
    }


def plain(task: Task) -> Callable[[], Any]:
    """Return conjugate gradients as in a textbook, until each recursive residual meets the tolerance."""

    def solve() -> Any:
        layout, product = Layout.of(task.x[0]), task.product(task.loss, task.x, regularization=task.lam)
        b = layout.ravel_rows(task.vectors())
        u, r, p, rr = torch.zeros_like(b), b.clone(), b.clone(), b.square().sum(-1, keepdim=True)
        end, steps = TOL**2 * rr, 0
        while bool((rr > end).any()):
            ap = layout.ravel_rows(product(layout.unravel_rows(p)))
            alpha = torch.where(rr > end, rr / (p * ap).sum(-1, keepdim=True), 0.0)
            u, r, steps = u + alpha * p, r - alpha * ap, steps + 1
            after = r.square().sum(-1, keepdim=True)
            p, rr = r + after / rr * p, after
        none = torch.zeros(len(b))
        info = SolveInfo(none == 0, none.long(), none.long() + steps, none, method="plain", reason="")
        return layout.unravel_rows(u), info

    return solve


def measure(task: Task, solve: Callable[[], Any], most: float = float("inf")) -> dict[str, Any] | None:
    """Return products, seconds, residual and what the solver says; None beyond the most products allowed."""
    COUNTER.products, COUNTER.most = 0, most
    start = time.perf_counter()
    try:
        u, info = solve()
    except OverflowError:
        return None
    finally:
        COUNTER.most = float("inf")
    record = {"products": COUNTER.products, "seconds": time.perf_counter() - start}
    solved, k = int(info.converged.sum()), len(info.converged)
    return record | {
        "residual": task.residual(u),
        "solved": f"{solved} of {k}",
        "statuses": " ".join(sorted({Status(int(code)).name for code in info.status.reshape(-1)})),
        "method": info.method,
        "reason": info.reason,
    }


def columns() -> list[dict[str, Any]]:
    """Print and return the products of each solver on the Gauss-Newton matrix, 32 right-hand sides."""
    print(
        f"Gauss-Newton matrix of an MLP 64-128-64-10 on digits, 32 right-hand sides, relative residual {TOL:g}, float32"
    )
    print("lambda  solver        products  of cg   target  seconds  residual  solved")
    records = []
    for lam, target in TARGETS.items():
        task, floor = gauss_newton(lam, 32), 0
        for name, solve in {"textbook cg": plain(task), **choices(task)}.items():
            if name == "explicit":
                continue
            found = measure(task, solve)
            assert found is not None
            floor = floor or found["products"]
            ratio = found["products"] / floor
            aim = f"{target:.3f}" if name in ("block cg", "auto") else ""
            print(
                f"{lam:<7g} {name:<12} {found['products']:>9} {ratio:>6.3f}   {aim:<6} {found['seconds']:>8.2f}  "
                f"{found['residual']:.1e}   {found['solved']}",
                flush=True,
            )
            records.append({"table": "columns", "lambda": lam, "solver": name, "ratio": ratio, **found})
    return records


def approximations() -> list[dict[str, Any]]:
    """Print and return products and residuals of the solvers that approximate, on the same matrix."""
    print("\napproximations on the same matrix, 32 right-hand sides")
    print("lambda  solver         set-up products  residual of each answer: median, largest")
    records = []
    for lam in TARGETS:
        task = gauss_newton(lam, 32)
        common: dict[str, Any] = {"regularization": lam, "product": ggnvp_at_x, "has_aux": True}
        for name, knobs in {
            "nystrom": {"rank": 100},
            "arnoldi": {"max_iter": 100},
            "lissa": {"batch_size": 64, "recursion_depth": 300, "scaling": "auto", "in_dims": (None, 0, 0)},
        }.items():
            generator = torch.Generator().manual_seed(0)
            bind = getattr(dattrifunc, f"ihvp_at_x_{name}")
            COUNTER.products = 0
            u, info = bind(task.loss, *task.x, generator=generator, **common, **knobs)(task.vectors())
            told = [float(info.residual.median()), float(info.residual.max())]
            count = str(COUNTER.products) if name != "lissa" else "300 of 64 samples each"
            print(f"{lam:<7g} {name:<12} {count:>24}  {told[0]:.1e} {told[1]:.1e}", flush=True)
            records.append({"table": "approximations", "lambda": lam, "solver": name, "residual": told})
            assert abs(task.residual(u) / told[1] - 1) < 0.1
    return records


def choosing() -> list[dict[str, Any]]:
    """Print and return, for each problem of the grid, how far ``ihvp_auto`` is from the best choice by hand."""
    print(f"\nihvp_auto beside the best choice by hand, in products; relative residual {TOL:g}; > where stopped early")
    names = list(choices(gauss_newton(1.0, 1)))[:-1]
    head = "".join(f"{name:>12}" for name in names)
    print(f"problem                  p    k  lambda  {head}        auto  of best  picked")
    records = []
    for task in grid():
        solve = choices(task)
        auto = measure(task, solve.pop("auto"))
        assert auto is not None
        counts: dict[str, int | None] = {}
        for name, run in solve.items():
            if name == "explicit" and task.p > 3000:
                counts[name] = task.p  # known without running it
                continue
            found = measure(task, run, most=2.0 * auto["products"] + 100)
            good = found is not None and found["residual"] <= 1.01 * TOL
            counts[name] = found["products"] if found and good else None
        best = min([count for count in counts.values() if count is not None], default=None)
        ratio = float("nan") if best is None else auto["products"] / best
        row = "".join(f"{'>' if counts[name] is None else counts[name]:>12}" for name in names)
        print(
            f"{task.name:<20} {task.p:>5} {task.k:>4}  {task.lam:<7g} {row} {auto['products']:>11}   {ratio:>6.2f}  "
            f"{auto['method']}, residual {auto['residual']:.0e}",
            flush=True,
        )
        record = {"table": "choosing", "problem": task.name, "p": task.p, "k": task.k, "lambda": task.lam}
        records.append({**record, "products": counts, "ratio": ratio, "auto": auto})
    worst = max(record["ratio"] for record in records)
    print(f"worst ratio {worst:.2f} on {len(records)} problems")
    return records


def indefinite() -> list[dict[str, Any]]:
    """Print and return what each solver says of the indefinite Hessian of an MLP small enough for a dense answer."""
    print("\nindefinite Hessian: MLP 64-32-10 on digits after a little training, 8 vectors, lambda 1e-2, float64")
    widths = (64, 32, 10)
    params = early(*widths)
    x, y = digits()
    loss = composite(*widths)
    task = Task("hessian", loss, (params, x.double(), y), hvp_at_x, 8, 1e-2)
    form = partial(solving, task)
    solvers = choices(task) | {
        "minres": form("minres", tol=TOL, max_iter=10 * task.p),
        "nystrom": form("nystrom", rank=100, generator=torch.Generator().manual_seed(0)),
        "arnoldi": form("arnoldi", max_iter=100, generator=torch.Generator().manual_seed(0)),
        "lissa": form(
            "lissa",
            batch_size=64,
            recursion_depth=300,
            scaling="auto",
            in_dims=(None, 0, 0),
            generator=torch.Generator().manual_seed(0),
        ),
    }
    records = []
    for name, solve in solvers.items():
        found = measure(task, solve)
        assert found is not None
        records.append({"table": "indefinite", "solver": name, **found})
        print(
            f"{name:<11} {found['products']:>6} products, {found['seconds']:.1f} s, residual {found['residual']:.1e}, "
            f"{found['solved']} solved, {found['statuses']}: {found['reason']}",
            flush=True,
        )
    return records


def early(*widths: int) -> dict[str, torch.Tensor]:
    """Return parameters after a few steps of training, where the Hessian is indefinite."""
    torch.manual_seed(0)
    loss, (x, y) = composite(*widths), digits()
    shapes = {}
    for i, (a, b) in enumerate(pairwise(widths)):
        shapes |= {f"{2 * i}.weight": (b, a), f"{2 * i}.bias": (b,)}
    params = {n: (torch.randn(s).double() / s[-1] ** 0.5).requires_grad_() for n, s in shapes.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss(params, x.double(), y).backward()
        optimizer.step()
    return {n: leaf.detach() for n, leaf in params.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__.partition("\n")[0])
    parser.add_argument("--products", action="store_true", required=True, help="count column products")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with counting():
        records = [*columns(), *approximations(), *choosing(), *indefinite()]
    if options.json:
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "optree")}
        about = {"python": platform.python_version(), **versions, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"about": about, "records": records}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
