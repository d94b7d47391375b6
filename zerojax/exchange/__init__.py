"""Parameters in files that other programs read and write."""
