"""Monitor attention and updates in any model. Depends only on torch."""

from merit_optim.monitor.attention import AttentionMonitor
from merit_optim.monitor.reading import AttentionReading
from merit_optim.monitor.updates import update_scalars

__all__ = ["AttentionMonitor", "AttentionReading", "update_scalars"]
