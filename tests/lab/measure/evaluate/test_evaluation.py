"""What is evaluated, what is known already, and what is refused; lm-eval itself is not needed."""

import json
import logging
from types import SimpleNamespace

import pytest
from run_cases import make_run

from merit_lab.measure.evaluate import evaluation, harness
from merit_lab.measure.evaluate.command import main
from merit_lab.measure.evaluate.evaluation import evaluate
from merit_lab.measure.evaluate.harness import Outcome
from merit_lab.measure.evaluate.sets import SETS
from merit_lab.runs import Metric, read_results


class CountingHarness:
    """A fake of lm-eval that records what was evaluated."""

    evaluated: list[tuple[str, int | None]]

    def __init__(self, checkpoint, *, prefix, **_) -> None:
        assert (checkpoint / "model.safetensors").exists()
        assert (checkpoint / "tokenizer.json").exists()
        assert prefix == ord("\n")

    def evaluate(self, name, limit) -> Outcome:
        if name == "rte":
            raise ValueError("rte has an answer that is too long")
        self.evaluated.append((name, limit))
        metric = Metric(value=float(len(self.evaluated)), stderr=None, higher_is_better=True)
        return Outcome(metrics={"acc": metric}, num_items=limit or 99, num_truncated=3, version=1.0)


@pytest.fixture
def evaluated(monkeypatch) -> list[tuple[str, int | None]]:
    monkeypatch.setattr(evaluation, "Harness", CountingHarness)
    monkeypatch.setattr(evaluation, "package_versions", lambda: {"lm-eval": "9.9"})
    monkeypatch.setattr(CountingHarness, "evaluated", [], raising=False)
    return CountingHarness.evaluated


# A row of each set that is named here.
ROWS = {
    "lambada": {"text": "a b"},
    "wikitext": " = Title = ",
    "arc_easy": {"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}, "answerKey": "A"},
    "boolq": {"passage": "a", "question": "b", "label": "true"},
    "copa": {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 0},
    "rte": {"premise": "a", "hypothesis": "b", "label": "entailment"},
    "wic": {"sentence1": "a", "sentence2": "a b", "word": "a", "label": "false"},
}


@pytest.fixture
def files(tmp_path):
    """Files of these sets, with a row each."""
    for name, row in ROWS.items():
        path = tmp_path / "sets" / SETS[name].file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row if isinstance(row, str) else json.dumps(row))
    return tmp_path / "sets"


def test_existing_results_are_not_computed_again(evaluated, files, tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20))
    first = evaluate(run.folder, ["wic", "copa"], task_files=files)
    assert evaluated == [("wic", None), ("copa", None)]
    again = evaluate(run.folder, ["copa", "boolq", "wic"], task_files=files)
    assert evaluated[2:] == [("boolq", None)]
    assert [result.name for result in again] == ["copa", "boolq", "wic"]
    assert [again[2], again[0]] == first
    assert read_results(run, 20) == {result.name: result for result in again}
    assert read_results(run, 10) == {}


def test_a_run_that_cannot_take_results_is_not_evaluated(evaluated, files, tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10,))
    run.evaluations.touch()
    with pytest.raises(OSError, match="evaluate is a file, but a folder is needed"):
        evaluate(run.folder, ["wic"], task_files=files)
    assert evaluated == []


@pytest.mark.usefixtures("evaluated")
def test_a_record_that_does_not_name_its_data_is_evaluated_with_a_tokenizer(files, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    (run.folder / "environment.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer of data is unknown.*give it with --tokenizer"):
        evaluate(run.folder, ["wic"], task_files=files)
    [result] = evaluate(run.folder, ["wic"], task_files=files, tokenizer="bytes")
    assert result.environment["data"] == {}


def test_other_inputs_are_computed(evaluated, files, tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20))
    evaluate(run.folder, ["wic"], task_files=files)
    evaluate(run.folder, ["wic"], task_files=files, limit=5)
    evaluate(run.folder, ["wic"], task_files=files, step=10)
    (files / SETS["wic"].file).write_text(json.dumps({**ROWS["wic"], "edition": 2}))
    evaluate(run.folder, ["wic"], task_files=files)
    evaluate(run.folder, ["wic"])
    assert evaluated == [("wic", None), ("wic", 5), ("wic", None), ("wic", None), ("wic", None)]
    evaluate(run.folder, ["wic"], task_files=files, limit=5, step=10)
    evaluate(run.folder, ["wic"])
    assert len(evaluated) == 6


