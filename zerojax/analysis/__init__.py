"""Reads traced and compiled programs, and describes the hardware they run on. Independent of ZeRO."""
