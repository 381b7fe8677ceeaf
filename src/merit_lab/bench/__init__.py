"""How long an optimizer's step takes on this machine, beside the alternatives."""
