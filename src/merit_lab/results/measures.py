"""The curves that a report shows as lines: their names, captions, units and scales."""

from __future__ import annotations

from dataclasses import dataclass

from merit_lab.results.curves import MAX_LOGIT


@dataclass(frozen=True)
class Measure:
    """A curve shown as lines, and how to show it."""

    key: str
    section: str
    row: str  # figures of one row are side by side
    title: str
    caption: str
    unit: str
    format: str = ".4~g"  # of values, in d3's notation, like ticks
    ticks: str = ".6~g"  # without a precision d3 takes that of the step, and 60 is 6e+1
    is_loss: bool = False
    may_be_logarithmic: bool = False
    from_zero: bool = False


BITS_PER_BYTE = "bits per byte"

_LOSS = "Loss"
ATTENTION = "Attention"
_UPDATES = "Updates"
_PROGRESS = "Gradients, weights, learning rate and speed"

LOSSES = (
    Measure(
        key="validation_loss",
        section=_LOSS,
        row="validation",
        title="Validation loss",
        caption="Mean cross-entropy on the validation set.",
        unit="nats per token",
        format=".3f",
        is_loss=True,
    ),
    Measure(
        key="training_loss",
        section=_LOSS,
        row="training",
        title="Training loss",
        caption="Mean cross-entropy on the batch of the step.",
        unit="nats per token",
        format=".3f",
        is_loss=True,
    ),
)
LOGIT = Measure(
    key=MAX_LOGIT,
    section=ATTENTION,
    row="logit",
    title="Largest attention logit",
    caption="The largest over all layers and heads, scaled and masked as the softmax sees it.",
    unit="logit",
    may_be_logarithmic=True,
)
OTHERS = (
    Measure(
        key="entropy_mean",
        section=ATTENTION,
        row="entropy",
        title="Attention entropy",
        caption="Mean over all heads. At 0 each token attends to a single one.",
        unit="nats",
    ),
    Measure(
        key="entropy_lowest",
        section=ATTENTION,
        row="entropy",
        title="Lowest attention entropy",
        caption="Of the head with the lowest.",
        unit="nats",
    ),
    Measure(
        key="clipped",
        section=_UPDATES,
        row="updates",
        title="Share clipped",
        caption="Elements whose scaled update exceeded the clip; mean over the parameters.",
        unit="share of elements",
        format=".3~p",
        ticks="~p",
        from_zero=True,
    ),
    Measure(
        key="bounded",
        section=_UPDATES,
        row="updates",
        title="Share bounded",
        caption="Elements whose ratio the weight-wise bound decided; mean over the parameters.",
        unit="share of elements",
        format=".3~p",
        ticks="~p",
        from_zero=True,
    ),
    Measure(
        key="relative_change",
        section=_UPDATES,
        row="updates",
        title="Relative change of a step",
        caption="|change| / |weight|, both Euclidean; mean over the parameters.",
        unit="share of the norm",
        format=".3~p",
        ticks="~p",
        from_zero=True,
    ),
    Measure(
        key="grad_norm",
        section=_PROGRESS,
        row="norms",
        title="Gradient norm",
        caption="Euclidean, over all parameters, before clipping.",
        unit="norm",
        may_be_logarithmic=True,
    ),
    Measure(
        key="weight_norm",
        section=_PROGRESS,
        row="norms",
        title="Weight norm",
        caption="Euclidean, over all parameters.",
        unit="norm",
        from_zero=True,
    ),
    Measure(
        key="lr",
        section=_PROGRESS,
        row="progress",
        title="Learning rate",
        caption="Set by the schedule; learning rates of different optimizers are not comparable.",
        unit="learning rate",
        format=".3~g",
        from_zero=True,
    ),
    Measure(
        key="tokens_per_second",
        section=_PROGRESS,
        row="progress",
        title="Throughput",
        caption="Training tokens per second.",
        unit="tokens per second",
        format=".3~s",
        ticks="~s",
        from_zero=True,
    ),
)
