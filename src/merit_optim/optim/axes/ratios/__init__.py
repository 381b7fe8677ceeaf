"""The ratios: how the sizes of a weight and of its update scale the update."""

from merit_optim.optim.axes.ratios.floor import Floor
from merit_optim.optim.axes.ratios.line import Column, Row
from merit_optim.optim.axes.ratios.merit import Merit
from merit_optim.optim.axes.ratios.none import Unscaled
from merit_optim.optim.axes.ratios.ratio import Norm, Ratio, Sizes
from merit_optim.optim.axes.ratios.weight import Weight

__all__ = ["Column", "Floor", "Merit", "Norm", "Ratio", "Row", "Sizes", "Unscaled", "Weight"]
