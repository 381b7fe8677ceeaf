"""The optimizers that are timed, on a GPU and on a CPU: this package's, torch's and public rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from merit_lab.measure.bench.model import Parameters, WeightSpec
from merit_lab.measure.bench.timing import Stepped
from merit_optim import LAMB, MERIT, SOAP, SOAPMERIT, MaxLAMB, Muon, MuonMERIT, MuonSphere, NorMuon
from merit_optim.optim.axes.directions import Soap

_DION = "git+https://github.com/microsoft/dion.git"
_ANY = 10**12
_BILLION = 10**9


@dataclass(frozen=True)
class BenchContestant:
    """An optimizer to time, and how to time it."""

    name: str
    make: Callable[[Parameters], Stepped]
    clip: bool = False
    compiled: bool = False
    graph: bool = False
    most_elements: int = _ANY
    """Larger models are left out, because the step would take minutes."""
    direction: Literal["adam", "muon", "soap"] = "adam"
    """The direction of hidden matrices; Muon and SOAP are left out for models without any."""
    cycle: int = 1
    """Number of steps after which the work repeats."""
    package: str | None = None
    """What must be installed: the name of the package, and what pip installs if that is another."""

    def left_out(self, weights: list[WeightSpec]) -> str | None:
        """Why it is not timed with this model, or None."""
        if self.package is not None:
            name, _, source = self.package.partition(" ")
            if find_spec(name) is None:
                return f"the package {name} is not installed; pip install {source or name}"
        if self.direction != "adam" and all(weight.kind != "hidden" for weight in weights):
            return "the model has no hidden matrix"
        if (total := sum(weight.num_elements for weight in weights)) > self.most_elements:
            return f"takes minutes with more than {self.most_elements:,} parameters; the model has {total:,}"
        return None


class Together:
    """Optimizers that are stepped one after the other."""

    def __init__(self, *optimizers: Stepped) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class NaiveMERIT(Optimizer):
    """A direct transcription of the definition: the cost without engines, and not meant for training."""

    def __init__(self, params: ParamsT, lr: float = 9e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95), "eps": 1e-6})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                state = self.state[w]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(w), torch.zeros_like(w)
                m, v, g = state["m"], state["v"], w.grad
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
                s = w.abs().max() / u.abs().max()
                if w.ndim == 2:
                    rows = w.abs().amax(1, keepdim=True) / u.abs().amax(1, keepdim=True)
                    columns = w.abs().amax(0, keepdim=True) / u.abs().amax(0, keepdim=True)
                    s = torch.maximum(torch.maximum(rows, columns), s)
                w.sub_(group["lr"] * (s * u).clamp(-1, 1))


def contestants(*, on_gpu: bool) -> list[BenchContestant]:
    """The optimizers that are timed, this package's with the fastest available engine."""
    one, adamw = BenchContestant, torch.optim.AdamW
    if on_gpu:
        most, large = _BILLION, _BILLION // 2
        own = [
            one("torch AdamW, fused", lambda p: adamw(p.all, fused=True), graph=True),
            one("MERIT, fused", lambda p: MERIT(p.all, fused=True), graph=True),
            one("clip_grad_norm_ and torch AdamW, fused", lambda p: adamw(p.all, fused=True), clip=True),
            one("MERIT, fused, max_grad_norm", lambda p: MERIT(p.all, fused=True, max_grad_norm=1.0)),
            one("MERIT, fused, nonfinite='skip'", lambda p: MERIT(p.all, fused=True, nonfinite="skip")),
            one("LAMB, fused", lambda p: LAMB(p.all, fused=True)),
            one("MaxLAMB, fused", lambda p: MaxLAMB(p.all, fused=True)),
            one("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True), most_elements=most),
            one("MERIT, foreach", lambda p: MERIT(p.all, foreach=True), most_elements=most),
            one(
                "MERIT, compiled",
                lambda p: MERIT(p.all, capturable=True),
                compiled=True,
                most_elements=2 * 10**8,
            ),
        ]
    else:
        most = large = 10**7
        own = [
            one("torch AdamW, foreach", lambda p: adamw(p.all, foreach=True)),
            one("torch AdamW, fused", lambda p: adamw(p.all, fused=True)),
            one("MERIT", lambda p: MERIT(p.all)),
            one("LAMB", lambda p: LAMB(p.all)),
            one("MaxLAMB", lambda p: MaxLAMB(p.all)),
        ]
    rest = partial(adamw, fused=True) if on_gpu else partial(adamw, foreach=True)
    muon = partial(one, direction="muon", most_elements=_ANY if on_gpu else most)
    # SOAP's steps differ within a cycle, because each basis is improved once in it.
    soap = partial(one, direction="soap", most_elements=large, cycle=Soap().precondition_frequency)
    other = "pytorch_optimizer"
    rival = partial(one, package=other, most_elements=most)
    return [
        *own,
        one("naive MERIT", lambda p: NaiveMERIT(p.all), most_elements=_BILLION),
        muon("torch Muon + AdamW", lambda p: Together(torch.optim.Muon(p.hidden), rest(p.rest))),
        muon("Muon", lambda p: Muon(p.groups), graph=on_gpu),
        muon("NorMuon", lambda p: NorMuon(p.groups), graph=on_gpu),
        muon("MuonSphere", lambda p: MuonSphere(p.groups), graph=on_gpu),
        muon("MuonMERIT", lambda p: MuonMERIT(p.groups), graph=on_gpu),
        soap("SOAP", lambda p: SOAP(p.groups)),
        soap("SOAPMERIT", lambda p: SOAPMERIT(p.groups)),
        # Of other packages, with their defaults, where these are installed. Dion as in its README: one
        # optimizer with AdamW for the rest; no mesh on one device, no Nesterov momentum.
        muon(
            "dion Muon + AdamW",
            lambda p: import_module("dion").Muon(
                [{"params": p.hidden}, {"params": p.rest, "algorithm": "adamw"}], use_triton=on_gpu
            ),
            package=f"dion {_DION}",
        ),
        rival(f"{other} Lamb", lambda p: import_module(other).Lamb(p.all)),
        rival(
            f"{other} Muon",
            lambda p: import_module(other).Muon(
                [{"params": p.hidden, "use_muon": True}, {"params": p.rest, "use_muon": False}]
            ),
            direction="muon",
        ),
        rival(f"{other} SOAP", lambda p: import_module(other).SOAP(p.all), direction="soap", cycle=10),
    ]
