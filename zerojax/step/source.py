"""What `init` takes: something that creates a model, which is traced, or a model that exists, which is sharded.

A model that exists must not be closed over by a traced function: its weights would become constants of a program, which
are copied several times.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import flax
import jax
from flax import errors, linen as nn, nnx
from jax.core import Tracer

from zerojax.sharding.placement import by_path
from zerojax.utils.typing import PRNGKey, PyTree
from zerojax.utils.warn import line_of

Inputs: TypeAlias = Sequence[PyTree] | Mapping[str, PyTree] | None  # example inputs of a Linen module


class ModelSource(NamedTuple):
    """Where the initial parameters come from: one of the two is None."""

    create: Callable[[PRNGKey], PyTree] | None  # `create(key)` returns the model
    existing: PyTree  # an nnx.Module, Linen variables or a tree of parameters, with arrays


def source_of(model: PyTree, inputs: Inputs) -> ModelSource:
    """The source of what was passed to `init`: see there for models and inputs."""
    # A Linen module.
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ValueError(
                f"init: a Linen module needs example inputs\n"
                f"  got:      {type(model).__name__}\n"
                f"  fix:      zero.init(module, tx, inputs=(x,)), or zero.init(lambda key: module.init(key, x), tx)"
            )
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        return _creates(lambda key: model.init(key, *args, **kwargs))

    # Another model, or a function.
    if inputs is not None:
        raise ValueError(
            f"init: inputs= is for a Linen module\n"
            f"  got:      {type(model).__name__}\n"
            f"  fix:      leave it out: other models are created without inputs"
        )
    if isinstance(model, nnx.Module):
        return ModelSource(None, model)
    if all(hasattr(model, name) for name in ("init_weights", "input_shape", "module")):  # Hugging Face transformers
        if getattr(model, "_is_initialized", False):
            return ModelSource(None, model.params)
        return _creates(lambda key: model.init_weights(key, model.input_shape))
    if callable(model):
        return _creates(functools.partial(_call, model))
    if not jax.tree.leaves(model) or jax.tree_util.all_leaves([model]):
        raise ValueError(
            f"init: neither a model nor a function that creates one\n"
            f"  got:      {type(model).__name__}\n"
            f"  fix:      pass an nnx.Module or its class, a Linen module with inputs=(x,), a tree of arrays, or a "
            f"function that returns one of them"
        )
    return ModelSource(None, model)


def _creates(create: Callable[[PRNGKey], PyTree]) -> ModelSource:
    return ModelSource(_explaining_errors()(create), None)


@contextlib.contextmanager
def _explaining_errors() -> Iterator[None]:
    """Adds a note to errors of a model that is created: its line, and what may help. Their type and text stay, except
    for Flax's error about a variable of another trace.
    """
    try:
        yield
    except errors.TraceContextError as error:
        raise ValueError(
            f"init: the function uses a variable of nnx that was created outside of it, such as nnx.Rngs\n"
            f"  got:      {str(error).partition(' (https')[0]}\n"
            f"  fix:      take it as a parameter, lambda rngs: Model(rngs=rngs); init(..., seed=) sets the seed"
        ) from error
    except Exception as error:
        if line := line_of(error):
            where = f"{line}, with jax {jax.__version__} and flax {flax.__version__}"
            fix = (
                "change the model there, or install versions of jax and flax with which it works. If it only\n"
                "            fails because `init` traces it, create it yourself: init(model, tx) takes one with values"
            )
        else:
            where = "its call: init calls model(rngs=rngs), model(key) or model()"
            fix = "pass a function that needs no other arguments, such as functools.partial(Model, config)"
        got = f"{type(error).__name__} at {where}"
        error.add_note(f"init: the model cannot be created\n  got:      {got}\n  fix:      {fix}")
        raise


def _call(create_model: Callable[..., PyTree], key: PRNGKey) -> PyTree:
    """Calls `create_model(rngs=nnx.Rngs(key))`, `create_model(key)` or `create_model()`, depending on its signature.

    Eager sharding is off, because Flax needs a mesh for it. Annotations are read later, by `split`.
    """
    parameters = _signature(create_model).parameters
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variadic]
    binds_rngs = isinstance(create_model, functools.partial) and "rngs" in create_model.keywords
    with nnx.use_eager_sharding(False):
        if "rngs" in required or ("rngs" in parameters and not binds_rngs):
            return create_model(rngs=nnx.Rngs(key))
        if not required:
            return create_model()
        try:
            return create_model(key)
        except (AttributeError, TypeError) as error:  # a parameter of another name may be meant for nnx.Rngs
            try:
                return create_model(nnx.Rngs(key))
            except Exception:
                raise error from None


def _signature(fn: Callable[..., PyTree]) -> inspect.Signature:
    """The signature of a call. That of an nnx class is hidden by its metaclass."""
    called, args, kwargs = fn, (), {}
    if isinstance(fn, functools.partial):
        called, args, kwargs = fn.func, fn.args, fn.keywords
    if isinstance(called, type):
        called, args = called.__init__, (None, *args)
    return inspect.signature(functools.partial(called, *args, **kwargs))


def plain_arrays(model: PyTree) -> list[str]:
    """The paths of arrays that are attributes of an nnx.Module and not in a variable. They become leaves of its state.

    Flax makes leaves of them if they are concrete, and leaves tracers in the static part of the module.
    """
    if not isinstance(model, nnx.Module):
        return []
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Variable):
            for name, value in list(vars(node).items()):
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))
    rest = by_path(nnx.split(model, nnx.Param, ...)[2], is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [path for path, node in rest.items() if not isinstance(node, nnx.Variable)]
