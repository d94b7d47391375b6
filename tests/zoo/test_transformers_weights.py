"""Weights of Hugging Face in the Flax models of Transformers: its own programs read the same from the same files."""

import jax
import numpy as np
import pytest
import transformers

from zerojax.exchange import parameters
from zerojax.exchange.tensors import Reader
from zoo.weights import DECODER, SMALL, TOKENS, assert_same_logits, exported, saved_by_pytorch, zeros

pytestmark = pytest.mark.zoo

ENCODER = dict(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = dict(**ENCODER, vocab_size=64, max_position_embeddings=32)
VIT = dict(**ENCODER, image_size=16, patch_size=4, num_labels=3)
CASES = {  # family, configuration, class without "Flax", options of the configuration
    "gpt2": ("gpt2", "GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2, without its head": ("gpt2", "GPT2Config", "GPT2Model", GPT2),
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": ("mistral", "MistralConfig", "MistralForCausalLM", DECODER),
    "gemma": ("gemma", "GemmaConfig", "GemmaForCausalLM", DECODER | {"head_dim": 8}),
    "bert": ("bert", "BertConfig", "BertForMaskedLM", BERT),
    "bert, classifier": ("bert", "BertConfig", "BertForSequenceClassification", BERT),
    "vit": ("vit", "ViTConfig", "ViTForImageClassification", VIT),
}
IMAGES = np.random.default_rng(0).standard_normal((8, 3, 16, 16), np.float32)


@pytest.fixture(params=CASES)
def case(request):
    """(family, configuration, class, inputs) of a model of transformers."""
    family, config, cls, options = CASES[request.param]
    return family, getattr(transformers, config)(**options), cls, IMAGES if family == "vit" else TOKENS


def flax_model(config, cls):
    """A model whose weights are all different from their initial values, which are often 0 or 1."""
    model = getattr(transformers, f"Flax{cls}")(config, seed=0)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(model.params))))
    model.params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape), model.params)
    return model


def outputs(model, inputs, params=None):
    """The logits of a Flax model, or the hidden states if it has no head."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(model(inputs, params=params)[0])


@pytest.mark.full
def test_files_of_pytorch_models_give_the_logits_of_pytorch(case, tmp_path):
    """The files are those that the PyTorch model writes, and so are the logits."""
    family, config, cls, inputs = case
    want = saved_by_pytorch(getattr(transformers, cls)(config), inputs, tmp_path)
    model = flax_model(config, cls)
    state = parameters.load(zeros(model.params), tmp_path, family=family)
    assert_same_logits(outputs(model, inputs, state.params), want)


def test_exports_are_read_by_transformers_as_pytorch_files(case, tmp_path):
    """With the code by which transformers turns PyTorch files into Flax parameters. It needs no PyTorch."""
    family, config, cls, inputs = case
    model = flax_model(config, cls)
    folder = exported(model.params, tmp_path, family=family)
    assert Reader(folder).metadata["format"] == "pt"
    config.save_pretrained(folder)
    theirs = type(model).from_pretrained(folder, from_pt=True)
    np.testing.assert_array_equal(outputs(theirs, inputs), outputs(model, inputs))
    state = parameters.load(zeros(model.params), folder, family=family)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(model.params))


def test_files_in_the_layout_of_flax_need_no_option(case, tmp_path):
    """Those that transformers writes are loaded here, and exports are loaded there."""
    _, config, cls, inputs = case
    model = flax_model(config, cls)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    state = parameters.load(zeros(model.params), tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(model.params))
    folder = exported(model.params, tmp_path)
    config.save_pretrained(folder)
    theirs = type(model).from_pretrained(folder)
    np.testing.assert_array_equal(outputs(theirs, inputs), outputs(model, inputs))
