"""Reading traced programs."""

from zerojax.jaxprs import sub_jaxprs


def equations(jaxpr):
    """Every equation of a jaxpr, those of nested jaxprs included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from equations(inner)


def count(jaxpr, primitive):
    """How often a primitive runs; what a scan holds, as often as it has iterations."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += (equation.primitive.name == primitive) + trips * sum(count(s, primitive) for s in sub_jaxprs(equation))
    return total
