"""setup.cfg and requirements.txt name the same packages and bounds."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parent.parent


def requirement_lines(text: str) -> set[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {line for line in lines if line}


def test_requirements_are_those_of_the_package_and_its_tests():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    runtime = requirement_lines(setup["options"]["install_requires"])
    test = requirement_lines(setup["options.extras_require"]["test"])
    listed = requirement_lines((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    assert listed == runtime | test
    assert not any(line.startswith("torch") for line in listed)
