"""`merit compare`: which runs are trained, which are reused, and which options are refused."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from merit_lab.compare import command as compare_command
from merit_lab.compare.plan import parse_learning_rates, plan
from merit_lab.data import Dataset
from merit_lab.models import PRESETS
from merit_lab.runs import MetricsWriter, Run, lock
from merit_lab.study import runner
from merit_lab.study.trial import Trial
from merit_lab.train import Interrupted, TrainConfig
from merit_lab.train.parallel import Ranks
from merit_optim import cli

main = compare_command.main


def test_trains_each_optimizer_and_seed_once_and_reports(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--optimizers", "lamb", "merit", "--seeds", "0", "1", "--lr", "merit=2e-2"]
    assert main(command) == 0
    output, progress = capsys.readouterr()
    assert re.match(r"4 runs, \S+ tokens in all: about \d+ s here\n", progress)
    names = [f"{prefix}-seed{seed}" for seed in (0, 1) for prefix in ("lamb-lr0.01", "merit-lr0.02")]
    begun = [line.split()[3] for line in progress.splitlines() if line.startswith("[")]
    assert begun == names
    assert all(Run.open(tmp_path / "out" / name).status == "finished" for name in names)
    page = tmp_path / "out" / "report" / "index.html"
    assert output.endswith(f"The page: {page}\n")
    assert "2 finished" in output
    assert "2 seeds each, p = " in output
    assert page.exists()

    before = {name: (tmp_path / "out" / name / "metrics.jsonl").read_bytes() for name in names}
    assert main(command) == 0
    progress = capsys.readouterr().err
    assert progress.count("is already done") == 4
    assert "tokens in all" not in progress
    assert before == {name: (tmp_path / "out" / name / "metrics.jsonl").read_bytes() for name in names}


def test_runs_of_merit_keep_are_not_repeated(
    command: list[str],
    tmp_path: Path,
    keep_only: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command += ["--optimizers", "merit", "--seeds", "0", "1"]
    assert main(command) == 0
    page = tmp_path / "out" / "report" / "table.md"
    before = page.read_text().split("|")[:5]  # merit keep stores fewer digits
    page.unlink()
    keep_only(tmp_path / "out")
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().err.count("is already done") == 2
    assert page.read_text().split("|")[:5] == before
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report", "runs.parquet"}

    assert main([*command, "--batch", "8"]) == 1
    assert f"{tmp_path / 'out' / 'runs.parquet'}/merit-lr0.009-seed0 holds a run with a different batch" in (
        capsys.readouterr().err
    )


def test_a_diverged_run_is_reported_and_not_repeated(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--optimizers", "adamw", "merit", "--lr", "adamw=1e30"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "1 diverged" in output
    assert "MERIT ended at a validation loss of" in output
    assert "AdamW diverged (at step" in output
    assert main(command) == 0
    assert "adamw-lr1e+30-seed0 diverged before and is not repeated" in capsys.readouterr().err


def test_each_learning_rate_of_an_optimizer_is_a_separate_run(data: Path, tmp_path: Path) -> None:
    base = TrainConfig(data=data, model=PRESETS["tiny"])
    rates = parse_learning_rates(["merit=1e-2", "merit=2e-2"])
    planned = plan(base, tmp_path, optimizers=["lamb", "merit"], seeds=[3], learning_rates=rates)
    assert [trial.folder.name for trial in planned] == [
        "lamb-lr0.01-seed3",
        "merit-lr0.01-seed3",
        "merit-lr0.02-seed3",
    ]
    assert [trial.config.optimizer.lr for trial in planned] == [0.01, 0.01, 0.02]
    assert {trial.config.seed for trial in planned} == {3}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "begin"),
        (["started"], "resume"),
        (["started", "interrupted"], "resume"),
        (["started", "interrupted", "resumed"], "resume"),
        (["started", "finished"], None),
        (["started", "diverged"], None),
    ],
)
def test_the_run_directory_decides_whether_a_run_starts_or_resumes(
    events: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(data=tmp_path).resolve(None)
    folder = tmp_path / "run"
    if events:
        run = Run.create(folder, config.to_dict(), {})
        with MetricsWriter(run.metrics_path) as metrics:
            for event in events:
                metrics.write({"kind": "event", "step": 0, "what": event, "message": ""})
    calls: list[str] = []

    def train(_config: TrainConfig, _folder: Path, *, resume: bool, **_: object) -> None:
        calls.append("resume" if resume else "begin")

    monkeypatch.setattr(runner, "train", train)
    runner.carry_out([Trial(folder, config)], Ranks.join())
    assert calls == ([expected] if expected else [])


def test_a_run_in_use_by_another_process_is_skipped(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_status", lambda _: "planned")  # a moment before
    with lock(tmp_path / "out" / "lamb-lr0.01-seed0"):
        base = TrainConfig(data=Path(command[2]), model=PRESETS["tiny"])
        planned = plan(base, tmp_path / "out", optimizers=["lamb"], seeds=[0], learning_rates={})
        runner.carry_out(planned, Ranks.join())
    assert "lamb-lr0.01-seed0 is in use by another process" in capsys.readouterr().err


def test_a_run_finished_by_another_process_is_not_repeated(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--optimizers", "lamb"]) == 0
    (folder,) = (tmp_path / "out").glob("lamb-*")
    status = iter(["planned", "finished"])  # a moment before, and now
    monkeypatch.setattr(runner, "_status", lambda _: next(status))
    config = TrainConfig.from_dict(Run.open(folder).config)
    runner.carry_out([Trial(folder, config)], Ranks.join())
    assert f"{folder.name} is already done" in capsys.readouterr().err


def test_a_signal_prints_how_to_continue(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGTERM, "stopped by SIGTERM after step 2, with a checkpoint")

    monkeypatch.setattr(runner, "train", train)
    assert main(command) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines()[-1] == (
        "merit compare: stopped by SIGTERM after step 2, with a checkpoint. "
        "Run the same command again to continue."
    )


def test_runs_of_another_configuration_are_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--optimizers", "merit"]) == 0
    capsys.readouterr()
    assert main([*command, "--optimizers", "lamb", "merit", "--batch", "8"]) == 1
    error = capsys.readouterr().err
    assert "merit-lr0.009-seed0 holds a run with a different batch; runs of one comparison share" in error
    assert not (tmp_path / "out" / "lamb-lr0.01-seed0").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "lion=1e-4"], "a learning rate is given for lion, which is not one of adamw, lamb, merit"),
        (["--lr", "merit"], "cannot parse the learning rate 'merit'; write OPTIMIZER=RATE"),
        (["--lr", "=1e-2"], "cannot parse the learning rate '=1e-2'; write OPTIMIZER=RATE"),
        (["--seeds", "1", "1"], "the seeds are 1, 1; each may be given only once"),
        (["--optimizers", "mertt"], "did you mean 'merit'?"),
        (["--optimizers", "maxlamb"], "or --lr maxlamb=RATE where optimizers are compared"),
        (
            ["--seed", "3"],
            "--seed 3 applies to a single run; in a comparison write for example",
        ),
        (
            ["--optimizer.name", "merit"],
            "--optimizer.name merit applies to a single run; in a comparison write",
        ),
        (["--seed=0"], "--seed 0 applies to a single run"),
        (["--optimizer.lr", "0.1"], "--optimizer.lr 0.1 applies to a single run"),
        (
            ["--optimizers", "merit", "nowhere:Mine", "--lr", "nowhere:Mine=0.1"],
            "'nowhere:Mine', but No module named 'nowhere'",
        ),
        (
            ["--optimizers", "merit", "adamw", "--optimizer.overrides", "*:clip=2"],
            "sets clip, which adamw does not have",
        ),
        (["--jobs", "0"], "--jobs is 0; it must be a whole number of at least 1"),
        (["--optimizers", "merit", "maxlamb"], "or --lr maxlamb=RATE where optimizers are compared"),
    ],
)
def test_invalid_options_are_refused(
    command: list[str], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_the_data_would_replace_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Dataset, "vocab_size", 300)
    assert main([*command, "--model.vocab-size", "256"]) == 1
    assert "--model.vocab-size is 256, but the vocabulary is sized for" in capsys.readouterr().err


def test_an_unknown_model_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2-smal"])
    assert "did you mean 'gpt2-small'?" in capsys.readouterr().err


def test_the_model_must_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--data", "data"])
    assert "the model is missing; it comes first. The models are: tiny" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_for_charts_is_reported_before_training(
    library: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["compare", *command, "--optimizers", "merit"])
    assert f"merit compare: this needs {library}, which is not installed" in str(exit_.value.code)
    assert not (tmp_path / "out").exists()


def test_foreign_files_in_the_report_folder_are_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out" / "report"
    report.mkdir(parents=True)
    (report / "index.html").write_text("<title>my thesis</title>")
    assert main([*command, "--optimizers", "merit"]) == 1
    assert "holds files that merit did not write" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report"]
