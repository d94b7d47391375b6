"""examples/pretrain_gpt.py: parity with a plain script, resumption, and files that other programs load."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pretrain_gpt
import pytest
import transformers
from flax import nnx
from safetensors import safe_open
from tokenizers import Tokenizer
from tunix.models.qwen3 import model as tunix_qwen3, params as tunix_files

import zerojax
from zerojax.exchange import parameters
from zerojax.exchange.tensors import Reader

pytestmark = [pytest.mark.examples, pytest.mark.xdist_group("pretrain_gpt")]

STEPS, EVERY, STOP = 8, 3, 5  # a run is stopped after step 5, and continues from step 3
CONTEXT, ROWS, VOCAB = 16, 16, 270
SMALL = f"--steps {STEPS} --every {EVERY} --width 64 --layers 2 --context {CONTEXT} --vocab {VOCAB} --batch {ROWS}"
TEXTS = {
    False: [f"def f{i}(x):\n    return x + {i * i}  # é {i}\n" for i in range(60)],
    True: ["def g(x):\n    return x\n" * 9],
}


@pytest.fixture(autouse=True)
def few_files(monkeypatch):
    """So little text that eight steps are more than an epoch."""
    monkeypatch.setattr(pretrain_gpt, "sources", lambda held_out: TEXTS[held_out])


def parse(out, *options):
    return pretrain_gpt.parse(["--out", str(out), "--most-rows", "2", *SMALL.split(), *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory and the result of an uninterrupted run at stage 3 on eight devices."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_gpt, "sources", lambda held_out: TEXTS[held_out])
        return out, pretrain_gpt.train(parse(out))


def tokenizer_of(out):
    return Tokenizer.from_file(str(out / "hf" / "tokenizer.json"))


def rows_of(out, held_out=False):
    return pretrain_gpt.Rows(pretrain_gpt.tokenize(tokenizer_of(out), TEXTS[held_out]), CONTEXT)


def config_of(out):
    fields = json.loads((out / "hf" / "config.json").read_text())
    return pretrain_gpt.Config(**{each.name: fields[each.name] for each in dataclasses.fields(pretrain_gpt.Config)})


def loaded(out):
    """The model of a run, at stage 3 on eight devices."""
    config = config_of(out)
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(lambda rngs: pretrain_gpt.Qwen3(config, rngs=rngs), optax.sgd(0.1), seed=1)
    return zero, parameters.load(state, out / "hf", family="qwen3")


# Training


class Stopped(Exception):
    """In place of whatever ends a run."""


class Stopping:
    """An iterator of batches that ends a run."""

    def __init__(self, batches):
        self._batches, self._left = batches, STOP

    def __iter__(self):
        return self

    def __next__(self):
        if not self._left:
            raise Stopped
        self._left -= 1
        return next(self._batches)

    def __getattr__(self, name):
        return getattr(self._batches, name)


def stopped(out, monkeypatch):
    with monkeypatch.context() as patch:
        create = pretrain_gpt.batches
        patch.setattr(pretrain_gpt, "batches", lambda *args: Stopping(create(*args)))
        with pytest.raises(Stopped):
            pretrain_gpt.train(parse(out))
    assert sorted(path.name for path in (out / "checkpoints").glob("step_*")) == [f"step_{EVERY}"]


def contents_of(file):
    """(The metadata of a safetensors file, name -> bytes of an array). The library writes metadata in any order."""
    with safe_open(file, "np") as opened:
        return opened.metadata(), {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118


def test_a_run_that_continues_in_mid_epoch_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    out, result = whole
    batches = len(rows_of(out)) / ROWS
    assert EVERY % batches and STEPS > batches > EVERY
    stopped(tmp_path / "run", monkeypatch)
    assert pretrain_gpt.train(parse(tmp_path / "run", "--resume")) == result
    files = [folder / "hf" / "model.safetensors" for folder in (out, tmp_path / "run")]
    metadata, arrays = zip(*map(contents_of, files), strict=True)
    assert metadata[0] == metadata[1]
    assert arrays[0] == arrays[1]


def test_a_run_continues_on_half_of_the_devices_at_another_stage(whole, tmp_path, monkeypatch):
    """Up to the order of sums."""
    stopped(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(zerojax, "make_mesh", functools.partial(zerojax.make_mesh, devices=jax.devices()[:4]))
    result = pretrain_gpt.train(parse(tmp_path / "run", "--resume", "--stage", "1"))
    assert result == pytest.approx(whole[1], rel=1e-5)
    start = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[1])
    assert (start["from_step"], start["mesh"], start["stage"]) == (EVERY, {"data": 4}, 1)


def test_processes_share_the_rows_that_one_would_read(monkeypatch):
    """Over two epochs. The position is the same number in all of them, so that another number of them can continue."""
    rows = pretrain_gpt.Rows(np.arange(161), CONTEXT)
    one = pretrain_gpt.batches(rows, 4)
    batches = [next(one) for _ in range(5)]
    first, second = np.concatenate([batch["x"][:, 0] for batch in batches]).reshape(2, -1).tolist()
    assert first != second and sorted(first) == sorted(second) == [*range(0, 160, CONTEXT)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        own = pretrain_gpt.batches(rows, 4)
        parts.append([next(own)["x"] for _ in range(5)])
        assert own.get_state() == one.get_state()
    for batch, *own in zip(batches, *parts, strict=True):
        assert sorted(np.concatenate(own).tolist()) == sorted(batch["x"].tolist())


def test_a_directory_with_a_run_is_refused_without_resume(whole):
    with pytest.raises(SystemExit, match="pass --resume to continue it"):
        pretrain_gpt.train(parse(whole[0]))


def plain_losses(model, tx, batches):
    """Of a script for one device, with none of zerojax's functions."""
    graph, params = nnx.split(model)

    def loss_fn(params, batch):
        logits = nnx.merge(graph, params)(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["y"], 0))
        return jnp.sum(losses * (batch["y"] >= 0)) / jnp.sum(batch["y"] >= 0)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses, opt_state = [], tx.init(params)
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


