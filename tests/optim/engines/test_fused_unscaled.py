"""The fused engine without ratios, which is AdamW, and with directions that it does not support."""

import re

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fused_cases import Pair, assert_within_ulps, gradient, parameters, tiles
from optimizer_cases import assert_unchanged, snapshot

from merit_optim import MERIT, SOAPMERIT, Muon, MuonMERIT, OrScale

ADAMW = {"ratio": "none", "clip": None, "bias_correction": True, "eps": 1e-8}


@pytest.mark.parametrize("options", [ADAMW, {"ratio": "none"}, {**ADAMW, "max_grad_norm": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_without_ratios_equal_the_eager_engine_s(device, dtype, options) -> None:
    with tiles():
        pair = Pair(parameters([(9, 37), (41, 3), (20,), ()], device, dtype), lr=0.05, **options)
        for _ in range(3):
            pair.step()
    assert not pair.engine._unfused


def test_steps_without_ratios_equal_torch_s_adamw(device) -> None:
    params = parameters([(9, 37), (20,)], device)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    ours = MERIT(params, lr=0.02, weight_decay=0.1, fused=True, **ADAMW)
    theirs = torch.optim.AdamW(copies, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(5):
        for i, (param, other) in enumerate(zip(params, copies, strict=True)):
            param.grad = gradient(param, 10 * step + i)
            other.grad = param.grad.clone()
        with tiles():
            ours.step()
        theirs.step()
    for param, other in zip(params, copies, strict=True):
        assert_within_ulps(param, other, 16)


def test_nothing_is_measured_without_ratios(device) -> None:
    """The sizes stay zero, and a ratio of zeros is 1."""
    with tiles():
        pair = Pair(parameters([(9, 37)], device), **ADAMW)
        pair.step()
    assert not pair.engine._shared.sizes.any()


def test_some_groups_with_ratios_and_some_without(device) -> None:
    groups = [{"params": slice(0, 2)}, {"params": slice(2, 4), **ADAMW}]
    with tiles():
        pair = Pair(parameters([(9, 37), (20,), (5, 16), (7,)], device), groups=groups, lr=0.05)
        for _ in range(3):
            pair.step()


def test_the_rest_is_fused_if_hidden_matrices_are_not(device) -> None:
    """MuonMERIT's embeddings and vectors have Adam's direction; its matrices may use the eager engine."""

    def build(params: list[nn.Parameter], **options: object) -> MuonMERIT:
        fused = options.pop("fused")
        groups = [
            {"params": params[:1], "direction": "muon", "fused": False},
            {"params": params[1:], "direction": "adam", "fused": fused},
        ]
        return MuonMERIT(groups, lr=0.05, **options)

    with tiles():
        pair = Pair(parameters([(9, 12), (41, 3), (20,)], device), build)
        for _ in range(3):
            pair.step()
    assert not pair.engine._unfused


def test_a_bad_step_is_skipped_by_both_engines(device) -> None:
    params = parameters([(9, 12), (20,)], device)
    groups = [
        {"params": params[:1], "direction": "muon", "fused": False},
        {"params": params[1:], "direction": "adam", "fused": True},
    ]
    optimizer = MuonMERIT(groups, nonfinite="skip")
    for step, bad in enumerate((False, True)):
        before = snapshot(optimizer)
        for i, param in enumerate(params):
            param.grad = gradient(param, 10 * step + i)
        if bad:
            params[1].grad[0] = torch.nan
        with tiles():
            optimizer.step()
    assert_unchanged(optimizer, before)
    assert optimizer.num_skipped_steps == 1


@pytest.mark.parametrize(
    ("optimizer_class", "group", "option"),
    [
        (MuonMERIT, {"direction": "muon", "ns_dtype": "float32"}, "ns_dtype='float32'"),
        (Muon, {"direction": "muon", "split": 3, "split_dim": 1}, "split=3 of columns"),
        (OrScale, {"direction": "muon"}, "calibrated=True"),
        (SOAPMERIT, {"direction": "soap"}, "direction='soap'"),
        (MERIT, {"split": 3, "split_dim": 1}, "split=3 of columns"),
        (MERIT, {"ratio": "weight", "calibrated": True}, "calibrated=True"),
        (MERIT, {"ratio": "row"}, "ratio='row'"),
        (MERIT, {"hold": "cautious"}, "hold='cautious'"),
    ],
)
def test_options_that_the_kernels_do_not_support_are_named(device, optimizer_class, group, option) -> None:
    message = re.escape(f"cannot be fused: the kernels do not support {option}")
    with pytest.raises(ValueError, match=message):
        optimizer_class([{"params": parameters([(9, 12)], device), **group}], fused=True)
