"""Files of runs give back what was put in, and are found where the runs' directories would be."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.runs import Excerpt, Run, archive, archive_of, holds_run, run_folders
from merit_lab.runs.flat_fields import fields_of, maker_of, path_of

LINES = [
    {"kind": "event", "step": 0, "what": "started", "message": 'a "word", and é'},
    {"kind": "train", "step": 1, "loss": math.nan, "lr": -0.0, "tokens": 2**60 + 1, "mfu": None},
    {"kind": "train", "step": 2, "loss": math.inf, "lr": 1.0, "tokens": 7, "mfu": -math.inf},
    {"kind": "attention", "step": 2, "max_logits": [[1.0, 2.0], [3.0, math.nan]], "entropy": None},
    {"kind": "update", "step": 2, "parameters": {"head.weight": {"clipped": 0.5}, "0": {"clipped": 1}}},
    {"kind": "update", "step": 2, "parameters": {}},
    {"kind": "note", "step": 2},
    {"kind": "event", "step": 2, "what": "finished", "message": ""},
]

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
dicts = st.dictionaries(st.text(max_size=5), values, max_size=4)


def exactly(value: object) -> str:
    """Text that tells types, NaN and the sign of zero."""
    return json.dumps(value, sort_keys=True)


def run_of(name: str, lines: list[dict[str, object]] = LINES, **config: object) -> Excerpt:
    return Excerpt(name, {"data": "enwik8", **config}, {"started": "2026-01-01"}, lines)


@given(dicts)
def test_fields_give_back_the_value(value: dict[str, object]) -> None:
    names, items = zip(*fields_of(value), strict=True)
    assert len(set(names)) == len(names)
    make = maker_of([path_of(name) for name in names])
    assert exactly(make(iter(items))) == exactly(value)


@given(
    st.lists(st.tuples(st.sampled_from(["train", "update", "config"]), st.integers(0, 2**62), dicts)), dicts
)
def test_any_lines_are_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory,
    measured: list[tuple[str, int, dict[str, object]]],
    config: dict[str, object],
) -> None:
    lines = [{**rest, "kind": kind, "step": step} for kind, step, rest in measured]
    path = tmp_path_factory.mktemp("any") / "runs.parquet"
    archive.add(path, [Excerpt("one", config, {}, lines), Excerpt("two", {}, config, lines[::-1])])
    assert exactly(archive.read_head(path, "one")) == exactly((config, {}))
    assert exactly(archive.read_head(path, "two")) == exactly(({}, config))
    assert exactly(list(archive.read_lines(path, "one"))) == exactly(lines)
    assert exactly(list(archive.read_lines(path, "two"))) == exactly(lines[::-1])


def test_columns_are_plain_to_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    archive.add(path, [run_of("one")])
    rows = pq.read_table(path).to_pylist()
    assert rows[0] == {
        "run": "one",
        "line": 0,
        "kind": "config",
        "step": 0,
        "field": "data",
        "value": None,
        "json": '"enwik8"',
    }
    found = {(row["step"], row["field"]): row["value"] for row in rows}
    assert found[2, "max_logits[1][0]"] == 3.0
    assert found[2, 'parameters["head.weight"].clipped'] == 0.5
    assert found[2, "tokens"] == 7.0
    assert math.isnan(found[1, "loss"])


def test_runs_are_added_and_those_that_are_there_stay(tmp_path: Path) -> None:
    path = tmp_path / "study" / "runs.parquet"
    archive.add(path, [run_of("b")])
    archive.add(path, [run_of("a", LINES[:2], seed=1), run_of("c", [])])
    assert archive.names_in(path) == ["b", "a", "c"]
    assert exactly(list(archive.read_lines(path, "b"))) == exactly(LINES)
    assert exactly(list(archive.read_lines(path, "a"))) == exactly(LINES[:2])
    assert list(archive.read_lines(path, "c")) == []


def test_a_run_is_not_added_twice(tmp_path: Path) -> None:
    archive.add(tmp_path / "runs.parquet", [run_of("one", seed=1)])
    with pytest.raises(ValueError, match=r"runs\.parquet already has a run one; choose another file"):
        archive.add(tmp_path / "runs.parquet", [run_of("one", seed=2)])
    assert Run.open(tmp_path / "one").config["seed"] == 1


def test_a_file_that_others_change_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"

    def runs():  # type: ignore[no-untyped-def]
        yield run_of("ours")
        archive.add(path, [run_of("theirs")])

    with pytest.raises(ValueError, match="changed by another process in the meantime; repeat"):
        archive.add(path, runs())
    assert archive.names_in(path) == ["theirs"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    pq.write_table(pa.table({"run": ["one"]}), path)
    with pytest.raises(ValueError, match=r"runs\.parquet has other columns .* `merit keep`"):
        run_folders(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    archive.add(path, [run_of("one")])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"runs\.parquet cannot be read .* restore the file"):
        run_folders(tmp_path)


@pytest.mark.parametrize("given_path", ["study", "study/runs", "study/runs.parquet"])
def test_runs_are_listed_by_name(tmp_path: Path, given_path: str) -> None:
    file = tmp_path / "study" / "runs.parquet"
    archive.add(file, [run_of("b"), run_of("a")])
    assert archive_of(tmp_path / given_path) == file
    assert run_folders(tmp_path / given_path) == [file / "a", file / "b"]


@pytest.mark.parametrize("given_path", ["study/one", "study/runs/one", "study/runs.parquet/one"])
def test_a_kept_run_opens_where_its_directory_would_be(tmp_path: Path, given_path: str) -> None:
    archive.add(tmp_path / "study" / "runs.parquet", [run_of("one", seed=3)])
    assert holds_run(tmp_path / given_path)
    assert not holds_run(tmp_path / given_path.replace("one", "other"))
    assert run_folders(tmp_path / given_path) == [tmp_path / given_path]
    run = Run.open(tmp_path / given_path)
    assert (run.name, run.status, run.is_kept) == ("one", "finished", True)
    assert run.config == {"data": "enwik8", "seed": 3}
    assert [line["step"] for line in run.metrics("update")] == [2, 2]


def test_a_file_of_another_name_is_read_too(tmp_path: Path) -> None:
    archive.add(tmp_path / "elsewhere.parquet", [run_of("one")])
    (folder,) = run_folders(tmp_path / "elsewhere.parquet")
    assert Run.open(folder).outcome == "finished"


def test_a_run_directory_goes_before_what_is_kept_of_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", {"seed": 5}, {})
    archive.add(tmp_path / "runs.parquet", [run_of("one"), run_of("two")])
    assert run_folders(tmp_path) == [run.folder, tmp_path / "runs.parquet" / "two"]
    assert Run.open(run.folder).config == {"seed": 5}
    assert Run.open(tmp_path / "runs.parquet" / "one").config == {"data": "enwik8"}


def test_a_kept_run_has_no_checkpoints_and_says_so(tmp_path: Path) -> None:
    archive.add(tmp_path / "runs.parquet", [run_of("one")])
    with pytest.raises(
        ValueError, match=r"has only the record of one and no checkpoints; give its run directory"
    ):
        _ = Run.open(tmp_path / "one").checkpoints


def test_a_run_is_not_begun_where_one_is_kept(tmp_path: Path) -> None:
    archive.add(tmp_path / "runs.parquet", [run_of("one")])
    with pytest.raises(FileExistsError, match=r"runs\.parquet keeps a run one already"):
        Run.create(tmp_path / "one", {}, {})
