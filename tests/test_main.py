"""The main job: what it writes, what it keeps, and how it stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the main job reads scikit-learn's digits (extra: demo)")

from dattrifunc import RowStore
from dattrifunc import __main__ as job

QUICK = ["--quick", "--queries", "2"]
KEYS = {
    *("loo_pearson", "loo_slope", "n_loo", "p", "n", "m", "model", "solver", "l2", "regularization", "iterations"),
    *("worst_residual", "seconds", "versions", "seed", "rows_reused", "train_grad_norm", "worst_retrain_grad_norm"),
    *("left_out", "smallest_curvature", "test_accuracy", "loo_worst_query_pearson", "threads"),
}


def start(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen:
    """Start Python on a program text, with this checkout on its path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(job.__file__).parents[1]), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=cwd, env=env, **pipes)


def report_in(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    out = tmp_path_factory.mktemp("job") / "made" / "by the job"
    assert job.main([*QUICK, "--out", str(out)]) == 0
    return out


def test_everything_is_written_and_agrees(first):
    report, table = report_in(first), np.load(first / "scores.npy")
    assert report.keys() >= KEYS
    assert table.shape == (report["m"], report["n"]) == (2, 1437)
    assert report["p"] == 650
    assert report["n_loo"] == len(set(report["left_out"])) >= 30
    assert np.isfinite(table).all()
    assert {"train", "rows", "solve", "scores", "retrain"} <= report["seconds"].keys()
    assert report["versions"]["torch"] == torch.__version__.partition("+")[0] or report["versions"]["torch"]
    for name in ("top.png", "loo.png"):
        assert (first / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(RowStore.open(first / "rows")) == report["n"]
    assert sorted(path.name for path in first.iterdir()) == ["loo.png", "report.json", "rows", "scores.npy", "top.png"]


def test_retraining_confirms_the_scores(first):
    report = report_in(first)
    assert report["loo_pearson"] >= 0.99
    assert 0.9 <= report["loo_slope"] <= 1.1
    assert report["train_grad_norm"] <= 1e-10
    assert report["worst_retrain_grad_norm"] <= 1e-10
    assert report["smallest_curvature"] == pytest.approx(1e-2)  # the penalty: softmax itself is flat in some directions


def test_scores_against_dense_algebra(first):
    """Rows from the store, the Hessian by torch.func, the solve by torch.linalg: another route to the same numbers."""
    store = RowStore.open(first / "rows")
    settings = job._parse([*QUICK, "--out", str(first)])
    problem = job._problem(settings)
    # The rows of an optimum add up to zero; score differences between queries come from the queries alone.
    torch.testing.assert_close(store[0 : len(store)].mean(0), torch.zeros(650, dtype=torch.float64), atol=1e-9, rtol=0)
    best, _ = job.train(job.Objective(problem, 0.0), job.Stages())
    params = job.Objective(problem, 0.0).params(best)
    images, digits = problem.train
    logits = images @ params["weight"].T + params["bias"]
    prob = logits.softmax(1)
    errors = prob - torch.nn.functional.one_hot(digits, 10)
    inputs = torch.cat([images, torch.ones(len(images), 1)], 1)
    hessian = torch.einsum("nab,ni,nj->aibj", torch.diag_embed(prob) - prob[:, :, None] * prob[:, None], inputs, inputs)
    hessian = hessian.reshape(650, 650) / len(images) + 1e-2 * torch.eye(650, dtype=torch.float64)
    weights = torch.cat([params["weight"], params["bias"][:, None]], 1)
    rows = (errors[:, :, None] * inputs[:, None] + 1e-2 * weights).flatten(1)
    queries = job._pick_queries(problem, params, 2)
    prob = (queries.images @ params["weight"].T + params["bias"]).softmax(1)
    asked = torch.cat([queries.images, torch.ones(2, 1)], 1)
    gradients = ((prob - torch.nn.functional.one_hot(queries.digits, 10))[:, :, None] * asked[:, None]).flatten(1)
    want = gradients @ torch.linalg.solve(hessian, rows.T)
    np.testing.assert_allclose(np.load(first / "scores.npy"), want.numpy(), rtol=1e-7, atol=1e-9)


def test_rows_are_used_again_until_something_changes(first, capsys):
    before = (first / "rows" / "rows.npy").stat().st_mtime_ns
    assert job.main([*QUICK, "--out", str(first), "--solver", "minres"]) == 0  # the solver is no part of the rows
    assert "reused" in capsys.readouterr().out
    assert report_in(first)["rows_reused"] is True
    assert report_in(first)["solver"] == "minres"
    assert (first / "rows" / "rows.npy").stat().st_mtime_ns == before
    for change in (["--seed", "1"], ["--seed", "1", "--regularization", "0.005"]):
        assert job.main([*QUICK, "--out", str(first), *change]) == 0
        text = capsys.readouterr().out
        assert "written" in text
        assert "reused" not in text
        report = report_in(first)
        assert report["rows_reused"] is False
        assert report["loo_pearson"] >= 0.99
        assert 0.9 <= report["loo_slope"] <= 1.1


def test_mlp(tmp_path, capsys):
    assert job.main([*QUICK, "--out", str(tmp_path), "--model", "mlp"]) == 0
    report = report_in(tmp_path)
    assert report["loo_pearson"] >= 0.8
    assert report["worst_retrain_grad_norm"] <= 1e-10
    assert report["smallest_curvature"] > 0  # a true local minimum
    captured = capsys.readouterr()
    assert "The scores predict what removing a training sample does" in captured.out
    for stage in ("train", "rows", "solve", "retrain"):
        assert stage in captured.err


def test_both_penalties_mean_the_same_retraining():
    """Weight 0 for one sample, 1/n for the others: with the penalty in the loss, the minimiser of the others' mean."""
    problem = job._problem(job._parse(["--seed", "3"]))
    objective = job.Objective(problem, 0.0)
    weights = objective.weights([5])[0]
    vector = torch.randn(650, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keep = torch.arange(1437) != 5
    others = problem.loss(objective.params(vector), problem.train.images[keep], problem.train.digits[keep])
    torch.testing.assert_close(objective(vector, weights) * 1437 / 1436, others)
    outside = job.Objective(problem, 0.5)(vector, weights) - objective(vector, weights)
    torch.testing.assert_close(outside, 0.25 * vector.square().sum())


def test_minimise_reaches_each_rows_own_minimum_with_a_poor_first_guess():
    def rosenbrock(vector, weight):
        return (1 - vector[0]) ** 2 + weight * (vector[1] - vector[0] ** 2) ** 2

    at, norms = job.minimise(
        rosenbrock,
        torch.tensor([-1.2, 1.0], dtype=torch.float64),
        torch.tensor([1.0, 100.0], dtype=torch.float64),
        lambda rows: rows,
        lambda: None,
    )
    assert (norms <= job.TIGHT).all()
    torch.testing.assert_close(at, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--queries", "0"], ["--queries", "an integer from 1 to 360", "'0'"]),
        (["--queries", "361"], ["--queries", "an integer from 1 to 360", "'361'"]),
        (["--queries", "two"], ["--queries", "an integer", "'two'"]),
        (["--regularization", "-1"], ["--regularization", "a finite number >= 0", "'-1'"]),
        (["--regularization", "nan"], ["--regularization", "a finite number >= 0", "'nan'"]),
        (["--l2", "inf"], ["--l2", "a finite number >= 0", "'inf'"]),
        (["--l2", "0"], ["--l2 and --regularization", "at least one > 0"]),
        (["--seed", "-3"], ["--seed", "an integer", "'-3'"]),
        (["--seed", "1.5"], ["--seed", "an integer", "'1.5'"]),
        (["--model", "cnn"], ["--model", "softmax", "mlp", "'cnn'"]),
        (
            ["--solver", "lu"],
            ["--solver", "explicit", "cg", "minres", "lissa", "arnoldi", "nystrom", "woodbury", "auto", "'lu'"],
        ),
        (["--solver", "nystrom"], ["--regularization: expected a number > 0 for --solver nystrom"]),
        (["--solver", "woodbury"], ["--regularization: expected a number > 0 for --solver woodbury"]),
        (["--out", __file__], ["--out", "a folder", "test_main.py"]),
        (["--fast"], ["--fast"]),
    ],
)
def test_a_wrong_argument_is_named(arguments, texts, capsys):
    with pytest.raises(SystemExit) as stop:
        job.main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for text in texts:
        assert text in message


def test_help_says_which_lambda_is_which(capsys):
    with pytest.raises(SystemExit) as stop:
        job.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--l2 A is part of every sample's loss", "--regularization L is the lambda", "weight 1/n becomes 0"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "module"), [("scikit-learn", "sklearn"), ("matplotlib", "matplotlib"), ("tqdm", "tqdm")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(name, module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert job.main([*QUICK, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.err == f'python -m dattrifunc needs {name}: pip install "dattrifunc[demo]"\n'
    assert not captured.out
    assert not (tmp_path / "out").exists()


def test_rows_of_somebody_else_are_not_touched(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "thesis.txt").write_text("mine")
    assert job.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "rows" / "thesis.txt").read_text() == "mine"


def test_interrupted_rows_leave_nothing_that_is_trusted(tmp_path, monkeypatch, capsys):
    """A store cut off in the middle, by Ctrl-C and by a kill that lets nobody tidy up."""

    def cut_off(*_x, out, **_knobs):
        out.append(torch.zeros(7, 650))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "grad_rows", cut_off)
        assert job.main([*QUICK, "--out", str(tmp_path)]) == 130
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("interrupted")
        assert not (tmp_path / "rows").exists()
        patch.setattr(job, "_remove_store", lambda _path: None)
        assert job.main([*QUICK, "--out", str(tmp_path)]) == 130
        assert (tmp_path / "rows").exists()
    assert job.main([*QUICK, "--out", str(tmp_path)]) == 0
    assert report_in(tmp_path)["rows_reused"] is False
    assert len(RowStore.open(tmp_path / "rows")) == 1437


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT as a terminal does")
def test_ctrl_c_from_a_terminal(tmp_path):
    program = "import sys, dattrifunc.__main__ as job; print('ready', flush=True); sys.exit(job.main())"
    with start(program, *QUICK, "--out", str(tmp_path), "--model", "mlp") as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in errors
    assert not (tmp_path / "rows").exists()


def test_as_a_module_without_the_extra(tmp_path):
    program = (
        "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = ['dattrifunc', '--quick'];"
        "runpy.run_module('dattrifunc', run_name='__main__')"
    )
    with start(program, cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert 'pip install "dattrifunc[demo]"' in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())
