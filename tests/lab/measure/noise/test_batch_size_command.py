"""`merit batch-size`: its output, and the file that it writes into a run."""

import json
import math
import re
import signal

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, Dataset
from merit_lab.measure.noise.command import describe, main
from merit_lab.measure.noise.measure import MeasuredScale, NoiseConfig, gradient_norms, measure_noise_scale
from merit_lab.measure.noise.scale import NoiseScale
from merit_lab.runs import Run, lock
from merit_lab.train.snapshot import Snapshot

QUICK = ["--batches", "3", "--batch", "8", "--micro-batch", "2"]


def read(run, step=6):
    return json.loads((run / "noise" / f"step-{step:08d}.json").read_text())


def test_norms_match_those_of_backward(run):
    model = Snapshot.find(run).load_model(torch.device("cpu"))
    sequences = torch.randint(256, (6, 17))

    def squared_gradient(piece):
        model.zero_grad()
        model(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()).loss.backward()
        return sum(parameter.grad.double().square().sum().item() for parameter in model.parameters())

    norms = gradient_norms(model, sequences, 2)
    assert norms.micro_batches == pytest.approx([squared_gradient(piece) for piece in sequences.split(2)])
    assert norms.mean == pytest.approx(squared_gradient(sequences))


def test_the_scale_of_a_run(run, data, capfd):
    assert main([str(run), *QUICK]) == 0
    printed = capfd.readouterr()
    content = read(run)["noise_scale"]
    assert content["settings"] == {"batches": 3, "batch": 8, "micro_batch": 2, "seed": 0, "context": 16}
    assert content["environment"]["device"]["type"] == "cpu"
    assert "gradients: 3 batches in" in printed.err
    assert "Twice the run's batch of 8" in printed.out
    assert "step-00000006.json" in printed.out

    batches = Batches(Dataset.open(data).train, context=16, batch=8, seed=2**64)
    model = Snapshot.find(run).load_model(torch.device("cpu"))
    norms = [gradient_norms(model, torch.from_numpy(batches.sequences(number)), 2) for number in range(3)]
    small = np.mean([norm.micro_batches for norm in norms])
    large = np.mean([norm.mean for norm in norms])
    assert content["result"]["noise"] == pytest.approx((small - large) / (1 / 2 - 1 / 8))
    assert content["result"]["signal"] == pytest.approx((8 * large - 2 * small) / 6)


def test_the_sequences_are_not_those_that_the_run_saw_first(run, data, monkeypatch):
    measured = []

    def record(model, sequences, size):
        measured.append(sequences)
        return gradient_norms(model, sequences, size)

    monkeypatch.setattr("merit_lab.measure.noise.measure.gradient_norms", record)
    assert main([str(run), *QUICK]) == 0
    assert Run.open(run).config["seed"] == 0 == NoiseConfig().seed
    seen = Batches(Dataset.open(data).train, context=16, batch=8, seed=0)
    for number, sequences in enumerate(measured):
        assert not np.array_equal(sequences, seen.sequences(number))


def test_an_existing_measurement_is_not_repeated(run, monkeypatch):
    config = NoiseConfig(batches=2, batch=4, micro_batch=2)
    first = measure_noise_scale(run, config)
    monkeypatch.setattr("merit_lab.measure.noise.measure.gradient_norms", None)  # nothing may be computed
    assert measure_noise_scale(run, config) == first
    with pytest.raises(TypeError):
        measure_noise_scale(run, NoiseConfig(batches=2, batch=4, micro_batch=2, seed=1))


def test_an_earlier_checkpoint(run):
    assert main([str(run), *QUICK, "--checkpoint", "4"]) == 0
    assert main([str(run), *QUICK]) == 0
    assert read(run, 4)["noise_scale"]["result"] != read(run, 6)["noise_scale"]["result"]


