"""Update statistics as numbers for a logger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from merit_optim.optim import UpdateStatistics
from merit_optim.optim.statistics import relative_change


def update_scalars(
    statistics: Mapping[str, UpdateStatistics], prefix: str = "update/", *, per_parameter: bool = True
) -> dict[str, float]:
    """Return the statistics of ``optimizer.recording()`` as one flat dict.

    For each parameter, and for all as if they were one: the shares of clipped and bounded elements, the
    largest ratio, and the relative change. The largest of all is of parameters that have ratios: not of those
    by AdamW, where it is 1. Waits for the device once.

    Examples:
        >>> import torch
        >>> from merit_optim import MERIT
        >>> linear = torch.nn.Linear(4, 4)
        >>> optimizer = MERIT(linear.named_parameters())
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> with optimizer.recording() as statistics:
        ...     optimizer.step()
        >>> list(update_scalars(statistics, per_parameter=False))
        ['update/clipped', 'update/bounded', 'update/largest_ratio', 'update/relative_change']
    """
    if not statistics:
        return {}
    rows = _table(statistics.values())
    names = ("clipped", "bounded", "largest_ratio", "relative_change")
    together = torch.cat([rows[:, :5].sum(0), _ratio_range(rows[:, 5:])])
    numbers = {f"{prefix}{name}": value for name, value in zip(names, _numbers(together), strict=True)}
    if per_parameter:
        for parameter, row in zip(statistics, rows, strict=True):
            for name, value in zip(names, _numbers(row), strict=True):
                numbers[f"{prefix}{name}/{parameter}"] = value
    return numbers


def _table(statistics: Iterable[UpdateStatistics]) -> Tensor:
    rows = [_row(update) for update in statistics]
    return torch.stack([row.to(rows[0].device) for row in rows]).cpu()


def _row(update: UpdateStatistics) -> Tensor:
    like = update.weight_sum_sq
    counts = (torch.full_like(like, update.num_elements), update.num_clipped, update.num_bounded)
    values = (*counts, update.update_sum_sq, like, update.smallest_ratio, update.largest_ratio)
    return torch.stack([value.to(like) for value in values])


def _ratio_range(ranges: Tensor) -> Tensor:
    """The smallest and the largest ratio of parameters that have ratios, or 1 and 1 if none has."""
    scaled = ranges[(ranges != 1).any(1)]
    chosen = scaled if len(scaled) else ranges
    return torch.stack([chosen[:, 0].amin(), chosen[:, 1].amax()])


def _numbers(row: Tensor) -> list[float]:
    elements, clipped, bounded, update_sum_sq, weight_sum_sq, _, largest = row
    return torch.stack(
        [clipped / elements, bounded / elements, largest, relative_change(update_sum_sq, weight_sum_sq)]
    ).tolist()
