"""What the spectrum of a curvature looks like, and what follows for a solver: on any bound product.

``product_at_x`` is a bound product ``f(v)`` that takes k vectors at once, ``hvp_at_x(loss, x)`` for one, C its
symmetric matrix (its own lambda included), and ``like`` the tree x[argnums], which fixes the shapes of a vector.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import implicit
from .curvature import unwatched
from .errors import ConvergenceWarning, StructureError, message
from .ihvp import lissa_scaling
from .products import hvp_at_x, on_rows
from .solvers.dense import require_finite
from .solvers.krylov import orthonormal, outside
from .solvers.lanczos import Eigenpairs, eigenpairs, seed_of
from .solvers.precondition import random_signs
from .solvers.rows import normalise
from .solvers.sketch import directions
from .tree import Point, Tree, check_choice, check_count, check_generator, check_number

__all__ = [
    "Estimate",
    "Regularization",
    "diagonal",
    "eigsh",
    "suggest_regularization",
    "suggest_scaling",
    "trace",
]

Product = Callable[[torch.Tensor], torch.Tensor]


class Estimate(NamedTuple):
    """A random estimate and its standard error; 0 where the estimate is exact."""

    estimate: Any
    standard_error: Any


class Regularization(NamedTuple):
    """A lambda, and the eigenvalue of C that asks for it."""

    regularization: float
    eigenvalue: float


def _door(product_at_x: Any, like: Tree, generator: Any) -> tuple[Point, Product, torch.Tensor]:
    """Check what all functions share; return the point, the product of rows, and a row."""
    check_generator(generator)
    _refuse_transforms()
    point, product = on_rows(product_at_x, like)
    if not point.layout.size:
        fix = "pass the tree that the product differentiates, x[argnums]"
        raise StructureError(message("like", "at least one number", "a tree without any", fix))

    def finite(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), unwatched():
            out = product(rows)
        require_finite(out, point.layout, "product_at_x(v)", "finite curvature")
        return out

    row = torch.empty(point.layout.size, dtype=point.work_dtype, device=point.leaves[0].device)
    return point, finite, row


def _refuse_transforms() -> None:
    if implicit.transforms_active():
        fix = "call it outside, on plain tensors"
        raise RuntimeError(message("spectrum", "a call outside torch.func transforms", "one inside", fix))


# ---------------------------------------------------------------------------------------------------------------------
# eigenvalues


def eigsh(
    product_at_x: Callable[[Tree], Tree],
    like: Tree,
    k: int,
    which: str = "LA",
    *,
    tol: float = 1e-7,
    max_iter: int = 300,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, Tree]:
    """Return k eigenvalues at an end of the spectrum of C, and their eigenvectors.

    By block Lanczos with full re-orthogonalisation and thick restarts. An eigenvalue of any multiplicity comes as often
    as it is one of the k. Memory 512 vectors, or 2^27 numbers where that is less, but at least 8 (k + 2) vectors.

    Args:
        product_at_x: a bound product that takes k vectors at once.
        like: the tree x[argnums], for its structure.
        k: how many, 1 to p.
        which: "LA" (largest), "SA" (smallest, which negative curvature is) or "LM" (largest in size).
        tol: ||C x - value x|| <= tol ||C|| for each pair, or what rounding allows: max(10, sqrt(p)) eps.
        max_iter: most products, each with k + 2 vectors.
        generator: source of the start; same seed, bit-equal answer. None = always the same one.

    Returns:
        (values, vectors): [k] in the working dtype, best first as ``which`` says, in units of loss / parameter**2; and
        a tree like ``like`` with a leading axis k on every leaf, orthonormal over all leaves together.

    Raises:
        StructureError: ``like`` and the product do not belong together.
        ValueError: k > p, which is none of the three, or C is not finite (the leaves are named).

    Warns:
        ConvergenceWarning: some pair missed ``tol`` within ``max_iter``; says by how much.

    Source: Wu and Simon (2000), doi:10.1137/S0895479898334605. Differs: see ``solvers.lanczos.eigenpairs``.

    >>> from dattrifunc import hvp_at_x
    >>> w = torch.zeros(3)
    >>> product = hvp_at_x(lambda w: (torch.tensor([1.0, -2.0, 3.0]) * w**2).sum(), (w,))       # diag(2, -4, 6)
    >>> values, vectors = eigsh(product, w, 2, "SA")
    >>> values.round(decimals=3), vectors.abs().round(decimals=3)
    (tensor([-4.,  2.]), tensor([[0., 1., 0.],
            [1., 0., 0.]]))
    """
    point, product, row = _door(product_at_x, like, generator)
    found = _ends(product, row, point, k, which, tol, max_iter, generator)
    return found.values.to(row.dtype), point.tree(found.vectors, single=False)


def _ends(
    product: Product,
    row: torch.Tensor,
    point: Point,
    k: int,
    which: str,
    tol: float,
    max_iter: int,
    generator: torch.Generator | None,
) -> Eigenpairs:
    """Return eigenpairs; warn of those that were not found to ``tol``."""
    k = check_count(k, "k", fix="pass how many eigenvalues to return")
    if k > len(row):
        fix = "pass a smaller k; hessian_matrix and torch.linalg.eigh give all of them"
        raise ValueError(message("k", f"at most the number of parameters ({len(row)})", f"{k}", fix))
    check_choice(which, "which", ("LA", "SA", "LM"))
    tol = check_number(tol, "tol", fix="pass a relative tolerance, for example tol=1e-7")
    max_iter = check_count(max_iter, "max_iter", fix="pass the most products, for example 300")
    seed = seed_of(generator)
    found = eigenpairs(product, row, k, which, tol=tol, max_iter=max_iter, eps=point.eps, seed=seed)
    if found.missed:
        worst = float(found.residuals.max()) / (found.largest or 1.0)
        warnings.warn(
            f"eigsh: {found.missed} of {k} eigenpairs not found; worst relative residual {worst:.2e} (tol {tol:.0e}). "
            "The values are inside the spectrum, and others may be beyond them: raise max_iter, or loosen tol.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return found


def suggest_regularization(
    product_at_x: Callable[[Tree], Tree],
    like: Tree,
    *,
    tol: float = 1e-8,
    max_iter: int = 300,
    generator: torch.Generator | None = None,
) -> Regularization:
    """Return the smallest lambda >= 0 for which C + lambda I is safely positive definite, and what decides it.

    Safely: its smallest eigenvalue is at least sqrt(eps) ||C||, so that a solve in the working dtype keeps half of its
    digits. A lambda that ``product_at_x`` has already counts as part of C.

    Args:
        product_at_x: a bound product that takes k vectors at once.
        like: the tree x[argnums], for its structure.
        tol: of the eigenvalue, see ``eigsh``; its error bound is part of lambda.
        max_iter: most products, each with 3 vectors.
        generator: source of the start; same seed, bit-equal answer. None = always the same one.

    Returns:
        ``(regularization, eigenvalue)``, floats in units of loss / parameter**2: lambda, and the smallest eigenvalue of
        C. lambda = 0 where C is safely positive definite as it is.

    Raises:
        StructureError: ``like`` and the product do not belong together.
        ValueError: C is not finite (the leaves are named).

    Warns:
        ConvergenceWarning: the eigenvalue was not found to ``tol``; there may be a smaller one.

    >>> from dattrifunc import hvp_at_x
    >>> w = torch.zeros(2)
    >>> product = hvp_at_x(lambda w: w[0] ** 2 - 0.5 * w[1] ** 2, (w,))             # diag(2, -1)
    >>> lam, eigenvalue = suggest_regularization(product, w)
    >>> round(lam, 2), round(eigenvalue, 2)
    (1.0, -1.0)
    """
    point, product, row = _door(product_at_x, like, generator)
    found = _ends(product, row, point, 1, "SA", tol, max_iter, generator)
    least, error = float(found.values[0]), float(found.residuals[0])
    floor = point.eps**0.5 * (max(found.largest, abs(least)) or 1.0)
    return Regularization(max(0.0, floor + error - least), least)


def suggest_scaling(
    func: Callable[..., Any],
    *x: Any,
    in_dims: Any = None,
    argnums: int | tuple[int, ...] = 0,
    batch_size: int = 1,
    damping: float = 0.0,
    collate_fn: Callable[..., Any] | None = None,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    generator: torch.Generator | None = None,
    product: Callable[..., Any] = hvp_at_x,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
) -> float:
    """Return a scale at which LiSSA with these arguments contracts in every step: what its ``scaling="auto"`` takes.

    1.1 / (1 - damping) times the largest |eigenvalue| of C_batch + lambda I over 32 batches, by 20 steps of the power
    method on all of them side by side.

    Args:
        func: loss of a batch, as for ``ihvp_at_x_lissa``; so are all other arguments.
        x: arguments of ``func``, holding all samples.
        in_dims: which axis of each argument holds samples.
        argnums: which argument to differentiate, or a tuple for several at once.
        batch_size: samples per step.
        damping: in [0, 1).
        collate_fn: applied to the tuple of (sampled) arguments before ``func``.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        regularization: lambda >= 0, in units of loss / parameter**2.
        generator: source of the batches and of the start; same seed, the same scale. None = always the same ones.
        product: ``hvp_at_x``, ``ggnvp_at_x``, ``fvp_at_x``, or any function with the signature of the first.
        keep_batch_dim: handed on to a product over samples.
        chunk_size: most vectors pushed through autodiff at once.

    Returns:
        The scale, in units of loss / parameter**2; 0 where no batch has any curvature.

    Raises:
        StructureError: the arguments disagree about the number of samples.
        ValueError: batch_size is larger than the number of samples, or curvature is not finite.

    >>> loss = lambda w, a: (a * w**2).mean()                       # Hessians 2 and 6 of single samples
    >>> round(suggest_scaling(loss, torch.tensor(1.0), torch.tensor([1.0, 3.0])), 3)
    6.6
    """
    _refuse_transforms()
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    knobs = {name: value for name, value in locals().items() if name not in ("func", "x", "in_dims")}
    return lissa_scaling(func, x, in_dims, **knobs)


# ---------------------------------------------------------------------------------------------------------------------
# trace and diagonal


def _samples(
    product: Product, row: torch.Tensor, num_samples: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the diagonal of C - P C P [p], exactly, and unbiased estimates of that of P C P [n, p]; float64.

    P leaves out a third of ``num_samples`` directions, those in which C is large: C is applied to a random matrix, to
    an orthonormal basis of the result, and to the rest of random signs. n = 0 where ``num_samples`` vectors are all p.
    """
    count = check_count(num_samples, "num_samples", low=2, fix="pass how many vectors to multiply C with")
    p = len(row)
    if count >= p:
        eye = torch.eye(p, dtype=row.dtype, device=row.device)
        return product(eye).diagonal().double(), row.new_zeros(0, p, dtype=torch.float64)
    rank = (count - 2) // 3
    rng = torch.Generator().manual_seed(0) if generator is None else generator  # one, so that all draws differ
    basis, exact = row.new_zeros(0, p), row.new_zeros(p, dtype=torch.float64)
    if rank:
        image = normalise(product(directions(rank, p, rng).T.to(row))).unit.unsqueeze(0)
        basis = orthonormal(image, torch.ones_like(image[..., 0], dtype=torch.bool)).squeeze(0)
        image = product(basis)
        core = image @ basis.T
        exact = 2 * (basis * image).sum(0).double() - ((core + core.T) / 2 @ basis * basis).sum(0).double()
    signs = random_signs(count - 2 * rank, p, rng).to(row)
    left = _outside(product(_outside(signs, basis)), basis)
    return exact, (signs * left).double()


