"""Reading traced programs."""


def equations(jaxpr):
    """Every equation of a jaxpr, those of nested jaxprs included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(item, "jaxpr", item), "eqns"):
                    yield from equations(item)


def count(jaxpr, primitive):
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))
