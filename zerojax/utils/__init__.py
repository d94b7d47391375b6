"""Types, messages and versions."""
