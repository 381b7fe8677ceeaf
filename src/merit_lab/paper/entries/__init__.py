"""The entries, grouped by what they analyse."""
