"""Every mistake at the keyboard is one line on stderr and exit code 2."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infer import startup
from infer.decode import DecodeFlags
from infer.evaluate import EvaluateFlags
from spd_jax import commandline
from spd_jax.checks import ConfigError

PROG = "python -m infer.decode"
ROOT = Path(__file__).parents[2]


def error_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().split("\n")
    return line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--promt", "x"], ["--promt", "--prompt"]),
        (["--max-new-tokens", "many"], ["--max-new-tokens", "many"]),
        (["--mesh", "torus"], ["--mesh", "torus", "auto", "virtual"]),
        (["--draft"], ["--draft"]),
        (["stray"], ["stray"]),
        (["--temprature", "1.0"], ["--temprature", "--temperature"]),
        (["--no-compare"], ["--no-compare"]),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        commandline.parse_flags(DecodeFlags, PROG, argv)
    assert stop.value.code == 2
    line = error_line(capsys)
    assert line.startswith("error: ")
    assert [w for w in words if w not in line] == []


def test_a_missing_flag_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        commandline.parse_flags(EvaluateFlags, "python -m infer.evaluate", [])
    assert stop.value.code == 2
    assert "--prompts" in error_line(capsys)


def test_every_flag_reaches_its_field():
    argv = (
        "--prompt p --target tiny --draft d --max-new-tokens 3 --n-stages 4 --stage-layers 1,2 "
        "--mesh virtual --placement dedicated --cpu-devices 6 --dtype bfloat16 --seed 9 "
        "--thinking False --compare --json"
    ).split()
    assert commandline.parse_flags(DecodeFlags, PROG, argv) == DecodeFlags(
        prompt="p",
        target="tiny",
        draft="d",
        max_new_tokens=3,
        n_stages=4,
        stage_layers="1,2",
        mesh="virtual",
        placement="dedicated",
        cpu_devices=6,
        dtype="bfloat16",
        seed=9,
        thinking=False,
        compare=True,
        json=True,
    )


def test_no_flags_give_the_documented_defaults():
    flags = commandline.parse_flags(DecodeFlags, PROG, [])
    assert (flags.target, flags.draft, flags.max_new_tokens) == ("smollm2-135m", None, 128)
    assert (flags.mesh, flags.compare, flags.json) == ("auto", False, False)


def test_stage_layers_are_a_comma_list():
    assert startup.parse_stage_layers(None) is None
    assert startup.parse_stage_layers("6,6, 5,7") == (6, 6, 5, 7)
    for text in ("", "6;6", "6,,6", "six"):
        with pytest.raises(ConfigError, match="--stage-layers"):
            startup.parse_stage_layers(text)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError("expected a,\ngot b"), 2, "error: expected a, got b"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_run_turns_the_end_of_a_main_into_an_exit_code(outcome, code, words, capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)

    def main() -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as stop:
        commandline.run(main)
    assert stop.value.code == code
    assert capsys.readouterr().err.strip() == words


CRASHES_AT_ITS_END = """
import atexit, os
from spd_jax.commandline import run
def main():
    print("the text so far")
    atexit.register(os.abort)
    raise KeyboardInterrupt
run(main)
"""


def test_an_interrupted_main_ends_without_what_may_crash_then():
    done = subprocess.run(
        [sys.executable, "-c", CRASHES_AT_ITS_END], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "the text so far\n", "stopped\n")


def test_a_stdout_that_cannot_show_a_character_escapes_it():
    code = "from spd_jax.commandline import run; run(lambda: print('\u00fc\u4e2d') or 0)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "\\xfc\\u4e2d\n"), done.stderr


def test_a_seed_of_more_than_64_bits_is_an_error():
    flags = DecodeFlags(target="tiny", seed=2**64)
    with pytest.raises(ConfigError, match="--seed must be a 64-bit integer"):
        startup.load_subject(flags)


def test_a_v10_head_is_refused_before_anything_is_computed(golden):
    flags = DecodeFlags(
        target=str(golden / "qwen3" / "target"), draft=str(golden / "qwen3" / "v10_n4")
    )
    with pytest.raises(ConfigError, match="a v10 head .* not decoded with; use a v11 head"):
        startup.load_subject(flags)


def test_run_shows_a_fault_of_the_program_in_full():
    def main() -> int:
        raise ValueError("not the user's fault")

    with pytest.raises(ValueError, match="not the user's fault"):
        commandline.run(main)


@pytest.mark.parametrize("count", [0, -3])
def test_a_cpu_device_count_below_one_is_an_error(count):
    with pytest.raises(ConfigError, match="at least 1"):
        startup.start_devices(count)


@pytest.mark.timeout(120)
def test_cpu_devices_wins_over_the_environment_and_a_late_call_is_an_error():
    script = (
        "import infer.decode, infer.evaluate\n"
        "from infer.startup import start_devices; from spd_jax.checks import ConfigError\n"
        "start_devices(3)\n"
        "import jax; assert jax.device_count() == 3\n"
        "try: start_devices(4)\n"
        "except ConfigError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "refused", done.stderr


@pytest.fixture
def interrupts():
    """Children hear SIGINT, which a shell ignores in its background, and that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("infer.decode", " numpy\n"),
        ("train.pdm", " jax._src.api\n"),
        ("train.prepare", " spd_jax.config\n"),
    ],
)
def test_an_interrupt_during_imports_shows_no_traceback(module, imported):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    others = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        for line in process.stderr:
            if line.endswith(imported):
                process.send_signal(signal.SIGINT)
            if not line.startswith("import time:"):
                others.append(line)
        assert process.stdout.read() == ""
    assert (process.returncode, others) == (-signal.SIGINT, [])
