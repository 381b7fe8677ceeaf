"""The learning rates at which each batch size is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

RateRule = Literal["list", "sqrt", "linear", "sweep"]

_POWERS = {"sqrt": 0.5, "linear": 1.0}


def rates_by_batch(
    rule: RateRule, rates: Sequence[float], batches: Sequence[int], base_batch: int, optimizer: str
) -> dict[int, list[float]]:
    """The learning rates of each batch size.

    Args:
        rule: "list" uses ``rates`` unchanged, one for each batch or one for all; "sqrt" and "linear" scale
            one rate, that of ``base_batch``, with the square root of the batch or with the batch; "sweep"
            tries every rate at every batch.
        rates: the rates of one optimizer.
        batches: the batch sizes, in their order.
        base_batch: the batch that the rate of "sqrt" and "linear" is for.
        optimizer: name of the optimizer, for error messages.

    Example:
        >>> rates_by_batch("sqrt", [0.01], [16, 64], 16, "merit")
        {16: [0.01], 64: [0.02]}
    """
    if rule == "sweep":
        return {batch: sorted(rates) for batch in batches}
    if rule == "list":
        if len(rates) not in (1, len(batches)):
            raise ValueError(
                f"{optimizer} has {len(rates)} learning rates for {len(batches)} batch sizes; --rule list "
                "takes one for each batch in its order, or one for all"
            )
        by_batch = rates if len(rates) > 1 else [*rates] * len(batches)
        return {batch: [rate] for batch, rate in zip(batches, by_batch, strict=True)}
    if len(rates) != 1:
        raise ValueError(
            f"{optimizer} has {len(rates)} learning rates; --rule {rule} takes one, that of the batch of "
            f"{base_batch}. To try several at each batch, use --rule sweep."
        )
    power = _POWERS[rule]
    return {batch: [float(f"{rates[0] * (batch / base_batch) ** power:.4g}")] for batch in batches}
