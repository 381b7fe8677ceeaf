"""The optimizers. Depends on torch alone."""

from merit_optim.optim.groups import describe_groups, param_groups
from merit_optim.optim.lamb import LAMB, MaxLAMB
from merit_optim.optim.lion import Lion
from merit_optim.optim.merit import MERIT
from merit_optim.optim.muon import Muon, MuonMERIT, NorMuon, OrScale
from merit_optim.optim.registry import OPTIMIZERS, Preset, create, optimizer_class
from merit_optim.optim.soap import SOAP, SOAPMERIT
from merit_optim.optim.sophia import SophiaG, sampled_label_loss
from merit_optim.optim.statistics import UpdateStatistics

__all__ = [
    "LAMB",
    "MERIT",
    "OPTIMIZERS",
    "SOAP",
    "SOAPMERIT",
    "Lion",
    "MaxLAMB",
    "Muon",
    "MuonMERIT",
    "NorMuon",
    "OrScale",
    "Preset",
    "SophiaG",
    "UpdateStatistics",
    "create",
    "describe_groups",
    "optimizer_class",
    "param_groups",
    "sampled_label_loss",
]
