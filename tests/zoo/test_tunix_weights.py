"""Weights of Hugging Face in the NNX models of Tunix: its own programs read the same from the same files."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from zerojax.exchange import parameters
from zoo.weights import DECODER, TOKENS, assert_same_logits, exported, saved_by_pytorch, zeros

pytestmark = pytest.mark.zoo

TUNIX = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
LLAMA = TUNIX | {"vocab_size": 64, "rope_theta": 10_000, "norm_eps": 1e-6}
QWEN = LLAMA | {"dtype": jnp.float32, "param_dtype": jnp.float32}
GEMMA = TUNIX | {"num_embed": 64}
GEMMA2 = GEMMA | {"final_logit_softcap": 30.0, "use_post_attn_norm": True, "use_post_ffw_norm": True}
GEMMA1 = {"final_logit_softcap": None, "use_post_attn_norm": False, "use_post_ffw_norm": False}
GEMMA3_TEXT = {"query_pre_attn_scalar": 8, "rope_local_base_freq": 10000.0}
TUNIX_CASES = {  # family, module, class, options of the configuration
    "llama": ("llama", "llama3", "Llama3", LLAMA),
    "llama, tied": ("llama", "llama3", "Llama3", LLAMA | {"weight_tying": True}),
    "qwen2": ("qwen2", "qwen2", "Qwen2", QWEN),
    "qwen3": ("qwen3", "qwen3", "Qwen3", QWEN),
    "qwen3, experts": ("qwen3", "qwen3", "Qwen3", QWEN | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("gemma2", "gemma", "Gemma", GEMMA2),
    "gemma2, one head for each": ("gemma2", "gemma", "Gemma", GEMMA2 | {"num_kv_heads": 4}),
    "gemma3": ("gemma3", "gemma3", "Gemma3", GEMMA | {"param_dtype": jnp.float32, "sliding_window_size": 32}),
}


def tunix_config(models, module, options):
    if module == "gemma":
        options = options | {"attention_types": (models.AttentionType.GLOBAL,) * 2}
    return models.ModelConfig(**options)


@pytest.mark.parametrize("name", TUNIX_CASES)
def test_exports_are_read_by_tunix_as_pytorch_files(name, tmp_path):
    """With the code by which tunix reads the files of Hugging Face, which gives the weights that were exported."""
    family, module, cls, options = TUNIX_CASES[name]
    models = importlib.import_module(f"tunix.models.{module}.model")
    files = "params_safetensors" if "gemma" in module else "params"
    loader = importlib.import_module(f"tunix.models.{module}.{files}")
    config = tunix_config(models, module, options)
    model = nnx.eval_shape(lambda: getattr(models, cls)(config, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), shapes)
    folder = exported(params, tmp_path, family=family)
    theirs = loader.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
    got = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), params)
    state = parameters.load(zeros(params), folder, family=family)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)


PYTORCH = DECODER | {"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
UNTIED = {"tie_word_embeddings": False}
PYTORCH_CASES = {  # family, tunix' module, class and options, and the class and options of transformers
    # tunix rotates with this theta in Llama 3 and Qwen 3, whatever the configuration says.
    "llama": ("llama", "llama3", "Llama3", LLAMA, "Llama", UNTIED | {"rope_theta": 1e6}),
    "qwen2": ("qwen2", "qwen2", "Qwen2", QWEN, "Qwen2", UNTIED),
    "qwen3": ("qwen3", "qwen3", "Qwen3", QWEN, "Qwen3", UNTIED | {"rope_theta": 1e6}),
    "qwen3, experts": (*TUNIX_CASES["qwen3, experts"], "Qwen3Moe", UNTIED | EXPERTS | {"rope_theta": 1e6}),
    "gemma": ("gemma", "gemma", "Gemma", GEMMA2 | GEMMA1, "Gemma", {}),
    "gemma2": (
        "gemma2",
        "gemma",
        "Gemma",
        GEMMA2 | {"attn_logits_soft_cap": 50.0},
        "Gemma2",
        {"query_pre_attn_scalar": 8},
    ),
    "gemma3": (*TUNIX_CASES["gemma3"], "Gemma3", GEMMA3_TEXT),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PYTORCH_CASES)
def test_files_of_pytorch_models_give_the_logits_of_pytorch_in_tunix(name, tmp_path):
    family, module, cls, options, their_cls, their_options = PYTORCH_CASES[name]
    config = getattr(transformers, f"{their_cls}{'Text' if their_cls == 'Gemma3' else ''}Config")
    config = config(**PYTORCH | their_options)
    config._attn_implementation = "eager"  # others ignore the soft cap of Gemma 2
    theirs = getattr(transformers, f"{their_cls}ForCausalLM")(config)
    want = saved_by_pytorch(theirs, TOKENS, tmp_path)
    models = importlib.import_module(f"tunix.models.{module}.model")
    model = getattr(models, cls)(tunix_config(models, module, options), rngs=nnx.Rngs(0))
    state = zeros(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    nnx.update(model, parameters.load(state, tmp_path, family=family).params)
    num_rows, length = TOKENS.shape
    positions = jnp.broadcast_to(jnp.arange(length), TOKENS.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (num_rows, length, length))
    with jax.default_matmul_precision("highest"):
        got = np.asarray(model(jnp.asarray(TOKENS), positions, None, mask)[0])
    assert_same_logits(got, want)
