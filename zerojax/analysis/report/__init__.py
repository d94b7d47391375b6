"""Reports where the leaves of a training state are placed, and how much memory a state and a step take."""