def test_what_was_done_before_a_failure_is_kept(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    command = [str(run.folder), "--task-files", str(files), "--tasks", "wic", "rte", "copa"]
    assert main(command) == 1
    assert "merit evaluate: rte has an answer that is too long" in capsys.readouterr().err
    assert evaluated == [("wic", None)]
    assert list(read_results(run, 10)) == ["wic"]


def test_the_record_says_what_it_follows_from(evaluated, files, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    evaluate(run.folder, ["arc_easy"], task_files=files, limit=7)
    content = json.loads((run.folder / "evaluate/step-00000010/arc_easy-first-7.json").read_text())
    inputs = content["inputs"]
    assert inputs["data"] == {
        "from": "file",
        "file": "arc/ARC-Easy-Test.jsonl",
        "sha256": SETS["arc_easy"].rows(files)[1],
    }
    manifest = json.loads((run.checkpoints / "step-00000010" / "manifest.json").read_text())
    assert inputs["checkpoint"] == manifest["files"]
    assert inputs["task"] == "arc_easy"
    assert inputs["limit"] == 7
    assert inputs["lm_eval"] == content["environment"]["versions"]["lm-eval"] == "9.9"
    assert inputs["prefix_token"] == ord("\n")
    assert content["environment"]["device"]["type"] in ("cpu", "cuda")
    assert content["metrics"]["acc"] == {"value": 1.0, "stderr": None, "higher_is_better": True}
    assert evaluated == [("arc_easy", 7)]


def test_the_command_shows_a_table(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run.folder), "--task-files", str(files), "--tasks", "fig5", "--limit", "4"]) == 0
    assert evaluated == [("lambada", 4), ("wikitext", 4)]
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["lambada", "acc", "4", "1"] in rows
    assert ["wikitext", "acc", "4", "2"] in rows
    assert "lambada: 3 prompts exceeded the context and were truncated" in shown
    assert f"The results are in {run.folder}/evaluate/step-00000010" in shown


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--tasks", "lambda", "--task-files", "{files}"],
            "no set 'lambda' among the task files; did you mean",
        ),
        (["--limit", "0", "--task-files", "{files}"], "limit is 0; it must be a whole number of at least 1"),
        (["--task-files", "{files}/arc"], "must contain lambada/lambada_test.jsonl"),
        (["--checkpoint", "3", "--task-files", "{files}"], "no checkpoint of step 3; available steps: 10"),
        (["--tokenizer", "gpt2"], "leave --tokenizer out"),
    ],
)
def test_refusals(evaluated, files, tmp_path, capsys, options, complaint) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run.folder), *(option.format(files=files) for option in options)]) == 1
    assert complaint in capsys.readouterr().err
    assert evaluated == []


def test_a_file_that_cannot_be_read_is_known_before_the_first_set(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    (files / SETS["copa"].file).write_text("<html>not found</html>")
    assert main([str(run.folder), "--task-files", str(files), "--tasks", "wic", "copa"]) == 1
    assert "copa" in (error := capsys.readouterr().err.lower())
    assert "not the file of this set" in error
    assert evaluated == []


def test_an_unknown_tokenizer_is_refused(evaluated, files, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", tokenizer="unknown")
    command = [str(run.folder), "--task-files", str(files), "--tasks", "wic"]
    assert main(command) == 1
    assert "give it with --tokenizer: gpt2, bytes" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "bytes"]) == 0
    assert evaluated == [("wic", None)]


