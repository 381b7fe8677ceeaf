"""The floors of a step, with values computed by hand."""

import pytest

from merit_lab.measure.bench.model import WeightSpec, floors_of


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
