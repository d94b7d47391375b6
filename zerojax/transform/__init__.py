"""A traced loss, cut into segments and rewritten: gathers, reductions and rematerialisation, unit by unit."""
