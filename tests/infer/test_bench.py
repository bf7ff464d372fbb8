"""infer.bench: complete records that add up, exact texts, and mistakes in one line."""

import json

import pytest

from infer import bench
from infer.bench_report import breakdown
from infer.timing import Figure, interleave, once_of


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_the_tiny_target(tmp_path, capsys):
    out, png = tmp_path / "bench.json", tmp_path / "bench.png"
    argv = "--target tiny --n-stages 2 --max-new-tokens 16 --reps 2 --seconds 0.001"
    argv += " --synthetic-acceptance 0 1 --chunk-cycles 4 --capacities 256"
    assert bench.main([*argv.split(), "--json", str(out), "--png", str(png)]) == 0
    record = json.loads(out.read_text())
    assert list(record["modes"]) == ["virtual", "sharded"]
    for mode, figures in record["modes"].items():
        assert len(figures["cycle_milliseconds_by_fill"]) == 2
        for row in figures["breakdown_by_fill"]:
            assert all(row[name] > 0 for name in row if name != "rest")
        whole = figures["breakdown_by_fill"][1]
        parts = sum(value for name, value in whole.items() if name != "fill")
        full = record["figures"][f"{mode} full cycle"]["seconds"]
        assert parts == pytest.approx(1000 * full)
        assert figures["full_cycle"]["milliseconds"] == pytest.approx(1000 * full)
    step = record["autoregressive"]
    best = max(record["read_gb_per_second"].values())
    assert step["gb_per_second"] == pytest.approx(step["gb_read"] / step["milliseconds"] * 1000)
    assert step["share_of_bandwidth"] == pytest.approx(step["gb_per_second"] / best)
    texts = {(text["mode"], text["acceptance"]): text for text in record["texts"]}
    assert len(texts) == 4 and all(text["identical"] for text in record["texts"])
    for (_, acceptance), text in texts.items():
        assert text["alpha"] == acceptance
        assert text["cycles"] == (16 if acceptance else 2 * 15)
    assert set(record["capacities"]) == {
        f"{name}, capacity 256"
        for name in ("autoregressive", "virtual full cycle", "sharded full cycle")
    }
    memory = record["memory"]
    assert memory["layouts_held"] == 2
    assert memory["arrays_mib"] >= memory["weights_mib"] > 1
    assert png.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for words in ("full cycle / max(stage, draft module)", "share of the best bandwidth"):
        assert words in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--reps 0", "reps must be at least 1, got 0"),
        ("--max-new-tokens 1", "max_new_tokens must be at least 2, got 1"),
        ("--seconds 0", "seconds must be above 0, got 0.0"),
        ("--synthetic-acceptance 1.5", "from 0 to 1, got (1.5,)"),
        ("--chunk-cycles 0", "chunk_cycles must be at least 1, got (0,)"),
        ("--modes", "modes must name virtual or sharded, got none"),
        ("--target tiny --n-stages 9 --modes sharded", "sharded needs 10 devices, here are 9"),
        ("--target tiny --modes virtual --capacities 128", "capacities must be above the"),
        ("--target tiny --modes virtual --hf", "--hf needs"),
        ("--json nowhere/b.json", "nowhere"),
        ("--png nowhere/b.png", "--png must name a file in an existing, writable folder"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.run(lambda: bench.main(argv.split()))
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    last = captured.err.strip().split("\n")[-1]
    assert last.startswith("error: ") and words in last


def test_measures_take_turns_and_give_their_medians():
    order = []

    def once(name, times):
        times = iter(times)

        def measure():
            order.append(name)
            return next(times)

        return measure

    found = interleave({"a": once("a", [3.0, 1.0, 2.0]), "b": once("b", [5.0, 5.0, 9.0])}, 3)
    assert found == {"a": Figure(2.0, 1.0, 3.0), "b": Figure(5.0, 5.0, 9.0)}
    assert order == ["a", "b"] * 3


def test_a_loop_is_as_long_as_asked_and_possible():
    asked = []

    def run(n):
        asked.append(n)
        return 0.01 * n

    assert once_of(run, 0.3)() == pytest.approx(0.01)
    assert asked == [1, 2, 30]
    assert once_of(run, 0.3, most=7)() == pytest.approx(0.01)
    assert asked[-1] == 7


def test_ranks_count_one_after_the_other_or_at_once():
    times = {"stage 0": 2, "stage 1": 3, "draft module": 4, "heads": 1, "draft head": 0.5}
    times |= {"exchange": 0.25, "cycle, fill 1": 8, "cycle, fill 2": 12, "full cycle": 12}
    figures = {
        f"{mode} {name}": Figure(seconds, seconds, seconds)
        for mode in ("virtual", "sharded")
        for name, seconds in times.items()
    }
    ms = 1000
    one, two = breakdown(figures, "virtual", 2)
    assert (one["stages"], one["heads"], one["rest"]) == (2 * ms, 0.5 * ms, 1.25 * ms)
    assert (two["stages"], two["draft module"], two["rest"]) == (5 * ms, 4 * ms, 1.75 * ms)
    one, two = breakdown(figures, "sharded", 2)
    assert (one["slowest rank"], two["slowest rank"], two["rest"]) == (4 * ms, 4 * ms, 6.75 * ms)
