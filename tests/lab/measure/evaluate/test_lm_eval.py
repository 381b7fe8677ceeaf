"""lm-eval on an exported checkpoint gives the numbers that the model here does on the same files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from run_cases import TINY, make_run, random_model

from merit_lab.measure.evaluate.command import Evaluate, evaluate, main
from merit_lab.measure.evaluate.sets import SETS
from merit_lab.train.snapshot import Snapshot

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra eval)")

LIMIT = 24  # of the sets whose numbers are compared
FEW = 2


def first(run, limit, task_files, *tasks):
    """The results on the first items of some sets."""
    measured = evaluate(Evaluate(run=run.folder, tasks=tasks, task_files=task_files, limit=limit))
    return {name: measured.results[f"{name}-first-{limit}"] for name in tasks}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture(scope="module")
def results(run, task_files):
    return first(run, LIMIT, task_files, "lambada", "arc_easy")


@pytest.fixture(scope="module")
def few(run, task_files):
    """Of all sets."""
    return first(run, FEW, task_files, *SETS)


@torch.no_grad()
def log_likelihood(model, context: str, continuation: str) -> tuple[float, bool]:
    """Of a continuation's bytes, and whether each was the likeliest."""
    tokens = torch.tensor([list((context + continuation).encode())])
    assert tokens.shape[1] <= model.config.context
    predictions = model(tokens[:, :-1]).logits[0].log_softmax(-1)[-len(continuation.encode()) :]
    wanted = tokens[0, -len(continuation.encode()) :]
    chosen = predictions.gather(1, wanted[:, None])
    return chosen.sum().item(), bool((predictions.argmax(-1) == wanted).all())


def items(task_files, name, limit=LIMIT) -> list[dict]:
    with (task_files / SETS[name].file).open() as file:
        return [json.loads(line) for line, _ in zip(file, range(limit), strict=False)]


def test_lambada_by_the_model_itself(results, task_files) -> None:
    model = random_model(TINY, seed=10)
    likelihoods, hits = [], []
    for item in items(task_files, "lambada"):
        context, _, word = item["text"].rpartition(" ")
        likelihood, is_greedy = log_likelihood(model, context, " " + word)
        likelihoods.append(likelihood)
        hits.append(is_greedy)
    found = results["lambada"]
    assert found["perplexity"] == pytest.approx(math.exp(-sum(likelihoods) / LIMIT), rel=1e-4)
    assert found["acc"] == sum(hits) / LIMIT
    assert found["perplexity_stderr"] > 0


def test_arc_by_the_model_itself(results, task_files) -> None:
    model = random_model(TINY, seed=10)
    hits, hits_by_length = [], []
    for item in items(task_files, "arc_easy"):
        question, choices = item["question"]["stem"], item["question"]["choices"]
        prompt = f"Question: {question}\nAnswer:"
        scores = [log_likelihood(model, prompt, f" {choice['text']}")[0] for choice in choices]
        by_length = [score / len(choice["text"]) for score, choice in zip(scores, choices, strict=True)]
        hits.append(choices[scores.index(max(scores))]["label"] == item["answerKey"])
        hits_by_length.append(choices[by_length.index(max(by_length))]["label"] == item["answerKey"])
    found = results["arc_easy"]
    assert found["acc"] == pytest.approx(sum(hits) / LIMIT)
    assert found["acc_norm"] == pytest.approx(sum(hits_by_length) / LIMIT)


@torch.no_grad()
def test_wikitext_by_the_model_itself(few, task_files) -> None:
    """Each token once, in windows of the context after a newline; words are those of the text as it was."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    model = random_model(TINY, seed=10)
    total, num_words = 0.0, 0
    for row in SETS["wikitext"].rows(task_files)[0][:FEW]:
        tokens = torch.tensor([10, *wikitext_detokenizer(row).encode()])
        for begin in range(0, len(tokens) - 1, TINY.context):
            end = min(begin + TINY.context, len(tokens) - 1)
            window = tokens[max(0, end - TINY.context) : end + 1]
            predictions = model(window[None, :-1]).logits[0].log_softmax(-1)
            total += predictions.gather(1, window[1:, None])[begin - end :].sum().item()
        num_words += len(row["page"].split()) + 2  # lm-eval also counts what is before and after
    assert few["wikitext"]["word_perplexity"] == pytest.approx(math.exp(-total / num_words), rel=1e-4)


def test_every_set_has_its_measure(few, task_files) -> None:
    for name, result in few.items():
        assert result["items"] == min(FEW, len(SETS[name].rows(task_files)[0])), name
        assert math.isfinite(result["word_perplexity" if name == "wikitext" else "acc"]), name


@pytest.mark.parametrize("missing", [0, 1])
def test_prompts_that_were_cut_are_counted(missing, tmp_path, task_files) -> None:
    (item,) = items(task_files, "lambada", 1)
    # The last byte is predicted and never read.
    context = len(item["text"].encode()) - 1 - missing
    run = make_run(tmp_path / "run", model=replace(TINY, context=context))
    assert first(run, 1, task_files, "lambada")["lambada"]["truncated"] == missing


def test_an_answer_longer_than_the_context_is_refused(tmp_path, task_files, capsys) -> None:
    run = make_run(tmp_path / "run", model=replace(TINY, context=32))
    command = [str(run.folder), "--task-files", str(task_files), "--limit", "3", "--tasks"]
    assert main([*command, "hellaswag"]) == 1
    assert "tokens, which is longer than the model's context of 32" in capsys.readouterr().err
    assert main([*command, "wic"]) == 0
    assert "wic-first-3: 6 prompts exceeded the context and were truncated" in capsys.readouterr().out


def test_a_model_that_diverged_has_no_accuracy(tmp_path, task_files, capsys, monkeypatch) -> None:
    load_model = Snapshot.load_model

    def diverged(*arguments) -> torch.nn.Module:
        model = load_model(*arguments)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1e30)  # finite still, as after one step with a rate far too large
        return model

    monkeypatch.setattr(Snapshot, "load_model", diverged)
    run = make_run(tmp_path / "run")
    assert main([str(run.folder), "--task-files", str(task_files), "--limit", "2", "--tasks", "copa"]) == 1
    printed = capsys.readouterr().err
    assert "copa: the model's logits are NaN, so the run diverged" in printed
    assert "choose an earlier checkpoint with --checkpoint" in printed
