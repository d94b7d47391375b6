/* The form and the chart of calculator.md. What it shows is computed by calculator.js. */
(function () {
  "use strict";

  const data = globalThis.zerojaxData;
  const { estimate, parameters } = globalThis.zerojaxCalculator;
  const place = document.getElementById("calculator-app");
  const GIB = 2 ** 30;
  const SVG = "http://www.w3.org/2000/svg";
  const TERMS = [
    ["parameters", "parameters"],
    ["gradients", "gradients"],
    ["optimizer state", "optimizer"],
    ["gathered", "gathered"],
    ["saved", "saved"],
    ["activations", "activations"],
  ];
  const LABELS = { gathered: "gathered weights", saved: "saved activations", activations: "other activations" };
  const MOST = 0.95; // with XLA_CLIENT_MEM_FRACTION=0.95

  // Fields: name, label, value, and either options or the smallest number.
  const MODEL = [
    ["layers", "layers", 1], ["width", "width", 1], ["heads", "heads", 1], ["kv_heads", "heads of keys and values", 1],
    ["hidden", "width inside the MLP", 1], ["vocab", "vocabulary", 1], ["seq", "tokens in a row", 1],
  ];
  const STEP = [
    ["stage", "stage", [["0", "0: nothing sharded"], ["1", "1: optimizer state"], ["2", "2: and gradients"], ["3", "3: and parameters"]], "3"],
    ["shards", "devices that share states (N)", 1, 8],
    ["chip", "device", Object.keys(data.chips).map((name) => [name, name.toUpperCase()]), "h100"],
    ["precision", "precision", Object.keys(data.precisions).map((name) => [name, name]), "bf16"],
    ["optimizer_bytes", "optimizer (bytes per parameter)", [["8", "AdamW (8)"], ["4", "Lion, SGD with momentum (4)"], ["0", "SGD (0)"]], "8"],
    ["remat", "remat", [["none", "none: all saved"], ["dots", "dots: products saved"], ["full", "full: inputs saved"]], "dots"],
    ["rows", "rows of a device in a microbatch", 1, 1],
    ["microbatches", "microbatches", 1, 1],
  ];

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function drawn(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function field([name, label, kind, value]) {
    const input = Array.isArray(kind)
      ? element("select", { name }, ...kind.map(([key, text]) => element("option", { value: key }, text)))
      : element("input", { name, type: "number", min: kind, step: 1, inputmode: "numeric" });
    if (value !== undefined) input.value = value;
    return element("label", {}, element("span", {}, label), input);
  }

  const presets = [...Object.keys(data.presets), "custom"].map((name) => [name, name]);
  const form = element(
    "form",
    { class: "calculator-form" },
    element("fieldset", {}, element("legend", {}, "Step"), ...STEP.map(field)),
    element(
      "fieldset",
      {},
      element("legend", {}, "Model"),
      field(["preset", "preset", presets, "llama3-8b"]),
      field(["llama", "kind", [["1", "Llama: gated, no biases"], ["", "GPT: biases, learned positions"]], "1"]),
      field(["tied", "output layer", [["", "its own"], ["1", "tied to the embedding"]], ""]),
      ...MODEL.map(field),
      field(["parameters", "parameters, if others than these shapes have", 0]),
    ),
  );
  const output = element("div", { class: "calculator-output", "aria-live": "polite" });
  place.replaceChildren(form, output);

  function fill(name) {
    const preset = data.presets[name];
    if (!preset) return;
    for (const [key] of MODEL) form.elements[key].value = preset[key];
    form.elements.llama.value = preset.llama ? "1" : "";
    form.elements.tied.value = preset.tied ? "1" : "";
    form.elements.rows.value = preset.rows;
    form.elements.parameters.value = "";
  }

  const number = (name) => Number(form.elements[name].value);
  const gib = (bytes) => `${(bytes / GIB).toFixed(bytes < 9.995 * GIB ? 2 : 1)} GiB`;
  const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : `${(1000 * s).toFixed(1)} ms`);
  const billions = (count) => (count >= 1e9 ? `${(count / 1e9).toFixed(2)} B` : `${(count / 1e6).toFixed(1)} M`);

  function inputs() {
    const model = { llama: Boolean(form.elements.llama.value), tied: Boolean(form.elements.tied.value) };
    for (const [key] of MODEL) model[key] = number(key);
    const config = {};
    for (const [name] of STEP) {
      config[name] = ["chip", "precision", "remat"].includes(name) ? form.elements[name].value : number(name);
    }
    config.parameters = number("parameters");
    const whole = [...MODEL.map(([key]) => key), "shards", "rows", "microbatches"].every((name) => {
      return Number.isInteger(number(name)) && number(name) >= 1;
    });
    const { shards, chip } = config;
    const host = data.chips[chip].devices_per_host;
    if (!whole) return { problem: "All numbers have to be whole and at least 1." };
    if (model.width % model.heads) return { problem: "The heads have to divide the width." };
    if (shards > host && shards % host) return { problem: `More than ${host} devices have to be a multiple of ${host}.` };
    return { model, config };
  }

  /* A bar for each stage, with the terms of its peak. The selected stage is framed, and lines mark the device's memory. */
  function chart(results, stage, chip) {
    const [width, left, row] = [Math.max(300, Math.min(640, output.clientWidth || 640)), 56, 44];
    const capacity = chip.memory_bytes;
    const most = Math.max(capacity, ...results.map((result) => Math.min(result.peak_bytes, 4 * capacity))) * 1.02;
    const scale = (bytes) => (Math.min(bytes, most) / most) * (width - left);
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${4 * row + 34}`, role: "img", class: "calculator-chart" });
    svg.append(drawn("title", {}, "Peak memory of a device by stage"));
    results.forEach((result, index) => {
      let x = left;
      const y = 8 + index * row;
      svg.append(drawn("text", { x: 0, y: y + 20, class: index === stage ? "selected" : "" }, `stage ${index}`));
      for (const [term, name] of TERMS) {
        const length = Math.min(scale(result.terms[term]), Math.max(0, width - x));
        const bar = drawn("rect", { x, y, width: length, height: row - 14, class: `term-${name}` });
        bar.append(drawn("title", {}, `${LABELS[term] || term}: ${gib(result.terms[term])}`));
        svg.append(bar);
        x += length;
      }
      const inside = x > width - 90;
      const anchor = inside ? { x: x - 6, "text-anchor": "end", class: "inside" } : { x: x + 6 };
      svg.append(drawn("text", { ...anchor, y: y + 20 }, gib(result.peak_bytes)));
      if (index === stage) {
        svg.append(drawn("rect", { x: left - 2, y: y - 2, width: x - left + 4, height: row - 10, class: "frame" }));
      }
    });
    for (const [share, label] of [[data.memory_share, "75%"], [1, "memory"]]) {
      const x = left + scale(share * capacity);
      svg.append(drawn("line", { x1: x, x2: x, y1: 0, y2: 4 * row + 4, class: "limit" }));
      svg.append(drawn("text", { x, y: 4 * row + 22, "text-anchor": share === 1 ? "start" : "end" }, label));
    }
    return svg;
  }

  function table(rows) {
    const cells = (tag, row) => row.map((text, index) => element(index ? tag : "th", index ? {} : { scope: "row" }, text));
    return element("table", {}, element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))));
  }

  function verdict(peak_bytes, memory_bytes) {
    if (peak_bytes <= data.memory_share * memory_bytes) return ["fits", "fits"];
    if (peak_bytes <= MOST * memory_bytes) return ["tight", `fits with XLA_CLIENT_MEM_FRACTION=${MOST}`];
    return ["no", "does not fit"];
  }

  function legend(result) {
    const items = TERMS.map(([term, name]) => {
      const swatch = element("span", { class: `swatch term-${name}` });
      return element("li", {}, swatch, `${LABELS[term] || term} ${gib(result.terms[term])}`);
    });
    return element("ul", { class: "calculator-legend" }, ...items);
  }

  function show() {
    const { problem, model, config } = inputs();
    if (problem) return output.replaceChildren(element("p", { class: "calculator-problem" }, problem));
    const results = [0, 1, 2, 3].map((stage) => estimate(model, { ...config, stage }, data));
    const result = results[config.stage];
    const states = result.states;
    const chip = data.chips[config.chip];
    const bound = result.link_s > result.compute_s ? "the links" : "matrix products";
    const tokens = config.rows * config.microbatches * model.seq;
    const step_s = Math.max(result.link_s, result.compute_s);
    const fits = Object.entries(data.chips).map(([device, { memory_bytes }]) => {
      const [name, text] = verdict(result.peak_bytes, memory_bytes);
      return element("li", { class: `fit-${name}` }, element("strong", {}, `${device.toUpperCase()} (${gib(memory_bytes)})`), ` ${text}`);
    });
    output.replaceChildren(
      element("p", { class: "calculator-sum" }, element("strong", {}, gib(result.peak_bytes)), ` at the peak, which is ${result.moment}`),
      element("ul", { class: "calculator-fits" }, ...fits),
      chart(results, config.stage, chip),
      legend(result),
      table([
        ["parameters of the model", billions(result.parameters)],
        ["model states of a device: parameters", `${Math.round(states.parameters).toLocaleString("en")} bytes`],
        ["gradients", `${Math.round(states.gradients).toLocaleString("en")} bytes`],
        ["optimizer state", `${Math.round(states.optimizer).toLocaleString("en")} bytes`],
        ["sent by a device in a step", gib(result.sent_bytes)],
        ["time of the links", seconds(result.link_s)],
        ["time of the matrix products", seconds(result.compute_s)],
        ["a step takes at least", `${seconds(step_s)} (${bound})`],
        ["tokens per second and device, at most", Math.round(tokens / step_s).toLocaleString("en")],
      ]),
    );
  }

  form.addEventListener("input", (event) => {
    const name = event.target.name;
    if (name === "preset") fill(form.elements.preset.value);
    else if (["llama", "tied", ...MODEL.map(([key]) => key)].includes(name)) form.elements.preset.value = "custom";
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  globalThis.addEventListener("resize", show); // the chart is drawn for the width of the page
  fill("llama3-8b");
  show();
})();
