"""A file is whole or as it was before."""

import errno
import os

import pytest

from deftune.artifacts.files import whole_file, write_atomic


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomic(tmp_path / "folder", "text")
    assert caught.value.filename == str(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_write_atomic_keeps_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "status.json"
    write_atomic(path, "old")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises((OSError, UnicodeEncodeError)):
        if moment != "write":
            patch.setattr(os, moment, full)
        write_atomic(path, "new" if moment != "write" else "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    write_atomic(path, "new")
    assert path.read_text() == "new"


def test_an_error_of_another_file_is_not_put_on_this_one(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, whole_file(tmp_path / "out"):
        (tmp_path / "source").read_bytes()
    assert caught.value.filename == str(tmp_path / "source")
    assert list(tmp_path.iterdir()) == []
