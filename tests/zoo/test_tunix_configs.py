"""Plans of config.json files, as transformers writes them, have the parameters of the same models in Tunix."""

import importlib

import jax
import pytest
import transformers
from flax import nnx

from zerojax.plan import from_hugging_face
from zerojax.plan.job import job_of
from zoo.test_tunix_weights import PYTORCH, PYTORCH_CASES, QWEN, TUNIX_CASES, UNTIED, tunix_config

pytestmark = pytest.mark.zoo

TIED = {"tie_word_embeddings": True}
CASES = PYTORCH_CASES | {
    "llama, tied": (*TUNIX_CASES["llama, tied"], "Llama", TIED),
    "qwen2, tied": ("qwen2", "qwen2", "Qwen2", QWEN | {"use_tied_embedding": True}, "Qwen2", TIED),
    "mistral": (*TUNIX_CASES["llama"], "Mistral", UNTIED),
}  # fmt: skip


def num_parameters(create):
    model = nnx.eval_shape(create)
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_the_parameters_of_the_model_in_tunix(name, tmp_path):
    _, module, cls, options, their_cls, their_options = CASES[name]
    config = getattr(transformers, f"{their_cls}{'Text' if their_cls == 'Gemma3' else ''}Config")
    config(**PYTORCH | their_options).save_pretrained(tmp_path)
    job = job_of(from_hugging_face(tmp_path))
    models = importlib.import_module(f"tunix.models.{module}.model")
    theirs = lambda: getattr(models, cls)(tunix_config(models, module, options), rngs=nnx.Rngs(0))
    assert num_parameters(lambda: job.create_model(nnx.Rngs(0))) == num_parameters(theirs)
