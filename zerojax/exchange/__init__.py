"""Reads and writes parameters in files of other programs."""
