"""What `init` takes: something that creates a model, which is traced, or a model that exists, which is sharded.

A model that exists must not be closed over by a traced function: its weights would become constants of a program, which
are copied several times.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
from flax import errors, linen as nn, nnx
from jax.core import Tracer

from zerojax.sharding.placement import path_text
from zerojax.utils.typing import PRNGKey, PyTree
from zerojax.utils.warn import line_of


class ModelSource(NamedTuple):
    """Where the initial parameters come from: one of the two is None.

    Attributes:
        create: `create(key)` returns the model.
        existing: an nnx.Module, Linen variables or a tree of parameters, with arrays.
    """

    create: Callable[[PRNGKey], Any] | None
    existing: PyTree


def source_of(model: Any, inputs: Sequence[Any] | Mapping[str, Any] | None) -> ModelSource:
    """The source of what was passed to `init`.

    Args:
        model: an nnx.Module or its class, a Linen module, a Hugging Face Flax model, a tree of arrays, or a function.
        inputs: example inputs of a Linen module: positional, or by name.

    Raises:
        ValueError: if it is none of these, or `inputs` is missing or not needed.
    """
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ValueError(
                f"init: a Linen module needs example inputs\n"
                f"  got:      {type(model).__name__}\n"
                f"  fix:      zero.init(module, tx, inputs=(x,)), or zero.init(lambda key: module.init(key, x), tx)"
            )
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        return _creates(lambda key: model.init(key, *args, **kwargs))
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


def _creates(create: Callable[[PRNGKey], Any]) -> ModelSource:
    return ModelSource(_explains_errors()(create), None)


@contextlib.contextmanager
def _explains_errors() -> Iterator[None]:
    """Adds a note to errors of a model that is created: its line, and what may help. Their type and text stay.

    Raises:
        ValueError: in place of Flax's error about a variable of another trace.
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
        error.add_note(_note(type(error).__name__, line_of(error)))
        raise


def _note(name: str, line: str | None) -> str:
    if line is None:
        return (
            f"init: the model cannot be created\n"
            f"  got:      {name} at its call: init calls model(rngs=rngs), model(key) or model()\n"
            f"  fix:      pass a function that needs no other arguments, such as functools.partial(Model, config)"
        )
    return (
        f"init: the model cannot be created\n"
        f"  got:      {name} at {line}, with jax {jax.__version__} and flax {flax.__version__}\n"
        f"  fix:      change the model there, or install versions of jax and flax with which it works. If it only\n"
        f"            fails because `init` traces it, create it yourself: init(model, tx) takes one with values"
    )


def _call(create_model: Callable[..., Any], key: PRNGKey) -> Any:
    """Calls `create_model(rngs=nnx.Rngs(key))`, `create_model(key)` or `create_model()`, depending on its signature.

    Eager sharding is off, because Flax needs a mesh for it. Annotations are read later, by `split`.
    """
    parameters = _signature(create_model).parameters
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    with nnx.use_eager_sharding(False):
        if any(p.name == "rngs" for p in required) or ("rngs" in parameters and not _binds(create_model, "rngs")):
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


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of a call. That of an nnx class is hidden by its metaclass."""
    called, args, kwargs = fn, (), {}
    if isinstance(fn, functools.partial):
        called, args, kwargs = fn.func, fn.args, fn.keywords
    if isinstance(called, type):
        called, args = called.__init__, (None, *args)
    return inspect.signature(functools.partial(called, *args, **kwargs))


def _binds(fn: Callable[..., Any], name: str) -> bool:
    return isinstance(fn, functools.partial) and name in fn.keywords


def plain_arrays(module: nnx.Module) -> list[str]:
    """The paths of arrays that are attributes of a module and not in a variable. They become leaves of its state.

    Flax makes leaves of them if they are concrete, and leaves tracers in the static part of the module.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Variable):
            for name, value in list(vars(node).items()):
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))
    rest: PyTree = nnx.split(module, nnx.Param, ...)[2]
    with_paths = jax.tree_util.tree_leaves_with_path(rest, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [path_text(path) for path, node in with_paths if not isinstance(node, nnx.Variable)]
