"""Builds the sdist and, from it, the wheel, and compares the wheel with the four source folders.

pyproject.toml lists the packages by name, so a new folder would be left out without a message; hence the comparison.
"""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import penelope_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = {
    "penelope_jax": "penelope_jax",
    "models": "penelope_jax/models",
    "kernels": "penelope_jax/kernels",
    "experiments": "penelope_jax/experiments",
}


def copy_sources(destination: pathlib.Path) -> None:
    """Copies what the build reads; a build in place would leave files that later builds pick up."""
    for name in (*FOLDERS, "tests", "tools"):
        shutil.copytree(ROOT / name, destination / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, destination)


def build(source: pathlib.Path, *options: str) -> pathlib.Path:
    """Builds in `source` and returns the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def differences(source: pathlib.Path, wheel: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the files that are missing from the wheel and those that should not be in it."""
    expected = {"penelope_jax/py.typed"}
    for folder, package in FOLDERS.items():
        expected |= {f"{package}/{path.relative_to(source / folder)}" for path in (source / folder).rglob("*.py")}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    return sorted(expected - names), sorted(names - expected)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    copy_sources(directory)
    return directory


@pytest.fixture(scope="module")
def wheel(source):
    return build(source)


def test_wheel_has_exactly_the_files_of_the_four_folders(source, wheel):
    assert differences(source, wheel) == ([], [])


def test_control_an_unlisted_folder_is_noticed(tmp_path):
    copy_sources(tmp_path)
    (tmp_path / "models" / "deeper").mkdir()
    (tmp_path / "models" / "deeper" / "lost.py").touch()
    (tmp_path / "build" / "lib" / "penelope_jax").mkdir(parents=True)
    (tmp_path / "build" / "lib" / "penelope_jax" / "stale.py").touch()
    missing, unexpected = differences(tmp_path, build(tmp_path, "--wheel"))
    assert missing == ["penelope_jax/models/deeper/lost.py"]
    assert unexpected == ["penelope_jax/stale.py"]


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"penelope_jax-{penelope_jax.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        assert archive.read(f"{info}/top_level.txt").split() == [b"penelope_jax"]
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")
    assert metadata["Version"] == penelope_jax.__version__
    assert metadata.get_all("Provides-Extra") == ["cuda13", "tpu", "demo", "aot", "report", "test", "oracle"]
    core = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert not [line for line in core if line.startswith(("torch", "transformers", "jax["))]


def test_wheel_imports_from_another_directory(wheel, tmp_path):
    """Every module is found in the unpacked wheel, not in this checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import importlib.util, pathlib, sys\n"
        "root = pathlib.Path.cwd()\n"
        "for path in sorted(root.rglob('*.py')):\n"
        "    name = '.'.join(path.relative_to(root).with_suffix('').parts).removesuffix('.__init__')\n"
        "    found = importlib.util.find_spec(name).origin\n"
        "    assert pathlib.Path(found) == path, (name, found)\n"
        "    print(name)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "penelope_jax.models" in done.stdout.split()


def test_sdist_carries_what_a_build_and_a_test_run_need(source, wheel):
    (sdist,) = (source / "dist").glob("*.tar.gz")
    listing = subprocess.run(["tar", "-tzf", sdist], capture_output=True, text=True, check=True).stdout
    names = {name.partition("/")[2] for name in listing.split()}
    wanted = {
        "LICENSE",
        "Makefile",
        "requirements.lock",
        "tools/create_venv.sh",
        "tests/conftest.py",
        "models/__init__.py",
    }
    assert wanted - names == set()
