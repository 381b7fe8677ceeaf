"""Convert evaluation sets as published by their authors to the rows that lm-eval's tasks expect.

lm-eval's tasks are written for the copies on the Hugging Face hub, whose fields differ from the original
files'. Each reader converts the text of a file to the rows of the hub's copy, as far as a task uses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Reader = Callable[[str], Iterator[Row]]

_ENTAILMENT = ("entailment", "contradiction", "neutral")  # the hub's order; RTE has the next
_ENTAILMENT_OR_NOT = ("entailment", "not_entailment")
_TRUTH = ("false", "true")


def plain(text: str) -> Iterator[Row]:
    """Lines of JSON that already are the hub's rows."""
    # Not splitlines: it also splits at characters that JSON allows within a string.
    return (json.loads(line) for line in text.split("\n") if line)


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
    for row in _labelled(_TRUTH)(text):
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


def _labelled(names: tuple[str, ...]) -> Reader:
    """A reader of lines whose label is a name, which becomes its number."""

    def read(text: str) -> Iterator[Row]:
        return ({**row, "label": names.index(row["label"])} for row in plain(text))

    return read


boolq = wic = _labelled(_TRUTH)
cb = _labelled(_ENTAILMENT)
rte = _labelled(_ENTAILMENT_OR_NOT)
