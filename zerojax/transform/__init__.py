"""A traced loss, cut into segments and rewritten: gathers, reductions and rematerialization, unit by unit."""
