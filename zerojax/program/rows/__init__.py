"""Follows the rows of a batch through a loss: which of its results are sums over rows, and over which rows."""
