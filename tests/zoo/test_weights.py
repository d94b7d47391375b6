"""Weights of Hugging Face in Flax models of other packages: their own programs read the same from the same files."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.exchange import parameters
from zerojax.exchange.tensors import Reader

pytestmark = pytest.mark.zoo

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = dict(**SMALL, vocab_size=64, num_key_value_heads=2, max_position_embeddings=32)
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
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 12))
IMAGES = np.random.default_rng(0).standard_normal((8, 3, 16, 16), np.float32)


@pytest.fixture(params=CASES)
def case(request):
    """(family, configuration, class, inputs) of a model of transformers."""
    transformers = pytest.importorskip("transformers")
    family, config, cls, options = CASES[request.param]
    return family, getattr(transformers, config)(**options), cls, IMAGES if family == "vit" else TOKENS


def flax_model(config, cls):
    """A model whose weights are all different from their initial values, which are often 0 or 1."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"Flax{cls}"):
        pytest.skip("this version of transformers has no Flax models")
    model = getattr(transformers, f"Flax{cls}")(config, seed=0)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(model.params))))
    model.params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape), model.params)
    return model


def outputs(model, inputs, params=None):
    """The logits of a Flax model, or the hidden states if it has no head."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(model(inputs, params=params)[0])


def zeros(params):
    """A state with zeros in place of the parameters, sharded over eight devices."""
    return zerojax.Zero(zerojax.make_mesh(), 3).init(lambda: jax.tree.map(jnp.zeros_like, params), optax.sgd(0.1))


def exported(params, directory, **options):
    """Writes parameters as files, by way of a checkpoint. Returns the folder."""
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(lambda: params, optax.sgd(0.1))
    with zero.checkpoints(directory / "run") as checkpoints:
        checkpoints.save(state)
    parameters.export(directory / "run", 0, directory / "model", **options)
    return directory / "model"


@pytest.mark.full
def test_files_of_pytorch_models_give_the_logits_of_pytorch(case, tmp_path):
    """The files are those that the PyTorch model writes, and so are the logits."""
    torch = pytest.importorskip("torch")
    import transformers

    family, config, cls, inputs = case
    theirs = getattr(transformers, cls)(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        want = theirs(torch.from_numpy(inputs))[0].numpy()
    theirs.save_pretrained(tmp_path)
    model = flax_model(config, cls)
    state = parameters.load(zeros(model.params), tmp_path, family=family)
    difference = np.abs(outputs(model, inputs, state.params) - want).max()
    print(f"{cls}: largest logit {np.abs(want).max():.2f}, largest difference {difference:.1e}")
    assert difference < 2e-5 * np.abs(want).max()


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


# tunix

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
    pytest.importorskip("tunix")
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
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("tunix")
    family, module, cls, options, their_cls, their_options = PYTORCH_CASES[name]
    config = getattr(transformers, f"{their_cls}{'Text' if their_cls == 'Gemma3' else ''}Config")
    config = config(**PYTORCH | their_options)
    config._attn_implementation = "eager"  # others ignore the soft cap of Gemma 2
    theirs = getattr(transformers, f"{their_cls}ForCausalLM")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        want = theirs(torch.from_numpy(TOKENS))[0].numpy()
    theirs.save_pretrained(tmp_path)
    models = importlib.import_module(f"tunix.models.{module}.model")
    model = getattr(models, cls)(tunix_config(models, module, options), rngs=nnx.Rngs(0))
    state = zeros(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    nnx.update(model, parameters.load(state, tmp_path, family=family).params)
    num_rows, length = TOKENS.shape
    positions = jnp.broadcast_to(jnp.arange(length), TOKENS.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (num_rows, length, length))
    with jax.default_matmul_precision("highest"):
        got = np.asarray(model(jnp.asarray(TOKENS), positions, None, mask)[0])
    difference = np.abs(got - want).max()
    print(f"{cls}: largest logit {np.abs(want).max():.2f}, largest difference {difference:.1e}")
    assert difference < 2e-5 * np.abs(want).max()
