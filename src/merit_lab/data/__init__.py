"""Convert text to token files, and token files to batches."""

from merit_lab.data.batches import Batches, check_validation_size, validation_sequences
from merit_lab.data.tokens import Dataset, TokenFile

__all__ = ["Batches", "Dataset", "TokenFile", "check_validation_size", "validation_sequences"]
