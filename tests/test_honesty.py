"""No solver lies: whatever the problem, a row is solved, or its status says what went wrong.

One property for all solvers, on problems drawn to be nasty: definite, indefinite, singular, Hilbert, repeated
eigenvalues, scales from 1e-25 to 1e25, zero rows, rows with NaN or inf, no rows, more rows than unknowns, float32 and
float64. 1,000 problems in the profile ``ci``, 20,000 in ``thorough``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dattrifunc import solvers
from dattrifunc.solvers import Status

EXAMPLES = 20_000 if settings.default.max_examples >= 400 else 1_000
KINDS = ["definite", "well", "indefinite", "singular", "hilbert", "repeated", "zero"]
TOL = 1e-7


@dataclass
class Problem:
    """A u = b with A symmetric [p, p], b [k, p], in one dtype."""

    kind: str
    a: torch.Tensor
    b: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """Eigenvalues over the largest entry, in float64."""
        a = self.a.double()
        return torch.linalg.eigvalsh(a / a.abs().max().clamp(min=1e-300))


@st.composite
def problems(draw):
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from([torch.float32, torch.float64]))
    p = draw(st.integers(1, 9))
    k = draw(st.sampled_from([0, 1, 2, max(p - 1, 1), p, p + 3]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    basis = torch.linalg.qr(torch.randn(p, p, generator=rng, dtype=torch.float64)).Q
    spread = draw(st.sampled_from([0, 1, 3, 8]))
    values = 10 ** (-spread * torch.rand(p, generator=rng, dtype=torch.float64))
    if kind == "well":
        values = 0.5 + torch.rand(p, generator=rng, dtype=torch.float64)
    if kind in ("indefinite", "singular"):
        values = values * (2 * torch.randint(2, (p,), generator=rng) - 1)
    if kind == "singular":
        values[: draw(st.integers(1, p))] = 0
    if kind == "repeated":
        values = values[torch.randint(2, (p,), generator=rng) % p]
    a = (basis * values) @ basis.T
    if kind == "hilbert":
        i = torch.arange(1, p + 1, dtype=torch.float64)
        a = 1 / (i[:, None] + i - 1)
    if kind == "zero":
        a = torch.zeros(p, p, dtype=torch.float64)
    a = (a + a.T) / 2
    b = torch.randn(k, p, generator=rng, dtype=torch.float64)
    if kind == "singular" and draw(st.booleans()):
        b = b @ a  # in the range
    a, b = (a * 10.0 ** draw(st.sampled_from(SCALES))).to(dtype), b * 10.0 ** draw(st.sampled_from(SCALES))
    for i in range(k):
        fate = draw(st.sampled_from(["", "", "", "zero", "nan", "inf", "axis", "same"]))
        if fate == "zero":
            b[i] = 0
        elif fate == "axis":
            b[i, 1:] = 0
        elif fate == "same":
            b[i] = b[0]
        elif fate:
            b[i, -1] = float(fate)
    return Problem(kind, a, b.to(dtype))


SCALES = [0, 0, 0, -25, -13, 13, 25]


def run(name, problem, b):
    """Solve for rows b by name."""
    name, _, how = name.partition(" ")
    knobs = {"batched": True}
    if how in ("jacobi", "nystrom"):
        knobs["preconditioner"] = how
    if how == "block":
        knobs["block"] = True
    if name == "lissa":
        knobs |= {"scaling": "auto", "recursion_depth": 30, "generator": torch.Generator().manual_seed(0)}
    if name in ("nystrom", "arnoldi"):
        knobs |= {"regularization": shift(problem), "generator": torch.Generator().manual_seed(0)}
        knobs |= {"rank": 4} if name == "nystrom" else {"max_iter": 6, "top_k": 5}
    return getattr(solvers, name)(lambda v: v @ problem.a, b, **knobs)


def shift(problem):
    """Lambda of the solvers that divide by it."""
    return 0.125 * float(problem.a.abs().max()) or 1.0


EXACT = ["explicit", "cg", "cg block", "cg jacobi", "cg nystrom", "minres", "minres jacobi", "auto"]
ROUGH = ["lissa", "nystrom", "arnoldi"]
INDEFINITE = ["explicit", "minres", "auto", "cg block"]  # these solve indefinite systems


@settings(max_examples=EXAMPLES)
@given(problem=problems(), exponent=st.sampled_from([-3, 4]))
def test_a_row_is_solved_or_flagged(problem, exponent):
    for name in (*EXACT, *ROUGH):
        check(name, problem, exponent)


def check(name, problem, exponent):
    b, dtype = problem.b, problem.b.dtype
    if not overflow_free(problem):  # what can be seen beforehand may be refused
        with contextlib.suppress(ValueError):
            run(name, problem, b)
        return
    u, info = run(name, problem, b)
    k, p = b.shape
    assert u.shape == b.shape
    assert u.dtype == dtype
    for field in (info.converged, info.status, info.iterations, info.residual):
        assert field.shape == (k,)
    a = problem.a.double() + (shift(problem) * torch.eye(p).double() if name in ("nystrom", "arnoldi") else 0)
    eps, size = torch.finfo(dtype).eps, float(torch.linalg.matrix_norm(a, 2))
    finite = b.isfinite().all(-1)
    length = torch.linalg.vector_norm(b.double(), dim=-1)
    for i in range(k):
        what = f"{name}, row {i}: {Status(int(info.status[i])).name}, {problem}"
        solved, status = bool(info.converged[i]), Status(int(info.status[i]))
        if not finite[i]:
            assert u[i].isnan().all(), what
            assert status == Status.NONFINITE, what
            assert not solved, what
            continue
        if length[i] == 0:
            assert (u[i] == 0).all(), what
            assert solved, what
            continue
        assert solved or status != Status.CONVERGED, what
        if not u[i].isfinite().all():
            assert status == Status.NONFINITE, what
            continue
        assert status != Status.NONFINITE, what
        true = float(torch.linalg.vector_norm(b[i].double() - a @ u[i].double()) / length[i])
        noise = eps * (1 + size * float(torch.linalg.vector_norm(u[i].double()) / length[i]))
        if solved:
            assert true <= 1.1 * max(TOL, min(10 * noise, eps**0.5)) + noise, (what, true, noise)
        if not info.residual[i].isnan():
            told = float(info.residual[i])
            assert true <= 1.11 * told + 10 * noise, (what, true, noise)
            shared = TOL if name in ("cg block", "auto") else 0.0  # one product for all rows gives a bound
            assert told <= max(1.11 * true, shared) + 10 * noise, (what, true, noise)
        right_status(name, problem, status, what)
    regular = problem.kind == "well" and name in EXACT
    regular |= problem.kind == "indefinite" and name in INDEFINITE and bool(problem.values.abs().min() > 0.05)
    if regular and in_range(problem):
        assert info.converged[finite].all(), (name, info, problem)
    scaled = run(name, problem, b * 2.0**exponent).value
    same = u.isfinite() & scaled.isfinite() & (u.abs() > 1e4 * torch.finfo(dtype).tiny)
    assert torch.equal(scaled[same], (u * 2.0**exponent)[same]), (name, problem)


def overflow_free(problem):
    """Whether products with the unit vectors, and their sums, stay in the range of the dtype."""
    return float(problem.a.double().abs().sum()) < torch.finfo(problem.a.dtype).max


def in_range(problem):
    """Whether the answers are numbers of the dtype, up to a factor of a thousand."""
    b, range_of = problem.b.double(), torch.finfo(problem.a.dtype)
    sizes = b[b.isfinite().all(-1)].norm(dim=-1) / problem.a.double().abs().max()
    sizes = sizes[sizes > 0]
    return bool(((sizes > 1e3 * range_of.tiny) & (sizes < 1e-3 * range_of.max)).all())


def right_status(name, problem, status, what):
    """Assert that the status fits the spectrum."""
    values = problem.values
    if name in ("nystrom", "arnoldi"):
        values = values + 0.125
    eps = torch.finfo(problem.a.dtype).eps
    if status == Status.NEGATIVE_CURVATURE:
        assert (problem.values if name == "nystrom" else values).min() < 0, what
    if status == Status.SINGULAR and "jacobi" not in name and "nystrom" not in name:
        assert values.abs().min() <= 100 * eps**0.5 * values.abs().max(), what
    if status == Status.DIVERGED:
        assert name == "lissa", what
    if name == "explicit":
        assert status in (Status.CONVERGED, Status.SINGULAR, Status.STAGNATED), what


@pytest.mark.parametrize("name", ["lissa", "nystrom", "arnoldi", "cg nystrom", "cg jacobi"])
def test_chance_is_the_generators(name):
    """The same seed gives the same bits, and the global state of chance is not touched."""
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(80, 80, generator=rng)
    problem = Problem("definite", a @ a.T / 80 + torch.eye(80), torch.randn(3, 80, generator=rng))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = run(name, problem, problem.b).value, run(name, problem, problem.b).value
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
