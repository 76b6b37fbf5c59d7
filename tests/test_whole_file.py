"""Files that are written whole or not at all."""

import pathlib

import pytest

from penelope_jax.whole_file import write_whole


def test_a_file_is_replaced_whole(tmp_path):
    for data in (b"one", b"", b"\x00two\n"):
        write_whole(str(tmp_path / "a.json"), data)
        assert (tmp_path / "a.json").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("at", ["write_bytes", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_what_ends_a_write_leaves_what_was_there(tmp_path, monkeypatch, at, error):
    write_whole(tmp_path / "a.json", b"before")

    def half(path, *_):
        with path.open("wb") as file:
            file.write(b"ha")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, at, half)
        with pytest.raises((KeyboardInterrupt, OSError)):
            write_whole(tmp_path / "a.json", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"before"


def test_a_folder_that_is_absent_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        write_whole(tmp_path / "absent" / "a.json", b"x")
