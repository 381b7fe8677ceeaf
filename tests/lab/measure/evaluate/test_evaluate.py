"""What is evaluated, what is known already, and what is refused; lm-eval's numbers are made up here."""

import json

import pytest
from run_cases import make_run

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from merit_lab.measure.evaluate import harness
from merit_lab.measure.evaluate.command import evaluate, main
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
        result = {"acc": float(len(asked)), "perplexity": float("inf"), "perplexity_stderr": 0.25}
        return {"result": {**result, "items": limit or 99, "truncated": 3}, "version": 1.0}

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
    first = evaluate(run, ["wic", "copa"], task_files=files)
    again = evaluate(run, ["copa", "boolq", "wic"], task_files=files)
    assert evaluated == [("wic", None), ("copa", None), ("boolq", None)]
    assert list(again.results) == ["copa", "boolq", "wic"]
    assert {name: again.results[name] for name in first.results} == first.results
    assert again.path == run / "evaluate" / "step-00000020.json"
    del evaluated[:]
    evaluate(run, ["wic"], task_files=files, limit=5)  # other items
    evaluate(run, ["wic"], task_files=files, step=10)  # other weights
    (files / SETS["wic"].file).write_text(json.dumps({**ROWS["wic"], "edition": 2}))
    evaluate(run, ["wic"], task_files=files)  # another file
    evaluate(run, ["wic"])  # the hub's
    assert evaluated == [("wic", 5), ("wic", None), ("wic", None), ("wic", None)]
    evaluate(run, ["copa"], task_files=files)
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
    assert ["lambada", "acc", "4", "1"] in rows
    assert ["perplexity", "inf", "0.25"] in rows
    assert "lambada: 3 prompts exceeded the context and were truncated" in shown
    assert f"The results are in {run}/evaluate/step-00000010.json" in shown


def test_a_file_that_cannot_be_read_is_known_before_the_first_set(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run").folder
    (files / SETS["copa"].file).write_text("<html>not found</html>")
    assert main([str(run), "--task-files", str(files), "--tasks", "wic", "copa"]) == 1
    assert "not the file of this set" in capsys.readouterr().err
    assert evaluated == []


def test_an_unknown_tokenizer_is_asked_for(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", tokenizer="unknown").folder
    options = [str(run), "--task-files", str(files), "--tasks", "wic"]
    assert main(options) == 1
    assert "give it with --tokenizer: gpt2, bytes" in capsys.readouterr().err
    assert main([*options, "--tokenizer", "bytes"]) == 0
    assert evaluated == [("wic", None)]


class HubOutOfReach:
    """Stands in for lm-eval's TaskManager."""

    all_subtasks = ("arc_easy", "piqa")
    all_tasks = (*all_subtasks, "mmlu")

    def load(self, names):
        raise ConnectionError(f"no network for {names}")


def test_names_are_checked_before_anything_is_computed(evaluated, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(harness, "_task_manager", lambda _: HubOutOfReach())
    run = make_run(tmp_path / "run").folder
    with pytest.raises(ValueError, match="no task 'arc_eazy'; the nearest are arc_easy"):
        evaluate(run, ["copa", "arc_eazy"])
    with pytest.raises(ValueError, match="'mmlu' is a group of lm-eval's tasks; give the tasks one by one"):
        evaluate(run, ["copa", "mmlu"])
    assert evaluated == []
    evaluate(run, ["piqa", "copa"])
    assert evaluated == [("piqa", None), ("copa", None)]
    with pytest.raises(OSError, match=r"copa could not be read .*no network for \['copa'\].*--task-files"):
        harness._load("copa", None, None, tmp_path)
