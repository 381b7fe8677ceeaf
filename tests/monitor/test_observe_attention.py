"""The operator, against logits computed all at once."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from merit_optim.monitor import observation as observation_module
from merit_optim.monitor.observation import observe_attention

LENGTH, KEYS = 24, 37


def materialised(query, key, mask=None, *, scale, left=-1, right=-1, offset=0, softcap=0.0) -> torch.Tensor:
    """The same three rows in float64 from the whole matrix, with every masked logit at -inf."""
    logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None] - offset
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        logits = logits + mask.double()
        visible = visible & (mask > torch.finfo(mask.dtype).min / 2)
    logits = logits.masked_fill(~visible, -torch.inf)
    weights = logits.softmax(dim=-1)
    seeing = (logits > -torch.inf).any(dim=-1)
    entropies = -torch.special.xlogy(weights, weights).sum(-1).masked_fill(~seeing, 0.0)
    rows = [logits.amax(dim=(0, 2, 3)), entropies.sum(dim=(0, 2)), seeing.double().sum(dim=(0, 2))]
    return torch.stack(rows).float()


def padding(batch: int) -> torch.Tensor:
    """Keys that are seen: fewer in each sequence, from the left, and none in the last."""
    lengths = torch.linspace(KEYS, 0, batch).long()
    return torch.arange(KEYS) >= KEYS - lengths[:, None, None, None]


_GENERATOR = torch.Generator().manual_seed(0)
CASES = {
    "everything": {},
    "causal": {"right": 0},
    "causal with a cache": {"right": 0, "offset": KEYS - LENGTH},
    "window": {"right": 0, "left": 4, "offset": KEYS - LENGTH},
    "window of one": {"right": 0, "left": 0},
    "two-sided window": {"right": 3, "left": 5},
    "window that ends before the keys begin": {"right": 0, "left": 2, "offset": -10},
    "padding": {"mask": padding(3)},
    "padding and causal": {"mask": padding(3), "right": 0},
    "a mask for each head": {"mask": torch.rand(1, 4, LENGTH, KEYS, generator=_GENERATOR) > 0.3},
    "a bias": {"mask": torch.randn(1, 4, LENGTH, KEYS, generator=_GENERATOR)},
    "an added mask": {"mask": torch.where(padding(3), 0.0, torch.finfo(torch.float32).min)},
    "an added mask of bf16": {
        "mask": torch.where(padding(3), 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    },
    "an added mask of -inf": {"mask": torch.where(padding(3), 0.0, -torch.inf), "right": 0},
    "softcap": {"softcap": 5.0, "right": 0},
    "softcap and a bias": {"softcap": 5.0, "mask": torch.randn(3, 1, 1, KEYS, generator=_GENERATOR)},
    "negative scale": {"scale": -0.4, "right": 0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("elements", [1, 3 * 4 * KEYS * 5, 2**25], ids=["one-query", "five-queries", "all"])
def test_masks_windows_and_groups_in_blocks(case, key_heads, elements, monkeypatch) -> None:
    monkeypatch.setattr(observation_module, "_BLOCK_ELEMENTS", elements)
    torch.manual_seed(0)
    query, key = 2 * torch.randn(3, 4, LENGTH, 16), 2 * torch.randn(3, key_heads, KEYS, 16)
    options = {"scale": 0.3} | CASES[case]
    mask = options.pop("mask", None)
    expected = materialised(query, key, mask, **options)
    observed = observe_attention(query, key, mask, **options, entropy=True)
    torch.testing.assert_close(observed, expected, rtol=1e-4, atol=1e-4)
    largest_alone = observe_attention(query, key, mask, **options, entropy=False)
    torch.testing.assert_close(largest_alone[0], expected[0], rtol=1e-5, atol=1e-5)
    assert not largest_alone[1:].any()


@pytest.mark.parametrize("time", [1, 2, 31, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_lengths(time, dtype) -> None:
    torch.manual_seed(0)
    query, key = (3 * torch.randn(2, 3, time, 16).to(dtype) for _ in range(2))
    expected = materialised(query, key, scale=0.25, right=0)
    with torch.autocast("cpu", torch.bfloat16):  # it does not reach the logits
        observed = observe_attention(query, key, scale=0.25, right=0, entropy=True)
    torch.testing.assert_close(observed, expected, rtol=1e-5, atol=1e-5)


def test_no_more_than_a_block_of_logits_is_held(monkeypatch) -> None:
    monkeypatch.setattr(observation_module, "_BLOCK_ELEMENTS", 4096)
    query, key = torch.randn(2, 6, 64, 4), torch.randn(2, 3, 64, 4)
    mask = torch.rand(2, 1, 64, 64) > 0.5
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if result is not mask and func is not torch.ops.aten.unsqueeze.default:  # views of the mask
                largest = max(largest, result.numel())
            return result

    with Watch():
        observation_module._observe(query, key, mask, 0.5, 0.0, -1, 0, 0, True)
    assert 2048 < largest <= 4096


def test_entropy_of_uniform_and_of_one_hot_attention() -> None:
    zeros = torch.zeros(1, 1, 8, 4)
    uniform = sum(math.log(n) for n in range(1, 9))
    observed = observe_attention(zeros, zeros, scale=1.0, right=0, entropy=True)[:, 0]
    torch.testing.assert_close(observed, torch.tensor([0.0, uniform, 8.0]))
    peaked = torch.eye(8)[None, None]
    observed = observe_attention(1e4 * peaked, peaked, scale=1.0, right=0, entropy=True)[:, 0]
    torch.testing.assert_close(observed, torch.tensor([1e4, 0.0, 8.0]))


def test_a_masked_logit_does_not_count() -> None:
    """Only the first query and the last key are large, and no query sees a later key."""
    query, key = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    query[0, 0, 0] = key[0, 0, 3] = 100.0
    assert observe_attention(query, key, scale=1.0, right=0, entropy=False)[0].item() == 0.0
    assert observe_attention(query, key, scale=1.0, entropy=False)[0].item() == 2e4


def test_a_head_that_sees_nothing() -> None:
    query = torch.ones(1, 1, 4, 2)
    nothing = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    observed = observe_attention(query, query, nothing, scale=1.0, entropy=True)[:, 0]
    assert observed.tolist() == [-math.inf, 0.0, 0.0]


def test_a_nan_is_seen_unless_it_is_masked() -> None:
    query = torch.zeros(1, 2, 4, 2)
    query[0, 1, 2] = torch.nan
    observed = observe_attention(query, torch.ones_like(query), scale=1.0, right=0, entropy=True)
    assert observed[:2].isnan().tolist() == [[False, True], [False, True]]
    seen = torch.ones(1, 1, 4, 1, dtype=torch.bool)
    seen[0, 0, 2] = False
    observed = observe_attention(query, torch.ones_like(query), seen, scale=1.0, right=0, entropy=True)
    assert not observed.isnan().any()


def test_the_operator_keeps_torchs_rules() -> None:
    """Its fake version, which compilers see, has the real one's shapes."""
    query, key = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4)
    for entropy in (True, False):
        torch.library.opcheck(
            observe_attention, (query, key, torch.ones(1, 1, 1, 5)), {"scale": 0.5, "entropy": entropy}
        )
