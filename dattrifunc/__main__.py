"""The main job: influence scores on scikit-learn's digits, checked against the truth by retraining.

``python -m dattrifunc`` trains a classifier to a tight gradient norm, writes the gradient rows of its training samples
to a store and scores every training sample for a few test queries. Then it removes chosen training samples one at a
time, trains again, and compares the measured change of each query's loss with the predicted one, score / n.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import cross_entropy, linear

from dattrifunc import (
    Layout,
    RowStore,
    SolveInfo,
    grad_rows,
    hessian_matrix,
    hvp_at_x,
    ihvp_at_x_arnoldi,
    ihvp_at_x_auto,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
    ihvp_at_x_lissa,
    ihvp_at_x_minres,
    ihvp_at_x_nystrom,
    ihvp_at_x_woodbury,
    per_sample_grads,
    ravel,
    scores,
)
from dattrifunc.rows import fingerprint

Params = dict[str, Tensor]
Solve = Callable[[Tensor], Tensor]

HELD_OUT = 360  # test samples, from which the queries come
HIDDEN = 12
PENALTY = {"softmax": 1e-2, "mlp": 2e-2}  # strong enough for a positive definite Hessian at the optimum
TIGHT = 1e-10  # gradient norm at which a model counts as trained
RANK = 400  # of the Nystrom and Arnoldi approximations
NEEDS = {"scikit-learn": "sklearn", "matplotlib": "matplotlib", "tqdm": "tqdm"}


# ---------------------------------------------------------------------------------------------------------------------
# the command line


DESCRIPTION = """Score every training digit for a few test digits by influence functions, then train again without some
of them and compare. Writes scores.npy, report.json, top.png, loo.png and the training rows."""

EPILOG = """Two penalties. --l2 A is part of every sample's loss, loss + A/2 |params|^2: it is in the gradient rows and
in the Hessian H. --regularization L is the lambda of the inverse product, (H + L I)^-1: a penalty L/2 |params|^2 on the
objective as a whole, in no row. Training and retraining include both. Removing sample j means that its weight 1/n
becomes 0 and the others keep theirs."""


class Settings(NamedTuple):
    """What the user asked for."""

    out: Path
    model: str
    solver: str
    l2: float
    regularization: float
    queries: int
    left_out: int
    seed: int


def _number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return an argparse type: a finite number of this kind from low to high."""
    noun = "an integer" if kind is int else "a finite number"
    expected = f"{noun} >= {low:g}" if high == math.inf else f"{noun} from {low:g} to {high:g}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def _folder(text: str) -> Path:
    """Return a folder's path: an argparse type."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text!r}")
    return path


def _parse(arguments: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m dattrifunc", description=DESCRIPTION, epilog=EPILOG)
    option = parser.add_argument
    option("--out", type=_folder, default=Path("dattrifunc-demo"), metavar="DIR", help="output folder (%(default)s)")
    option(
        "--model",
        choices=["softmax", "mlp"],
        default="softmax",
        help="softmax regression (%(default)s) or one tanh layer",
    )
    option(
        "--solver",
        choices=["explicit", "cg", "minres", "lissa", "arnoldi", "nystrom", "woodbury", "auto"],
        default="explicit",
        help="inverse product (%(default)s)",
    )
    option("--l2", type=_number(float, 0), metavar="A", help="penalty in every sample's loss (softmax 0.01, mlp 0.02)")
    option(
        "--regularization", type=_number(float, 0), default=0.0, metavar="L", help="lambda of the solver (%(default)s)"
    )
    option(
        "--queries", type=_number(int, 1, HELD_OUT), metavar="M", help="test samples to explain (10; 4 with --quick)"
    )
    option(
        "--seed", type=_number(int, 0, 2**63 - 1), default=0, metavar="S", help="split, start and choices (%(default)s)"
    )
    option("--quick", action="store_true", help="retrain without 30 samples instead of 60, for fewer queries")
    given = parser.parse_args(arguments)
    l2 = PENALTY[given.model] if given.l2 is None else given.l2
    if l2 + given.regularization == 0:
        parser.error("--l2 and --regularization: expected at least one > 0, or the optimum does not exist")
    if given.solver in ("nystrom", "woodbury") and not given.regularization:
        parser.error(f"--regularization: expected a number > 0 for --solver {given.solver}, which divides by it")
    queries = given.queries or (4 if given.quick else 10)
    left_out = 30 if given.quick else 60
    return Settings(given.out, given.model, given.solver, l2, given.regularization, queries, left_out, given.seed)


# ---------------------------------------------------------------------------------------------------------------------
# the clock and the progress bars


@dataclass
class Stages:
    """Seconds per stage, and a progress bar for the stage that is running."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[Any]:
        """Time a stage; yields its bar, on which to call ``update(steps)``. A stage that never does is one step."""
        from tqdm import tqdm

        start = time.perf_counter()
        with tqdm(total=total, desc=f"{name:<8}", unit=" steps", file=sys.stderr) as bar:
            yield bar
            bar.update(not bar.n)
        self.seconds[name] = round(time.perf_counter() - start, 3)


