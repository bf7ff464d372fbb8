"""The plot command: every figure that runs have, none that they lack; a mistake is one line."""

import json

import pytest

from spd_jax.checks import ConfigError
from train import plot

HELDOUT = {
    "n_scored": 9,
    "loss": 2.0,
    "lookup": 0.25,
    "agree_target": 0.5,
    "agree_text": 0.4,
    "agree_text_by_fill": [0.5, 0.375, 0.25],
}


def write_run(folder, *records, tail=""):
    folder.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail)
    return str(folder)


def training(step, **figures):
    return {"step": step, "loss": 3.0 / step, "accuracy": 0.1, "lr": 1e-3, **figures}


def heldout(step, **figures):
    return {"step": step, "heldout": {"all": HELDOUT | figures, "T=0": {"loss": 1.0}}}


def panels(*runs, group="all"):
    return {p.label: p for p in plot.panels_of(plot.read_runs(runs, group))}


def test_curves_are_the_records_by_step(tmp_path):
    run = write_run(tmp_path / "a", heldout(4, agree_target=0.75), training(4), training(2))
    drawn = panels(run, write_run(tmp_path / "b", training(3), heldout(6)))
    (first, second) = drawn["training loss (per position)"].lines
    assert (first.run, first.x, first.y) == (0, [2, 4], [1.5, 0.75])
    assert (second.run, second.x, second.y) == (1, [3], [1.0])
    target = drawn["agreement with the target (share)"]
    found = [(line.run, line.is_baseline, line.x, line.y) for line in target.lines]
    assert found == [
        (0, False, [4], [0.75]), (1, False, [6], [0.5]),
        (0, True, [4], [0.25]), (1, True, [6], [0.25]),
    ]  # fmt: skip


def test_a_profile_is_the_last_one_there_is(tmp_path):
    run = write_run(
        tmp_path / "a",
        heldout(2),
        heldout(4, agree_text_by_fill=[0.6, None, 0.3]),
        {"step": 6, "heldout": {"all": {"loss": 1.0}}},
        training(6),
    )
    fills = plot.panels_of(plot.read_runs([run], "all"))[-1]
    assert fills.x_label == "tokens in flight"
    assert (fills.lines[0].x, fills.lines[0].y) == ([1, 3], [0.6, 0.3])


def test_figures_by_stages_and_of_decodes_are_drawn(tmp_path):
    decode = {"decode": {"alpha": 0.25, "tau": None, "rows": 4}}
    stages = {"alpha_by_stages": {"16": 0.25, "4": 0.5, "8": None, "x": 1.0}}
    run = write_run(
        tmp_path / "a", heldout(2, alpha=0.5, lookup_alpha=0.25), heldout(4, **decode, **stages),
        heldout(6, decode=3),
    )  # fmt: skip
    drawn = panels(run)
    (line,) = drawn["alpha of decoding held-out prompts"].lines
    assert (line.x, line.y) == ([4], [0.25])
    assert "tau of decoding held-out prompts" not in drawn
    by_stages = next(
        p for p in plot.panels_of(plot.read_runs([run], "all")) if p.x_label == "stages"
    )
    assert (by_stages.lines[0].x, by_stages.lines[0].y) == ([4, 16], [0.5, 0.25])
    own = write_run(tmp_path / "own", heldout(4, alpha=0.375, **stages))  # of three fills
    (line,) = panels(own)["held-out alpha by stages"].lines
    assert (line.x, line.y) == ([3, 4, 16], [0.375, 0.5, 0.25])
    alpha = plot.panels_of(plot.read_runs([run], "all"))
    (alpha,) = [p for p in alpha if p.label == "held-out alpha (accepted / verified)"]
    assert [(line.is_baseline, line.y) for line in alpha.lines] == [(False, [0.5]), (True, [0.25])]


