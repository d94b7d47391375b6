"""The objects of Transformers itself as models, and a model that this version of JAX does not run."""

import re

import numpy as np
import optax
import pytest
from flax import traverse_util

import zerojax
from zerojax import Zero
from zoo import transformers_models

pytestmark = pytest.mark.zoo
T = transformers_models.T


def test_a_model_object_is_passed_to_init_as_it_is():
    model = T.FlaxGPT2LMHeadModel(T.GPT2Config(**transformers_models.GPT2), _do_init=False)
    zero = Zero(zerojax.make_mesh())
    state = zero.init(model, optax.sgd(0.1))
    shapes = {"/".join(path): a.shape for path, a in traverse_util.flatten_dict(model.params_shape_tree).items()}
    assert {leaf.path: leaf.shape for leaf in state.layout.leaves} == shapes
    entry = next(entry for entry in transformers_models.entries() if entry.name == "hf-gpt2")
    _, metrics = zero.train_step(entry.loss)(state, entry.batch(0))
    assert np.isfinite(metrics["loss"])


def test_t5_raises_the_error_of_its_own_call_to_jax_with_a_note():
    module, inputs = transformers_models.t5()
    with pytest.raises(TypeError, match=r"clip\(\) got an unexpected keyword argument 'a_max'") as raised:
        Zero(zerojax.make_mesh()).init(module, optax.sgd(0.1), inputs=inputs)
    (note,) = [note for note in raised.value.__notes__ if note.startswith("init: ")]  # JAX adds one too
    assert note.startswith("init: the model cannot be created\n  got:      TypeError at ")
    assert re.search(r"modeling_flax_t5\.py:\d+, with jax .* and flax .*\n  fix: .*install versions of jax", note)
