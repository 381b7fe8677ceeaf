"""Parameters on several ranks: what their placements mean, and the collectives of a step."""
