"""What is shown while a set is evaluated."""

import io

import pytest
from rich.console import Console

from merit_lab.evaluate import display
from merit_lab.evaluate.display import EvaluationDisplay


def shown(is_terminal: bool) -> str:
    """What is written while three sequences of four are done, and one too many."""
    stream = io.StringIO()
    bar = EvaluationDisplay(
        Console(file=stream, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
    )
    bar.begin("wic", 4)
    bar.advance(3)
    bar.advance(2)
    bar.end()
    bar.say("wic: [done]")
    return stream.getvalue()


def test_a_bar_in_a_terminal() -> None:
    text = shown(is_terminal=True)
    assert "wic" in text
    assert "100%" in text
    assert "sequences" not in text


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, ["75%", "100%"]), (60.0, [])])
def test_lines_now_and_then_elsewhere(monkeypatch, seconds, lines) -> None:
    monkeypatch.setattr(display, "_SECONDS_BETWEEN_LINES", seconds)
    text = shown(is_terminal=False)
    expected = [f"wic: {share} of 4 sequences" for share in lines]
    assert text.splitlines() == [*expected, "wic: [done]"]


def test_standard_error_is_the_one_of_the_beginning(monkeypatch) -> None:
    before, later = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", before)
    bar = EvaluationDisplay()
    monkeypatch.setattr("sys.stderr", later)
    bar.say("here")
    assert (before.getvalue(), later.getvalue()) == ("here\n", "")
