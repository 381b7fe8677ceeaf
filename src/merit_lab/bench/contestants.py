"""The optimizers that are timed beside each other, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from merit_lab.bench.naive import NaiveMERIT
from merit_lab.bench.shapes import Parameters, Tensors, Weight
from merit_lab.bench.timing import Stepped
from merit_optim import LAMB, MERIT, SOAP, SOAPMERIT, MaxLAMB, Muon, MuonMERIT, NorMuon
from merit_optim.optim.directions import Soap

DION = "pip install git+https://github.com/microsoft/dion.git"


@dataclass(frozen=True)
class Contestant:
    """An optimizer, how to make it, and what happens before its step."""

    name: str
    make: Callable[[Parameters], Stepped]
    clip: bool = False
    compiled: bool = False
    graph: bool = False
    most_elements: int = 10**12
    """Larger models are left out: for what takes minutes there."""
    direction: Literal["adam", "muon", "soap"] = "adam"
    """Of hidden matrices: without any, Muon and SOAP are left out."""
    cycle: int = 1
    """Steps after which its work repeats itself."""
    missing: str | None = None
    """Why it cannot be timed here."""

    def left_out(self, weights: list[Weight]) -> str | None:
        """Why it is not timed with such a model, or None."""
        if self.missing is not None:
            return self.missing
        if self.direction != "adam" and all(own.kind != "hidden" for own in weights):
            return "the model has no hidden matrix"
        if (total := sum(own.num_elements for own in weights)) > self.most_elements:
            return f"takes minutes with more than {self.most_elements:,} parameters; the model has {total:,}"
        return None


class Together:
    """Optimizers that are stepped one after the other."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def on_cuda() -> list[Contestant]:
    adamw, billion = torch.optim.AdamW, 10**9
    return [
        Contestant("torch AdamW, fused", lambda p: adamw(p.all, fused=True), graph=True),
        Contestant("MERIT, fused", lambda p: MERIT(p.all, fused=True), graph=True),
        Contestant("clip_grad_norm_ and torch AdamW, fused", lambda p: adamw(p.all, fused=True), clip=True),
        Contestant("MERIT, fused, max_grad_norm", lambda p: MERIT(p.all, fused=True, max_grad_norm=1.0)),
        Contestant("MERIT, fused, nonfinite='skip'", lambda p: MERIT(p.all, fused=True, nonfinite="skip")),
        Contestant("LAMB, fused", lambda p: LAMB(p.all, fused=True)),
        Contestant("MaxLAMB, fused", lambda p: MaxLAMB(p.all, fused=True)),
        *muon_family(partial(adamw, fused=True), use_triton=True, graph=True),
        *soap_family(most_elements=billion // 2),
        Contestant("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True), most_elements=billion),
        Contestant("MERIT, foreach", lambda p: MERIT(p.all, foreach=True), most_elements=billion),
        Contestant("naive MERIT", lambda p: NaiveMERIT(p.all), most_elements=billion),
        *others(),
        Contestant(
            "MERIT, compiled", lambda p: MERIT(p.all, capturable=True), compiled=True, most_elements=2 * 10**8
        ),
    ]


def on_cpu() -> list[Contestant]:
    adamw, most = torch.optim.AdamW, 10**7
    return [
        Contestant("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True)),
        Contestant("torch AdamW, fused", lambda p: adamw(p.all, fused=True)),
        Contestant("MERIT", lambda p: MERIT(p.all)),
        Contestant("LAMB", lambda p: LAMB(p.all)),
        Contestant("MaxLAMB", lambda p: MaxLAMB(p.all)),
        Contestant("naive MERIT", lambda p: NaiveMERIT(p.all)),
        *muon_family(partial(adamw, foreach=True), use_triton=False, graph=False, most_elements=most),
        *soap_family(most_elements=most),
        *others(),
    ]


def muon_family(
    adamw: Callable[[Tensors], Optimizer], *, use_triton: bool, graph: bool, most_elements: int = 10**12
) -> list[Contestant]:
    """Torch's Muon with AdamW beside it, dion's, and this package's with the fastest engine there is."""

    def own(name: str, make: Callable[[Parameters], Stepped], **options: Any) -> Contestant:
        return Contestant(name, make, direction="muon", most_elements=most_elements, **options)

    return [
        own("torch Muon + AdamW", lambda p: Together(torch.optim.Muon(p.hidden), adamw(p.rest))),
        own(
            "dion Muon + AdamW",
            partial(dion_muon, use_triton=use_triton),
            missing=None if find_spec("dion") else f"the package dion is not installed; {DION}",
        ),
        own("Muon", lambda p: Muon(p.groups), graph=graph),
        own("NorMuon", lambda p: NorMuon(p.groups), graph=graph),
        own("MuonMERIT", lambda p: MuonMERIT(p.groups), graph=graph),
    ]


def dion_muon(params: Parameters, *, use_triton: bool) -> Stepped:
    """dion's Muon as its README builds it: one optimizer with AdamW for the rest, and no mesh on one device.

    Its defaults else, which spare it Nesterov's look ahead.
    """
    groups = [{"params": params.hidden}, {"params": params.rest, "algorithm": "adamw"}]
    made: Stepped = import_module("dion").Muon(groups, use_triton=use_triton)
    return made


def soap_family(*, most_elements: int) -> list[Contestant]:
    """SOAP improves each basis once in a cycle, so that the steps of a cycle differ."""

    def own(name: str, make: Callable[[Parameters], Stepped]) -> Contestant:
        cycle = Soap().precondition_frequency
        return Contestant(name, make, direction="soap", cycle=cycle, most_elements=most_elements)

    return [own("SOAP", lambda p: SOAP(p.groups)), own("SOAPMERIT", lambda p: SOAPMERIT(p.groups))]


def others() -> list[Contestant]:
    """Another library's LAMB, where it is installed."""
    if find_spec("pytorch_optimizer") is None:
        return []
    from pytorch_optimizer import Lamb

    return [Contestant("pytorch_optimizer Lamb", lambda p: Lamb(p.all), most_elements=10**9)]
