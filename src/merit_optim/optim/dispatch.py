"""The choice of an engine for each weight, and a step's phases on the engines.

An engine turns works into parts. On one device each part is updated before the next is begun. On several
ranks, parts of cut matrices wait for the owners of whole ones, and parts of cut weights for the sizes that
other ranks measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from merit_optim.optim.engines import fused_unavailable, interpreting
from merit_optim.optim.engines.eager import engine as eager
from merit_optim.optim.engines.fused.known import has_kernels
from merit_optim.optim.engines.part import Formed, MatrixPart, Part, ProductPart, Whole
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Work, apart, count_step, names_of
from merit_optim.optim.refresh import Members, in_turns
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder
from merit_optim.optim.torch_private import is_fake

if TYPE_CHECKING:
    from merit_optim.optim.engines.fused.engine import FusedEngine


def fuses(spec: Spec, param: Tensor) -> bool:
    """Whether the fused engine is requested, or is the default choice, and can run.

    A request can be impossible to meet if it comes from a checkpoint of another machine, or if tensors are
    fake, which have no addresses.
    """
    device = param.device
    if spec.fused is None:
        wanted = spec.foreach is None and not spec.differentiable and device.type == "cuda"
    else:
        wanted = spec.fused and (device.type == "cuda" or interpreting())
    can_run = has_kernels(spec.direction) and fused_unavailable() is None
    return bool(wanted) and can_run and not is_fake(param)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """What the engines need of an optimizer, and a step on them."""

    members: Members
    """The spec and the parameters of every group."""
    state: dict[Tensor, dict[str, Any]]
    fused_on: Callable[[torch.device], FusedEngine]
    """The fused engine of a device. The optimizer keeps it, with its tables."""

    def take_step(
        self, works: list[Work], controls: Controls, sharding: Sharding | None, recorder: Recorder | None
    ) -> None:
        """Count the step, and update every weight and its state; statistics go to the recorder."""
        works = in_turns(works, self.members)
        parts = self._parts_of(works, controls, sharding, one_by_one=recorder is not None)
        if sharding is not None:
            self._update_on_ranks(works, parts, sharding, recorder)
            return
        while parts:  # one at a time: each direction is freed before the next is formed
            part = parts.pop()
            part.advance()
            part.apply(recorder)
            del part

    def _parts_of(
        self, works: list[Work], controls: Controls, sharding: Sharding | None, *, one_by_one: bool
    ) -> list[Part]:
        """Count the step, and give each weight to the engine of its group and device."""
        shares = None if sharding is None else sharding.shares
        parts: list[Part] = []
        for device, on_device in apart(works, controls).items():
            fused: list[Work] = []
            rest: list[Work] = []
            for work in on_device:
                (fused if fuses(work.spec, work.params[0]) else rest).append(work)
            if fused:
                fused = [self._counted_on(device, work) for work in fused]
                fused_parts, unfused = self.fused_on(device).parts_of(fused, controls[device], shares)
                parts += fused_parts
                rest += unfused
            count_step(rest, controls)  # the fused engine counts its own
            parts += eager.parts_of(rest, controls, shares, one_by_one=one_by_one)
        return parts

    def _counted_on(self, device: torch.device, work: Work) -> Work:
        """The work, with its step counts moved to the device, where the kernels increment them."""
        if set(map(Tensor.get_device, work.steps)) != {work.params[0].get_device()}:
            for original, step in zip(work.originals, work.steps, strict=True):
                self.state[original]["step"] = step.to(device, torch.float32)
            work = work._replace(steps=[self.state[original]["step"] for original in work.originals])
        return work

    def _update_on_ranks(
        self, works: list[Work], parts: list[Part], sharding: Sharding, recorder: Recorder | None
    ) -> None:
        originals = {p: o for work in works for p, o in zip(work.params, work.originals, strict=True)}
        here = set(originals.values())
        cut = [cast("MatrixPart", part) for part in parts if part.is_cut]
        rest = [part for part in parts if not part.is_cut]
        parts.clear()  # so that a part is freed once its weights are updated
        waiting: list[Part] = []

        def go_on(part: Part) -> None:
            """Update the weights now, or keep the part until ranks have exchanged their norms."""
            if sharding.crosses(part.places, originals) or (
                part.has_products and sharding.line_sums.cross(cast("ProductPart", part))
            ):
                waiting.append(part)
            else:
                part.apply(recorder)

        sharding.owners.start(cut)
        while rest:  # while messages are in flight
            whole = rest.pop()
            whole.advance()
            go_on(whole)
            del whole

        def step_of(param: Tensor) -> float | Tensor:
            """The step of a weight that this rank owns, which may have its gradient on other ranks only."""
            # The eager engine has counted it where the gradient is. Muon, which may be fused, ignores it.
            before: float | Tensor = self.state[param]["step"] if self.state.get(param) else 0
            return before if param in here else before + 1

        formed = sharding.owners.finish([spec for spec, _ in self.members], step_of, self._form)
        while cut:
            part = cut.pop()
            part.after([formed.pop(original) for original in part.originals])
            go_on(part)
            del part
        sharding.reduce((place for part in waiting for place in part.places), originals)
        held = [cast("ProductPart", part) for part in waiting if part.has_products]
        for ready in held:
            ready.scale(recorder)
        sharding.line_sums.agree(held)
        for ready in held:
            ready.settle(recorder)
        for other in waiting:
            if not other.has_products:
                other.apply(recorder)
        if recorder is not None:
            names = {
                o: name for work in works for o, name in zip(work.originals, names_of(work), strict=True)
            }
            sharding.merge_statistics(recorder, names)

    def _form(self, wholes: Iterable[Whole]) -> Iterator[Formed]:
        """Form the directions of whole matrices: one by one, or many at once where they are fused."""

        def device_if_fused(whole: Whole) -> torch.device | None:
            n_NRC = whole.gathered[0]
            return n_NRC.device if fuses(whole.spec, n_NRC) else None

        for device, some in groupby(wholes, device_if_fused):
            yield from (eager.form if device is None else self.fused_on(device).form)(some)
