"""Walks over the equations of traced programs."""

from zerojax.program.jaxprs import is_call, is_var, sub_jaxprs


def equations(jaxpr):
    """Yields every equation of a jaxpr and of its nested jaxprs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from equations(inner)


def count(jaxpr, primitive):
    """How often a primitive runs, with the trip counts of scans."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += (equation.primitive.name == primitive) + trips * sum(count(s, primitive) for s in sub_jaxprs(equation))
    return total


def flat(jaxpr):
    """(equation, the variables that it reads) of a jaxpr. Nested jits and `shard_map` are inlined, loops are not."""
    found, names = [], {}
    resolve = lambda atoms: [names.get(atom, atom) if is_var(atom) else atom for atom in atoms]

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            operands = resolve(equation.invars)
            if is_call(equation) or equation.primitive.name == "shard_map":
                (inner,) = sub_jaxprs(equation)
                names.update(zip(inner.invars, operands, strict=True))
                walk(inner)
                names.update(zip(equation.outvars, resolve(inner.outvars), strict=True))
            else:
                found.append((equation, [atom for atom in operands if is_var(atom)]))

    walk(jaxpr)
    return found
