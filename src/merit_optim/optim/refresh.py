"""Schedule the improvement of SOAP's bases: matrices take turns, so that all steps cost about the same.

SOAP's authors improve the bases of all matrices in one step, which then takes many times as long as the
others. Here every matrix has a phase, and is improved when the step count modulo ``precondition_frequency``
equals it.

Phases depend only on the shapes of all parameters in their order. They are the same on every rank and in
every step, whichever parameters have gradients, and after a checkpoint is loaded, so they are not saved. If
the parameters or their order change, some matrices get another phase, and one improvement comes a few steps
sooner or later.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

from torch import Tensor

from merit_optim.optim.axes.directions import Soap
from merit_optim.optim.engines.work import Work, pick
from merit_optim.optim.spec import Spec

Members = Sequence[tuple[Spec, Sequence[Tensor]]]
"""The spec and the parameters of every group."""


def in_turns(works: list[Work], members: Members) -> list[Work]:
    """Split each work whose matrices take turns into one per phase, with the phase in its spec."""
    phases = phases_of(members)
    if not phases:
        return works
    split: list[Work] = []
    for work in works:
        if not phases.keys() & work.originals:
            split.append(work)
            continue
        alike: dict[int, list[int]] = {}
        for i, original in enumerate(work.originals):
            alike.setdefault(phases[original], []).append(i)
        # In the order of phases, which is the same on all ranks, whichever parameters have gradients there.
        for phase, keep in sorted(alike.items()):
            split.append(pick(work, keep)._replace(spec=work.spec.in_turn(phase)))
    return split


def phases_of(members: Members) -> dict[Tensor, int]:
    """The phase of every parameter that takes turns, assigned separately for each frequency."""
    costs: dict[int, dict[Tensor, int]] = {}
    for spec, params in members:
        direction = spec.direction
        if isinstance(direction, Soap) and direction.refresh_phase is None:
            alike = costs.setdefault(direction.precondition_frequency, {})
            for param in params:
                alike[param] = direction.refresh_cost(spec.view.matrices(param.shape))
    return {
        param: phase
        for frequency, alike in costs.items()
        for param, phase in zip(alike, spread(tuple(alike.values()), frequency), strict=True)
    }


@functools.lru_cache
def spread(costs: tuple[int, ...], num_phases: int) -> tuple[int, ...]:
    """Assign costs to phases of about equal cost: the largest cost first, each to the lightest phase.

    The stacked matrices of one parameter are one cost, because they are processed together.

    Examples:
        >>> spread((1, 5, 3, 3), 2)
        (0, 0, 1, 1)
    """
    phases = [0] * len(costs)
    lightest = [(0, phase) for phase in range(num_phases)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):  # stable: equal costs keep their order
        load, phase = lightest[0]
        phases[i] = phase
        heapq.heapreplace(lightest, (load + costs[i], phase))
    return tuple(phases)
