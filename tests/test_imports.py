"""Holds the one-way import order, the purity of the policy files, file sizes and the words that no file may contain."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = {
    "penelope_jax": "penelope_jax",
    "models": "penelope_jax.models",
    "kernels": "penelope_jax.kernels",
    "experiments": "penelope_jax.experiments",
}

# Layers above the policy. A module imports modules of its own layer and of lower ones; what is named in none is policy
# (the cache and the pure engine) and imports the standard library, numpy, immutables and other policy files.
LAYERS = (
    ("kernels", "kernels.*"),
    ("chat_template", "tokenizer", "models", "models.*"),
    ("batch", "sampling", "sampling_slots", "forward", "host_pages", "transfer", "pool_bytes"),
    ("executor", "snapshot"),
    ("driver", "garbage", "metrics", "text_stream", "whole_file"),
    ("experiments", "experiments.*"),
    ("cli",),
)

MAX_LINES = 400
LONGER_FILES: dict[str, int] = {}  # path: lines, with the reason beside it

VAGUE_NAMES = {"utils", "util", "common", "core", "helpers", "misc"}

# Written in pieces, so that this file does not contain them.
BANNED_WORDS = ["TO" + "DO", "FIX" + "ME", "/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/op" + "t/", "/us" + "r/local"]


def text_files() -> list[pathlib.Path]:
    """Returns the files that are or would be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if name != "LICENSE" and (ROOT / name).is_file()]


def module_name(path: pathlib.Path) -> str:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in parts if part != "__init__")])


SOURCES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def imported(source: str) -> set[str]:
    """Returns every module that `source` imports anywhere; `from m import n` gives m, or m.n where that is a module."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys() or {str(node.module)}
    return names


def layer(module: str) -> int:
    """Returns the layer of a module of the package: 0 for policy, else 1 + its place in LAYERS."""
    name = module.removeprefix("penelope_jax.")
    for rank, members in enumerate(LAYERS, 1):
        if name in members or f"{name.rpartition('.')[0]}.*" in members:
            return rank
    return 0


def violations(module: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of `module`, one line each."""
    found = []
    for name in sorted(imported(source)):
        top = name.partition(".")[0]
        if top in ("models", "kernels", "experiments"):
            found.append(f"{module} imports {name}, which is penelope_jax.{name}")
        elif top == "penelope_jax":
            if layer(name) > layer(module):
                found.append(f"{module} (layer {layer(module)}) imports {name} (layer {layer(name)})")
        elif not layer(module) and top not in sys.stdlib_module_names and top not in ("numpy", "immutables"):
            found.append(f"{module} is policy and imports {name}")
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_one_way(module):
    assert violations(module, SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("penelope_jax.engine", "import jax.numpy as jnp", "penelope_jax.engine is policy and imports jax.numpy"),
        ("penelope_jax.engine", "def f():\n    import jax", "penelope_jax.engine is policy and imports jax"),
        ("penelope_jax.models.qwen3", "import kernels.x", "imports kernels.x, which is penelope_jax.kernels.x"),
        (
            "penelope_jax.kernels.x",
            "from penelope_jax import models",
            "(layer 1) imports penelope_jax.models (layer 2)",
        ),
        ("penelope_jax.not_listed", "import penelope_jax.driver", "(layer 0) imports penelope_jax.driver (layer 5)"),
    ],
)
def test_control_a_wrong_import_is_found(module, source, expected):
    (line,) = violations(module, source)
    assert expected in line


def test_no_import_cycles():
    graph = {module: imported(path.read_text()) & SOURCES.keys() for module, path in SOURCES.items()}
    while leaves := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}


def test_mapped_folders_are_flat():
    nested = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.parent != ROOT / folder
    ]
    assert nested == []


def test_files_are_short_and_named_for_one_idea():
    paths = [*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py"))]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > LONGER_FILES.get(name, MAX_LINES)} == {}
    assert [name for name in lengths if pathlib.Path(name).stem in VAGUE_NAMES] == []


def test_no_banned_words():
    paths = text_files()
    assert {"README.md", "Makefile", "run", "create_venv.sh"} <= {path.name for path in paths}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for word in BANNED_WORDS
        if word in line
    ]
    assert found == []