def test_losses_are_those_of_a_plain_script(whole):
    """At stages 1 and 3 on eight devices, also of the row that is not full. They differ by 3e-7, and may by 1e-5."""
    config, tx = config_of(whole[0]), pretrain_gpt.optimizer(STEPS, 3e-3)
    create = lambda rngs: pretrain_gpt.Qwen3(config, rngs=rngs)
    iterator = pretrain_gpt.batches(rows_of(whole[0]), ROWS)
    batches = [next(iterator) for _ in range(STEPS)]
    assert any((batch["y"] < 0).any() for batch in batches)
    model = zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:1])).init(create, optax.sgd(0.1)).model()
    want = plain_losses(model, optax.chain(optax.clip_by_global_norm(1.0), tx), batches)
    assert want[-1] < want[0] - 0.5
    for stage in 1, 3:
        zero = zerojax.Zero(zerojax.make_mesh(), stage)
        state, step = zero.init(create, tx), zero.train_step(pretrain_gpt.loss_fn, clip_norm=1.0)
        got = []
        for batch in batches:
            state, metrics = step(state, batch)
            got.append(float(metrics["loss"]))
        difference = np.abs(np.subtract(got, want)).max()
        print(f"stage {stage}: losses from {want[0]:.3f} to {want[-1]:.3f}, largest difference {difference:.1e}")
        np.testing.assert_allclose(got, want, rtol=1e-5)


# The result


def test_evaluations_count_every_byte_of_the_held_out_files(whole):
    out, result = whole
    tokens, model = rows_of(out, held_out=True).tokens, loaded(out)[1].model()
    x = np.pad(tokens[:-1], (0, -(len(tokens) - 1) % CONTEXT)).reshape(-1, CONTEXT)
    logits = model(x).reshape(-1, VOCAB)[: len(tokens) - 1].astype(np.float32)
    nats = float(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).sum())
    num_bytes = sum(len(each.encode()) for each in TEXTS[True])
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)


