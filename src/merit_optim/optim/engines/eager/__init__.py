"""The trust-ratio step in ordinary torch operations, in place and in pieces."""
