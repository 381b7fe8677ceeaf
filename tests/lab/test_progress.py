"""What is shown while something takes long."""

import io

import pytest
from rich.console import Console

from merit_lab import progress
from merit_lab.progress import WorkProgress


def shown(is_terminal: bool) -> str:
    """What is written while three sequences of four are done, and one too many."""
    stream = io.StringIO()
    bar = WorkProgress(Console(file=stream, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"}))
    bar.begin("wic", 4, "sequences")
    bar.advance(3)
    bar.advance(2)
    bar.end()
    bar.say("wic: [done]")
    return stream.getvalue()


def test_a_bar_in_a_terminal() -> None:
    text = shown(is_terminal=True)
    assert "wic" in text
    assert "100% of 4 sequences" in text


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, ["75%", "100%"]), (60.0, [])])
def test_lines_now_and_then_elsewhere(monkeypatch, seconds, lines) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", seconds)
    text = shown(is_terminal=False)
    expected = [f"wic: {share} of 4 sequences" for share in lines]
    assert text.splitlines() == [*expected, "wic: [done]"]


def test_work_of_unknown_length_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    bar = WorkProgress(Console(file=stream, width=80))
    with bar.piece("reading", None, "bytes"):
        bar.update(1234, "half of a file")
        bar.advance()
    assert stream.getvalue().splitlines() == ["reading: 1,234 bytes, half of a file", "reading: 1,235 bytes"]
