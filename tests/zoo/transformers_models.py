"""The Flax models of Hugging Face's Transformers 4: Linen modules behind a class that holds their config."""

import functools

import jax.numpy as jnp
import numpy as np
import transformers as T
from support.zoo import cross_entropy

from zoo.entries import ROWS, VOCAB, Entry, next_token_batch, numbered, token_loss, tokens

LAYERS, WIDTH, HEADS, CLASSES = 2, 32, 2, 8


def entry(name, model, config, call, batch, units, **options):
    """`call(model, params, batch)` returns the loss. The model without weights is created when it is first used."""

    @functools.cache
    def made():
        return model(config(), _do_init=False)

    def create(key):
        return made().init_weights(key, made().input_shape)

    def loss(params, batch):
        return call(made(), params, batch)

    return Entry(name, create, loss, batch, units=units, **options)


def decoder(name, model, config, units, **options):
    call = lambda model, params, batch: token_loss(model(batch["x"], params=params).logits, batch)
    return entry(name, model, config, call, next_token_batch, units, **options)


def masked_language_batch(seed):
    return {"x": tokens(seed), "y": tokens(seed + 1000)}


def image_batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((ROWS, 3, 16, 16), np.float32),
        "y": rng.integers(0, CLASSES, ROWS, dtype=np.int32),
    }


def classified(model, params, batch):
    return cross_entropy(model(batch["x"], params=params).logits, batch["y"]).mean()


def classified_with_statistics(model, params, batch):
    """Batch normalization with the running statistics, because Transformers' modules cannot share them over devices."""
    return cross_entropy(model(batch["x"], params=params, train=False).logits, batch["y"]).mean()


def speech_batch(seed):
    rng = np.random.default_rng(seed)
    return {"sound": rng.standard_normal((ROWS, 8, 16), np.float32), **next_token_batch(seed)}


def transcribed(model, params, batch):
    return token_loss(model(batch["sound"], decoder_input_ids=batch["x"], params=params).logits, batch)


def pair_batch(seed):
    return {"image": image_batch(seed)["x"], "text": tokens(seed)}


def matched(model, params, batch):
    """The similarity of the two parts of each row: a contrastive loss would compare rows with each other."""
    out = model(input_ids=batch["text"], pixel_values=batch["image"], params=params)
    return 1 - jnp.mean(jnp.sum(out.text_embeds * out.image_embeds, -1))


LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 32,
}
BERT = {**LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
del BERT["num_key_value_heads"]
GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "ffn_dim": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "word_embed_proj_dim": WIDTH,
}
WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 8,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "d_model": WIDTH,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def clip_config():
    part = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    part |= {"num_attention_heads": HEADS, "projection_dim": WIDTH}
    text = {**part, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1, "bos_token_id": 0}
    return T.CLIPConfig(
        text_config=text, vision_config={**part, "image_size": 16, "patch_size": 8}, projection_dim=WIDTH
    )


def decoders():
    rope = numbered("model/layers/{}", LAYERS, "model/embed_tokens", "model/norm")
    h = numbered("transformer/h/{}", LAYERS, "transformer/ln_f")
    opt = numbered("model/decoder/layers/{}", LAYERS, "model/decoder/final_layer_norm")
    gpt2_units = (*h, "transformer/wte", "transformer/wpe")
    opt_units = (*opt, "model/decoder/embed_tokens", "model/decoder/embed_positions")
    bloom_units = (*h, "transformer/word_embeddings", "transformer/word_embeddings_layernorm")
    bloom = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    mistral = {**LLAMA, "sliding_window": 4}
    return [
        decoder("hf-gpt2", T.FlaxGPT2LMHeadModel, lambda: T.GPT2Config(**GPT2), gpt2_units),
        decoder("hf-llama", T.FlaxLlamaForCausalLM, lambda: T.LlamaConfig(**LLAMA), (*rope, "lm_head")),
        decoder("hf-mistral", T.FlaxMistralForCausalLM, lambda: T.MistralConfig(**mistral), (*rope, "lm_head")),
        decoder("hf-gemma", T.FlaxGemmaForCausalLM, lambda: T.GemmaConfig(**LLAMA, head_dim=WIDTH // HEADS), rope),
        decoder("hf-opt", T.FlaxOPTForCausalLM, lambda: T.OPTConfig(**OPT), opt_units),
        decoder("hf-bloom", T.FlaxBloomForCausalLM, lambda: T.BloomConfig(**bloom), bloom_units),
    ]


def encoders():
    bert = numbered("bert/encoder/layer/{}", LAYERS, "bert/embeddings", "cls")
    masked = lambda model, params, batch: token_loss(model(batch["x"], params=params).logits, batch)
    vit = numbered("vit/encoder/layer/{}", LAYERS, "vit/embeddings", "vit/layernorm", "classifier")
    images = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES}
    vit_config = {**{name: BERT[name] for name in BERT if name.startswith(("hidden_s", "inter", "num"))}, **images}
    stages = [numbered(f"resnet/encoder/stages/{stage}/layers/{{}}", 2) for stage in range(2)]
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return [
        entry("hf-bert", T.FlaxBertForMaskedLM, lambda: T.BertConfig(**BERT), masked, masked_language_batch, bert),
        entry(
            "hf-vit", T.FlaxViTForImageClassification, lambda: T.ViTConfig(**vit_config), classified, image_batch, vit
        ),
        entry(
            "hf-resnet",
            T.FlaxResNetForImageClassification,
            lambda: T.ResNetConfig(**resnet, num_labels=CLASSES),
            classified_with_statistics,
            image_batch,
            (*stages[0], *stages[1], "resnet/embedder", "classifier"),
        ),
    ]


def pairs():
    parts = [
        numbered(f"model/{part}/layers/{{}}", LAYERS, f"model/{part}/layer_norm") for part in ("encoder", "decoder")
    ]
    embeddings = ("conv1", "conv2", "embed_positions")
    whisper = (*parts[0], *parts[1], *(f"model/encoder/{name}" for name in embeddings))
    whisper += ("model/decoder/embed_tokens", "model/decoder/embed_positions")
    towers = [numbered(f"{kind}_model/encoder/layers/{{}}", LAYERS) for kind in ("text", "vision")]
    clip = (*towers[0], *towers[1], "text_model/embeddings", "text_model/final_layer_norm", "text_projection")
    clip += ("vision_model/embeddings", "vision_model/pre_layrnorm", "vision_model/post_layernorm")
    clip += ("visual_projection", "logit_scale")
    return [
        entry(
            "hf-whisper",
            T.FlaxWhisperForConditionalGeneration,
            lambda: T.WhisperConfig(**WHISPER),
            transcribed,
            speech_batch,
            whisper,
        ),
        entry("hf-clip", T.FlaxCLIPModel, clip_config, matched, pair_batch, clip),
    ]


def entries():
    return decoders() + encoders() + pairs()


def t5():
    """A Linen module that does not run, and inputs. Its position biases call `jnp.clip(a_max=...)`, which JAX removed.

    The object of Transformers around it cannot even be constructed.
    """
    config = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_heads": HEADS}
    ids = np.ones((1, 8), np.int32)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    config = T.T5Config(**config, num_layers=LAYERS)
    return T.FlaxT5ForConditionalGeneration.module_class(config), dict.fromkeys(names, ids)
