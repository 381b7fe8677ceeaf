"""Results as files in the run directory."""

import math

import pytest
from run_cases import make_run

from merit_lab.runs import EvaluationResult, Metric, read_results, result_path


def result(name="lambada", limit=None, value=3.5, stderr=None) -> EvaluationResult:
    return EvaluationResult(
        name=name,
        step=10,
        metrics={
            "perplexity": Metric(value=value, stderr=stderr, higher_is_better=False),
            "acc": Metric(value=0.25, stderr=0.1, higher_is_better=True),
        },
        num_items=8,
        num_truncated=1,
        version=1.0,
        inputs={"limit": limit},
        environment={"host": "here"},
        seconds=1.5,
    )


@pytest.mark.parametrize(("value", "stderr"), [(3.5, None), (math.inf, None), (1e300, math.inf)])
def test_a_result_comes_back_as_it_was(tmp_path, value, stderr) -> None:
    path = tmp_path / "new" / "lambada.json"
    result(value=value, stderr=stderr).write(path)
    assert EvaluationResult.read(path) == result(value=value, stderr=stderr)
    assert "Infinity" not in path.read_text()


def test_a_part_of_a_set_is_not_taken_for_the_whole(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10,))
    for limit in (None, 5):
        path = result_path(run, 10, "lambada", limit)
        result(limit=limit, value=float(limit or 100)).write(path)
    result(name="wic", limit=5).write(result_path(run, 10, "wic", 5))
    whole, part = read_results(run, 10), read_results(run, 10, limit=5)
    assert list(whole) == ["lambada"]
    assert sorted(part) == ["lambada", "wic"]
    assert whole["lambada"].metrics["perplexity"].value == 100
    assert part["lambada"].metrics["perplexity"].value == 5
    assert read_results(run, 20) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "metrics": {}}'])
def test_another_file_is_refused(tmp_path, text) -> None:
    path = tmp_path / "lambada.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lambada\.json is not a result of `merit evaluate`"):
        EvaluationResult.read(path)
