"""The optimizers. Depends on torch alone."""

from merit_optim.optim.axes.directions import Direction, MatrixDirection
from merit_optim.optim.axes.holds import Hold
from merit_optim.optim.axes.ratios import Ratio
from merit_optim.optim.axes.registered import register
from merit_optim.optim.groups import describe_groups, param_groups
from merit_optim.optim.initial import init_hidden
from merit_optim.optim.presets import (
    LAMB,
    MERIT,
    SOAP,
    SOAPMERIT,
    Lion,
    MaxLAMB,
    Muon,
    MuonMERIT,
    MuonSphere,
    Muown,
    NorMuon,
    NorMuonSphere,
    OrScale,
    SOAPMuon,
    compose,
)
from merit_optim.optim.registry import OPTIMIZERS, Preset, create, optimizer_class
from merit_optim.optim.sophia import SophiaG, sampled_label_loss
from merit_optim.optim.statistics import UpdateStatistics

__all__ = [
    "LAMB",
    "MERIT",
    "OPTIMIZERS",
    "SOAP",
    "SOAPMERIT",
    "Direction",
    "Hold",
    "Lion",
    "MatrixDirection",
    "MaxLAMB",
    "Muon",
    "MuonMERIT",
    "MuonSphere",
    "Muown",
    "NorMuon",
    "NorMuonSphere",
    "OrScale",
    "Preset",
    "Ratio",
    "SOAPMuon",
    "SophiaG",
    "UpdateStatistics",
    "compose",
    "create",
    "describe_groups",
    "init_hidden",
    "optimizer_class",
    "param_groups",
    "register",
    "sampled_label_loss",
]
