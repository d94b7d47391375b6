"""Compares what a step is expected to do with what its compiled program does."""
