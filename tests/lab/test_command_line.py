"""Help of commands: which options it lists, and how texts are wrapped."""

from dataclasses import dataclass

import pytest
import tyro

from merit_lab import completion
from merit_lab.command_line import rules

SINGLE = {"--seed", "--optimizer.name", "--optimizer.lr"}


@pytest.mark.parametrize(
    ("command", "also_varied"),
    [
        ("compare", set()),
        ("sweep", set()),
        ("arena", {"--optimizer.warmup"}),
        ("scale", {"--batch", "--tokens", "--measure.validation-every"}),
    ],
)
def test_studies_do_not_list_what_they_vary(command: str, also_varied: set[str]) -> None:
    train, study = (set(completion._options(completion._help(name, "tiny"))) for name in ("train", command))
    assert train - study == {*SINGLE, *also_varied, "--auto-resume", "--no-auto-resume"}
    assert study >= {"--seeds", "--optimizers", "--out", "--jobs"}


@dataclass(frozen=True)
class Common:
    common: int = 1
    """One and
    Two and
    --three."""


@dataclass(frozen=True)
class Arguments(Common):
    own: int = 2
    """First paragraph.

    Second paragraph.
    """
    bare: int = 3


def test_each_paragraph_of_help_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(Arguments, args=["--help"], registry=rules())
    lines = [line.strip("│ \n") for line in capsys.readouterr().out.splitlines()]
    assert any(line.endswith("One and Two and --three. (default: 1)") for line in lines)
    first = next(place for place, line in enumerate(lines) if line.endswith("First paragraph."))
    assert lines[first + 1 : first + 3] == ["", "Second paragraph. (default: 2)"]
    assert any(line.startswith("--bare INT") for line in lines)


def test_a_field_without_an_option_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    def parse(*args: str) -> Arguments:
        registry = rules(without=[(Arguments, "own")])
        return tyro.cli(Arguments, default=Arguments(own=7), args=args, registry=registry)

    assert parse("--common", "5") == Arguments(common=5, own=7)
    with pytest.raises(SystemExit):
        parse("--own", "8")
    assert "--own" in capsys.readouterr().err
