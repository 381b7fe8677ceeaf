"""Statistics of the update of each weight, measured only in steps that are recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_optim.optim.axes.ratios import Ratio, Sizes


@dataclass
class UpdateStatistics:
    """Statistics of one weight's update. Totals stay on the device; reading a property waits for it."""

    num_elements: int
    num_clipped: Tensor
    num_bounded: Tensor
    smallest_ratio: Tensor
    largest_ratio: Tensor
    update_sum_sq: Tensor
    weight_sum_sq: Tensor

    @property
    def clipped(self) -> float:
        """Share of elements whose scaled update exceeded the clip (figure 13 of the paper)."""
        return self.num_clipped.item() / self.num_elements

    @property
    def bounded(self) -> float:
        """Share of elements whose ratio the weight-wise bound decided (figure 15 of the paper)."""
        return self.num_bounded.item() / self.num_elements

    @property
    def ratio_range(self) -> tuple[float, float]:
        """The smallest and the largest element-wise ratio s."""
        return self.smallest_ratio.item(), self.largest_ratio.item()

    @property
    def relative_change(self) -> float:
        """|change of w| / |w| in Euclidean norms; infinite for a zero weight, unless it stays zero."""
        return relative_change(self.update_sum_sq, self.weight_sum_sq).item()

    def merge(self, other: UpdateStatistics) -> UpdateStatistics:
        """Combine the statistics of two parts of a weight."""
        return UpdateStatistics(
            self.num_elements + other.num_elements,
            self.num_clipped + other.num_clipped,
            self.num_bounded + other.num_bounded,
            torch.minimum(self.smallest_ratio, other.smallest_ratio),
            torch.maximum(self.largest_ratio, other.largest_ratio),
            self.update_sum_sq + other.update_sum_sq,
            self.weight_sum_sq + other.weight_sum_sq,
        )


def relative_change(update_sum_sq: Tensor, weight_sum_sq: Tensor) -> Tensor:
    """The square root of the quotient; 0 where both are zero, not NaN."""
    nothing = (update_sum_sq == 0) & (weight_sum_sq == 0)
    return (update_sum_sq / weight_sum_sq).sqrt().masked_fill(nothing, 0)


def measure(
    weight: Tensor, scaled: Tensor, scale: Tensor, ratios: Sizes, ratio: Ratio, taken: Tensor
) -> UpdateStatistics:
    """Measure a weight, or a part of one, that is about to change by ``taken``.

    ``scaled`` is s*u before the clip.
    """
    none = torch.zeros((), dtype=torch.int64, device=weight.device)
    bounded = ratio.is_bound(ratios, scale)
    return UpdateStatistics(
        num_elements=weight.numel(),
        num_clipped=none if ratio.clip is None else (scaled.abs() > ratio.clip).sum(),
        num_bounded=none if bounded is None else bounded.sum(),
        smallest_ratio=scale.amin(),
        largest_ratio=scale.amax(),
        update_sum_sq=taken.square().sum(),
        weight_sum_sq=weight.square().sum(),
    )


class Recorder(dict[str, UpdateStatistics]):
    """Statistics by parameter name, filled part by part."""

    def add(self, name: str, part: UpdateStatistics) -> None:
        """Add the statistics of a part of a weight."""
        self[name] = self[name].merge(part) if name in self else part
