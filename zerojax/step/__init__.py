"""One training step: the model, its state, the gradient on one device's data, and the update."""
