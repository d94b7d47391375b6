"""What the tests of the zoo and `scripts/benchmarks/zoo.py` measure of a state, as `Zero.explain` shows it."""


def unit_shares(zero, state):
    """The share of the bytes of all units that each unit holds, by its name."""
    units = zero.explain(state).units
    total = sum(unit.num_bytes for unit in units)
    return {unit.name: unit.num_bytes / total for unit in units}


def replicated_share(zero, state):
    """The share of the bytes of the parameters that every device holds."""
    explained = zero.explain(state)
    size = lambda rows: sum(row.undivided_bytes for row in rows if row.category == "params")
    return size(explained.replicated) / size(explained.rows)
