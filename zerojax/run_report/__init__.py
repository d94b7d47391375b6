"""A page about a run: what its directory says, as one HTML file with charts."""