def test_a_sharded_model_generates_what_one_device_does(whole):
    out, prompts = whole[0], ("def", "    return x + ")
    _, state = loaded(out)
    sharded = state.model()
    one = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), sharded)
    assert len(sharded.model.norm.scale.sharding.device_set) == 8 > len(one.model.norm.scale.sharding.device_set)
    texts = [pretrain_gpt.generate(each, tokenizer_of(out), prompts, CONTEXT, 0.0) for each in (sharded, one)]
    assert texts[0] == texts[1] and all(map(str.startswith, texts[0], prompts))
    ids = tokenizer_of(out).encode(prompts[0]).ids
    for _ in range(3):  # a token at a time, without the rest of the row
        ids.append(int(one(np.array([ids]))[0, -1].argmax()))
    assert texts[0][0].startswith(tokenizer_of(out).decode(ids))
    drawn = pretrain_gpt.generate(sharded, tokenizer_of(out), prompts, CONTEXT, 1.5)
    assert drawn != texts[0] and all(map(str.startswith, drawn, prompts))


def test_tunix_computes_the_same_logits_from_the_files(whole):
    """Tunix reads them with its own code. Both compute in fp32, and sum in another order: the
    logits differ by 6e-7 of the largest, five units in its last place. The tolerance is eight times as large."""
    out = whole[0]
    fields = json.loads((out / "hf" / "config.json").read_text())
    config = tunix_qwen3.ModelConfig(
        num_layers=fields["num_hidden_layers"],
        vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"],
        hidden_dim=fields["intermediate_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        num_kv_heads=fields["num_key_value_heads"],
        rope_theta=fields["rope_theta"],
        norm_eps=fields["rms_norm_eps"],
        use_tied_embedding=fields["tie_word_embeddings"],
    )
    theirs = tunix_files.create_model_from_safe_tensors(str(out / "hf"), config, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, CONTEXT))
    positions = np.broadcast_to(np.arange(CONTEXT), tokens.shape)
    mask = np.broadcast_to(np.tril(np.ones((CONTEXT, CONTEXT), bool)), (3, CONTEXT, CONTEXT))
    want, _ = theirs(tokens, positions, None, mask)
    got = np.asarray(loaded(out)[1].model()(tokens))
    difference, largest = float(np.abs(got - want).max()), float(np.abs(want).max())
    print(f"largest logit {largest:.2f}, largest difference {difference:.1e}")
    assert largest > 0.5 and difference < 5e-6 * largest


def test_files_have_the_names_of_transformers(whole):
    layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))]
    layer += [f"self_attn.{each}" for each in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = {f"model.layers.{i}.{each}.weight" for i in range(2) for each in layer}
    reader = Reader(whole[0] / "hf")
    assert set(reader.names) == names | {"model.embed_tokens.weight", "model.norm.weight"}
    assert reader.shape("model.layers.1.mlp.up_proj.weight") == (192, 64)


def test_transformers_reads_the_configuration(whole):
    """All fields that it has are in the file, but for those of any model. `rope_theta` is for its version 4."""
    folder = whole[0] / "hf"
    fields = json.loads((folder / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(folder).to_dict()
    assert read.pop("transformers_version") == transformers.__version__
    general = transformers.PretrainedConfig().to_dict().keys() - fields.keys()
    assert {name: value for name, value in read.items() if name not in general} == {
        name: value for name, value in fields.items() if name not in ("rope_theta", "torch_dtype")
    }
    assert read.keys() >= transformers.Qwen3Config().to_dict().keys() - {"transformers_version"}


def test_transformers_reads_the_tokenizer(whole):
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole[0] / "hf")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 0, VOCAB)
    for text in TEXTS[False][:3] + TEXTS[True]:
        ids = tokenizer(text)["input_ids"]
        assert ids == tokenizer_of(whole[0]).encode(text).ids and tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>x<|im_end|>")["input_ids"][::2] == [1, 2]


def test_the_same_texts_give_the_same_tokenizer(whole):
    again = pretrain_gpt.train_tokenizer(TEXTS[False], VOCAB)
    assert again.to_str() == tokenizer_of(whole[0]).to_str()
    for text in ("élan\t\n\n   x", "\r\n'''", "日本"):  # bytes that were never seen
        assert again.decode(again.encode(text).ids) == text
