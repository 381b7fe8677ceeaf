"""Weight decay: inside the ratio, outside of it, where it agrees with the update, or as the rate falls."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.holds.hold import Hold, Move
from merit_optim.optim.axes.registered import register
from merit_optim.optim.options import rate

State = tuple[Tensor, ...]


@register("decay")
@dataclass(frozen=True, kw_only=True)
class Decay(Hold):
    """u = d + weight_decay*w;  w <- w - lr*c.  Decay is scaled and clipped with the update, as in MERIT."""

    def inside(self, d_NRC: Tensor, weight_NRC: Tensor, weight_decay: float) -> Tensor:
        # A product and a sum instead of add(alpha=...): their rounding does not depend on an element's place
        # in memory, so sharded and whole tensors give the same bits.
        return d_NRC + weight_NRC * weight_decay

    def apply(self, weight_NRC: Tensor, change_NRC: Tensor, state: State, move: Move) -> tuple[Tensor, State]:
        return weight_NRC - change_NRC * move.lr, state


@dataclass(frozen=True, kw_only=True)
class Shares(Hold):
    """w <- a*w - b*c  with one a and one b for all weights of a group."""

    @abstractmethod
    def shares(self, lr: float | Tensor, weight_decay: float) -> tuple[Any, Any]:
        """Return a and b."""

    def apply(self, weight_NRC: Tensor, change_NRC: Tensor, state: State, move: Move) -> tuple[Tensor, State]:
        of_weight, of_change = self.shares(move.lr, move.weight_decay)
        return weight_NRC * of_weight - change_NRC * of_change, state


@register("decoupled")
@dataclass(frozen=True, kw_only=True)
class Decoupled(Shares):
    """w <- (1 - lr*weight_decay)*w - lr*c.  Decay is neither scaled nor clipped, as in AdamW."""

    def shares(self, lr: float | Tensor, weight_decay: float) -> tuple[Any, Any]:
        return 1 - lr * weight_decay, lr


@register("cautious")
@dataclass(frozen=True, kw_only=True)
class Cautious(Hold):
    """w <- w - lr*(c + weight_decay*w where c*w > 0).  Only what the update shrinks decays.

    Chen et al., "Cautious Weight Decay", 2025, https://arxiv.org/abs/2510.12402.
    """

    def apply(self, weight_NRC: Tensor, change_NRC: Tensor, state: State, move: Move) -> tuple[Tensor, State]:
        decay_NRC = weight_NRC * (weight_NRC * change_NRC > 0) * move.weight_decay
        return weight_NRC - (change_NRC + decay_NRC) * move.lr, state


@dataclass(frozen=True, kw_only=True)
class PeakRate(Hold):
    """A hold that looks at the rate as a share of its peak."""

    peak_lr: float | None = None
    """The highest rate of the schedule; None for the rate with which the group was made."""

    def check(self) -> None:
        if self.peak_lr is not None:
            validate.positive("peak_lr", self.peak_lr, "None for the rate with which the group is made")

    def filled(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"peak_lr": float(rate(group)) or None} if self.peak_lr is None else {}

    def of_peak(self, lr: float | Tensor) -> float | Tensor:
        return lr / self.peak_lr if self.peak_lr else 1.0


@register("corrected")
@dataclass(frozen=True, kw_only=True)
class Corrected(PeakRate, Shares):
    """w <- (1 - lr*(lr/peak_lr)*weight_decay)*w - lr*c.  Decay falls as the square of the rate.

    So the size at which a normalised weight settles does not grow while the rate falls (Defazio, "Why
    Gradients Rapidly Increase Near the End of Training", 2025, https://arxiv.org/abs/2506.02285).
    """

    def shares(self, lr: float | Tensor, weight_decay: float) -> tuple[Any, Any]:
        return 1 - lr * self.of_peak(lr) * weight_decay, lr


@register("ball")
@dataclass(frozen=True, kw_only=True)
class Ball(Shares):
    """w <- (1 - lr)*w - lr*radius*c.  While c is in the unit ball of a norm, w stays in that of ``radius``.

    Scion's constraint (Pethick et al., 2025, https://arxiv.org/abs/2502.07529).
    """

    USES_DECAY = False

    radius: float = 1.0

    def check(self) -> None:
        validate.positive("radius", self.radius, "another hold for no ball")

    def shares(self, lr: float | Tensor, weight_decay: float) -> tuple[Any, Any]:
        return 1 - lr, lr * self.radius
