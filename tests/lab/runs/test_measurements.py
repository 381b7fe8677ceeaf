"""Measurements at a checkpoint, kept in a file and as columns of the table of runs."""

import math
import multiprocessing

import pytest

from merit_lab.runs import Measurements
from merit_lab.runs.measurements import columns


def test_parts_are_kept_with_their_settings(tmp_path) -> None:
    path = tmp_path / "run" / "curvature" / "step-00000010.json"
    first, second = Measurements(path), Measurements(path)
    first.put("trace", {"probes": 8}, {"value": math.inf, "samples": [1.5, math.nan]}, seconds=0.5)
    second.put("loss", {}, {"value": 2.5})  # does not know of the first
    kept = Measurements(path)
    assert kept.find("loss", {}) == {"value": 2.5}
    assert kept.find("trace", {"probes": 9}) is None
    found = kept.find("trace", {"probes": 8})
    assert found is not None
    assert found["value"] == math.inf
    assert math.isnan(found["samples"][1])
    kept.put("loss", {"sequences": 2}, {"value": 3.5})
    assert list(kept.parts) == ["trace", "loss"]
    assert Measurements(path).find("loss", {}) is None


def test_columns_are_those_of_the_last_measured_checkpoints(tmp_path) -> None:
    for step in (4, 10):
        curvature = Measurements(tmp_path / "curvature" / f"step-{step:08}.json")
        curvature.put("trace", {}, {"value": step / 2, "standard_error": 0.25, "nodes": [[1.0], [2.0]]})
    Measurements(tmp_path / "evaluate" / "step-00000004.json").put(
        "wic-first-5", {}, {"acc": 0.5, "items": 5}
    )
    assert columns(tmp_path) == {
        "evaluate.step": 4,
        "evaluate.wic-first-5.acc": 0.5,
        "evaluate.wic-first-5.items": 5,
        "curvature.step": 10,
        "curvature.trace": 5.0,
        "curvature.trace.standard_error": 0.25,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "move it elsewhere"),
        ('{"format": 1, "trace": 7}', "is not a file of measurements"),
        ('{"format": 1, "trace": {"settings": {}}}', "is not a file of measurements"),
        ('{"format": 2}', "its format is 2, and this version reads format 1"),
    ],
    ids=["list", "number", "no result", "format"],
)
def test_another_file_is_refused(text, complaint, tmp_path) -> None:
    path = tmp_path / "noise" / "step-00000010.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Measurements(path)
    with pytest.raises(ValueError, match=complaint):
        columns(tmp_path)


def put_many(path, name, ready):
    results = Measurements(path)
    ready.wait()
    for number in range(20):
        results.put(f"{name}{number}", {}, {"value": number})


def test_parts_of_two_processes_are_all_kept(tmp_path):
    path = tmp_path / "curvature" / "step.json"
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(2)
    processes = [context.Process(target=put_many, args=(path, name, ready)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    kept = Measurements(path)
    assert all(kept.find(f"{name}{number}", {}) == {"value": number} for name in "ab" for number in range(20))
