"""Files that a command is to write: whole or not at all, and refused before the work."""

import json

import pytest

from spd_jax.checks import ConfigError
from spd_jax.weights.files import check_writable, write_json


def test_json_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(ConfigError, match="--json"):
        write_json(tmp_path / "absent" / "out.json", {})
    path = tmp_path / "out.json"
    write_json(path, {"alpha": 0.5})
    assert json.loads(path.read_text()) == {"alpha": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_place_where_no_file_can_be_is_refused_and_nothing_is_made(tmp_path):
    for path in (tmp_path / "absent" / "out.json", tmp_path):
        with pytest.raises(ConfigError, match="--json must name a file in an existing, writable"):
            check_writable(path)
    check_writable(tmp_path / "out.json")
    assert not [*tmp_path.iterdir()]
