"""In which steps SOAP's bases are improved: matrices take turns, so that all steps cost about the same.

To improve the bases of all matrices in one step, as SOAP's authors do, makes that step many times as long as
the others. Here every matrix has a phase, and is improved when the number of steps taken, divided by
``precondition_frequency``, leaves that rest.

Phases follow from the shapes of all parameters in their order, and from nothing else. So they are the same on
every rank and in every step, whichever parameters have gradients, and are found again by an optimizer that
loads a checkpoint; nothing of them is saved. Where the parameters are others or in another order, some
matrices have another phase, and are improved once a few steps sooner or later than they would have been.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from merit_optim.optim.directions import Soap, direction_of
from merit_optim.optim.engines.work import Work, pick
from merit_optim.optim.matrices import View

Group = dict[str, Any]


def in_turns(works: list[Work], groups: list[Group]) -> list[Work]:
    """The works, each whose matrices take turns as one for every phase, with a group that names it."""
    phases = phases_of(groups)
    if not phases:
        return works
    found: list[Work] = []
    for work in works:
        if not phases.keys() & work.owners:
            found.append(work)
            continue
        members: dict[int, list[int]] = {}
        for i, owner in enumerate(work.owners):
            members.setdefault(phases[owner], []).append(i)
        # In the order of phases, which is the same on ranks that have gradients of different parameters.
        for phase, keep in sorted(members.items()):
            found.append(pick(work, keep)._replace(group=in_turn(work.group, phase)))
    return found


def in_turn(group: Group, phase: int | None) -> Group:
    """The group, for parameters of this phase; itself for those that take no turns."""
    return group if phase is None else {**group, "refresh_phase": phase}


def phases_of(groups: Sequence[Group]) -> dict[Tensor, int]:
    """The phase of every parameter that takes turns; groups with other frequencies have other turns."""
    costs: dict[int, dict[Tensor, int]] = {}
    for group in groups:
        direction = direction_of(group)
        if isinstance(direction, Soap) and direction.refresh_phase is None:
            alike, view = costs.setdefault(direction.precondition_frequency, {}), View.of(group)
            for param in group["params"]:
                alike[param] = direction.refresh_cost(view.matrices(param.shape))
    return {
        param: phase
        for frequency, alike in costs.items()
        for param, phase in zip(alike, spread(tuple(alike.values()), frequency), strict=True)
    }


@functools.lru_cache
def spread(costs: tuple[int, ...], num_phases: int) -> tuple[int, ...]:
    """A phase for each cost, so that phases cost alike: the heaviest first, each to the lightest phase.

    The stacked matrices of one parameter are one cost, for they are worked on as one.

    Examples:
        >>> spread((1, 5, 3, 3), 2)
        (0, 0, 1, 1)
    """
    phases = [0] * len(costs)
    lightest = [(0, phase) for phase in range(num_phases)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):  # of equal ones the first comes first
        load, phase = lightest[0]
        phases[i] = phase
        heapq.heapreplace(lightest, (load + costs[i], phase))
    return tuple(phases)
