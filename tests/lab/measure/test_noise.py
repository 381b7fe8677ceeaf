"""The noise scale of gradients for which it is known, and `merit batch-size` on a run."""

import dataclasses
import json
import math
import re
import signal

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, Dataset
from merit_lab.measure import noise
from merit_lab.measure.checkpoint import Measured
from merit_lab.measure.noise import NoiseConfig, gradient_norms, main, measure_noise_scale, noise_scale
from merit_lab.train.snapshot import Snapshot

QUICK = ["--batches", "3", "--batch", "8", "--micro-batch", "2"]


def norms_of(gradients, micro_batch):
    """Gradients of single sequences, (batches, sequences, size), as micro-batches' norms."""
    batches, _, size = gradients.shape
    means = gradients.reshape(batches, -1, micro_batch, size).mean(axis=2)
    return [((g**2).sum(axis=1).tolist(), (g.mean(axis=0) ** 2).sum()) for g in means]


def gaussian(generator, batches, *, mean, deviations, sequences=32):
    """Gradients with a known mean and a diagonal covariance."""
    return mean + deviations * generator.standard_normal((batches, sequences, len(mean)))


MEAN, DEVIATIONS = np.linspace(-0.3, 0.5, 20), np.linspace(0.1, 2.0, 20)
NOISE, SIGNAL = (DEVIATIONS**2).sum(), (MEAN**2).sum()


@pytest.mark.parametrize("micro_batch", [1, 4, 16])
def test_gaussian_gradients(micro_batch):
    generator = np.random.default_rng(0)
    gradients = gaussian(generator, 500, mean=MEAN, deviations=DEVIATIONS)
    scale = noise_scale(norms_of(gradients, micro_batch), micro_batch=micro_batch)
    assert scale.noise == pytest.approx(NOISE, rel=0.05)
    assert scale.signal == pytest.approx(SIGNAL, rel=0.2)
    assert scale.low < NOISE / SIGNAL < scale.high
    assert scale.low < scale.value < scale.high < 2 * scale.low


def test_the_interval_has_its_nominal_coverage():
    generator = np.random.default_rng(1)
    covered, signals = [], []
    for _ in range(400):
        gradients = gaussian(generator, 12, mean=MEAN, deviations=DEVIATIONS)
        scale = noise_scale(norms_of(gradients, 4), micro_batch=4)
        covered.append(scale.low < NOISE / SIGNAL < scale.high)
        signals.append(scale.signal)
    assert 0.88 < np.mean(covered) < 0.99
    error = np.std(signals) / math.sqrt(len(signals))
    assert np.mean(signals) == pytest.approx(SIGNAL, abs=4 * error)  # unbiased


def test_nonfinite_gradients_are_refused():
    with pytest.raises(FloatingPointError, match="nan in micro-batches"):
        noise_scale([([math.nan, 1.0], 1.0)] * 2, micro_batch=1)


def read(run, step=6):
    return json.loads((run / "noise" / f"step-{step:08d}.json").read_text())


def test_the_scale_of_a_run(run, data, capfd):
    assert main([str(run), *QUICK]) == 0
    printed = capfd.readouterr()
    content = read(run)["scale"]
    assert content["settings"] == {"batches": 3, "batch": 8, "micro_batch": 2, "seed": 0, "context": 16}
    assert content["environment"]["device"]["type"] == "cpu"
    assert "scale: measured in" in printed.err
    assert "step-00000006.json" in printed.out

    batches = Batches(Dataset.open(data).train, context=16, batch=8, seed=2**64)
    model = Snapshot.find(run).load_model(torch.device("cpu"))
    norms = [gradient_norms(model, torch.from_numpy(batches.sequences(number)), 2) for number in range(3)]
    small = np.mean([norm[0] for norm in norms])
    large = np.mean([norm[1] for norm in norms])
    assert content["result"]["noise"] == pytest.approx((small - large) / (1 / 2 - 1 / 8))
    assert content["result"]["signal"] == pytest.approx((8 * large - 2 * small) / 6)


def test_an_existing_measurement_is_not_repeated(run, monkeypatch):
    config = NoiseConfig(run=run, batches=2, batch=4, micro_batch=2)
    first = measure_noise_scale(config)
    monkeypatch.setattr(noise, "gradient_norms", None)  # nothing may be computed
    assert measure_noise_scale(config).results == first.results
    with pytest.raises(TypeError):
        measure_noise_scale(dataclasses.replace(config, seed=1))


@pytest.mark.parametrize("damaged", ['"low": []', '"lwo": 1.0'])
def test_a_damaged_measurement_is_refused(damaged, run, capfd):
    assert main([str(run), *QUICK]) == 0
    path = run / "noise" / "step-00000006.json"
    path.write_text(re.sub('"low": [^,]+', damaged, path.read_text()))
    assert main([str(run), *QUICK]) == 1
    assert "scale.l" in capfd.readouterr().err


def test_a_signal_stops_after_a_batch(run, monkeypatch, capfd):
    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return gradient_norms(*arguments)

    monkeypatch.setattr(noise, "gradient_norms", interrupted)
    assert main([str(run), *QUICK]) == 128 + signal.SIGINT
    assert "stopped by SIGINT" in capfd.readouterr().err
    assert not (run / "noise").exists()


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ((1234.0, 300.0, 2000.0), "1.23k sequences (300 to 2k with two standard errors), or 19.7k tokens"),
        ((1000.0, 300.0, math.inf), "1k sequences (above 300 sequences with"),
        ((math.inf, 1000.0, math.inf), "not determined; it is above 1k sequences"),
        ((math.inf, math.inf, math.inf), "nothing can be said"),
    ],
)
def test_what_is_said_of_any_signal(scale, said, run, capfd, monkeypatch):
    result = {**dict(zip(("value", "low", "high"), scale, strict=True)), "noise": 1.0, "signal": 1.0}
    found = Measured(run, Snapshot.find(run), {"scale": result})
    monkeypatch.setattr(noise, "measure_noise_scale", lambda _: found)
    assert main([str(run)]) == 0
    printed = capfd.readouterr().out
    assert f"After step 6 {'no signal' if math.isinf(scale[0]) else 'the noise scale'}" in printed
    assert said in printed
    assert ("1,024" in printed) == math.isfinite(scale[1])
    assert "inf" not in printed