def _outside(rows: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return outside(rows.unsqueeze(0), basis.unsqueeze(0))[1].squeeze(0)


def _estimate(exact: torch.Tensor, samples: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact + the mean of samples [n, ...], and its standard error, in the dtype of ``like``."""
    if not len(samples):
        return exact.to(like.dtype), torch.zeros_like(exact).to(like.dtype)
    return (exact + samples.mean(0)).to(like.dtype), (samples.std(0) / len(samples) ** 0.5).to(like.dtype)


def trace(
    product_at_x: Callable[[Tree], Tree],
    like: Tree,
    *,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return an unbiased estimate of the trace of C, and its standard error.

    Hutch++: exact on a third of ``num_samples`` directions in which C is large, random signs on what is left. The error
    falls with 1 / num_samples where eigenvalues decay, and never more slowly than with 1 / sqrt(num_samples). Memory
    2 num_samples vectors.

    Args:
        product_at_x: a bound product that takes k vectors at once.
        like: the tree x[argnums], for its structure.
        num_samples: how many vectors C is multiplied with, at least 2; from p on, the trace is exact.
        generator: source of the vectors; same seed, bit-equal answer. None = always the same ones.

    Returns:
        ``(estimate, standard_error)``, 0-d in the working dtype, in units of loss / parameter**2. The standard error is
        that of the mean over the random signs, as they were met; it is 0 where the trace is exact.

    Raises:
        StructureError: ``like`` and the product do not belong together.
        ValueError: num_samples is not >= 2, or C is not finite (the leaves are named).

    Source: Meyer, Musco, Musco and Woodruff (2021), Hutch++, arXiv:2010.09649.

    >>> from dattrifunc import hvp_at_x
    >>> trace(hvp_at_x(lambda w: (w**3).sum(), (torch.ones(4),)), torch.ones(4))
    Estimate(estimate=tensor(24.), standard_error=tensor(0.))
    """
    _, product, row = _door(product_at_x, like, generator)
    exact, samples = _samples(product, row, num_samples, generator)
    return Estimate(*_estimate(exact.sum(), samples.sum(-1), row))


def diagonal(
    product_at_x: Callable[[Tree], Tree],
    like: Tree,
    *,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return an unbiased estimate of the diagonal of C, and the standard error of each entry.

    As ``trace``, entry by entry: exact on a third of ``num_samples`` directions in which C is large, random signs on
    what is left.

    Args:
        product_at_x: a bound product that takes k vectors at once.
        like: the tree x[argnums], for its structure.
        num_samples: how many vectors C is multiplied with, at least 2; from p on, the diagonal is exact.
        generator: source of the vectors; same seed, bit-equal answer. None = always the same ones.

    Returns:
        ``(estimate, standard_error)``, two trees like ``like``, in units of loss / parameter**2; errors of 0 where the
        diagonal is exact.

    Raises:
        StructureError: ``like`` and the product do not belong together.
        ValueError: num_samples is not >= 2, or C is not finite (the leaves are named).

    Source: Baston and Nakatsukasa (2022), Stochastic diagonal estimation, arXiv:2201.10684; Bekas, Kokiopoulou and Saad
    (2007), doi:10.1016/j.apnum.2007.01.003.

    >>> from dattrifunc import hvp_at_x
    >>> diagonal(hvp_at_x(lambda w: (w**3).sum(), (torch.ones(2),)), torch.ones(2)).estimate
    tensor([6., 6.])
    """
    point, product, row = _door(product_at_x, like, generator)
    found = _estimate(*_samples(product, row, num_samples, generator), row)
    return Estimate(*(point.tree(part.unsqueeze(0), single=True) for part in found))