def test_the_panels_that_tell_most_are_drawn_and_all_when_asked(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a", training(2), heldout(2, alpha=0.5, kl_by_fill=[1.0, 2.0]))
    drawn, draw = [], plot.draw
    monkeypatch.setattr(
        plot, "draw", lambda names, panels: drawn.append(panels) or draw(names, panels)
    )
    for more in ([], ["--all"]):
        assert plot.main([run, "--out", str(tmp_path / "curves.png"), *more]) == 0
    few, every = ({panel.label for panel in panels} for panels in drawn)
    agreement = "agreement with the target (share)"
    assert few == {
        "training loss (per position)",
        agreement,
        "held-out alpha (accepted / verified)",
    }
    assert every - few >= {
        "held-out loss (per position)",
        "held-out KL by fill (nats per position)",
    }
    only = write_run(tmp_path / "b", {"step": 2, "accuracy": 0.5})  # nothing that tells most
    assert plot.main([only, "--out", str(tmp_path / "curves.png")]) == 0
    assert [panel.label for panel in drawn[-1]] == ["training accuracy (share of positions)"]


def test_the_lookup_is_grey_and_drawn_from_one_evaluation_on(tmp_path):
    from matplotlib.image import imread

    grey = []
    for name, more in (("a", {}), ("b", {"lookup": None})):
        run = write_run(tmp_path / name, training(1), heldout(4, **more))
        assert plot.main([run, "--out", str(tmp_path / "curves.png")]) == 0
        image = imread(tmp_path / "curves.png")[..., :3]
        grey.append(int((abs(image - 0.4) < 0.02).all(axis=-1).sum()))
    assert grey[0] > grey[1] + 200


def test_unknown_and_broken_records_are_tolerated(tmp_path):
    odd = [
        {"step": 1, "new": {"a": 1}}, {"other": 1}, [1], None, "x", {"step": "2", "loss": 1},
        {"step": 2, "loss": "high", "accuracy": True}, {"step": 3, "loss": float("nan")},
        {"step": 4, "heldout": None}, {"step": 5, "heldout": {"all": {"tau": [1.5]}}},
        {"step": 6, "heldout": {"all": {"agree_text_by_fill": "0.5", "lookup": 0.5}}},
    ]  # fmt: skip
    run = write_run(tmp_path / "a", *odd, training(7), tail='{"step": 8, "loss": 1')
    drawn = panels(run)
    assert list(drawn) == [
        "training loss (per position)",
        "training accuracy (share of positions)",
    ]
    assert drawn["training loss (per position)"].lines[0].x == [7]


def test_absurd_numbers_are_left_out(tmp_path):
    records = [training(1, loss=1e308), training(2, loss=-1e308), training(3, loss=10**400)]
    records += [
        {"step": 10**400, "loss": 1.0},
        training(4),
        training(5, loss=1e30),
        training(6, loss=-1e30),
    ]
    stages = {"9" * 4000: 0.5, "4": None, "04": 0.25, "8": 10**400, "16": 0.5}
    run = write_run(tmp_path / "a", *records, heldout(4, alpha_by_stages=stages))
    (line,) = panels(run)["training loss (per position)"].lines
    assert line.x == [4, 5, 6]
    (line,) = plot.panels_of(plot.read_runs([run], "all"))[-1].lines
    assert (line.x, line.y) == ([4, 16], [0.25, 0.5])
    assert plot.main([run, "--out", str(tmp_path / "curves.png")]) == 0


@pytest.mark.filterwarnings("error")
def test_a_run_is_shown_whatever_its_name(tmp_path, monkeypatch):
    from matplotlib.text import Text

    shown, draw = set(), Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, r: (shown.add(self.get_text()), draw(self, r)))
    names = ["$x_{y$", "_under", "b\udce9"]
    runs = [write_run(tmp_path / name, training(1)) for name in names]
    assert plot.main([*runs, "--out", str(tmp_path / "curves.png")]) == 0
    assert {"$x_{y$", "_under", "b\ufffd"} <= shown


def test_another_group_can_be_drawn(tmp_path):
    run = write_run(tmp_path / "a", training(2), heldout(2))
    drawn = panels(run, group="T=0")
    assert drawn["held-out loss (per position)"].lines[0].y == [1.0]
    assert "agreement with the text (share)" not in drawn
    with pytest.raises(ConfigError, match="no held-out group 'T=1'; there are T=0, all"):
        panels(run, group="T=1")


def test_runs_are_named_by_folder_or_path(tmp_path, monkeypatch):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
    paths = [
        write_run(folder, training(1))
        for folder in (tmp_path / "x" / "a", tmp_path / "x" / "b", tmp_path / "y" / "a")
    ]
    curves = plot.read_runs([*paths[:2], paths[2] + "/metrics.jsonl"], "all")
    assert [run.name for run in curves] == [paths[0], "b", paths[2] + "/metrics.jsonl"]
    monkeypatch.chdir(paths[0])
    assert plot.read_runs(["."], "all")[0].name == "a"


@pytest.mark.parametrize("n_runs", [1, 12])
def test_a_png_is_written_whatever_runs_have(tmp_path, n_runs, capsys):
    from matplotlib.image import imread

    runs = [write_run(tmp_path / "r0", *map(training, range(1, 90)), heldout(40), heldout(80))]
    runs += [write_run(tmp_path / f"r{i}", training(i)) for i in range(1, n_runs)]
    out = tmp_path / "new" / "curves.png"
    assert plot.main([*runs, "--out", str(out)]) == 0
    image = imread(out)
    assert min(image.shape[:2]) > 400 and image[..., :3].std() > 0.02
    blue = (abs(image[..., :3] * 255 - [31, 119, 180]) < 2).all(axis=-1)  # of the first run
    assert blue.any()
    assert [p.name for p in out.parent.iterdir()] == ["curves.png"]


def test_mistakes_are_one_line(tmp_path):
    good = write_run(tmp_path / "a", training(1))
    empty = write_run(tmp_path / "empty")
    (tmp_path / "none").mkdir()
    for argv, words in (
        ([str(tmp_path / "none")], "none/metrics.jsonl: no metrics to read"),
        ([good, str(tmp_path / "gone")], "gone: no metrics to read"),
        ([empty], "holds no figure to draw"),
        ([], "at least one run"),
        ([good, "--out", str(tmp_path / "x.pdf")], "must end in .png"),
        ([good, "--out", good + "/metrics.jsonl/x.png"], "cannot write the plot"),
        ([good, "--out", "x" * 256 + ".png"], "x: File name too long"),
        ([good, "--out", "x" * 245 + ".png"], "cannot write the plot"),
        (["x" * 256], "x: File name too long"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            plot.main(argv)
        assert "\n" not in str(caught.value)
