"""Reads programs, traced and compiled, and describes the hardware they run on. Knows nothing of ZeRO."""
