"""The parts of a training step: model adapters, the training state, the gradient and the optimizer update."""
