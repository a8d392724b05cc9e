"""Curvature products and CG beside hand-written closures: ``python -m benchmarks.products [--json PATH]``.

Every case is one thing to compute, done by the library, by a floor written out by hand on ``torch.func``, and by the
peers that are installed. Answers are compared before anything is timed. Contenders take turns in one process on one
thread; a ratio is taken within each round, and the table gives its median and quartiles. Times are in units of one
gradient of the same loss, so that they mean the same on every machine. The library's CG spends one product more than
the floor's, on the true residual.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad, vjp, vmap

from dattrifunc import Layout, hvp_at_x, ihvp_at_x_cg, ravel

LAMBDA, STEPS = 0.01, 20
Contender = Callable[[], Any]


# ---------------------------------------------------------------------------------------------------------------------
# the problems


@dataclass(frozen=True)
class Problem:
    """A loss of digits near a minimum, in float32."""

    name: str
    loss: Callable[..., torch.Tensor]
    params: dict[str, torch.Tensor]
    data: tuple[torch.Tensor, torch.Tensor]

    @property
    def p(self) -> int:
        """Number of parameters."""
        return sum(leaf.numel() for leaf in self.params.values())


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(labels)


def problem(name: str, *widths: int) -> Problem:
    """Return softmax regression or an MLP of these widths, after some training."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for i, o in pairwise(widths):
        layers += [torch.nn.Tanh(), torch.nn.Linear(i, o)]
    model = torch.nn.Sequential(*layers[1:])
    data = digits()

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = torch.stack([leaf.square().sum() for leaf in params.values()]).sum()
        return torch.nn.functional.cross_entropy(functional_call(model, params, (x,)), y) + 0.005 * penalty

    params = {name: leaf.detach().clone().requires_grad_() for name, leaf in model.named_parameters()}
    optimizer = torch.optim.LBFGS(params.values(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(params, *data)
        value.backward()
        return value

    optimizer.step(closure)
    return Problem(name, loss, {name: leaf.detach() for name, leaf in params.items()}, data)


def flattened(problem: Problem) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return the loss as a function of the flat parameters alone, and these."""
    flat, unravel = ravel(problem.params)
    return lambda vector: problem.loss(unravel(vector), *problem.data), flat


def vectors(problem: Problem, k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(k, *leaf.shape, generator=g) for name, leaf in problem.params.items()}


# ---------------------------------------------------------------------------------------------------------------------
# the floor, written by hand


def hand_product(problem: Problem) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return k vectors -> k Hessian products: one vjp of the gradient, under vmap."""
    _, pull = vjp(lambda params: grad(problem.loss)(params, *problem.data), problem.params)
    return vmap(lambda v: pull(v)[0])


def hand_cg(problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return flat right-hand sides [k, p] -> solutions after a fixed number of CG steps."""
    loss, flat = flattened(problem)
    _, pull = vjp(grad(loss), flat)
    product = vmap(lambda v: pull(v)[0] + LAMBDA * v)

    def solve(b: torch.Tensor) -> torch.Tensor:
        u, r, d = torch.zeros_like(b), b, b
        rr = (r * r).sum(1, keepdim=True)
        for _ in range(STEPS):
            ad = product(d)
            alpha = rr / (d * ad).sum(1, keepdim=True)
            u, r = u + alpha * d, r - alpha * ad
            new = (r * r).sum(1, keepdim=True)
            d, rr = r + new / rr * d, new
        return u

    return solve


# ---------------------------------------------------------------------------------------------------------------------
# the cases


def product_case(problem: Problem, k: int) -> dict[str, Contender]:
    """Hessian products with k vectors, built beforehand."""
    v = vectors(problem, k)
    library, hand = hvp_at_x(problem.loss, (problem.params, *problem.data)), hand_product(problem)
    contenders = {"dattrifunc": lambda: library(v), "by hand": lambda: hand(v)}
    if peer := _peer("dattri.func.hessian"):
        (loss, flat), layout = flattened(problem), Layout.of(problem.params)
        rows, other = layout.ravel_rows(v), vmap(peer.hvp_at_x(loss, (flat,)))
        contenders["dattri"] = lambda: layout.unravel_rows(other(rows))
    return contenders


def build_case(problem: Problem) -> dict[str, Contender]:
    """Building the product: all work that depends on x alone."""
    x = (problem.params, *problem.data)
    v = vectors(problem, 1)
    return {"dattrifunc": lambda: hvp_at_x(problem.loss, x)(v), "by hand": lambda: hand_product(problem)(v)}


def cg_case(problem: Problem, k: int) -> dict[str, Contender]:
    """A fixed number of CG steps on k right-hand sides, the product built beforehand."""
    layout = Layout.of(problem.params)
    v = vectors(problem, k)
    rows = layout.ravel_rows(v)
    knobs = {"regularization": LAMBDA, "max_iter": STEPS, "tol": 0, "has_aux": True}
    library, hand = ihvp_at_x_cg(problem.loss, problem.params, *problem.data, **knobs), hand_cg(problem)
    iterations = library(v)[1].iterations
    if not (iterations == STEPS).all():
        raise SystemExit(f"{problem.name}: cg stopped after {iterations.tolist()} steps, expected {STEPS}")
    contenders = {"dattrifunc": lambda: library(v)[0], "by hand": lambda: layout.unravel_rows(hand(rows))}
    if peer := _peer("dattri.func.hessian"):
        loss, flat = flattened(problem)
        other = peer.ihvp_at_x_cg(loss, flat, max_iter=STEPS, tol=0, regularization=LAMBDA)
        contenders["dattri"] = lambda: layout.unravel_rows(other(rows))
    return contenders


def _peer(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# comparing and timing


def compare(case: str, contenders: dict[str, Contender], tol: float) -> dict[str, float]:
    """Return each contender's relative distance from the floor; stop where one is not the same answer."""
    answers = {name: ravel(call())[0] for name, call in contenders.items()}
    floor = answers["by hand"]
    errors = {name: float((answer - floor).norm() / floor.norm()) for name, answer in answers.items()}
    for name, error in errors.items():
        if not error <= tol:
            raise SystemExit(f"{case}: {name} differs from the floor by {error:.1e}, more than {tol:g}")
    return errors


def measure(contenders: dict[str, Contender], rounds: int, least: float) -> dict[str, list[float]]:
    """Return seconds per call of each contender, one entry per round; contenders take turns."""
    calls = {}
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        calls[name] = max(1, round(least / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders) if turn % 2 else list(contenders)[::-1]
        for name in order:
            start = time.perf_counter()
            for _ in range(calls[name]):
                contenders[name]()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds


def quartiles(values: list[float]) -> list[float]:
    """Return the quartiles."""
    return [round(q, 4) for q in statistics.quantiles(values, n=4, method="inclusive")]


def run(rounds: int, least: float) -> list[dict[str, Any]]:
    """Return one record per case and contender."""
    records = []
    for one in (problem("softmax", 64, 10), problem("mlp", 64, 128, 64, 10)):
        cases = {"build and one hvp": (build_case(one), 1e-4)}
        cases |= {f"hvp k={k}": (product_case(one, k), 1e-4) for k in (1, 32)}
        cases |= {f"cg {STEPS} steps k={k}": (cg_case(one, k), 1e-2) for k in (1, 16)}
        for case, (contenders, tol) in cases.items():
            errors = compare(f"{one.name}, {case}", contenders, tol)
            unit = {"gradient": lambda one=one: grad(one.loss)(one.params, *one.data)}
            seconds = measure(contenders | unit, rounds, least)
            for name in contenders:
                ratios = [a / b for a, b in zip(seconds[name], seconds["by hand"], strict=True)]
                units = [a / b for a, b in zip(seconds[name], seconds["gradient"], strict=True)]
                record = {"problem": one.name, "p": one.p, "case": case, "contender": name}
                record |= {"ratio": quartiles(ratios), "gradients": quartiles(units), "error": errors[name]}
                records.append(record | {"seconds": statistics.median(seconds[name])})
                print(line(record), flush=True)
    return records


def line(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    low, middle, high = record["ratio"]
    return (
        f"{record['problem']:<8} {record['p']:>6}  {record['case']:<18} {record['contender']:<11} "
        f"{middle:>6.3f} [{low:.3f}, {high:.3f}] {record['gradients'][1]:>10.2f}   {record['error']:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--rounds", type=int, default=25, help="rounds per case (%(default)s)")
    parser.add_argument("--least", type=float, default=0.02, help="seconds per turn, at least (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    absent = [name for name, module in {"dattri": "dattri.func.hessian"}.items() if not _peer(module)]
    print(f"left out, not installed: {', '.join(absent) or 'none'}")
    print("problem       p  case               contender    ratio to by hand     gradients   error")
    records = run(options.rounds, options.least)
    if options.json:
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "optree")}
        about = {"python": platform.python_version(), **versions, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"about": about, "absent": absent, "records": records}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
