"""The evaluation sets that the paper reports, and their files as rows.

lm-eval's tasks are written for the copies on the Hugging Face hub, whose fields differ from the original
files'. Each reader converts the text of a file as its authors published it to the rows of the hub's copy, as
far as a task uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.json_values import decode
from merit_optim.spelling import did_you_mean

Row = dict[str, Any]
Reader = Callable[[str], Iterator[Row]]


def plain(text: str) -> Iterator[Row]:
    """Lines of JSON that already are the hub's rows."""
    # Not splitlines: it also splits at characters that JSON allows within a string.
    return (decode(line) for line in text.split("\n") if line)


def arc(text: str) -> Iterator[Row]:
    """ARC: the question's choices as two lists."""
    for row in plain(text):
        choices = row["question"]["choices"]
        yield {
            "question": row["question"]["stem"],
            "choices": {key: [choice[key] for choice in choices] for key in ("text", "label")},
            "answerKey": row["answerKey"],
        }


def race(text: str) -> Iterator[Row]:
    """RACE: an article's problems as a Python literal, which the task evaluates."""
    for row in plain(text):
        problems = [
            {"question": question, "answer": answer, "options": options}
            for question, answer, options in zip(
                row["questions"], row["answers"], row["options"], strict=True
            )
        ]
        yield {"article": row["article"], "problems": repr(problems)}


def multirc(text: str) -> Iterator[Row]:
    """MultiRC: a row for each proposed answer to each question."""
    for row in plain(text):
        passage = row["passage"]
        for question in passage["questions"]:
            for answer in question["answers"]:
                yield {
                    "paragraph": passage["text"],
                    "question": question["question"],
                    "answer": answer["text"],
                    "label": answer["label"],
                }


def wsc(text: str) -> Iterator[Row]:
    """WSC: the spans as separate fields, with their first letters as in the text."""
    for row in _labelled("false", "true")(text):
        spans = row.pop("target")
        for name in ("span1_text", "span2_text"):
            if spans[name] not in row["text"]:
                spans[name] = spans[name][0].swapcase() + spans[name][1:]
        yield {**row, **spans}


def wikitext(text: str) -> Iterator[Row]:
    """WikiText: a row for each article, which begins with a heading of the first level."""
    page: list[str] = []
    for line in text.split("\n"):
        # " = Title = " but not " = = Section = = "
        words = line.split()
        if words[:1] == ["="] == words[-1:] and len(words) > 2 and words[1] != "=" != words[-2]:
            if "".join(page).strip():
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    if "".join(page).strip():
        yield {"page": "\n".join(page)}


def _labelled(*names: str) -> Reader:
    """A reader of lines whose label is a name, which becomes its number."""

    def read(text: str) -> Iterator[Row]:
        return ({**row, "label": names.index(row["label"])} for row in plain(text))

    return read


@dataclass(frozen=True)
class EvaluationSet:
    """A set with the prompts and metrics of a task of lm-eval, and its file."""

    task: str
    """The task's name in lm-eval."""
    tasks_folder: str
    """The folder of lm-eval's tasks that defines it."""
    file: str
    """The set's file, relative to the folder of task files."""
    read: Reader
    fields: str = ""
    """Fields of a row that the task needs and the reader copies from the file."""

    def rows(self, folder: Path) -> tuple[list[Row], str]:
        """Return the set's rows from its file below ``folder``, and the sha256 of the file."""
        path = folder / self.file
        if not path.is_file():
            raise ValueError(f"there is no file {path}; {folder} must contain {self.file}")
        content = path.read_bytes()
        try:
            items = list(self.read(content.decode()))
            if not items or any(row[name] is None for row in items for name in self.fields.split()):
                raise ValueError("it is empty, or a field is")
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is not the file of this set as published by its authors "
                f"({type(error).__name__}: {error})"
            ) from error
        return items, hashlib.sha256(content).hexdigest()


def _superglue(name: str, read: Reader, fields: str = "", task: str = "") -> EvaluationSet:
    return EvaluationSet(task or name.lower(), "super_glue", f"superglue/{name}/val.jsonl", read, fields)


_HELLASWAG = "activity_label ctx_a ctx_b endings label"

SETS: Mapping[str, EvaluationSet] = {
    "lambada": EvaluationSet("lambada_openai", "lambada", "lambada/lambada_test.jsonl", plain, "text"),
    "wikitext": EvaluationSet("wikitext", "wikitext", "wikitext2/wiki.test.raw", wikitext),
    "arc_easy": EvaluationSet("arc_easy", "arc", "arc/ARC-Easy-Test.jsonl", arc),
    "arc_challenge": EvaluationSet("arc_challenge", "arc", "arc/ARC-Challenge-Test.jsonl", arc),
    "hellaswag": EvaluationSet("hellaswag", "hellaswag", "hellaswag/hellaswag_val.jsonl", plain, _HELLASWAG),
    "race": EvaluationSet("race", "race", "race/race_high_test.jsonl", race),
    "boolq": _superglue("BoolQ", _labelled("false", "true"), "passage question"),
    # The hub's order of the labels; RTE has the next.
    "cb": _superglue("CB", _labelled("entailment", "contradiction", "neutral"), "premise hypothesis"),
    "copa": _superglue("COPA", plain, "premise choice1 choice2 question label"),
    "multirc": _superglue("MultiRC", multirc),
    "rte": _superglue("RTE", _labelled("entailment", "not_entailment"), "premise hypothesis", "sglue_rte"),
    "wic": _superglue("WiC", _labelled("false", "true"), "sentence1 sentence2 word"),
    "wsc": _superglue("WSC", wsc),
}

PAPER_SETS: Mapping[str, tuple[str, ...]] = {
    "fig5": ("lambada", "wikitext"),
    "fig12": ("boolq", "cb", "copa", "multirc", "rte", "wic", "wsc"),
    # The paper only says ARC; its 43.43 for GPT-2 small is typical of such a model on the easy part.
    "table1": ("arc_easy", "copa", "hellaswag", "race", "wic"),
}


def expand(names: Sequence[str]) -> list[str]:
    """Replace the paper's figures and tables by their sets, each once."""
    return list(dict.fromkeys(name for entry in names for name in PAPER_SETS.get(entry, (entry,))))


def check_local(names: Sequence[str]) -> None:
    """Raise ValueError if a name is not a set."""
    for name in names:
        if name not in SETS:
            hint = did_you_mean(name, [*SETS, *PAPER_SETS], otherwise=";")
            raise ValueError(
                f"there is no set {name!r} among the task files{hint} they are {', '.join(SETS)}. Other "
                "tasks of lm-eval can be evaluated without --task-files, from the Hugging Face hub"
            )
