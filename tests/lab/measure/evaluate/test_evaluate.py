"""What is evaluated, what is known already, and what is refused; lm-eval's numbers are made up here."""

import json
from typing import Any

import pytest
from run_cases import make_run

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from merit_lab.measure.checkpoint import Measured
from merit_lab.measure.evaluate import harness
from merit_lab.measure.evaluate.command import Evaluate, evaluate, main
from merit_lab.measure.evaluate.sets import SETS
from merit_lab.runs import Measurements

# A row of each set that is named here.
ROWS = {
    "lambada": {"text": "a b"},
    "wikitext": " = Title = ",
    "boolq": {"passage": "a", "question": "b", "label": "true"},
    "copa": {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 0},
    "rte": {"premise": "a", "hypothesis": "b", "label": "entailment"},
    "wic": {"sentence1": "a", "sentence2": "a b", "word": "a", "label": "false"},
}


@pytest.fixture
def evaluated(monkeypatch) -> list[tuple[str, int | None]]:
    """What lm-eval was asked for."""
    asked: list[tuple[str, int | None]] = []

    def open_checkpoint(checkpoint, *, prefix, **_) -> None:
        assert (checkpoint / "model.safetensors").exists()
        assert (checkpoint / "tokenizer.json").exists()
        assert prefix == ord("\n")

    def run_task(_lm, name, limit, _task_files):
        if name == "rte":
            raise ValueError("rte has an answer that is too long")
        asked.append((name, limit))
        metrics = {"acc": float(len(asked)), "perplexity": float("inf"), "perplexity_stderr": 0.25}
        return {**metrics, "items": limit or 99, "truncated": 3}

    monkeypatch.setattr(harness, "CheckpointLM", open_checkpoint)
    monkeypatch.setattr(harness, "run_task", run_task)
    return asked


@pytest.fixture
def files(tmp_path):
    """Files of these sets, with a row each."""
    for name, row in ROWS.items():
        path = tmp_path / "sets" / SETS[name].file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row if isinstance(row, str) else json.dumps(row))
    return tmp_path / "sets"


def test_only_what_is_not_known_is_computed(evaluated, files, tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20)).folder

    def results(*tasks: str, **options: Any) -> Measured:
        return evaluate(Evaluate(run=run, tasks=tasks, **{"task_files": files, **options}))

    first = results("wic", "copa")
    again = results("copa", "boolq", "wic")
    assert evaluated == [("wic", None), ("copa", None), ("boolq", None)]
    assert list(again.results) == ["copa", "boolq", "wic"]
    assert {name: again.results[name] for name in first.results} == first.results
    assert again.path == run / "evaluate" / "step-00000020.json"
    del evaluated[:]
    assert list(results("wic", limit=5).results) == ["wic-first-5"]  # other items
    results("wic", checkpoint=10)  # other weights
    (files / SETS["wic"].file).write_text(json.dumps({**ROWS["wic"], "edition": 2}))
    results("wic")  # another file
    results("wic", task_files=None)  # the hub's
    assert evaluated == [("wic", 5), ("wic", None), ("wic", None), ("wic", None)]
    results("copa")
    assert len(evaluated) == 4


def test_what_was_done_before_a_failure_is_kept(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run").folder
    options = [str(run), "--task-files", str(files), "--tasks", "wic", "rte", "copa"]
    assert main(options) == 1
    assert "merit evaluate: rte has an answer that is too long" in capsys.readouterr().err
    assert evaluated == [("wic", None)]
    assert list(Measurements(run / "evaluate/step-00000010.json").parts) == ["wic"]


def test_the_command_shows_a_table(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run").folder
    assert main([str(run), "--task-files", str(files), "--tasks", "fig5", "--limit", "4"]) == 0
    assert evaluated == [("lambada", 4), ("wikitext", 4)]
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["lambada-first-4", "acc", "4", "1"] in rows
    assert ["perplexity", "inf", "0.25"] in rows
    assert "lambada-first-4: 3 prompts exceeded the context and were truncated" in shown
    assert f"The results are in {run}/evaluate/step-00000010.json" in shown


def test_a_file_that_cannot_be_read_is_known_before_the_first_set(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run").folder
    (files / SETS["copa"].file).write_text("<html>not found</html>")
    assert main([str(run), "--task-files", str(files), "--tasks", "wic", "copa"]) == 1
    assert "not the file of this set" in capsys.readouterr().err
    assert evaluated == []


class HubOutOfReach:
    """Stands in for lm-eval's TaskManager; mmlu is a group of its tasks."""

    all_subtasks = ("arc_easy", "piqa")

    def load(self, names):
        raise ConnectionError(f"no network for {names}")


def test_names_are_checked_before_anything_is_computed(evaluated, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(harness, "_task_manager", lambda _: HubOutOfReach())
    run = str(make_run(tmp_path / "run").folder)
    for name, hint in {"arc_eazy": "; did you mean 'arc_easy'?", "mmlu": "."}.items():
        assert main([run, "--tasks", "copa", name]) == 1
        assert f"no task {name!r}{hint} Give the tasks of a group one by one" in capsys.readouterr().err
    assert evaluated == []
    assert main([run, "--tasks", "piqa", "copa"]) == 0
    assert evaluated == [("piqa", None), ("copa", None)]
    with pytest.raises(OSError, match=r"copa could not be read .*no network for \['copa'\].*--task-files"):
        harness._load("copa", None, None, tmp_path)
