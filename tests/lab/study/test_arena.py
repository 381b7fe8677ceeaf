"""`merit arena`: who is tuned how, which runs count, and that the page says what the runs say."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import fake_runs
import polars as pl
import pytest

from merit_lab.results import statistic
from merit_lab.runs import table
from merit_lab.study import arena
from merit_lab.study.arena import main
from merit_lab.train.list_command import read_list

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(data: Path, out: Path) -> Callable[..., int]:
    """Run an arena with options."""
    common = ["tiny", "--data", str(data), "--out", str(out), *fake_runs.SHORT, "--seeds", "1", "2", "3"]
    return lambda *options: main([*common, *options])


THREE = ("--optimizers", "adamw", "muon", "muon-merit", "--budget", "4")


def names(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/config.json")}


def test_all_are_tuned_alike_and_the_best_is_trained_with_fresh_seeds(
    run: Callable[..., int], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*THREE) == 0
    runs = arena.read(out).runs
    tuned = runs.filter(pl.col("kind") == "tune")
    assert sorted(tuned["slug"].to_list()) == sorted(["adamw", "muon", "muon-merit"] * 4)
    assert tuned["seed"].unique().to_list() == [0]
    best = dict(arena.best_of(runs).select("slug", "number").iter_rows())
    finals = runs.filter(pl.col("kind") == "final")
    assert sorted(finals["run"]) == sorted(
        f"{slug}-final{number:03d}-seed{seed}" for slug, number in best.items() for seed in (1, 2, 3)
    )
    for slug, number in best.items():
        mine = tuned.filter(pl.col("slug") == slug).sort("loss")
        assert mine["number"][0] == number
        chosen = finals.filter(pl.col("slug") == slug)
        assert chosen["optimizer.lr"].unique().to_list() == [mine["optimizer.lr"][0]]

    page = (out / "report" / "table.md").read_text()
    means = dict(finals.group_by("slug").agg(pl.col("loss").mean()).iter_rows())
    shown = re.findall(r"^\| (\w+) \| 3 finished \| (\d\.\d{3}) ", page, flags=re.MULTILINE)
    assert shown == [
        (name, f"{means[slug]:.3f}")
        for slug, name in (("muon-merit", "MuonMERIT"), ("muon", "Muon"), ("adamw", "AdamW"))
    ]
    by_seed = {slug: dict(of.select("seed", "loss").iter_rows()) for (slug,), of in finals.group_by("slug")}
    assert re.search(r"\| AdamW \| [a-z_, ]*\beps\b", page)  # among those that were never tuned
    pair = statistic.simultaneous(by_seed)["muon-merit", "muon"]
    assert f"| {-pair.mean:.4f} | {-pair.high:.4f} to {-pair.low:.4f} | 3 |" in page
    printed = capsys.readouterr()
    assert "MuonMERIT ended lowest" in printed.out
    assert "the budget ran out before all were tuned, which takes 8 or more" in printed.err


def test_an_arena_that_is_stopped_anywhere_ends_as_one_that_is_not(
    run: Callable[..., int], out: Path, fake: fake_runs.Fake
) -> None:
    assert run(*THREE) == 0
    whole = [path.name for path in fake.trained]
    page = (out / "report" / "table.md").read_text()
    for stops in (1, 12, 14):
        shutil.rmtree(out)
        fake.trained.clear()
        fake.stop_after = stops
        assert run(*THREE) == 130
        fake.stop_after = math.inf
        assert run(*THREE) == 0
        assert sorted(path.name for path in fake.trained) == sorted(whole)
        assert (out / "report" / "table.md").read_text() == page


def test_a_contestant_is_added_and_a_larger_budget_goes_on(
    run: Callable[..., int], out: Path, fake: fake_runs.Fake
) -> None:
    assert run("--optimizers", "adamw", "muon", "--budget", "3") == 0
    before = names(out)
    assert run("--add", "muon-merit", "--budget", "3") == 0
    added = names(out) - before
    assert {name.partition("-t")[0].partition("-f")[0] for name in added} == {"muon-merit"}
    text = (out / "report" / "index.html").read_text()
    assert all(name in text for name in ("AdamW", "MuonMERIT"))
    fake.trained.clear()
    assert run("--optimizers", "adamw", "--budget", "5") == 0
    assert {path.name for path in fake.trained if "tune" in path.name} == {"adamw-tune003", "adamw-tune004"}
    assert "MuonMERIT" in (out / "report" / "index.html").read_text()


def test_what_is_level_is_named_and_what_diverges_too(
    run: Callable[..., int], fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = iter(range(10_000))

    def loss(config: fake_runs.TrainConfig) -> float:
        if config.optimizer.name == "adamw" and config.seed == 2:
            return math.nan
        return 3.0 + 0.01 * (next(noise) * 7919 % 13)

    fake.loss = loss
    assert run("--optimizers", "adamw", "muon", "muon-merit", "--budget", "2") == 0
    printed = capsys.readouterr()
    assert re.search(
        r"(Muon|MuonMERIT) ended lowest.*; (Muon|MuonMERIT) cannot be told from it by these seeds",
        printed.out,
    )
    assert "AdamW diverged at step" in printed.out
    fake.trained.clear()
    assert run("--optimizers", "adamw", "muon", "muon-merit", "--budget", "2") == 0
    assert fake.trained == [], "a run that diverged would diverge again"


def test_the_folder_says_which_arena_it_is(
    run: Callable[..., int], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--optimizers", "adamw", "--budget", "2") == 0
    assert run("--optimizers", "muon", "--budget", "2", "--batch", "8") == 1
    assert "holds an arena with another model, text, batch" in capsys.readouterr().err
    assert run("--optimizers", "adamw", "--budget", "3", "--space", "adamw.lr=0.1:1") == 1
    assert "holds adamw with another search space; give the same" in capsys.readouterr().err
    for content in ("[" * 100_000, '{"of": 1}', "\xff"):
        (out / "arena.json").write_text(content)
        assert run("--add", "muon", "--budget", "2") == 1
        assert "is not as `merit arena` wrote it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1" * 31], "--budget is 1111111111111111111111111111111; it must be at most 10000"),
        (["--budget", "0"], "--budget is 0; it must be a whole number of at least 1"),
        (["--seeds", "1" * 31], f"--seeds is {'1' * 31}; it must be at most 9223372036854775807"),
        (["--seeds", "0", "1"], "--seeds has 0, which is --tuning-seed"),
        (["--seeds", "1", "1"], "the seeds are 1, 1; each may be given only once"),
        (["--optimizers", "adamw", "adamw"], "the optimizers are adamw, adamw; each may be given only once"),
        (["--optimizers", "mertt"], "did you mean 'merit'?"),
        (["--optimizers", "a=b"], "cannot parse the contestant 'a=b'"),
        (["--optimizers", "adamw,lr=none"], "has lr=none; it must be a number above 0"),
        (["--space", "muon.lr=0.1"], "names muon, which is none of the contestants: adamw"),
        (["--measure.validation-every", "0"], "a study compares validation losses"),
        (["--optimizer.lr", "0.1"], "--optimizer.lr 0.1 is of a single run; `merit arena` takes"),
        (["--add", "muon"], "holds no arena; `merit arena ... --out"),
    ],
)
def test_bad_input_is_refused_before_training(
    options: list[str],
    message: str,
    run: Callable[..., int],
    fake: fake_runs.Fake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--optimizers", "adamw", *options) == 1
    assert message in capsys.readouterr().err
    assert fake.trained == []


def test_missing_runs_are_listed_for_another_machine(
    run: Callable[..., int],
    out: Path,
    fake: fake_runs.Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "runs.jsonl"
    for num in (4, 6):  # the tuning runs, then the final ones
        assert run("--optimizers", "adamw", "muon", "--budget", "2", "--list", str(path)) == 0
        listed = read_list(path, out)
        assert len(listed) == num
        assert f"{num} of {num} runs are missing" in capsys.readouterr().out
        for folder, config in listed.items():
            fake_runs.write(config, folder, fake_runs.valley(config))
    assert run("--optimizers", "adamw", "muon", "--budget", "2") == 0
    assert fake.trained == []
    assert table.read(out).runs.height == 10
