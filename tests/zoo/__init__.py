"""Models of other people, unmodified, made small by their own configs. See `entries`."""
