"""Where arrays live: mesh axes, the placement of leaves and optimizer state, precision, names of units."""
