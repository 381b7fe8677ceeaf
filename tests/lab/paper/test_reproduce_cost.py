"""`merit reproduce --list`: the entries, the runs left to do, and their cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merit_lab.data import Dataset
from merit_lab.models.source import work_per_token
from merit_lab.paper import command, records
from merit_lab.paper.cost import cost_of
from merit_lab.paper.registry import ENTRIES
from merit_lab.paper.scales import SCALES
from merit_lab.paper.setups import Scale
from merit_lab.runs import MetricsWriter, Run
from merit_lab.study import cost
from merit_lab.study.cost import Cost, Speed
from merit_lab.study.trial import Trial
from merit_lab.train import MeasureConfig


@pytest.fixture(autouse=True)
def _toy_for_tiny(monkeypatch: pytest.MonkeyPatch, toy: Scale, tmp_path: Path) -> None:
    monkeypatch.setitem(SCALES, "tiny", toy)
    monkeypatch.chdir(tmp_path)


def write_run(folder: Path, *, steps: int, end: str | None) -> None:
    """Write a run directory with this many steps done."""
    run = Run.create(folder, {}, {})
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        metrics.write({"kind": "train", "step": steps, "loss": 2.5})
        if end is not None:
            metrics.write({"kind": "event", "step": steps, "what": end, "message": ""})


def row(name: str, output: str) -> list[str]:
    """The numbers in a line of the list."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.split()[-6:-1] if line.split()[-1] in ("s", "min", "h") else line.split()[-5:]


def test_the_list_counts_shared_runs_once(capsys: pytest.CaptureFixture[str], toy: Scale) -> None:
    assert command.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ENTRIES)
    assert "measured here" in output
    fig13, fig4 = ENTRIES["fig13"], ENTRIES["fig4"]
    assert cost_of([fig13, fig4], toy, None) == cost_of([fig4], toy, None)
    assert cost_of([fig4], toy, None).num_runs == 5 * toy.seeds
    assert cost_of([fig4], toy, 7).num_runs == 5 * 7
    assert cost_of([fig13], toy, 1).tokens == 4 * 8 * 16


def test_time_follows_from_flops() -> None:
    cost_of_one = Cost(num_runs=1, num_left=1, tokens=1, flops=3.6e15)
    assert cost_of_one.gpu_hours(Speed(1e12, 2, "")) == pytest.approx(2 * 1.3)
    assert cost.duration(0.2) == "1 s"
    assert cost.duration(40) == "40 s"
    assert cost.duration(600) == "10 min"
    assert cost.duration(2 * 3600) == "2.0 h"
    assert cost.duration(283.2 * 3600) == "12 days"


def test_validations_are_forward_passes(toy: Scale) -> None:
    measure = MeasureConfig(validation_every=4, validation_sequences=30)
    config = replace(toy.trial(toy.gpt2[0], "adamw", 0).config, batch=10, steps=10, measure=measure)
    per_sequence = work_per_token(config.model) * config.model.context
    # Before the first step and after steps 4, 8 and 10; after 8 and 10.
    assert Cost.of([(config, 0)]).flops == pytest.approx(per_sequence * (10 * 10 + 4 * 30 / 3))
    assert Cost.of([(config, 5)]).flops == pytest.approx(per_sequence * (5 * 10 + 2 * 30 / 3))
    assert Cost.of([(config, 10)]).flops == 0
    config = replace(config, measure=replace(measure, validation_every=0))
    assert Cost.of([(config, 0)]).flops == per_sequence * 10 * 10


def test_worker_processes_take_time_to_start(
    toy: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "find_speed", lambda _: Speed(1e20, 0, "set by the test"))
    trial = Trial(tmp_path / "run", toy.trial(toy.gpt2[0], "adamw", 0).config)
    assert cost.estimate([trial]).endswith("about 1 s here")
    assert cost.estimate([trial], jobs=2).endswith("about 10 s here")


