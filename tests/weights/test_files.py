"""Files that a command is to write: whole or not at all, and refused before the work."""

import json
from pathlib import Path

import pytest

from spd_jax.checks import ConfigError
from spd_jax.weights.files import check_writable, replace_file, write_json


def test_json_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(ConfigError, match="--json"):
        write_json(tmp_path / "absent" / "out.json", {})
    path = tmp_path / "out.json"
    write_json(path, {"alpha": 0.5})
    assert json.loads(path.read_text()) == {"alpha": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_only_a_regular_file_is_replaced(tmp_path):
    old, link, folder = (tmp_path / name for name in ("old", "link", "folder"))
    old.write_bytes(b"old")
    link.symlink_to(old)
    folder.mkdir()
    for path in (link, folder, Path("/dev/full")):
        with pytest.raises(FileExistsError, match="not a regular file"):
            replace_file(path, b"new")
    assert link.is_symlink() and old.read_bytes() == b"old"
    replace_file(old, b"new")
    assert old.read_bytes() == b"new" and len([*tmp_path.iterdir()]) == 3


def test_a_place_where_no_file_can_be_is_refused_and_nothing_is_made(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "absent" / "out.json", tmp_path, link):
        with pytest.raises(ConfigError, match="--json must name a file in an existing, writable"):
            check_writable(path)
    check_writable(tmp_path / "out.json")
    assert [*tmp_path.iterdir()] == [link]
