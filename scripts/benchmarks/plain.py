"""The training step of gpt.py written without zerojax: with `jit`, `NamedSharding` and Optax alone."""

import inspect

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def num_slices(devices):
    """The number of TPU slices, each of which holds a copy of the state; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def mesh_over(devices):
    """A mesh with the axis 'data', and with 'replica' over several slices."""
    slices = num_slices(devices)
    return Mesh(np.array(devices).reshape(slices, -1), ("replica", "data")) if slices > 1 else Mesh(devices, ("data",))


def make_init(config, tx, captured):
    """Returns `init() -> (params, opt_state)`, with the values of `Zero.init`.

    When `init` is traced, it stores the graph definition of the module in `captured["graph"]`.
    """

    def init():
        captured["graph"], params = nnx.split(gpt.GPT(config, nnx.Rngs(0)), nnx.Param)
        return params, tx.init(params)

    return init


def divisible_dims(a, config, num_devices):
    """The dims of a leaf that can be sharded. Dim 0 of a stack, which counts layers, is never sharded."""
    stacked = config.scan and a.ndim > 1 and a.shape[0] == config.layers
    return [d for d in range(int(stacked), a.ndim) if a.shape[d] % num_devices == 0]


def layer_by_layer(form, config, remat, devices):
    """A step that gathers each layer by itself: the strongest plain form that we know.

    Args:
        form: "plain" shards the state; with any other form everything is replicated.
        config: of the GPT.
        remat: "full" or "offload" (the inputs of the layers are saved), "dots" or "none" (everything is saved). Nothing
            is offloaded here.
        devices: to run on.

    Returns:
        (jitted `init() -> state`, jitted `step(state, batch) -> (state, metrics)`, the sharding of the batch).
    """
    mesh = mesh_over(devices)
    tx = optax.adamw(1e-3)
    shard = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    rows = shard(mesh.axis_names)
    captured = {}
    init = make_init(config, tx, captured)

    def place(a):
        dims = divisible_dims(a, config, mesh.shape["data"])
        if form != "plain" or not dims:
            return shard()
        return shard(*[None] * dims[0], "data")

    shardings = jax.tree.map(place, jax.eval_shape(init))
    full = lambda tree: jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: shard(), tree))
    checkpointed = {
        "full": jax.checkpoint,
        "offload": jax.checkpoint,
        "dots": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable),
        "none": lambda fn: fn,
    }[remat]

    def loss(params, batch):
        model = nnx.merge(captured["graph"], params)
        blocks = [model.blocks] if config.scan else model.blocks
        split = [nnx.split(block) for block in blocks]

        @checkpointed
        def layer(x_BSD, weights):
            return jax.lax.with_sharding_constraint(nnx.merge(split[0][0], full(weights))(x_BSD), rows), None

        merged = lambda part: nnx.merge(*(lambda graph, state: (graph, full(state)))(*nnx.split(part)))
        embed, head = merged(model.embed), merged(model.head)
        x_BSD = jax.lax.with_sharding_constraint(embed(batch["tokens"][:, :-1]), rows)
        for _, weights in split:
            x_BSD, _ = jax.lax.scan(layer, x_BSD, weights) if config.scan else layer(x_BSD, weights)
        x_BSD = merged(model.norm)(x_BSD) if model.norm else x_BSD
        return gpt.cross_entropy(head(x_BSD), batch["tokens"][:, 1:])

    def step(state, batch):
        params, opt_state = state
        cast = jax.lax.with_sharding_constraint(jax.tree.map(lambda a: a.astype(jnp.bfloat16), params), shardings[0])
        value, grads = jax.value_and_grad(loss)(cast, batch)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        return (params, opt_state), metrics

    out_shardings = (shardings, {name: shard() for name in ("loss", "grad_norm", "param_norm")})
    step = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
    return jax.jit(init, out_shardings=shardings), step, rows


def unedited(model, tx, devices):
    """A step of a model that is not edited: the compiler decides where its sharded parameters are gathered.

    Args:
        model: of models.py.
        tx: an Optax transformation.
        devices: to run on.

    Returns:
        (jitted `init() -> state`, jitted `step(state, batch) -> (state, metrics)`, the sharding of the batch).
    """
    mesh = mesh_over(devices)
    shard = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    is_nnx = "rngs" in inspect.signature(model.create).parameters
    captured = {}

    def init():
        if not is_nnx:
            params = model.create(jax.random.key(0))
            return params, tx.init(params)
        captured["graph"], params = nnx.split(model.create(rngs=nnx.Rngs(0)), nnx.Param)
        params = jax.tree.map(jnp.asarray, nnx.pure(params))
        return params, tx.init(params)

    def place(a):
        """Shards the largest dim that the devices divide."""
        dims = [d for d in range(a.ndim) if a.shape[d] % mesh.shape["data"] == 0]
        return shard(*[None] * max(dims, key=lambda d: a.shape[d]), "data") if dims else shard()

    shardings = jax.tree.map(place, jax.eval_shape(init))

    def step(state, batch):
        params, opt_state = state
        is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
        cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if is_float(a) else a, params)
        cast = jax.lax.with_sharding_constraint(cast, shardings[0])
        loss = lambda p: model.loss(nnx.merge(captured["graph"], p) if is_nnx else p, batch)
        value, grads = jax.value_and_grad(loss)(cast)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        return (params, opt_state), metrics

    out_shardings = (shardings, {name: shard() for name in ("loss", "grad_norm", "param_norm")})
    step = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
    return jax.jit(init, out_shardings=shardings), step, shard(mesh.axis_names)


def whole_model(form, config):
    """A step without gathers of single layers.

    Args:
        form: "constrained" gathers all leaves at once, "inferred" leaves the gathering to the compiler, and
            "replicated" shards nothing.
        config: of the GPT.

    Returns:
        (state, lower(state, batch)).
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.adamw(1e-3)
    shard = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))

    captured = {}
    init = make_init(config, tx, captured)

    def place(a):
        dims = divisible_dims(a, config, mesh.size)
        if form == "replicated" or not dims:
            return shard()
        dim = max(dims, key=lambda d: a.shape[d])
        return shard(*[None] * dim, "data")

    shardings = jax.tree.map(place, jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()

    def step(state, batch):
        params, opt_state = state

        def loss(params):
            if form == "constrained":
                params = jax.lax.with_sharding_constraint(params, jax.tree.map(lambda _: shard(), params))
            return gpt.loss(nnx.merge(captured["graph"], params), batch)

        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        norm = optax.tree.norm(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": value, "grad_norm": norm, "param_norm": optax.tree.norm(params)}

    out_shardings = (shardings, {name: shard() for name in ("loss", "grad_norm", "param_norm")})
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(shardings, shard("data")), out_shardings=out_shardings)
    return state, jitted.lower
