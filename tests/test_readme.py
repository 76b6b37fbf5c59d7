"""Runs the README's marked Python, and holds what it says about commands and files."""

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RUNNABLE = re.findall(r"<!-- run -->\n```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_documents_name_targets_and_files_that_exist():
    documents = README + (ROOT / "BUILD.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", documents)) - targets == set()
    files = re.findall(r"`((?:tools|tests|experiments|models|kernels|\.ci)/[\w./]+)`", documents)
    assert [name for name in files if not (ROOT / name).exists()] == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", documents)
    assert [name for name in links if not (ROOT / name).exists()] == []


@pytest.mark.skipif(not RUNNABLE, reason="no block of README.md is marked to be run")
def test_readme_python_runs(tmp_path, capsys):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(RUNNABLE))
    runpy.run_path(str(script))
    assert "512 of 616 prompt tokens were in the cache" in capsys.readouterr().out
