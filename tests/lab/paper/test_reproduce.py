"""`merit reproduce`: what it runs, shares, lists and refuses."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from toy_scale import make_scale

from merit_lab.data import Dataset
from merit_lab.paper import command, measured, work
from merit_lab.paper.artefact import Result
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Corpus, Runs, plan
from merit_lab.paper.scales import SCALES, Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.study import cost
from merit_lab.study.cost import Speed


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def row(name: str, output: str) -> list[str]:
    """The numbers of a line of the list."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.split()[-6:-1] if line.split()[-1] in ("s", "min", "h") else line.split()[-5:]


def test_entries_share_runs_which_are_listed_as_done_and_not_repeated(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig13", "fig15", "--data", str(data), "--out", "out", "--jobs", "1"]
    assert command.main(arguments) == 0
    assert len(list(Path("out/runs").glob("*/config.json"))) == 2  # two seeds of MERIT, once
    assert "The page: out/index.html" in capsys.readouterr().out
    before = Path("out/fig13/verdict.json").read_bytes()
    monkeypatch.setattr(work, "carry_out", lambda *_, **__: pytest.fail("nothing is left to train"))
    assert command.main(arguments) == 0
    assert Path("out/fig13/verdict.json").read_bytes() == before

    capsys.readouterr()
    assert command.main(["--list", "--seeds", "3", "--out", "out", "--data", str(data)]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ENTRIES)
    assert row("fig13", output)[:3] == ["3", "1", "512"]
    whole = [plan(entry.runs, SCALES["tiny"], 3) for entry in ENTRIES.values()]
    assert row("together", output)[0] == str(len({one.identity for of in whole for one in of}))

    other = Path("other")
    other.mkdir()
    for name in ("train.bin", "val.bin"):
        (other / name).write_bytes((data / name).read_bytes()[:-2])
    for mode in ("--no-training", "--yes"):
        assert command.main([mode, "fig13", "--out", "out", "--data", "other"]) == 1
        assert "another folder with --out" in capsys.readouterr().err
    monkeypatch.setitem(SCALES, "nano", make_scale(name="other", steps=2))
    assert command.main(["fig13", "--scale", "nano", "--data", str(data), "--out", "out"]) == 1
    assert "entries of scale toy, for example fig13" in capsys.readouterr().err
    Path("out/fig15/verdict.json").write_text("{")
    assert command.main(arguments) == 1
    assert "remove it and make fig15 again" in capsys.readouterr().err
    assert Path("out/fig13/verdict.json").read_bytes() == before


def test_other_settings_or_data_are_other_runs_and_records_are_found_by_their_settings(
    data: Path, toy: Scale
) -> None:
    corpus = Corpus.of(Dataset.open(data))
    queries = [
        *(
            Runs("first", ("merit",)),
            Runs("first", ("merit",), changes={"optimizer.without": ("clip",)}),
            Runs("first", ("lamb-uncorrected",)),
        ),
        *(
            Runs("first", ("merit",), factors=(2.0,)),
            Runs("first", ("merit",), changes={"model.qk_norm": True}),
        ),
        Runs("first", ("merit",), changes={"optimizer.warmup": 0.1}),
    ]
    planned = plan(queries, toy, 1, corpus) + plan(queries[:1], toy, 1, corpus._replace(fingerprint="x"))
    assert len({one.folder for one in planned}) == len(queries) + 1
    assert planned[0].folder.startswith("gpt2-3x16-merit-lr0.01-batch8-seed0-")

    task = Task(names=("fig13",), data=data, out=Path("out"), seeds=1, jobs=1)
    (made,) = reproduce(task)
    (run,) = Path("out/runs").iterdir()
    run.rename(run.with_name("of-another-name"))
    assert reproduce(dataclasses.replace(task, no_training=True)) == [made]


def test_large_scales_are_planned_and_start_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fig4", "--scale", "paper"]) == 1
    output, error = capsys.readouterr()
    assert "GPU hours" in output
    assert "pass --yes" in error
    assert command.main(["fig4", "--scale", "small", "--yes"]) == 1
    assert "needs --data" in capsys.readouterr().err
    runs = {(one.panel, one.series): one.config for one in plan(ENTRIES["fig4"].runs, SCALES["paper"], 1)}
    large = runs["GPT-2 large, batch 8192", "MERIT"]
    assert (large.batch, large.optimizer.lr, large.model.layers) == (8192, 6e-3, 36)
    assert large.steps == -(-16 * 10**9 // (8192 * 1024))
    assert runs["GPT-2 medium, batch 4096", "AdamW"].optimizer.lr == 4e-3


@pytest.mark.parametrize(("speed", "asks"), [(1e10, True), (1e16, False)])
def test_days_of_work_are_not_started_without_asking(
    speed: float, asks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "find_speed", lambda _: Speed(speed, 0, "set by the test"))
    monkeypatch.setattr(command, "reproduce", lambda *_: pytest.fail("it has started"))
    if asks:
        assert command.main(["fig4", "--scale", "nano"]) == 1
        assert "pass --yes" in capsys.readouterr().err
    else:
        with pytest.raises(pytest.fail.Exception, match="it has started"):
            command.main(["fig4", "--scale", "nano"])


@pytest.mark.parametrize("name", list(SCALES))
def test_every_scale_has_runs_for_every_entry(name: str) -> None:
    for entry in ENTRIES.values():
        planned = plan(entry.runs, SCALES[name], 2)
        assert bool(planned) == (entry.name != "theorem1")
        assert {one.config.seed for one in planned} <= {0, 1}


def test_missing_weights_curvature_and_failed_measurements_affect_only_their_entry(
    data: Path, tmp_path: Path
) -> None:
    here = shutil.copytree(data, tmp_path / "data")
    task = Task(names=("fig3", "fig7", "fig13"), data=here, out=Path("out"), seeds=1, jobs=1)
    before = reproduce(task)
    assert not any(result.missing for result in before)
    shutil.rmtree(here)
    gone = dataclasses.replace(task, data=None, no_training=True)
    assert reproduce(gone) == before, "measured curvature needs no data"
    for end in tmp_path.glob("out/runs/*/curvature/step-00000004.json"):
        end.rename(end.with_name("step-00000002.json"))
    for path in tmp_path.glob("out/runs/*/checkpoints/*/*.safetensors"):
        path.write_bytes(b"")
    measured.weights_at.cache_clear()  # as in a new process
    weights, curvature, fine = reproduce(gone)
    assert "cannot be read" in weights.missing
    assert "give them with --data" in curvature.missing
    assert fine == before[2]
    assert Result.read(Path("out/fig3")) == before[0], "an earlier result stays"
