"""Language models of Google's Tunix: NNX modules whose annotations name the mesh axes `fsdp` and `tp`."""

import functools

import jax.numpy as jnp
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from zoo.entries import SEQ, VOCAB, Entry, next_token_batch, numbered, token_loss

LAYERS = 2
AXES = {"fsdp": "data", "tp": None}
SIZES = {"num_layers": LAYERS, "embed_dim": 32, "hidden_dim": 64, "num_heads": 2, "head_dim": 16, "num_kv_heads": 2}
QWEN = {**SIZES, "vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6}
GEMMA = {**SIZES, "num_embed": VOCAB}


def entry(name, model, config, units, **options):
    def loss(model, batch):
        x = batch["x"]
        positions = jnp.broadcast_to(jnp.arange(SEQ), x.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((SEQ, SEQ), bool)), (len(x), SEQ, SEQ))
        logits, _ = model(x, positions, None, mask)
        return token_loss(logits, batch)

    def create(rngs):
        return model(config, rngs=rngs)

    return Entry(name, create, loss, next_token_batch, units=units, options={"axis_names": AXES}, **options)


def entries():
    layers = functools.partial(numbered, "layers/{}", LAYERS)
    tied = layers("embedder", "final_norm")
    local_and_global = [gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL]
    one = gemma.ModelConfig(
        **GEMMA,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=[gemma.AttentionType.GLOBAL] * LAYERS,
    )
    two = gemma.ModelConfig(
        **GEMMA,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=local_and_global,
        sliding_window_size=4,
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    four = {"sliding_window_size": 4, "global_key_size": 16, "attention_pattern": None}
    return [
        entry("tunix-qwen2", qwen2.Qwen2, qwen2.ModelConfig(**QWEN, use_tied_embedding=True), tied),
        entry("tunix-qwen3", qwen3.Qwen3, qwen3.ModelConfig(**QWEN), (*tied, "lm_head")),
        entry("tunix-qwen3-experts", qwen3.Qwen3, qwen3.ModelConfig(**QWEN, **experts), (*tied, "lm_head")),
        entry("tunix-llama3", llama3.Llama3, llama3.ModelConfig(**QWEN), (*tied, "lm_head")),
        entry("tunix-llama3-tied", llama3.Llama3, llama3.ModelConfig(**QWEN, weight_tying=True), tied),
        entry("tunix-gemma1", gemma.Gemma, one, tied),
        entry("tunix-gemma2", gemma.Gemma, two, tied),
        entry(
            "tunix-gemma3",
            gemma3.Gemma3,
            gemma3.ModelConfig(**GEMMA, sliding_window_size=4, param_dtype=jnp.float32),
            tied,
        ),
        # Rounding alone: at stage 3 the parameters are off by 1.4e-4 of the update in fp32, and by 9e-14 if everything
        # is computed in fp64. In fp32, the plain step on one device itself moves by 0.4e-4 to 2.4e-4 of the update if
        # each initial weight is changed by 6e-8 of its value, up or down at random (six draws); the plain step of
        # tunix-qwen3 moves by 0.2e-4 to 0.4e-4, and that of tunix-gemma3 by 0.06e-4.
        entry("tunix-gemma4", gemma4.Gemma4, gemma4.ModelConfig(**GEMMA, **four), tied, update=5e-4),
    ]
