"""The directions: what gradients become before any ratio scales them."""

from merit_optim.optim.axes.directions.adam import Adam
from merit_optim.optim.axes.directions.direction import Direction, MatrixDirection, Sent, Traffic
from merit_optim.optim.axes.directions.muon import Muon
from merit_optim.optim.axes.directions.sgd import Sgd
from merit_optim.optim.axes.directions.sign import Sign
from merit_optim.optim.axes.directions.soap import Soap
from merit_optim.optim.axes.directions.soap_muon import SoapMuon
from merit_optim.optim.axes.directions.two_averages import TwoAverages

__all__ = [
    "Adam",
    "Direction",
    "MatrixDirection",
    "Muon",
    "Sent",
    "Sgd",
    "Sign",
    "Soap",
    "SoapMuon",
    "Traffic",
    "TwoAverages",
]
