"""Mesh axes, the placement of parameters and optimizer state, precision, and the names of units."""
