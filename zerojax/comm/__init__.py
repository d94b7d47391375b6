"""What moves between devices: collectives over the data axes, in buckets, and the order in which they run."""
