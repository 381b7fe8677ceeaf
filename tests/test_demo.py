"""The demo: it runs from end to end, and its last sentence follows from the numbers."""

import math
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO.parent)
    import demo

    return demo


def test_runs_and_ends_with_its_conclusion() -> None:
    finished = subprocess.run(
        [sys.executable, DEMO, "--steps", "2", "--batch-size", "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last.startswith("In this run ")
    assert all(name in last for name in ("AdamW", "LAMB", "MERIT"))


def test_interrupt_leaves_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, DEMO, "--batch-size", "2", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()  # it is past its imports
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors == ""
    assert output.endswith("Stopped before the comparison was complete.\n")


def test_conclusion_follows_the_numbers(demo: ModuleType) -> None:
    first = demo.Outcome("LAMB", loss=2.5, largest_logit=9.0)
    second = demo.Outcome("MERIT", loss=2.25, largest_logit=30.0)
    assert demo.conclude([first, second]) == (
        "In this run MERIT reached the lowest validation loss (MERIT 2.250, LAMB 2.500) and "
        "LAMB kept the attention logits smallest (LAMB 9.0, MERIT 30.0)."
    )


def test_conclusion_names_runs_that_diverged(demo: ModuleType) -> None:
    lost = demo.Outcome("AdamW", loss=math.nan, largest_logit=math.nan)
    kept = demo.Outcome("MERIT", loss=2.25, largest_logit=3.0)
    assert demo.conclude([lost, kept]).endswith(", while AdamW diverged.")
    assert demo.conclude([lost]) == "Every run diverged."


def test_learning_rate_rises_to_its_peak_and_falls(demo: ModuleType) -> None:
    shares = [demo.learning_rate_share(step, 100) for step in range(100)]
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert min(shares[peak:]) >= demo.FINAL_LEARNING_RATE_SHARE


def test_refuses_a_count_that_is_not_positive() -> None:
    finished = subprocess.run(
        [sys.executable, DEMO, "--steps", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 2
    assert "'0' is given, but a whole number from 1 is needed" in finished.stderr
