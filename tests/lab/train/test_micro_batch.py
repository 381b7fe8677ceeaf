from types import SimpleNamespace

import pytest
import torch

from merit_lab.models import LanguageModel
from merit_lab.train import micro_batch, train


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_the_trial_on_cuda_has_the_precision_of_the_run(precision, changed, monkeypatch, tmp_path):
    tried = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**40))
    forward = LanguageModel.forward

    def observed(self, *args, **options):
        tried.append(torch.is_autocast_enabled("cpu"))
        return forward(self, *args, **options)

    def as_on_cuda(_config, model, ranks, **options):
        assert micro_batch._fits(model, 2, ranks.device, **options)
        return 2

    monkeypatch.setattr(LanguageModel, "forward", observed)
    monkeypatch.setattr("merit_lab.train.loop.choose_micro_batch", as_on_cuda)
    train(changed(precision=precision, steps=1), tmp_path / "run")
    assert set(tried) == {precision == "bf16"}
