"""An optimizer's statistics as numbers for a logger."""

import math

import torch
from torch._subclasses import FakeTensorMode

from merit_optim import MERIT, MuonMERIT
from merit_optim.monitor import update_scalars, updates
from merit_optim.optim import UpdateStatistics


def test_numbers_are_the_statistics_and_their_totals() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = MERIT(model.named_parameters(), lr=0.1, clip=0.01)
    model(torch.randn(8, 6)).square().sum().backward()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with optimizer.recording() as statistics:
        optimizer.step()
    numbers = update_scalars(statistics, "u/")
    for name, update in statistics.items():
        assert math.isclose(numbers[f"u/clipped/{name}"], update.clipped, rel_tol=1e-6)
        assert math.isclose(numbers[f"u/bounded/{name}"], update.bounded, rel_tol=1e-6)
        assert math.isclose(numbers[f"u/largest_ratio/{name}"], update.ratio_range[1], rel_tol=1e-6)
        assert math.isclose(numbers[f"u/relative_change/{name}"], update.relative_change, rel_tol=1e-6)
    clipped = (24 * statistics["weight"].clipped + 4 * statistics["bias"].clipped) / 28
    assert 0 < clipped <= 1
    assert math.isclose(numbers["u/clipped"], clipped, rel_tol=1e-6)
    assert numbers["u/largest_ratio"] == max(
        numbers["u/largest_ratio/weight"], numbers["u/largest_ratio/bias"]
    )
    flat = torch.cat([before[name].flatten() for name in before])
    change = torch.cat([(w.detach() - before[name]).flatten() for name, w in model.named_parameters()])
    assert math.isclose(numbers["u/relative_change"], (change.norm() / flat.norm()).item(), rel_tol=1e-3)
    assert len(numbers) == 12
    assert len(update_scalars(statistics, per_parameter=False)) == 4
    assert update_scalars({}) == {}


def test_the_largest_ratio_is_of_parameters_that_have_ratios() -> None:
    """Not the 1 of those that AdamW updates beside MuonMERIT's, nor a NaN hidden among them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = MuonMERIT(
        [
            {"params": [("weight", model.weight)], "direction": "muon"},
            {"params": [("bias", model.bias)], "direction": "adam"},
        ]
    )
    model(torch.randn(8, 6)).square().sum().backward()
    with optimizer.recording() as statistics:
        optimizer.step()
    numbers = update_scalars(statistics)
    assert numbers["update/largest_ratio/bias"] == 1
    assert 0 < numbers["update/largest_ratio"] == numbers["update/largest_ratio/weight"] < 0.2
    alone = update_scalars({"bias": statistics["bias"]})
    assert alone["update/largest_ratio"] == 1
    statistics["weight"].largest_ratio.fill_(math.nan)
    assert math.isnan(update_scalars(statistics)["update/largest_ratio"])


def test_a_weight_of_zeros_that_stays_so_has_not_changed() -> None:
    bias = torch.nn.Parameter(torch.zeros(3))
    bias.grad = torch.ones(3)
    optimizer = MERIT([("bias", bias)], lr=0.0)
    with optimizer.recording() as statistics:
        optimizer.step()
    numbers = update_scalars(statistics)
    assert numbers["update/relative_change/bias"] == numbers["update/relative_change"] == 0


def test_parameters_may_be_on_several_devices() -> None:
    def statistics(device: str) -> UpdateStatistics:
        number = torch.ones((), device=device)
        return UpdateStatistics(4, *[number] * 6)

    with FakeTensorMode():
        devices = "cpu", "cuda:0", "cuda:1"
        table = updates._table(statistics(device) for device in devices)
    assert table.shape == (3, 7)
    assert table.device.type == "cpu"
