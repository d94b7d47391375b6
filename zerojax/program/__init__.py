"""The traced loss: cut into parts, each of which is gathered, computed and reduced."""
