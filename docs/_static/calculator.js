/* Memory and time of a training step by formula, from the shapes of a transformer. No page is needed: tests run this file
   in Node and compare it with zerojax. `data` is what docs/_ext/calculator_data.py writes: chips, precisions, presets.

   Model states and bytes sent are those of zerojax. What exists only during a step is approximated: the coefficients in
   SAVED and LAYER were fitted to the traces of the presets. All bytes are per device. */
(function (root) {
  "use strict";

  // What a layer saves for its backward pass, per token: values in the dtype of the computation, as multiples of the width,
  // of the width inside the MLP, and of the width of keys and values; and bytes in fp32 whatever the precision is, as
  // multiples of the first two and of the number of heads.
  const SAVED = {
    llama: { none: [8, 5, 2, 16.6, 1.63, 4], dots: [4, 2, 2, 0, 0, 4], full: [1, 0, 0, 0, 0, 0] },
    gpt: { none: [8, 3.4, 2, 16.2, 4.7, 4], dots: [4, 1, 2, 0, 0, 4], full: [1, 0, 0, 0, 0, 0] },
  };
  // Bytes of the values of a layer that exist at once in its backward pass, per token and byte of an element, as a
  // multiple of the width inside the MLP. What it has saved is copied from the stack of all layers.
  const LAYER = { llama: 6.1, gpt: 4 };
  const LOSS_CHUNK = 2048; // tokens whose logits exist at a time

  const kind = (model) => (model.llama ? "llama" : "gpt");
  const kvWidth = (model) => (model.kv_heads * model.width) / model.heads;

  /* Numbers of parameters: of the model, of a layer, and of those in matrix products for each token. */
  function parameters(model) {
    const { layers, width, hidden, vocab, seq, llama, tied } = model;
    const kv = kvWidth(model);
    const norm = llama ? width : 2 * width;
    const products = 2 * width * width + 2 * width * kv + (llama ? 3 : 2) * width * hidden;
    const biases = llama ? 0 : 3 * width + 2 * kv + hidden;
    const layer = products + biases + 2 * norm;
    const table = vocab * width;
    const total = layers * layer + norm + table * (tied ? 1 : 2) + (llama ? 0 : seq * width);
    return { total, layer, products: layers * products, head: table };
  }

  /* The model states: exact, apart from scalars such as the optimizer's counter, and from zeros that pad shards. */
  function states(total, config, data) {
    const { compute_bytes, reduce_bytes, master_bytes } = data.precisions[config.precision];
    const divided = (num_bytes, stage) => (config.stage >= stage ? num_bytes / config.shards : num_bytes);
    return {
      parameters: divided(compute_bytes * total, 3),
      gradients: divided(reduce_bytes * total, 2),
      optimizer: divided((master_bytes + config.optimizer_bytes) * total, 1),
    };
  }

  /* Bytes that a device sends in a step. Embedding tables count as gathered, which is an upper bound. */
  function sent(total, config, data) {
    const { compute_bytes, reduce_bytes } = data.precisions[config.precision];
    const k = config.microbatches;
    const gathers = [1, 1, 1, 2 * k][config.stage]; // at stage 0, the second half of an all-reduce
    const reductions = [1, 1, k, k][config.stage];
    const gathered_bytes = config.stage === 0 ? reduce_bytes : compute_bytes;
    return ((gathers * gathered_bytes + reductions * reduce_bytes) * total * (config.shards - 1)) / config.shards;
  }

  function savedBytes(model, remat, width_bytes) {
    const [byWidth, byHidden, byKv, f32ByWidth, f32ByHidden, f32ByHead] = SAVED[kind(model)][remat];
    const values = byWidth * model.width + byHidden * model.hidden + byKv * kvWidth(model);
    return values * width_bytes + f32ByWidth * model.width + f32ByHidden * model.hidden + f32ByHead * model.heads;
  }

  /* What a step holds in addition to parameters and optimizer state, at the moments at which its memory may peak. */
  function moments(model, count, total, config, data) {
    const { compute_bytes, reduce_bytes } = data.precisions[config.precision];
    const { shards, remat } = config;
    const stage = shards > 1 ? config.stage : 0; // one device gathers and reduces nothing
    const tokens = config.rows * model.seq;
    const x_bytes = tokens * model.width * compute_bytes;
    const saved = model.layers * tokens * savedBytes(model, remat, compute_bytes);
    const copied = remat === "full" ? 0 : tokens * savedBytes(model, remat, compute_bytes);
    const recomputed = remat === "none" ? 0 : tokens * LAYER[kind(model)] * model.hidden * compute_bytes;
    const summed = (config.microbatches > 1 ? 4 : reduce_bytes) * total;
    const head = count.head * compute_bytes;
    const chunk = Math.min(tokens, LOSS_CHUNK);
    const logits = chunk * (model.vocab + model.width) * compute_bytes;
    const accumulated = config.microbatches > 1 ? (stage >= 2 ? summed / shards : summed) : 0;
    const result = {
      "at the output layer": {
        gathered: stage >= 3 ? head : 0,
        gradients: accumulated + count.head * (compute_bytes + (tokens > LOSS_CHUNK ? 4 : 0)), // a sum over chunks
        saved: saved + 3 * x_bytes,
        activations: logits,
      },
      "in the backward pass of a layer": {
        gathered: stage >= 3 ? 2 * count.layer * compute_bytes : 0,
        gradients: stage >= 2 ? summed / shards + count.layer * reduce_bytes : summed,
        saved,
        activations: copied + recomputed,
      },
    };
    if (stage === 1 || stage === 2) {
      // The stack of the largest weights, gathered with the devices in front, before it has its own layout.
      const stack = model.layers * model.width * model.hidden * compute_bytes;
      result["at the gather of the updated parameters"] = { gathered: stack, gradients: 0, saved: 0, activations: 0 };
    }
    return result;
  }

  /* Bytes per second that a device sends in a ring over all of them, as `Cluster.route` has it for GPUs. */
  function linkRate(shards, chip) {
    return shards <= chip.devices_per_host
      ? chip.link_rate
      : Math.min(chip.devices_per_host * chip.network_rate, chip.link_rate);
  }

  /* Flops of the matrix products that a device computes in a step. A causal mask halves those of attention, of which
     there are two in the forward pass and five in the backward pass. What remat='full' computes again is the forward pass
     of a layer without its last product, whose result no gradient reads. */
  function flops(model, count, config) {
    const tokens = config.rows * model.seq * config.microbatches;
    const products = 2 * count.products;
    const attention = 2 * model.layers * model.seq * model.width;
    const last = 2 * model.layers * model.hidden * model.width;
    const head = 3 * 2 * count.head; // the loss computes its gradients together with the logits
    const again = { none: 0, dots: 0, full: products - last + attention }[config.remat];
    return tokens * (3 * products + 3.5 * attention + head + again);
  }

  /* Everything that the page shows.

     config: stage, shards (N), precision, optimizer_bytes, remat ('none', 'dots', 'full'), rows (sequences of a device in
     a microbatch), microbatches, chip, and optionally parameters, in place of those of the shapes. */
  function estimate(model, config, data) {
    const count = parameters(model);
    const total = config.parameters || count.total;
    const held = states(total, config, data);
    const all = Object.entries(moments(model, count, total, config, data));
    const size = (moment) => Object.values(moment).reduce((sum, value) => sum + value, 0);
    const [moment, terms] = all.reduce((best, next) => (size(next[1]) > size(best[1]) ? next : best));
    const chip = data.chips[config.chip];
    const share = data.precisions[config.precision].compute_bytes === 4 ? chip.f32_share : 1;
    const sent_bytes = sent(total, config, data);
    return {
      parameters: total,
      states: held,
      terms: { parameters: held.parameters, "optimizer state": held.optimizer, ...terms },
      moment,
      peak_bytes: held.parameters + held.optimizer + size(terms),
      sent_bytes,
      link_s: config.shards > 1 ? sent_bytes / linkRate(config.shards, chip) : 0,
      compute_s: ((flops(model, count, config) / chip.flops) * (total / count.total)) / share,
    };
  }

  root.zerojaxCalculator = { parameters, estimate };
})(globalThis);
