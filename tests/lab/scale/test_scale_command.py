"""`merit scale`: the critical batch, which runs are reused, and which options are refused."""

import csv
import itertools
import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair
import noisy_quadratic
import pytest

from merit_lab.runs import Run, RunInUse
from merit_lab.scale.charts import make_chart
from merit_lab.scale.command import main
from merit_lab.scale.measure import Attempt, Measurement
from merit_lab.scale.summary import fit_results, summarise, warnings
from merit_lab.study import cost, runner
from merit_lab.study.cost import Speed
from merit_lab.train import Interrupted, TrainConfig, memory

BATCHES = (4, 8, 16, 32, 64, 128, 256)
TARGET = 1.0


@pytest.fixture
def quadratic(command: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A study of the noisy quadratic, each batch with its best step size."""
    monkeypatch.setattr(runner, "train", noisy_quadratic.train)
    command += ["--optimizers", "merit"]  # the name does not matter here
    command += ["--batches", *map(str, BATCHES), "--steps", "500", "--target", str(TARGET)]
    return [*command, *("--rule", "list", "--lr", *rates(0.02))]


def rates(eta: float) -> list[str]:
    return [str(noisy_quadratic.step_size(batch, eta)) for batch in BATCHES]


def table(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "out" / "report" / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def limit(tmp_path: Path, row: dict[str, str]) -> int:
    """The most steps that a run of the table may take."""
    steps = Run.open(tmp_path / "out" / row["run"]).config["steps"]
    assert isinstance(steps, int)
    return steps


def test_the_critical_batch_of_a_noisy_quadratic_is_found(
    quadratic: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eta = 0.005  # the relative error of the curve is of this order
    options = ["--seeds", "0", "1", "--steps", "1500", "--lr", *rates(eta)]
    assert main([*quadratic, *options]) == 0
    output = capsys.readouterr().out
    fitted = json.loads((tmp_path / "out" / "report" / "scale.json").read_text())["optimizers"]["merit"]
    critical, least = fitted["critical_batch"], fitted["least_steps"]
    assert critical["low"] <= noisy_quadratic.NOISE_SCALE <= critical["high"]
    assert critical["high"] / critical["low"] < 1.2
    assert least["low"] <= noisy_quadratic.least_steps(TARGET, eta) <= least["high"]
    assert fitted["is_told"]
    assert fitted["is_inside"]
    assert f"its critical batch is {critical['value']:.0f} sequences (95% interval" in output
    assert all(row["reached"] == "True" for row in table(tmp_path))
    svg = (tmp_path / "out" / "report" / "steps-to-target.svg").read_text()
    assert all(text in svg for text in ("steps to the target", "batch (sequences)", "MERIT", "256"))


def test_a_larger_batch_gets_1_25_times_the_steps_of_the_smaller(
    quadratic: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(quadratic) == 0
    expected = f"1 run, .* here; then up to {len(BATCHES) - 1} more, at most about .* for all of them\n"
    assert re.match(expected, capsys.readouterr().err)
    rows = table(tmp_path)
    limits = {int(row["batch"]): limit(tmp_path, row) for row in rows}
    needed = {int(row["batch"]): float(row["steps"]) for row in rows}
    assert limits[4] == 500
    for smaller, larger in itertools.pairwise(BATCHES):
        assert limits[larger] == -(-1.25 * needed[smaller] // 1)
    config = TrainConfig.from_dict(Run.open(tmp_path / "out" / rows[0]["run"]).config)
    assert config.optimizer.final == 1.0  # the rate stays at its peak
    assert config.measure.validation_every == 10


def test_the_estimate_counts_the_larger_batches(
    quadratic: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of 256 is as much training as 64 of 4, and each run has the same validations."""
    monkeypatch.setattr(cost, "find_speed", lambda _: Speed(1e5, 0, "set by the test"))
    monkeypatch.setattr(cost, "duration", lambda seconds: f"{seconds:.1f} seconds")
    assert main([*quadratic, "--measure.validation-sequences", "30"]) == 0
    first, in_all = map(float, re.findall(r"about ([\d.]+) seconds", capsys.readouterr().err))
    validated = 51 * 30 / 3  # before the first step, and then every 10 of 500; a third of the work
    trained = [500 * batch for batch in BATCHES]
    expected = (sum(trained) + len(BATCHES) * validated) / (trained[0] + validated)
    assert in_all / first == pytest.approx(expected)


def test_a_batch_that_cannot_be_trained_is_refused_before_the_first_run(
    quadratic: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_host_memory", lambda: 2**32)
    assert main([*quadratic, "--batches", "4", "2000000000", "--rule", "sqrt", "--lr", "0.004"]) == 1
    error = capsys.readouterr().err
    assert "merit scale: the run merit-batch2000000000-" in error
    assert "choose a smaller --batch or model" in error
    assert not (tmp_path / "out").exists()


def test_a_run_is_done_if_it_is_over_or_at_the_target() -> None:
    over = ("finished", "diverged", "abandoned")
    assert all(Attempt("run", 0, status, None, 10).is_done for status in over)
    assert not Attempt("run", 0, "interrupted", None, 10).is_done
    assert Attempt("run", 0, "interrupted", 9.5, 10).is_done


def test_the_slowest_seed_decides_how_long_a_larger_batch_may_train(
    quadratic: list[str], tmp_path: Path
) -> None:
    assert main([*quadratic, "--seeds", "0", "1"]) == 0
    limits: dict[int, set[int]] = {}
    needed: dict[int, list[float]] = {}
    for row in table(tmp_path):
        limits.setdefault(int(row["batch"]), set()).add(limit(tmp_path, row))
        needed.setdefault(int(row["batch"]), []).append(float(row["steps"]))
    for smaller, larger in itertools.pairwise(BATCHES):
        assert limits[larger] == {math.ceil(1.25 * max(needed[smaller]))}


def test_the_longest_of_several_runs_that_missed_the_target_counts(
    quadratic: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 4 need about 315 steps."""
    begun = []
    for steps in ("100", "200", "150"):
        assert main([*quadratic, "--rule", "sweep", "--lr", "0.002", "--batches", "4", "--steps", steps]) == 0
        begun.append(capsys.readouterr().err.count(" starts"))
    assert begun == [1, 1, 0]


def test_rates_scale_from_the_base_batch(quadratic: list[str], tmp_path: Path) -> None:
    options = ["--rule", "sqrt", "--lr", "0.004", "--base-batch", "16", "--batches", "4", "16", "64"]
    assert main([*quadratic, *options]) == 0
    rates = {row["batch"]: float(row["lr"]) for row in table(tmp_path)}
    assert rates == {"4": 0.002, "16": 0.004, "64": 0.008}


def test_larger_batches_wait_for_a_run_in_use_by_another_process(
    quadratic: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, folder: Path, *, resume: bool, **_: object) -> None:
        noisy_quadratic.train(config, folder, resume=resume)
        if config.batch == 8:
            lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            (folder / "metrics.jsonl").write_text("".join(lines[:3]))
            raise RunInUse(f"{folder} is in use")

    monkeypatch.setattr(runner, "train", train)
    assert main(quadratic) == 1
    error = capsys.readouterr().err
    assert "is in use by another process, and the length of runs with larger batches depends on it" in error
    names = {path.parent.name.split("-")[1] for path in (tmp_path / "out").glob("*/config.json")}
    assert names == {"batch4", "batch8"}


def test_existing_runs_are_used_for_other_targets_and_lengths(
    quadratic: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun() -> int:
        return capsys.readouterr().err.count(" starts")

    assert main(quadratic) == 0
    assert begun() == len(BATCHES)
    assert main(quadratic) == 0
    assert begun() == 0
    assert main([*quadratic, "--target", "1.5"]) == 0  # every run passed it
    assert begun() == 0
    # Another seed changes the limits, but runs that reached the target are kept.
    assert main([*quadratic, "--seeds", "0", "1"]) == 0
    assert begun() == len(BATCHES)
    # Runs end at their target, so a lower one needs new runs. Afterwards both are there.
    assert main([*quadratic, "--target", "0.5"]) == 0
    assert begun() == len(BATCHES)
    assert main([*quadratic, "--target", "0.5"]) == 0
    assert main(quadratic) == 0
    assert begun() == 0
    assert len({(row["batch"], row["seed"]) for row in table(tmp_path)}) == len(table(tmp_path))


def test_runs_end_at_the_target(quadratic: list[str], tmp_path: Path) -> None:
    assert main(quadratic) == 0
    for folder in (tmp_path / "out").glob("merit-*"):
        losses = [row["loss"] for row in Run.open(folder).lines() if row["kind"] == "validation"]
        assert losses[-1] <= TARGET < losses[-2]


def test_runs_of_merit_keep_are_used(
    quadratic: list[str],
    tmp_path: Path,
    keep_only: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(quadratic) == 0
    keep_only(tmp_path / "out")
    capsys.readouterr()
    assert main(quadratic) == 0
    assert " starts" not in capsys.readouterr().err
    assert len(table(tmp_path)) == len(BATCHES)


def test_a_missed_target_is_reported_drawn_and_left_out_of_the_curve(
    quadratic: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*quadratic, "--steps", "200"]) == 0  # batches of 4 need about 315
    output, error = capsys.readouterr()
    assert "MERIT did not reach the target with any seed at a batch of 4 (1 of 1 not reached in 200" in error
    assert "MERIT needed" in output
    assert "with a batch of 8 sequences and" in output
    rows = table(tmp_path)
    assert [row["reached"] for row in rows] == ["False"] + ["True"] * 6
    assert limit(tmp_path, rows[1]) == 200  # no smaller batch limits it
    assert "not reached in 200 steps" in (tmp_path / "out" / "report" / "steps-to-target.svg").read_text()


def test_the_best_of_several_rates_is_used_at_each_batch(
    quadratic: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = quadratic.index("--rule")
    sweep = [*quadratic[:place], "--rule", "sweep", "--lr", "0.002", "0.005", "0.01", "0.02"]
    assert main([*sweep, "--steps", "500", "--target", "1", "--batches", "8", "32", "128"]) == 0
    rows = table(tmp_path)
    assert len(rows) == 3 * 4
    for batch in ("8", "32", "128"):
        same_batch = [row for row in rows if row["batch"] == batch]
        best = min((row for row in same_batch if row["steps"]), key=lambda row: float(row["steps"]))
        assert [row for row in same_batch if row["chosen"] == "True"] == [best]
    error = capsys.readouterr().err
    assert "MERIT's best learning rate with a batch of 128, 0.02, is the highest that was tried" in error


def test_a_model_is_trained(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command += ["--optimizers", "merit", "--batches", "8", "2", "4", "--lr", "3e-2", "--steps", "20"]
    assert main([*command, "--target", "5.0"]) == 0
    output = capsys.readouterr().out
    assert "To a validation loss of 5: MERIT needed" in output
    assert [row["batch"] for row in table(tmp_path)] == ["2", "4", "8"]
    assert [float(row["lr"]) for row in table(tmp_path)] == [0.03, 0.04243, 0.06]


def test_the_folder_of_a_custom_optimizer_has_its_class_name(quadratic: list[str], tmp_path: Path) -> None:
    assert main([*quadratic, "--optimizers", "torch.optim:Adam"]) == 0
    names = {path.parent.name.partition("-")[0] for path in (tmp_path / "out").glob("*/config.json")}
    assert names == {"Adam"}


def test_a_signal_prints_how_to_continue(
    quadratic: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGINT, "stopped by SIGINT, with a checkpoint")

    monkeypatch.setattr(runner, "train", train)
    assert main(quadratic) == 128 + signal.SIGINT
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last == "merit scale: stopped by SIGINT, with a checkpoint. Run the same command again to continue."
    )


def test_runs_of_another_configuration_are_refused(
    quadratic: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(quadratic) == 0
    assert main([*quadratic, "--optimizer.warmup", "0.5"]) == 1
    assert "holds a run with a different optimizer.warmup" in capsys.readouterr().err


def test_another_run_with_the_same_folder_name_is_refused(
    quadratic: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*quadratic, "--optimizers", "torch.optim:Adam"]) == 0
    assert main([*quadratic, "--optimizers", "torch.optim.adam:Adam"]) == 1
    assert "holds a run with a different optimizer.name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "-1"], "the target is -1.0; it must be a validation loss in nats, above 0"),
        (["--target", "9"], "the target 9 is not below the initial loss, 4.000"),
        (["--steps", "None"], "the maximum number of steps is not given; pass --steps"),
        (["--batches", "4", "4"], "the batches are 4, 4; each may be given only once"),
        (["--rule", "sqrt"], "merit has 7 learning rates; --rule sqrt takes one, that of the batch of 4"),
        (
            ["--optimizers", "merit", "lamb", "--lr", "merit=1"],
            "lamb has no learning rate; write for example",
        ),
        (["--batches", "0", "4"], "a batch is 0; it must be a whole number of at least 1"),
        (["--batches", "-4", "4"], "a batch is -4; it must be a whole number of at least 1"),
        (["--base-batch", "0"], "--base-batch is 0; it must be a whole number of at least 1"),
        (["--lr", "0"], "a learning rate of merit is 0; it must be above 0"),
        (
            ["--rule", "sweep", "--lr", "0.1", "0.1000000001"],
            "optimizer.lr 0.1 and 0.1000000001 would share the folder",
        ),
        (["--batch", "512"], "--batch 512 applies to a single run; use --batches"),
        (["--batch", "8"], "--batch 8 applies to a single run; use --batches"),
        (["--measure.validation-every", "8"], "each run is validated fifty times"),
    ],
)
def test_invalid_options_are_refused(
    quadratic: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*quadratic, *options]) == 1
    assert message in capsys.readouterr().err


def test_an_unknown_model_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2-smal"])
    assert "did you mean 'gpt2-small'?" in capsys.readouterr().err


def test_the_chart_matches_the_schema() -> None:
    attempts = [
        (batch, Attempt("run", 0, status, steps, 500))
        for batch, status, steps in (
            (4, "finished", None),
            (8, "diverged", None),
            (16, "finished", 60.0),
            (32, "finished", 40.0),
            (64, "finished", 31.0),
        )
    ]
    fitted = fit_results([Measurement("merit", batch, 0.01, (attempt,)) for batch, attempt in attempts])
    figure = make_chart(fitted, 3.0)
    altair.LayerChart.from_dict(dict(figure.spec))
    missed = [row["what"] for row in figure.spec["datasets"]["missed"]]
    assert missed == ["not reached in 500 steps", "diverged at step 500"]
    assert fitted[0].curve is not None
    assert [row["batch"] for row in figure.spec["datasets"]["means"]] == [16, 32, 64]


def measurement(batch: int, *steps: float | None, lr: float = 0.01) -> Measurement:
    attempts = [Attempt("run", seed, "finished", num_steps, 500) for seed, num_steps in enumerate(steps)]
    return Measurement("merit", batch, lr, tuple(attempts))


def test_batches_that_no_seed_and_that_some_seeds_reached_are_told_apart() -> None:
    measured = [measurement(8, None, None), measurement(16, 60.0, None), measurement(32, 40.0, 41.0)]
    none, some = warnings(fit_results(measured), measured)
    assert none.startswith("MERIT did not reach the target with any seed at a batch of 8 (2 of 2 not")
    assert some.startswith("MERIT did not reach the target with every seed at a batch of 16 (1 of 2 not")


def test_a_rate_with_which_every_seed_reaches_the_target_beats_a_faster_one() -> None:
    fast, safe = measurement(16, 20.0, None, lr=0.02), measurement(16, 60.0, 62.0)
    [result] = fit_results([fast, safe])
    assert result.measurements == (safe,)


def test_a_critical_batch_below_the_fitted_batches_is_an_extrapolation() -> None:
    """Even if it is within the range of batches that were tried."""
    whole = [measurement(batch, 100 * (1 + 10 / batch)) for batch in (16, 32, 64, 128)]
    [result] = fit_results([measurement(8, None), *whole])
    assert not result.is_bend_inside
    assert "lies outside the batches tried; extrapolated, it is 10 sequences" in summarise([result], 3.0)


def test_a_batch_with_which_one_seed_missed_the_target_is_left_out_of_the_curve() -> None:
    whole = [measurement(batch, *[100 * (1 + 40 / batch)] * 2) for batch in (16, 32, 64, 128)]
    [result] = fit_results([measurement(8, 50.0, None), *whole])
    assert result.curve is not None
    assert result.curve.critical_batch.value == pytest.approx(40)
    assert [reached.batch for reached in result.reached] == [16, 32, 64, 128]


def test_a_custom_optimizer_is_distinguished_from_a_built_in_one_of_the_same_name() -> None:
    attempt = Attempt("run", 0, "finished", 60.0, 500)
    measurements = [Measurement(name, 16, 0.01, (attempt,)) for name in ("adamw", "torch.optim:AdamW")]
    assert [result.name for result in fit_results(measurements)] == ["AdamW", "torch.optim:AdamW"]
    assert [result.name for result in fit_results(measurements[1:])] == ["AdamW"]