# ---------------------------------------------------------------------------------------------------------------------
# data, models and losses


class Samples(NamedTuple):
    """Images [n, 64] with pixels from 0 to 1, and their digits [n]."""

    images: Tensor
    digits: Tensor


@dataclass(frozen=True)
class Problem:
    """Two sets of samples, a network with its starting point, and the losses of one sample or of a batch."""

    train: Samples
    test: Samples
    params: Params
    network: Callable[[Params, Tensor], Tensor]
    loss: Callable[[Params, Tensor, Tensor], Tensor]
    test_loss: Callable[[Params, Tensor, Tensor], Tensor]


def _softmax(params: Params, images: Tensor) -> Tensor:
    return linear(images, params["weight"], params["bias"])


def _mlp(params: Params, images: Tensor) -> Tensor:
    hidden = torch.tanh(linear(images, params["weight1"], params["bias1"]))
    return linear(hidden, params["weight2"], params["bias2"])


def _start(model: str, generator: torch.Generator) -> Params:
    """Return initial parameters in float64: zeros, or Gaussian weights of size 1 / sqrt(inputs)."""

    def normal(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) / math.sqrt(inputs)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    if model == "softmax":
        return {"weight": zeros(10, 64), "bias": zeros(10)}
    return {"weight1": normal(HIDDEN, 64), "bias1": zeros(HIDDEN), "weight2": normal(10, HIDDEN), "bias2": zeros(10)}


def _problem(settings: Settings) -> Problem:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(labels), generator=generator)
    images, digits = torch.as_tensor(pixels / 16)[order], torch.as_tensor(labels, dtype=torch.int64)[order]
    network, l2 = {"softmax": _softmax, "mlp": _mlp}[settings.model], settings.l2

    def test_loss(params: Params, images: Tensor, digits: Tensor) -> Tensor:
        return cross_entropy(network(params, images), digits)

    def loss(params: Params, images: Tensor, digits: Tensor) -> Tensor:
        return test_loss(params, images, digits) + l2 / 2 * _square(params)

    return Problem(
        train=Samples(images[HELD_OUT:], digits[HELD_OUT:]),
        test=Samples(images[:HELD_OUT], digits[:HELD_OUT]),
        params=_start(settings.model, generator),
        network=network,
        loss=loss,
        test_loss=test_loss,
    )


def _square(params: Params) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in params.values()]).sum()


