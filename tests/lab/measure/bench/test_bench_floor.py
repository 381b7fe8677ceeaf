"""The floors of a step, with values computed by hand, and the weights of the benchmarks' models."""

from collections import Counter

import pytest
import torch

from merit_lab.measure.bench.model import WEIGHTS, WeightSpec, floors_of, gpt2, llama
from merit_lab.models import PRESETS, build
from merit_optim import param_groups


def test_the_floor_of_muon_is_its_bytes_and_its_products() -> None:
    weights = [
        WeightSpec((10, 4), "embedding"),
        WeightSpec((2, 3), "hidden"),
        WeightSpec((3, 2), "hidden"),
        WeightSpec((4,), "vector"),
    ]
    adamw, merit, muon = floors_of(weights)
    assert (adamw.num_bytes, adamw.num_flops) == (28 * 56, 0)
    assert (merit.num_bytes, merit.num_flops) == (40 * 56, 0)
    # Twelve elements of hidden matrices at 20 bytes, the other 44 at AdamW's 28; two matrices of 320.
    assert (muon.num_bytes, muon.num_flops) == (240 + 1232, 640)
    # 1472 bytes at 2 TB/s are 736 ps, 640 operations at 4 TFLOP/s 160 ps.
    assert muon.milliseconds(copy_tb_s=2.0, matrix_tflop_s=4.0) == pytest.approx(896e-9)


@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        ("gpt2-small", WEIGHTS["gpt2-small"]),
        ("gpt2-large", WEIGHTS["gpt2-large"]),
        ("tiny", gpt2(64, 4, vocabulary=256, context=64)),
        ("llama-tiny", llama(64, 176, 4, vocabulary=256)),
    ],
)
def test_weights_have_the_kinds_of_the_labs_models(preset, weights) -> None:
    with torch.device("meta"):
        model = build(PRESETS[preset])
    found = Counter(
        (tuple(param.shape), kind)
        for group in param_groups(model)
        for param, kind in zip(group["params"], group["param_kinds"], strict=True)
    )
    assert Counter(map(tuple, weights)) == found
