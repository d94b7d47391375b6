"""Configs of Hugging Face become models with the parameters that the published models have, or clear errors."""

import json

import jax
import optax
import pytest
from click.testing import CliRunner

import zerojax
from zerojax.cli import main
from zerojax.plan import from_hugging_face, plan, transformer
from zerojax.plan.job import HUGGING_FACE_FAMILIES, find_job, job_of


def decoder(model_type, width, layers, heads, kv_heads, hidden, vocab, **more):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size")  # fmt: skip
    sizes = dict(zip(names, (width, layers, heads, kv_heads, hidden, vocab), strict=True))
    return {"model_type": model_type, "max_position_embeddings": 8192, **sizes, **more}


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA3_8B = decoder("llama", 4096, 32, 32, 8, 14336, 128256, tie_word_embeddings=False)
GEMMA2_2B = decoder("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh",
                    sliding_window=4096)  # fmt: skip
QWEN3_MOE = decoder("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768,
                    num_experts=128, num_experts_per_tok=8, mlp_only_layers=[], decoder_sparse_step=1)  # fmt: skip
# The shapes and the numbers of parameters of the published models.
PUBLISHED = {
    "Llama-3-8B": (LLAMA3_8B, 8_030_261_248),
    "Llama-3.2-1B": (
        decoder("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True), 1_235_814_400),
    "Llama-2-7B": (decoder("llama", 4096, 32, 32, None, 11008, 32000), 6_738_415_616),
    "Mistral-7B": (decoder("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
    "Mixtral-8x7B": (
        decoder("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704),
    "Qwen2.5-0.5B": (decoder("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768),
    "Qwen2.5-7B": (decoder("qwen2", 3584, 28, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen3-8B": (decoder("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-0.6B": (
        decoder("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624),
    "Gemma-2B": (decoder("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256, hidden_act="gelu"), 2_506_172_416),
    "Gemma-2-2B": (GEMMA2_2B, 2_614_341_888),
    "Gemma-3-1B": (decoder("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256), 999_885_952),
    "GPT-2": (GPT2, 124_439_808),
}  # fmt: skip


def written(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


def test_every_family_has_a_published_model():
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(HUGGING_FACE_FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_that_of_the_published_model(name, tmp_path):
    config, parameters = PUBLISHED[name]
    zero = zerojax.Zero(zerojax.make_mesh(devices=8), 3)
    job = job_of(from_hugging_face(written(tmp_path, config)))
    state = zero.eval_init(job.create_model, job.tx)
    assert sum(leaf.size for leaf in state.layout.leaves) == parameters


def test_the_count_of_a_decoder_by_hand(tmp_path):
    """Every option that adds parameters: width 12, 2 layers, 4 heads of 6, 2 of keys, 20 in the MLP, 50 tokens."""
    biased = decoder("qwen3", 12, 2, 4, 2, 20, 50, head_dim=6, attention_bias=True, mlp_bias=True)
    shapes = from_hugging_face(written(tmp_path, biased))
    q, kv, out, mlp = 12 * 24 + 24, 2 * (12 * 12 + 12), 24 * 12 + 12, 2 * (12 * 20 + 20) + 20 * 12 + 12
    by_hand = 2 * 50 * 12 + 12 + 2 * (q + kv + out + mlp + 2 * 12 + 2 * 6)
    model = jax.eval_shape(lambda: job_of(shapes).create_model(zerojax_rngs()))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == by_hand


def zerojax_rngs():
    from flax import nnx

    return nnx.Rngs(0)


TINY = {
    "llama": decoder("llama", 16, 2, 4, 2, 32, 64, attention_bias=True),
    "qwen2": decoder("qwen2", 16, 2, 4, 2, 32, 64),
    "qwen3": decoder("qwen3", 16, 2, 4, 2, 32, 64, head_dim=8),
    "gemma2": decoder("gemma2", 16, 2, 4, 1, 32, 64, head_dim=8),
    "gpt2": {**GPT2, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 64},
}


@pytest.mark.parametrize("name", TINY)
def test_the_model_of_a_config_trains(name, tmp_path):
    job = job_of(from_hugging_face(written(tmp_path, TINY[name]), seq=8))
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(job.create_model, optax.adam(1e-2))
    step = zero.train_step(job.loss_fn)
    tokens = jax.random.randint(jax.random.key(0), (8, 9), 0, 64)
    losses = []
    for _ in range(4):
        state, metrics = step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
    assert losses[3] < losses[0]


def test_a_plan_of_a_config(tmp_path):
    made = plan(from_hugging_face(written(tmp_path, GEMMA2_2B), seq=4608), "h100:8", suggest=False)
    assert made.parameters == 2_614_341_888 and made.what == f"{tmp_path.name} (gemma2)"
    window, caps = made.notes[:2]
    assert "window of 4,096 tokens" in window and "rule out fused attention" in caps
    assert not [note for note in plan(from_hugging_face(tmp_path, seq=4096), "h100:8").notes if "window" in note]


def test_the_length_of_rows_changes_activations_and_not_parameters(tmp_path):
    path = written(tmp_path, LLAMA3_8B)
    long, short = (plan(from_hugging_face(path, seq), "h100:8", suggest=False) for seq in (8192, 2048))
    assert long.parameters == short.parameters
    checkpoints = [made.held["checkpoints"] for made in (long, short)]
    assert checkpoints[0] == pytest.approx(4 * checkpoints[1], rel=0.02)
    assert plan("llama3-8b", "h100:8", suggest=False).memory == long.memory  # it is the same model


@pytest.mark.parametrize(
    ("head_dim", "target", "fused"),
    [(128, "a100", True), (256, "a100", False), (256, "h100", True), (512, "h100", False), (20, "h100", False)],
)
def test_attention_is_fused_if_the_gpu_fuses_heads_of_this_width(head_dim, target, fused, tmp_path):
    from zerojax.analysis.hardware import CHIPS

    shapes = from_hugging_face(written(tmp_path, decoder("qwen3", 64, 2, 4, 2, 32, 64, head_dim=head_dim)), seq=8)
    job = find_job(shapes, CHIPS[target])
    model = jax.eval_shape(lambda: job.create_model(zerojax_rngs()))
    assert (model.layers.attention.attention is transformer.cudnn_attention_for_tracing) == fused
    notes = plan(shapes, f"{target}:8", suggest=False).notes
    assert any(f"heads of width {head_dim} are not fused" in note for note in notes) != fused


def command(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_command_plans_a_directory_or_a_file(tmp_path):
    path = written(tmp_path, TINY["qwen3"])
    for place in path, path / "config.json":
        shown = command("--hf", str(place), "--seq", "128", "--target", "h100:8", "--json")
        assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert data["what"] == f"{path.name} (qwen3)" and data["fits"]


INVALID = [
    ("{", "JSONDecodeError"),
    ("[]", "a JSON list"),
    ("null", "a JSON NoneType"),
    ("[" * 100_000, "RecursionError"),
    ({}, "model_type None"),
    ({"model_type": ["llama"]}, "model_type ['llama']"),
    ({"model_type": "mamba"}, "model_type 'mamba'"),
    ({"model_type": "gemma3", "text_config": {}}, "text_config of this file"),
    ({"model_type": "llama"}, "no num_attention_heads"),
    ({**LLAMA3_8B, "hidden_size": "4096"}, 'hidden_size = "4096"'),
    ({**LLAMA3_8B, "hidden_size": float("nan")}, "hidden_size = NaN"),
    ({**LLAMA3_8B, "hidden_size": 4096.0}, "hidden_size = 4096.0"),
    ({**LLAMA3_8B, "hidden_size": True}, "hidden_size = true"),
    ({**LLAMA3_8B, "num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({**LLAMA3_8B, "num_hidden_layers": -32}, "num_hidden_layers = -32"),
    ({**LLAMA3_8B, "vocab_size": 10**30}, "vocab_size = 1000000"),
    ({**LLAMA3_8B, "vocab_size": {"a": "b" * 1000}}, "..."),
    ({**LLAMA3_8B, "tie_word_embeddings": "no"}, 'tie_word_embeddings = "no"'),
    ({**LLAMA3_8B, "hidden_act": "relu"}, 'the activation "relu"'),
    ({**LLAMA3_8B, "num_key_value_heads": 5}, "32 heads, 5 of keys"),
    ({**LLAMA3_8B, "num_attention_heads": 24}, "hidden_size 4096, 24 heads"),
    ({**LLAMA3_8B, "head_dim": 7}, "heads of width 7"),
    ({**GPT2, "n_head": 7}, "n_embd 768, 7 heads"),
    ({**QWEN3_MOE, "decoder_sparse_step": 2}, "layers with and without experts"),
    ({**QWEN3_MOE, "mlp_only_layers": [0]}, "layers with and without experts"),
    ({**QWEN3_MOE, "num_experts_per_tok": 129}, "129 of 128 experts"),
]  # fmt: skip


def test_an_invalid_config_is_an_error_with_a_fix(tmp_path):
    for config, message in INVALID:
        shown = command("--hf", str(written(tmp_path, config)))
        assert shown.exit_code == 1 and message in shown.output, shown.output
        assert "fix:" in shown.output and "config.json" in shown.output and "Traceback" not in shown.output
        assert isinstance(shown.exception, SystemExit)


def test_no_value_is_a_traceback(tmp_path):
    """Whatever a value is, the config is either described or refused."""
    for name in sorted({*LLAMA3_8B, *QWEN3_MOE, "sliding_window", "use_sliding_window", "hidden_act"}):
        for value in [None, [], {}, "x", -1, 1.5, False, 10**400]:
            for config in LLAMA3_8B, QWEN3_MOE:
                path = written(tmp_path, {**config, name: value})
                try:
                    assert from_hugging_face(path).layers > 0
                except ValueError as error:
                    assert "  got:" in str(error) and "  fix:" in str(error)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match="UnicodeDecodeError"):
        from_hugging_face(tmp_path)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        from_hugging_face(tmp_path / "nothing")
    assert command("--hf", str(tmp_path / "nothing")).exit_code == 2


def test_options_that_do_not_go_together_are_errors(tmp_path):
    for arguments, message in [
        (("--hf", "PATH", "--preset", "llama3-8b"), "--hf cannot be used with"),
        (("--job", "math:gcd", "--seq", "8"), "--seq is for --preset and --hf"),
        (("--preset", "vit-h14", "--seq", "8"), "the patches of an image"),
        (("--hf", "PATH", "--seq", "2048"), "1024 learned positions"),
        (("--hf", "PATH", "--model", "2"), "cannot be divided over a model axis of 2"),
    ]:
        path = str(written(tmp_path, GPT2))
        shown = command(*(path if word == "PATH" else word for word in arguments))
        assert (
            shown.exit_code in (1, 2) and message in " ".join(shown.output.split()) and "Traceback" not in shown.output
        )