class HubOutOfReach:
    """Stands in for lm-eval's TaskManager."""

    all_subtasks = ("arc_easy", "piqa")
    all_tasks = (*all_subtasks, "mmlu")

    def load(self, names):
        raise ConnectionError(f"no network for {names}")


def test_names_are_checked_before_anything_is_computed(evaluated, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(harness, "_task_manager", lambda _: HubOutOfReach())
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="no task 'arc_eazy'; the nearest are arc_easy"):
        evaluate(run.folder, ["copa", "arc_eazy"])
    with pytest.raises(ValueError, match="'mmlu' is a group of lm-eval's tasks; give the tasks one by one"):
        evaluate(run.folder, ["copa", "mmlu"])
    assert evaluated == []
    evaluate(run.folder, ["piqa", "copa"])
    assert evaluated == [("piqa", None), ("copa", None)]


def test_numbers_are_taken_with_their_filters_and_errors() -> None:
    found = {
        "alias": "x",
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "f1,strict": 0.25,
        "f1_stderr,strict": "N/A",
        "f1,loose": 0.75,
        "f1_stderr,loose": 0.2,
        "sample_len": 4,
    }
    assert harness._metrics(found, {"acc": True}) == {
        "acc": Metric(value=0.5, stderr=0.1, higher_is_better=True),
        "f1,strict": Metric(value=0.25, stderr=None, higher_is_better=None),
        "f1,loose": Metric(value=0.75, stderr=0.2, higher_is_better=None),
    }


def test_a_task_has_no_examples_in_its_prompts_and_no_cut_ones_of_the_task_before(monkeypatch) -> None:
    """Whatever its definition asks for: texts that are read in windows count no prompts of their own."""
    settings, seen = {"num_fewshot": 5}, []
    task = SimpleNamespace(task_name="x", set_config=lambda key, value: settings.update({key: value}))

    def run_lm_eval(**_):
        seen.append(dict(settings))
        return {
            "results": {"x": {"acc,none": 0.5}},
            "higher_is_better": {"x": {"acc": True}},
            "n-samples": {"x": {"effective": 2}},
            "versions": {"x": 1},
        }

    monkeypatch.setattr(harness, "import_module", lambda _: SimpleNamespace(evaluate=run_lm_eval))
    monkeypatch.setattr(harness.Harness, "_load", lambda *_: {"tasks": {"x": task}})
    loaded = object.__new__(harness.Harness)
    loaded._lm, loaded._progress = SimpleNamespace(num_truncated=3), SimpleNamespace(end=lambda: None)
    found = loaded.evaluate("x", None)
    assert seen == [{"num_fewshot": 0}]
    assert (found.num_items, found.num_truncated) == (2, 0)


def test_the_hubs_attempts_are_not_shown() -> None:
    log = logging.getLogger("huggingface_hub.utils._http")
    with harness._quiet():
        assert not log.isEnabledFor(logging.WARNING)
        assert log.isEnabledFor(logging.ERROR)
    assert log.isEnabledFor(logging.WARNING)


def test_without_a_network_the_way_out_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(harness, "_task_manager", lambda _: HubOutOfReach())
    hub = object.__new__(harness.Harness)
    hub._task_files = None
    with pytest.raises(OSError, match=r"copa could not be read .*no network for \['copa'\].*--task-files"):
        hub._load("copa", None, tmp_path)


def test_a_missing_package_is_named_with_the_way_out(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(harness, "_PACKAGES", ("lm-eval-of-another-world",))
    run = make_run(tmp_path / "run")
    assert main([str(run.folder)]) == 1
    complaint = capsys.readouterr().err
    assert "needs the package lm-eval-of-another-world, which is not installed" in complaint
    assert "pip install 'merit-optim[eval]'" in complaint
