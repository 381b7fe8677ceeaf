"""The command and the file it writes, on a run."""

import json
import signal

import numpy as np
import pytest
import torch

from merit_lab.measure.curvature.command import CurvatureConfig, main, measure_curvature
from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.measure.curvature.spectrum import hutchinson_trace
from merit_lab.train.snapshot import Snapshot, mean_loss

QUICK = ["--sequences", "4", "--top", "2", "--probes", "2"]
DENSITY = ["--density", "--density-probes", "2", "--density-steps", "3"]


def read(run, step=6):
    return json.loads((run / "curvature" / f"step-{step:08d}.json").read_text())


def test_everything_is_measured_written_and_printed(run, capfd):
    assert main([str(run), *QUICK, *DENSITY]) == 0
    printed = capfd.readouterr()
    content = read(run)
    assert content.keys() == {"format", "loss", "eigenvalues", "trace", "density"}
    assert content["trace"]["settings"] == {"sequences": 4, "context": 16, "probes": 2, "seed": 0}
    assert content["trace"]["environment"]["device"]["type"] == "cpu"
    assert content["trace"]["seconds"] > 0
    result = content["eigenvalues"]["result"]
    assert len(result["values"]) == len(result["residuals"]) == 2
    density = content["density"]["result"]
    assert np.trapezoid(density["density"], density["grid"]) == pytest.approx(1, abs=1e-5)
    assert f"{result['values'][0]:.5g}" in printed.out
    assert f"{content['loss']['result']['value']:.4f}" in printed.out
    for text in ("Step 6", "step-00000006.json"):
        assert text in printed.out
    assert "trace: measured in" in printed.err


def test_the_numbers_are_those_of_the_checkpoints_model_on_training_data(run):
    curvature = measure_curvature(
        CurvatureConfig(run=run, sequences=5, top=0, probes=2, micro_batch=2)
    ).results
    snapshot = Snapshot.find(run)
    model = snapshot.load_model(torch.device("cpu"), twice=True)
    assert model.config.attention == "math"
    tokens = np.fromfile(snapshot.config.data / "train.bin", dtype="<u2").astype(np.int64)
    starts = [(place * ((len(tokens) - 1) // 16) // 5) * 16 for place in range(5)]
    sequences = torch.from_numpy(np.stack([tokens[start : start + 17] for start in starts]))
    loss = model(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()).loss
    assert curvature["loss"]["value"] == pytest.approx(loss.item(), rel=1e-5)
    hessian = Hessian(mean_loss(model, sequences, 5), model.parameters())
    assert curvature["trace"]["samples"] == pytest.approx(hutchinson_trace(hessian, 2)["samples"], rel=1e-4)


def test_other_settings_are_measured_and_the_rest_is_kept(run):
    assert main([str(run), *QUICK]) == 0
    before = read(run)
    assert main([str(run), *QUICK, "--probes", "3"]) == 0
    after = read(run)
    assert after["eigenvalues"] == before["eigenvalues"]
    assert len(after["trace"]["result"]["samples"]) == 3
    assert after["trace"]["result"]["samples"][:2] == before["trace"]["result"]["samples"]
    assert main([str(run), *QUICK, "--sequences", "3"]) == 0
    assert read(run)["eigenvalues"]["result"] != before["eigenvalues"]["result"]


def test_a_signal_stops_after_a_product_and_keeps_what_was_done(run, monkeypatch, capfd):
    def interrupted_dot(*_):
        signal.raise_signal(signal.SIGINT)
        return 1.0

    with monkeypatch.context() as patch:
        patch.setattr("merit_lab.measure.curvature.spectrum.dot", interrupted_dot)
        assert main([str(run), *QUICK]) == 128 + signal.SIGINT
    assert "stopped by SIGINT" in capfd.readouterr().err
    before = read(run)
    assert "eigenvalues" in before
    assert "trace" not in before
    assert main([str(run), *QUICK]) == 0
    assert read(run)["eigenvalues"] == before["eigenvalues"]
    assert "trace" in read(run)


def test_moved_data(run, data, tmp_path, capfd):
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("train.bin", "val.bin"):
        (moved / name).write_bytes((data / name).read_bytes())
    assert main([str(run), *QUICK, "--data", str(moved)]) == 0
    (moved / "train.bin").write_bytes((data / "val.bin").read_bytes())
    assert main([str(run), *QUICK, "--data", str(moved)]) == 1
    assert "does not hold the data that the run was trained on" in capfd.readouterr().err


def test_a_run_that_diverged(run, monkeypatch, capfd):
    load = Snapshot.load_model

    def diverged(*arguments, **options):
        model = load(*arguments, **options)
        model.norm.weight.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(Snapshot, "load_model", diverged)
    assert main([str(run), *QUICK]) == 1
    assert "the loss is nan; a run that diverged has no curvature: choose an" in capfd.readouterr().err
    assert not (run / "curvature").exists()
