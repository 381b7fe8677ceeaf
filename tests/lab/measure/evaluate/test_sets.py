"""Files of the sets as lm-eval's tasks expect them."""

import ast
import hashlib
import json

import pytest

from merit_lab.measure.evaluate.sets import PAPER_SETS, SETS, check_local, expand

# The sizes that are published with the sets; WikiText-2's test part has 62 articles.
NUM_ROWS = {
    "lambada": 5153,
    "wikitext": 62,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "hellaswag": 10042,
    "race": 1045,
    "boolq": 3270,
    "cb": 56,
    "copa": 100,
    "multirc": 4848,
    "rte": 277,
    "wic": 638,
    "wsc": 104,
}


@pytest.fixture
def rows_of(tmp_path):
    """The rows of a set whose file has some text."""

    def read(name, text):
        path = tmp_path / SETS[name].file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return SETS[name].rows(tmp_path)[0]

    return read


@pytest.mark.parametrize("name", SETS)
def test_real_files_are_read_whole(name, task_files) -> None:
    rows, sha256 = SETS[name].rows(task_files)
    assert len(rows) == NUM_ROWS[name]
    assert sha256 == hashlib.sha256((task_files / SETS[name].file).read_bytes()).hexdigest()


def test_arc_has_its_choices_in_lists(rows_of) -> None:
    choices = [{"text": "ice", "label": "1"}, {"text": "steam", "label": "2"}]
    line = {"id": "x", "question": {"stem": "Which is hot?", "choices": choices}, "answerKey": "2"}
    assert rows_of("arc_easy", json.dumps(line) + "\n") == [
        {
            "question": "Which is hot?",
            "choices": {"text": ["ice", "steam"], "label": ["1", "2"]},
            "answerKey": "2",
        }
    ]


def test_race_has_its_problems_in_a_string(rows_of) -> None:
    line = {"article": "A", "questions": ["Q's?"], "answers": ["B"], "options": [["w", "x", "y", "z"]]}
    (row,) = rows_of("race", json.dumps(line))
    problem = {"question": "Q's?", "answer": "B", "options": ["w", "x", "y", "z"]}
    assert row["article"] == "A"
    assert ast.literal_eval(row["problems"]) == [problem]


@pytest.mark.parametrize(
    ("name", "label", "number"),
    [("boolq", "false", 0), ("wic", "true", 1), ("cb", "neutral", 2), ("rte", "not_entailment", 1)],
)
def test_labels_have_the_hubs_numbers(name, label, number) -> None:
    line = json.dumps({"text": "one\u2028line", "label": label}, ensure_ascii=False)
    assert list(SETS[name].read(line)) == [{"text": "one\u2028line", "label": number}]


def test_multirc_has_a_row_for_each_answer(rows_of) -> None:
    answers = [{"text": "yes", "label": 1}, {"text": "no", "label": 0}]
    passage = {"text": "P", "questions": [{"question": "Q?", "answers": answers}]}
    rows = rows_of("multirc", json.dumps({"passage": passage}))
    assert rows == [
        {"paragraph": "P", "question": "Q?", "answer": "yes", "label": 1},
        {"paragraph": "P", "question": "Q?", "answer": "no", "label": 0},
    ]


def test_a_wsc_span_has_the_first_letter_that_stands_in_the_text(rows_of) -> None:
    span = {"span1_index": 2, "span1_text": "The table", "span2_index": 5, "span2_text": "it"}
    line = {"text": "Turn over the table because it fell", "label": "true", "target": span}
    (row,) = rows_of("wsc", json.dumps(line))
    assert row == {"text": line["text"], "label": 1, **span, "span1_text": "the table"}


def test_an_article_of_wikitext_begins_with_a_heading_of_the_first_level(rows_of) -> None:
    text = " \n = One = \n \n a = b \n = = Part = = \n c \n = Two words = \n d \n "
    pages = [row["page"] for row in rows_of("wikitext", text)]
    assert pages == [" = One = \n \n a = b \n = = Part = = \n c ", " = Two words = \n d \n "]


def test_wikitext_is_cut_into_articles_and_nothing_is_lost(task_files) -> None:
    real = [row["page"] for row in SETS["wikitext"].rows(task_files)[0]]
    whole = (task_files / SETS["wikitext"].file).read_text()
    assert "\n".join(real) == whole.removeprefix(" \n")
    # lm-eval's own rule for the articles of this file.
    for page in real:
        heading, *others = (
            line.replace("= = =", "===").replace("= =", "==").strip() for line in page.split("\n")
        )
        assert heading.startswith("= ")
        assert heading.endswith(" =")
        assert not any(line.startswith("= ") and line.endswith(" =") for line in others)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "text", ["", "no JSON", "[" * 100_000, "[1, 2]", '{"label": "entailment"}', '{"text": null}']
)
def test_another_file_is_refused(rows_of, name, text) -> None:
    if name == "wikitext" and text.strip():
        return  # any text is an article
    with pytest.raises(ValueError, match=r"is not the file of this set as published by its authors \("):
        rows_of(name, text)


def test_names() -> None:
    assert expand(["table1", "wic", "fig5"]) == [*PAPER_SETS["table1"], "lambada", "wikitext"]
    check_local([name for names in PAPER_SETS.values() for name in names])
    with pytest.raises(ValueError, match=r"no set 'hellaswg' .* did you mean 'hellaswag'\? they are lambada"):
        check_local(["hellaswg"])
