"""Sharded parameters: their placements, and the collectives of a step."""
