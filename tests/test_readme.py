"""The README: its commands are the project's, and its Python blocks run, in order, in one namespace."""

import re
import sys
import warnings
from pathlib import Path

import pytest

import dattrifunc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

ROOT = Path(dattrifunc.__file__).parents[1]
INSTALL_AND_RUN = 'pip install -e ".[demo]" && python -m dattrifunc'
INSTALL_AND_TEST = 'pip install -e ".[test]" && pytest'

if not (ROOT / "README.md").exists():
    pytest.skip("reads README.md, which lies in a checkout only", allow_module_level=True)
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """Return (line, text) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [(TEXT[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def test_blocks_run_in_order_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {}
    assert len(blocks("python")) >= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        for line, text in blocks("python"):
            exec(compile("\n" * (line - 1) + text, ROOT / "README.md", "exec"), names)
    assert float(names["table"][0, names["j"]]) > 0
    measured = float(names["plain"](names["without"]) - names["plain"](names["best"]))
    assert measured == pytest.approx(float(names["table"][0, names["j"]]) / 200, rel=0.2)


def test_code_comes_early():
    assert TEXT[: TEXT.index("```python")].count("\n") + 1 <= 35


def test_the_two_commands():
    shell = [text.strip() for _, text in blocks("sh")]
    assert shell == [INSTALL_AND_RUN, INSTALL_AND_TEST]


def test_commands_agree_with_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', TEXT):
        assert extra in extras
    needed = {re.split(r"[=<>\[]", name)[0] for name in extras["demo"]}
    assert {"torch", "scikit-learn", "matplotlib", "tqdm"} <= needed
    assert any(name.startswith("pytest") for name in extras["test"])
    pinned = re.search(r"torch==([\d.]+)", " ".join(extras["demo"]))[1]
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))[1]
    assert f"{pinned}." in TEXT[TEXT.index("## Versions") :]
    assert f"Oldest supported torch: {oldest}," in TEXT
    assert (ROOT / "dattrifunc" / "__main__.py").exists()


def test_continuous_integration_runs_the_commands_as_written():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert INSTALL_AND_TEST in script
    assert "python -m dattrifunc --quick" in script


def test_the_status_table_has_every_status():
    rows = re.findall(r"^\| (\d) \|", TEXT, re.MULTILINE)
    assert [int(row) for row in rows] == sorted(int(status) for status in dattrifunc.solvers.Status)


def test_only_names_that_exist():
    for name in re.findall(r"`((?:ihvp|hvp)\w*)[`(]", TEXT):
        if name.endswith("_"):  # the pattern of a family of names
            continue
        assert hasattr(dattrifunc, name), name