def _each(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the losses [n] of the samples by themselves."""
    return vmap(loss, in_dims=(None, 0, 0))


# ---------------------------------------------------------------------------------------------------------------------
# training, and training again


@dataclass(frozen=True)
class Objective:
    """What is minimised, as a function of the flat parameters [p] and the weights [n] of the training samples."""

    problem: Problem
    regularization: float

    def __call__(self, vector: Tensor, weights: Tensor) -> Tensor:
        """Return sum_i weights_i loss_i + regularization / 2 |params|^2."""
        losses = _each(self.problem.loss)(self.params(vector), *self.problem.train)
        return weights @ losses + self.regularization / 2 * vector.square().sum()

    def params(self, vector: Tensor) -> Params:
        """Return the tree of a flat vector."""
        tree: Params = ravel(self.problem.params)[1](vector)
        return tree

    def weights(self, left_out: Sequence[int] | None = None) -> Tensor:
        """Return one row of weights 1/n per sample left out, with weight 0 on it; one full row for None."""
        n = len(self.problem.train.digits)
        rows = torch.full((len(left_out or [0]), n), 1 / n, dtype=torch.float64)
        if left_out is not None:
            rows[range(len(left_out)), list(left_out)] = 0
        return rows

    def inverse_hessian(self, vector: Tensor) -> Solve:
        """Return rows [k, p] -> rows times the inverse Hessian at ``vector``, all weights 1/n."""
        return ihvp_at_x_explicit(self, vector, self.weights()[0], chunk_size=128)


def minimise(
    objective: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    weights: Tensor,
    inverse: Solve,
    tick: Callable[[], None],
    tol: float = TIGHT,
    steps: int = 100,
) -> tuple[Tensor, Tensor]:
    """Minimise objective(vector, w) for all rows w of ``weights`` at once: L-BFGS with a good first guess.

    Args:
        objective: scalar function of a vector [p] and weights [n].
        start: one vector [p], or one per row [k, p].
        weights: rows [k, n].
        inverse: rows [k, p] -> rows, about the inverse Hessian; it sets the speed, not the answer.
        tick: called once per step.
        tol: gradient norm at which a row is left alone.
        steps: most steps.

    Returns:
        The minimisers [k, p] and their gradient norms [k].
    """
    value_of = vmap(grad_and_value(objective))
    at = start.expand(len(weights), -1)
    gradient, value = value_of(at, weights)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        todo = gradient.norm(dim=1) > tol
        if not todo.any():
            break
        direction = -_two_loops(gradient, pairs, inverse) * todo[:, None]
        slope = (direction * gradient).sum(1)
        size = torch.ones_like(value)
        for _ in range(40):
            trial = at + size[:, None] * direction
            new_gradient, new_value = value_of(trial, weights)
            rounding = 1e-14 * value.abs()
            worse = ~(new_value <= value + 1e-4 * size * slope + rounding)  # written so that NaN counts as worse
            if not worse.any():
                break
            size = torch.where(worse, size / 2, size)
        pairs.append((trial - at, new_gradient - gradient))
        at, gradient, value = trial, new_gradient, new_value
        tick()
    return at, gradient.norm(dim=1)


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]], inverse: Solve) -> Tensor:
    """Return the L-BFGS inverse Hessian times ``gradient``, row by row; pairs of curvature <= 0 do not count."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1, keepdim=True)

    history = [(s, y, torch.where(dot(s, y) > 0, 1 / dot(s, y), 0.0)) for s, y in pairs]
    taken = []
    for s, y, rho in reversed(history):
        taken.append(rho * dot(s, gradient))
        gradient = gradient - taken[-1] * y
    result = inverse(gradient)
    for (s, y, rho), alpha in zip(history, reversed(taken), strict=True):
        result = result + (alpha - rho * dot(y, result)) * s
    return result


def train(objective: Objective, stages: Stages) -> tuple[Tensor, float]:
    """Train on all samples: L-BFGS from the starting point, then a few steps with the exact Hessian."""
    weights = objective.weights()
    vector = ravel(objective.problem.params)[0].clone().requires_grad_()
    rough = torch.optim.LBFGS(
        [vector],
        max_iter=3000,
        history_size=50,
        tolerance_grad=1e-5,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    with stages("train") as bar:

        def closure() -> Tensor:
            bar.update()
            vector.grad, value = grad_and_value(objective)(vector.detach(), weights[0])
            return value  # type: ignore[no-any-return]

        rough.step(closure)  # type: ignore[no-untyped-call]
        near = vector.detach()
        best, norm = minimise(objective, near, weights, objective.inverse_hessian(near), bar.update, tol=TIGHT / 10)
    return best[0], float(norm)


def retrain(objective: Objective, best: Tensor, left_out: Sequence[int], stages: Stages) -> tuple[Tensor, float]:
    """Train without each sample by itself, from the optimum on all of them; also the worst gradient norm."""
    with stages("retrain") as bar:
        inverse = objective.inverse_hessian(best)
        models, norms = minimise(objective, best, objective.weights(left_out), inverse, bar.update)
    return models, float(norms.max())


# ---------------------------------------------------------------------------------------------------------------------
# the comparison with the truth


def choose(table: Tensor, count: int, seed: int) -> list[int]:
    """Return ``count`` training samples: a third with the highest summed score, a third the lowest, a third between."""
    order = table.sum(0).argsort().tolist()
    third = count // 3
    middle = order[third:-third]
    picks = torch.randperm(len(middle), generator=torch.Generator().manual_seed(seed))[: count - 2 * third]
    return order[:third] + [middle[i] for i in sorted(picks.tolist())] + order[-third:]


class Agreement(NamedTuple):
    """How the measured changes [M, k] compare with the predicted ones."""

    predicted: Tensor
    measured: Tensor
    pearson: float
    slope: float
    worst_query_pearson: float


def compare(predicted: Tensor, measured: Tensor) -> Agreement:
    """Correlate over all pairs, and query by query; the slope is the least-squares one of measured on predicted."""
    x, y = predicted.flatten(), measured.flatten()
    slope = torch.cov(torch.stack([x, y]))[0, 1] / x.var()
    return Agreement(predicted, measured, _pearson(x, y), float(slope), min(map(_pearson, predicted, measured)))


def _pearson(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


# ---------------------------------------------------------------------------------------------------------------------
# what is written and printed


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Open a temporary file that takes the place of ``path`` once it is complete."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Open a figure that is written to ``path`` at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    yield figure
    with _replacing(path) as file:
        figure.savefig(file, format="png")


def draw_top(figure: Any, train: Samples, queries: Samples, guesses: Tensor, table: Tensor, each: int = 4) -> None:
    """Draw each query with the training images that help it most and harm it most."""
    rows = figure.subplots(len(guesses), 2 * each + 1, squeeze=False)
    n = table.shape[1]

    def image(axes: Any, pixels: Tensor, text: str, colour: str) -> None:
        axes.imshow(pixels.reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(text, fontsize=8, color=colour)
        for side in axes.spines.values():
            side.set(color=colour, linewidth=1.5)

    for row, pixels, digit, guess, score in zip(rows, *queries, guesses, table, strict=False):
        image(row[0], pixels, f"query: {digit}\nmodel says {guess}", "black")
        order = score.argsort(descending=True)
        for axes, j in zip(row[1:], [*order[:each].tolist(), *order.flip(0)[:each].tolist()], strict=True):
            helps = bool(score[j] > 0)
            text = f"{train.digits[j]}  ({score[j] / n:+.1e})"
            image(axes, train.images[j], text, "tab:green" if helps else "tab:red")
    figure.suptitle(
        f"Each query, its {each} most helpful training digits (green), its {each} most harmful ones (red)\n"
        "in brackets: predicted change of the query's loss when the digit is removed",
        fontsize=10,
    )


def draw_agreement(figure: Any, agreement: Agreement, title: str) -> None:
    """Draw measured against predicted changes, with the diagonal."""
    x, y = agreement.predicted.numpy(), agreement.measured.numpy()
    third = x.shape[1] // 3
    groups = {"most harmful": slice(0, third), "middling": slice(third, -third), "most helpful": slice(-third, None)}
    everything, centre = figure.subplots(1, 2)
    for axes in (everything, centre):
        for (name, part), colour in zip(groups.items(), ["tab:red", "tab:gray", "tab:green"], strict=True):
            axes.scatter(x[:, part], y[:, part], s=14, alpha=0.6, color=colour, label=f"{name} samples", linewidths=0)
        axes.axline((0, 0), slope=1, color="black", linewidth=1, label="measured = predicted", zorder=0)
        axes.ticklabel_format(style="sci", scilimits=(-2, 2))
        axes.set_xlabel("predicted change of a query's loss (score / n)")
    everything.set(ylabel="measured change, by retraining", title="all pairs")
    everything.legend(fontsize=8, frameon=False)
    centre.set(xlim=np.quantile(x, [0.05, 0.95]), ylim=np.quantile(y, [0.05, 0.95]), title="the middle nine tenths")
    figure.suptitle(f"{title}: Pearson {agreement.pearson:.4f}, slope {agreement.slope:.3f}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("dattrifunc", "torch", "optree", "numpy", "scikit-learn", "matplotlib"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _words(report: dict[str, Any]) -> str:
    """Say what was found."""
    pearson, slope = report["loo_pearson"], report["loo_slope"]
    good = pearson >= 0.95 and 0.8 <= slope <= 1.25
    fair = pearson >= 0.8
    verdict = (
        "The scores predict" if good else "The scores rank, but do not size," if fair else "The scores do NOT predict"
    )
    text = (
        f"{verdict} what removing a training sample does: over {report['n_loo']} retrainings x {report['m']} queries "
        f"the measured changes of loss correlate with score / n at {pearson:.4f}, slope {slope:.3f} "
        "(least squares, measured on predicted)."
    )
    if report["worst_retrain_grad_norm"] > TIGHT or report["train_grad_norm"] > TIGHT:
        text += " Some model was not trained tightly, so the measured changes are themselves uncertain."
    if report["smallest_curvature"] <= 0:
        text += " The Hessian is not positive definite at the optimum; more --l2 makes it so."
    if report["solver"] == "woodbury":
        text += " Woodbury puts the empirical Fisher in the place of the Hessian."
    if report["solver"] in ("lissa", "arnoldi", "nystrom"):
        text += f" {report['solver']} is an approximation: its residual says how close it came."
    elif report["unsolved_queries"]:
        text += f" {report['unsolved_queries']} queries were not solved to tolerance: {report['solve_message']}."
    return text


def _summary(report: dict[str, Any], out: Path) -> str:
    """Return the closing table, and its meaning in words."""
    seconds = "  ".join(f"{name} {value:.1f}" for name, value in report["seconds"].items())
    rows = {
        "model": f"{report['model']}, {report['p']} parameters, {report['n']} training samples, "
        f"test accuracy {report['test_accuracy']:.3f}",
        "optimum": f"gradient norm {report['train_grad_norm']:.1e}, "
        f"smallest curvature {report['smallest_curvature']:.1e}",
        "rows": "reused: parameters, loss and data are the stored ones" if report["rows_reused"] else "written",
        "solver": f"{report['solver']}, lambda {report['regularization']:g}, {report['iterations']} iterations, "
        f"worst residual {report['worst_residual']:.1e}",
        "retraining": f"{report['n_loo']} times, worst gradient norm {report['worst_retrain_grad_norm']:.1e}",
        "agreement": f"pearson {report['loo_pearson']:.4f} (worst query {report['loo_worst_query_pearson']:.4f}), "
        f"slope {report['loo_slope']:.3f}",
        "seconds": seconds,
        "written to": str(out),
    }
    table = "\n".join(f"{name:<11} {value}" for name, value in rows.items())
    return f"\n{table}\n\n{textwrap.fill(_words(report), 100)}"


# ---------------------------------------------------------------------------------------------------------------------
# the job


def _pick_queries(problem: Problem, params: Params, count: int) -> Samples:
    """Return ``count`` test samples, evenly spaced from the smallest test loss to the largest."""
    order = _each(problem.test_loss)(params, *problem.test).argsort()
    chosen = order[torch.linspace(0, len(order) - 1, count + 1).round().long()[1:]]
    return Samples(problem.test.images[chosen], problem.test.digits[chosen])


def _inverse(settings: Settings, problem: Problem, params: Params, tick: Callable[[], None]) -> Callable[[Any], Any]:
    """Return the inverse product that the user chose, bound to the mean loss at ``params``."""
    x, regularization = (problem.loss, params, *problem.train), settings.regularization
    if settings.solver == "explicit":
        return ihvp_at_x_explicit(*x, regularization=regularization, chunk_size=128, has_aux=True)
    if settings.solver == "auto":
        return ihvp_at_x_auto(*x, regularization=regularization, has_aux=True)
    if settings.solver in ("cg", "minres"):
        iterative = {"cg": ihvp_at_x_cg, "minres": ihvp_at_x_minres}[settings.solver]
        return iterative(*x, regularization=regularization, has_aux=True, callback=lambda *_: tick())
    if settings.solver == "woodbury":
        return ihvp_at_x_woodbury(*x, in_dims=(None, 0, 0), regularization=regularization, chunk_size=128, has_aux=True)
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.solver == "nystrom":
        return ihvp_at_x_nystrom(
            *x, rank=RANK, regularization=regularization, chunk_size=128, generator=generator, has_aux=True
        )
    if settings.solver == "arnoldi":
        return ihvp_at_x_arnoldi(
            *x, max_iter=RANK, top_k=RANK, regularization=regularization, generator=generator, has_aux=True
        )
    return ihvp_at_x_lissa(
        *x,
        regularization=regularization,
        batch_size=256,
        recursion_depth=2000,
        scaling="auto",
        generator=generator,
        has_aux=True,
    )


def training_rows(path: Path, problem: Problem, params: Params, stages: Stages) -> tuple[RowStore, bool]:
    """Return the store of the training samples' gradient rows, and whether it was there already.

    A store is used again if it is complete and made from the same loss, parameters and data; any other is written anew.
    """
    n = len(problem.train.digits)
    mark = fingerprint(problem.loss, params, problem.train)
    with stages("rows", n) as bar:
        with contextlib.suppress(OSError, ValueError):
            store = RowStore.open(path)
            if store.complete and store.attrs.get("fingerprint") == mark and len(store) == n:
                bar.update(n)
                return store, True
        _remove_store(path)
        try:
            with RowStore.create(path, Layout.of(params), attrs={"fingerprint": mark}) as store:
                grad_rows(
                    problem.loss,
                    params,
                    *problem.train,
                    in_dims=(None, 0, 0),
                    chunk_size=128,
                    out=store,
                    progress=lambda done, _: bar.update(done - bar.n),
                )
        except BaseException:
            _remove_store(path)
            raise
    return RowStore.open(path), False


def _remove_store(path: Path) -> None:
    """Remove a store, whole or not; a folder that holds anything else is the user's."""
    foreign = [item.name for item in path.glob("*") if item.suffix not in {".npy", ".json", ".part", ".tmp"}]
    if foreign:
        raise OSError(f"{path} is in the way: {foreign[0]} in it is no part of a store; choose another folder")
    if path.exists():
        shutil.rmtree(path)


def attribute(
    settings: Settings, problem: Problem, params: Params, queries: Samples, store: RowStore, stages: Stages
) -> tuple[Tensor, SolveInfo]:
    """Return scores [M, n] = g_query^T (H + lambda I)^-1 g_train, and what became of the M solves."""
    gradients = per_sample_grads(problem.test_loss, params, *queries, in_dims=(None, 0, 0))
    with stages("solve") as bar:
        solved, info = _inverse(settings, problem, params, bar.update)(gradients)
    with stages("scores", len(store)) as bar:
        table = scores(solved, store, block_size=512, progress=lambda done, _: bar.update(done - bar.n))
    return table, info


def run(settings: Settings) -> dict[str, Any]:
    """Do the whole job, write its files and return the report."""
    settings.out.mkdir(parents=True, exist_ok=True)
    stages, problem = Stages(), _problem(settings)
    objective = Objective(problem, settings.regularization)

    best, train_norm = train(objective, stages)
    params = objective.params(best)
    queries = _pick_queries(problem, params, settings.queries)
    store, reused = training_rows(settings.out / "rows", problem, params, stages)
    table, info = attribute(settings, problem, params, queries, store, stages)

    left_out = choose(table, settings.left_out, settings.seed)
    models, retrain_norm = retrain(objective, best, left_out, stages)
    losses = torch.stack(
        [_each(problem.test_loss)(objective.params(model), *queries) for model in (best, *models)], dim=1
    )
    n = len(problem.train.digits)
    agreement = compare(predicted=table[:, left_out] / n, measured=losses[:, 1:] - losses[:, :1])

    with stages("check"):
        hessian = hessian_matrix(hvp_at_x(objective, (best, objective.weights()[0])), best, chunk_size=128)
        lowest = float(torch.linalg.eigvalsh(hessian)[0])
    guesses = problem.network(params, problem.test.images).argmax(1)
    report = {
        "loo_pearson": agreement.pearson,
        "loo_slope": agreement.slope,
        "loo_worst_query_pearson": agreement.worst_query_pearson,
        "n_loo": len(left_out),
        "p": best.numel(),
        "n": n,
        "m": len(table),
        "model": settings.model,
        "solver": settings.solver,
        "l2": settings.l2,
        "regularization": settings.regularization,
        "iterations": int(info.iterations.max()),
        "worst_residual": float(info.residual.max()),
        "unsolved_queries": int((info.status != 0).sum()),
        "solve_message": info.messages()[int(info.status.argmax())],
        "rows_reused": reused,
        "train_grad_norm": train_norm,
        "worst_retrain_grad_norm": retrain_norm,
        "smallest_curvature": lowest,
        "test_accuracy": float((guesses == problem.test.digits).double().mean()),
        "seed": settings.seed,
        "left_out": left_out,
        "versions": _versions(),
        "threads": torch.get_num_threads(),
    }
    with stages("write"):
        with _replacing(settings.out / "scores.npy") as file:
            np.save(file, table.numpy())
        shown = Samples(*(part[:12] for part in queries))
        guesses = problem.network(params, shown.images).argmax(1)
        with _picture(settings.out / "top.png", 9.5, 1.2 * len(guesses) + 0.8) as figure:
            draw_top(figure, problem.train, shown, guesses, table)
        with _picture(settings.out / "loo.png", 9.5, 4.8) as figure:
            draw_agreement(
                figure, agreement, f"{settings.model}, {len(left_out)} samples left out, {len(table)} queries"
            )
    report["seconds"] = stages.seconds
    with _replacing(settings.out / "report.json") as file:
        file.write(json.dumps(report, indent=2).encode())
    return report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors are small, so that a second one only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _missing() -> str:
    """Return the names of the packages that the job needs and cannot import."""
    missing = []
    for name, module in NEEDS.items():
        try:
            import_module(module)
        except ImportError:
            missing.append(name)
    return ", ".join(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    settings = _parse(arguments)
    try:
        if missing := _missing():
            print(f'python -m dattrifunc needs {missing}: pip install "dattrifunc[demo]"', file=sys.stderr)
            return 1
        with _one_thread():
            report = run(settings)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing unfinished is kept; the same command starts again", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"--out {settings.out}: {error}", file=sys.stderr)
        return 1
    print(_summary(report, settings.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
