"""How steps are timed: their number, the worst one, and how far ahead the host may be."""

import itertools

import pytest
import torch

from merit_lab.measure.bench import timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("num_cycles", [3, 4, 5, 20])
def test_the_worst_step_is_the_most_expensive_of_a_cycle_and_not_an_outlier(num_cycles) -> None:
    """Nine steps of 1 ms and one of 2 ms per cycle, and a single outlier."""
    times = sorted([1.0] * 9 * num_cycles + [2.0] * (num_cycles - 1) + [50.0])
    assert timing.worst(times) == 2.0


@pytest.mark.parametrize(
    ("seconds", "cycle", "num"),
    [(0, 1, 5), (0, 2, 6), (0, 10, 30), (8.5, 1, 9), (33.5, 10, 40)],
)
def test_whole_cycles_are_timed_until_the_seconds_are_over(seconds, cycle, num, monkeypatch) -> None:
    """With a clock that advances by one second per step."""
    calls: list[None] = []
    monkeypatch.setattr(timing.time, "monotonic", lambda: float(len(calls)))
    times = timing.step_times(lambda: calls.append(None), seconds, CPU, cycle)
    assert len(times) == len(calls) == num
    assert times == sorted(times)


class FakeEvent:
    """An event of a device that makes progress only when it is synchronized."""

    numbers = itertools.count()
    done = -1

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.number = next(FakeEvent.numbers)

    def synchronize(self) -> None:
        FakeEvent.done = max(FakeEvent.done, self.number)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return float(end.number - self.number)


@pytest.mark.parametrize(("seconds", "cycle", "num"), [(0, 1, 5), (0, 10, 30), (1e9, 1, 50), (1e9, 20, 60)])
def test_on_a_gpu_the_queue_is_never_empty_and_never_long(seconds, cycle, num, monkeypatch) -> None:
    """Otherwise device times would include host time, or the limit in seconds would be exceeded."""
    FakeEvent.numbers, FakeEvent.done = itertools.count(), -1
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    ended: list[int] = []  # steps that the device had finished when each step started
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ended.append(-1))
    times = timing.step_times(lambda: ended.append((FakeEvent.done + 1) // 2), seconds, CUDA, cycle)
    assert times == [1.0] * num
    assert ended.pop() == -1  # the device is synchronized once, at the end
    first, *timed = ended
    assert first == 0
    assert timed == [max(0, begun - timing.STEPS_AHEAD) for begun in range(num)]