def test_every_checkpoint_of_a_run(run, capsys):
    kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert len(kept) > 1
    assert main([str(run), *QUICK, "--along"]) == 0
    printed = capsys.readouterr().out
    table, _, sentence = printed.partition("After step")
    for step in kept:
        assert read(run, step)["noise_scale"]["result"]
        assert re.search(rf"^ *{step} ", table, re.MULTILINE)
    assert sentence.startswith(f" {kept[-1]} the")

    assert main([str(run), "--along", "--checkpoint", "4"]) == 1
    assert "give one of the two" in capsys.readouterr().err


def test_a_signal_stops_after_a_batch(run, monkeypatch, capfd):
    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return gradient_norms(*arguments)

    monkeypatch.setattr("merit_lab.measure.noise.measure.gradient_norms", interrupted)
    assert main([str(run), *QUICK]) == 128 + signal.SIGINT
    assert "stopped by SIGINT" in capfd.readouterr().err
    assert not (run / "noise").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "1"], "batches is 1; it must be a whole number of at least 2"),
        (
            ["--batch", "6"],
            "batch is 6; it must be a multiple of micro_batch, 4, at least twice as large, for example 8",
        ),
        (["--batch", "4"], "batch is 4; it must be a multiple of micro_batch"),
        (["--checkpoint", "5"], "no checkpoint of step 5"),
        (
            ["--batches", "4", "--batch", "2000"],
            "4 batches of 2000 sequences are 8000, but train.bin has 6248",
        ),
        (["--batches", "4", "--batch", "2000"], "choose fewer batches, at most 3, or smaller ones"),
        (["--batch", "4000"], "choose smaller batches, of at most 388"),  # a multiple of 4
        (["--batches", "3000", "--batch", "8000"], "choose at most 781 batches of 8"),
        (["--batch", "4000", "--micro-batch", "2000"], "choose a smaller micro_batch than 2000, or train on"),
    ],
)
def test_invalid_options_are_refused(run, options, message, capfd):
    assert main([str(run), *options]) == 1
    assert message in capfd.readouterr().err


def measured(tmp_path, **scale):
    return MeasuredScale(path=tmp_path, step=9, context=100, batch=100, scale=NoiseScale(**scale))


def test_description(tmp_path):
    text = describe(measured(tmp_path, noise=30000.0, signal=100.0, ratio_error=1 / 3000))
    assert "noise scale is 300 sequences (250 to 375 with two standard errors), or 30,000 tokens" in text
    # From 1 + 3 to 1 + 1.5 times the fewest steps, from 1 + 1/3 to 1 + 2/3 times the fewest tokens.
    assert "Twice the run's batch of 100 would save 38% of the steps and cost 25% more tokens" in text
    text = describe(measured(tmp_path, noise=30000.0, signal=100.0, ratio_error=1.0))
    assert "(above 0.499 with" in text
    text = describe(measured(tmp_path, noise=1.0, signal=-1e-3, ratio_error=1e-3))
    assert "not determined; it is above 1,000 sequences" in text
    text = describe(measured(tmp_path, noise=1.0, signal=-1.0, ratio_error=1e-3))
    assert "nothing can be said" in text


@pytest.mark.parametrize("signal_seen", [1e-3, -1e-3, -1.0])
def test_the_table_for_any_signal(run, capfd, monkeypatch, signal_seen):
    scale = measured(run, noise=1.0, signal=signal_seen, ratio_error=1e-3)
    monkeypatch.setattr("merit_lab.measure.noise.command.measure_noise_scale", lambda *_, **__: scale)
    assert main([str(run)]) == 0
    printed = capfd.readouterr().out
    assert ("1,024" in printed) == math.isfinite(scale.scale.interval[0])
    assert "inf" not in printed


def test_results_locked_by_another_process(run, monkeypatch, capfd):
    monkeypatch.setattr("merit_lab.runs.measurements._PATIENCE", 0.0)
    with lock(run / "noise"):
        assert main([str(run), "--batches", "2", "--batch", "8"]) == 1
    assert "noise is in use by process" in capfd.readouterr().err