def test_many_gpu_hours_are_not_started_without_asking(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fig4", "--scale", "paper"]) == 1
    output, error = capsys.readouterr()
    assert "GPU hours" in output
    assert "pass --yes" in error


@pytest.mark.parametrize(("speed", "asks"), [(1e10, True), (1e16, False)])
def test_days_of_work_are_not_started_without_asking(
    speed: float, asks: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's scale on a slow machine asks; on a fast one it starts."""
    monkeypatch.setattr(command, "find_speed", lambda _: Speed(speed, 0, "set by the test"))
    monkeypatch.setattr(command, "_corpus", lambda *_: pytest.fail("it has started"))
    if asks:
        assert command.main(["fig4", "--scale", "nano"]) == 1
        assert "pass --yes" in capsys.readouterr().err
    else:
        with pytest.raises(pytest.fail.Exception, match="it has started"):
            command.main(["fig4", "--scale", "nano"])


def test_large_scales_need_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fig4", "--scale", "small", "--yes"]) == 1
    assert "needs --data: a folder that `merit prepare openwebtext` wrote" in capsys.readouterr().err


def test_training_already_done_is_deducted(
    data: Path, dataset: Dataset, toy: Scale, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of fig13's four seeds one is finished, one diverged, one has done three of its four steps."""
    entry = ENTRIES["fig13"]
    runs = tmp_path / "out" / "runs"
    planned = [trial for _, trial in records.plan(entry.trials(toy, 4), runs, dataset)]
    for trial, steps, end in zip(planned, (4, 2, 3), ("finished", "diverged", None), strict=False):
        write_run(trial.folder, steps=steps, end=end)
    whole = cost_of([entry], toy, 4)
    left = cost_of([entry], toy, 4, folder=runs, corpus=dataset)
    assert (whole.num_runs, whole.num_left) == (4, 4)
    assert (left.num_runs, left.num_left) == (4, 2)
    assert left.tokens == (1 + 4) * 8 * 16
    config = planned[0].config
    assert left.flops == Cost.of([(config, 3), (config, 0)]).flops

    arguments = ["fig13", "--list", "--seeds", "4", "--out", str(tmp_path / "out")]
    assert command.main([*arguments, "--data", str(data)]) == 0
    output = capsys.readouterr().out
    assert row("fig13", output)[:3] == ["4", "2", "640"]
    assert f"training already done in {tmp_path / 'out'} is deducted" in output
    assert command.main(arguments) == 0
    output = capsys.readouterr().out
    assert row("fig13", output)[:2] == ["4", "4"]
    assert f"give --data to deduct training already done in {tmp_path / 'out'}" in output


def test_runs_with_other_data_are_not_deducted(dataset: Dataset, toy: Scale, tmp_path: Path) -> None:
    entry = ENTRIES["fig13"]
    for _, trial in records.plan(entry.trials(toy, 1), tmp_path / "runs", dataset):
        write_run(trial.folder, steps=4, end="finished")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train.bin", "val.bin"):
        (other / name).write_bytes((dataset.folder / name).read_bytes()[:-2])
    assert cost_of([entry], toy, 1, folder=tmp_path / "runs", corpus=dataset).num_left == 0
    assert cost_of([entry], toy, 1, folder=tmp_path / "runs", corpus=Dataset.open(other)).num_left == 1


@pytest.mark.parametrize("name", ["small", "paper"])
def test_large_scales_are_listed_without_building_a_model(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(_: object) -> None:
        raise AssertionError("a plan needs no model")

    monkeypatch.setattr(cost, "build", build)
    assert command.main(["--list", "--scale", name]) == 0
    output = capsys.readouterr().out
    assert all(row(entry, output) for entry in ENTRIES)
    assert "GPU hours" in output
    together = cost_of(list(ENTRIES.values()), SCALES[name], None)
    assert row("together", output)[0] == str(together.num_runs)


@pytest.mark.parametrize("name", ["small", "paper"])
def test_large_scales_can_be_planned(name: str, dataset: Dataset, tmp_path: Path) -> None:
    """Every run of every entry has a separate directory and configuration, with its number of steps."""
    scale = SCALES[name]
    trials = [trial for entry in ENTRIES.values() for trial in entry.trials(scale, 2)]
    planned = [trial for _, trial in records.plan(trials, tmp_path, dataset)]
    folders = {trial.folder: trial.config for trial in planned}
    assert len(folders) == len({trial.config.fingerprint for trial in planned})
    for config in folders.values():
        tokens = (config.steps or 0) * config.batch * config.model.context
        assert 2e9 <= tokens < 48.1e9
    assert not list(tmp_path.iterdir())


def test_no_training_asks_no_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fig4", "--scale", "paper", "--no-training", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "are not known; give them with --data" in error
    assert command.main(["fig4", "--no-training", "--out", str(tmp_path / "nowhere")]) == 1
    assert "nowhere; give the folder of the runs with --out" in capsys.readouterr().err
    assert "--yes" not in error


def test_a_user_who_ends_the_input_has_not_agreed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_of_input(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", end_of_input)
    assert command.main(["fig4", "--scale", "small"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("answer", "started"), [("y", True), ("yes", True), ("n", False), ("", False)])
def test_a_user_at_a_terminal_is_asked(answer: str, started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    calls: list[Any] = []
    monkeypatch.setattr(command, "_corpus", lambda *args: calls.append(args))
    monkeypatch.setattr(command, "reproduce", lambda _: [])
    assert command.main(["fig4", "--scale", "small"]) == (0 if started else 1)
    assert bool(calls) == started
