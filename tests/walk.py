"""Reading traced programs."""

from zerojax.jaxprs import sub_jaxprs


def equations(jaxpr):
    """Every equation of a jaxpr, those of nested jaxprs included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from equations(inner)


def count(jaxpr, primitive):
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))
