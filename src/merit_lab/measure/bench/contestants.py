"""The optimizers that are timed, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from merit_lab.measure.bench.naive import NaiveMERIT
from merit_lab.measure.bench.shapes import Parameters, Tensors, WeightSpec
from merit_lab.measure.bench.timing import Stepped
from merit_optim import LAMB, MERIT, SOAP, SOAPMERIT, MaxLAMB, Muon, MuonMERIT, NorMuon
from merit_optim.optim.directions import Soap

DION = "pip install git+https://github.com/microsoft/dion.git"


@dataclass(frozen=True)
class BenchContestant:
    """An optimizer to time, and how to time it."""

    name: str
    make: Callable[[Parameters], Stepped]
    clip: bool = False
    compiled: bool = False
    graph: bool = False
    most_elements: int = 10**12
    """Larger models are left out, because the step would take minutes."""
    direction: Literal["adam", "muon", "soap"] = "adam"
    """The direction of hidden matrices; Muon and SOAP are left out for models without any."""
    cycle: int = 1
    """Number of steps after which the work repeats."""
    missing: str | None = None
    """Why it cannot be timed here, or None."""

    def left_out(self, weights: list[WeightSpec]) -> str | None:
        """Why it is not timed with this model, or None."""
        if self.missing is not None:
            return self.missing
        if self.direction != "adam" and all(weight.kind != "hidden" for weight in weights):
            return "the model has no hidden matrix"
        if (total := sum(weight.num_elements for weight in weights)) > self.most_elements:
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


def on_cuda() -> list[BenchContestant]:
    adamw, billion = torch.optim.AdamW, 10**9
    return [
        BenchContestant("torch AdamW, fused", lambda p: adamw(p.all, fused=True), graph=True),
        BenchContestant("MERIT, fused", lambda p: MERIT(p.all, fused=True), graph=True),
        BenchContestant(
            "clip_grad_norm_ and torch AdamW, fused", lambda p: adamw(p.all, fused=True), clip=True
        ),
        BenchContestant("MERIT, fused, max_grad_norm", lambda p: MERIT(p.all, fused=True, max_grad_norm=1.0)),
        BenchContestant(
            "MERIT, fused, nonfinite='skip'", lambda p: MERIT(p.all, fused=True, nonfinite="skip")
        ),
        BenchContestant("LAMB, fused", lambda p: LAMB(p.all, fused=True)),
        BenchContestant("MaxLAMB, fused", lambda p: MaxLAMB(p.all, fused=True)),
        *muon_family(partial(adamw, fused=True), use_triton=True, graph=True),
        *soap_family(most_elements=billion // 2),
        BenchContestant("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True), most_elements=billion),
        BenchContestant("MERIT, foreach", lambda p: MERIT(p.all, foreach=True), most_elements=billion),
        BenchContestant("naive MERIT", lambda p: NaiveMERIT(p.all), most_elements=billion),
        *others(),
        BenchContestant(
            "MERIT, compiled", lambda p: MERIT(p.all, capturable=True), compiled=True, most_elements=2 * 10**8
        ),
    ]


def on_cpu() -> list[BenchContestant]:
    adamw, most = torch.optim.AdamW, 10**7
    return [
        BenchContestant("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True)),
        BenchContestant("torch AdamW, fused", lambda p: adamw(p.all, fused=True)),
        BenchContestant("MERIT", lambda p: MERIT(p.all)),
        BenchContestant("LAMB", lambda p: LAMB(p.all)),
        BenchContestant("MaxLAMB", lambda p: MaxLAMB(p.all)),
        BenchContestant("naive MERIT", lambda p: NaiveMERIT(p.all)),
        *muon_family(partial(adamw, foreach=True), use_triton=False, graph=False, most_elements=most),
        *soap_family(most_elements=most),
        *others(),
    ]


def muon_family(
    adamw: Callable[[Tensors], Optimizer], *, use_triton: bool, graph: bool, most_elements: int = 10**12
) -> list[BenchContestant]:
    """torch's Muon with AdamW for the rest, dion's, and this package's with the fastest available engine."""

    def contestant(name: str, make: Callable[[Parameters], Stepped], **options: Any) -> BenchContestant:
        return BenchContestant(name, make, direction="muon", most_elements=most_elements, **options)

    return [
        contestant("torch Muon + AdamW", lambda p: Together(torch.optim.Muon(p.hidden), adamw(p.rest))),
        contestant(
            "dion Muon + AdamW",
            partial(dion_muon, use_triton=use_triton),
            missing=None if find_spec("dion") else f"the package dion is not installed; {DION}",
        ),
        contestant("Muon", lambda p: Muon(p.groups), graph=graph),
        contestant("NorMuon", lambda p: NorMuon(p.groups), graph=graph),
        contestant("MuonMERIT", lambda p: MuonMERIT(p.groups), graph=graph),
    ]


def dion_muon(params: Parameters, *, use_triton: bool) -> Stepped:
    """dion's Muon as in its README: one optimizer with AdamW for the rest, and no mesh on one device.

    Other options have their defaults, which leave out Nesterov momentum.
    """
    groups = [{"params": params.hidden}, {"params": params.rest, "algorithm": "adamw"}]
    optimizer: Stepped = import_module("dion").Muon(groups, use_triton=use_triton)
    return optimizer


def soap_family(*, most_elements: int) -> list[BenchContestant]:
    """SOAP and SOAPMERIT, whose steps differ within a cycle because each basis is improved once in it."""

    def contestant(name: str, make: Callable[[Parameters], Stepped]) -> BenchContestant:
        cycle = Soap().precondition_frequency
        return BenchContestant(name, make, direction="soap", cycle=cycle, most_elements=most_elements)

    return [
        contestant("SOAP", lambda p: SOAP(p.groups)),
        contestant("SOAPMERIT", lambda p: SOAPMERIT(p.groups)),
    ]


def others() -> list[BenchContestant]:
    """The LAMB of pytorch_optimizer, if it is installed."""
    if find_spec("pytorch_optimizer") is None:
        return []
    from pytorch_optimizer import Lamb

    return [BenchContestant("pytorch_optimizer Lamb", lambda p: Lamb(p.all), most_elements=10**9)]
