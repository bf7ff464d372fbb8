"""Events carry the figures of metrics.jsonl; a resumed run's file hides what it will say again."""

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from spd_jax.checks import ConfigError
from train.tensorboard import EventFile, scalars

FIGURES = {"all": {"loss": 1.5, "agree_target_by_fill": [0.25, 0.5], "n_scored": 3}}


def read_events(directory):
    """TFRecord by hand: length, its checksum, the event, its checksum."""
    events = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (n,) = struct.unpack("<Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + n]))
            content = content[12 + n + 4 :]
    return events


def test_nested_figures_are_flattened_by_their_path():
    record = {"step": 4, "lr": 0.5, "heldout": FIGURES, "text": "x", "bad": float("nan")}
    assert dict(scalars(record)) == {
        "lr": 0.5,
        "heldout/all/loss": 1.5,
        "heldout/all/agree_target_by_fill/1": 0.25,
        "heldout/all/agree_target_by_fill/2": 0.5,
        "heldout/all/n_scored": 3.0,
    }


def test_events_are_on_disk_at_once_and_a_new_file_purges_later_steps(tmp_path):
    with EventFile(tmp_path / "tensorboard", 0) as log:
        log.write({"step": 2, "loss": 1.0})
        log.write({"step": 4, "heldout": FIGURES})
        (start, *events) = read_events(tmp_path / "tensorboard")[1:]
        assert (start.step, start.session_log.status) == (1, SessionLog.START)
        values = [(e.step, e.summary.value[0].tag, e.summary.value[0].simple_value) for e in events]
        assert values[0] == (2, "loss", 1.0) and (4, "heldout/all/loss", 1.5) in values
    with EventFile(tmp_path / "tensorboard", 2):
        pass
    starts = [e.step for e in read_events(tmp_path / "tensorboard") if e.HasField("session_log")]
    assert sorted(starts) == [1, 3]


def test_a_disk_that_refuses_is_one_line(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(ConfigError, match="tensorboard: cannot write"):
        EventFile(tmp_path / "tensorboard", 0)
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(ConfigError, match="new: cannot write .*No space left"),
        EventFile(tmp_path / "new", 0) as log,
    ):
        log._file._py_recordio_writer._writer.close()
        log._file._py_recordio_writer._writer = full
        log.write({"step": 1, "loss": 0.5})
