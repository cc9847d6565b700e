// --- the formulas of inference/planning/gpu_roofline.py

function machineOf(plan, gpu, numGpus, weights) {
  const { assumptions } = plan.machine;
  return {
    assumptions, numGpus, memory: gpu.memory, weightBytes: plan.bytes[weights], otherBytes: plan.bytes.bf16,
    flops: numGpus * assumptions.flops_share * ({ fp8: gpu.fp8, fp4: gpu.fp4 }[weights] || gpu.bf16),
    bandwidth: numGpus * assumptions.bandwidth_share * gpu.bandwidth,
    layerMs: assumptions.layer_ms + (numGpus > 1 ? 2 * assumptions.exchange_ms : 0),
  };
}

function passMs(machine, weights, cached, operations, layers) {
  const products = Math.max(weights / machine.bandwidth, operations / machine.flops);
  return 1000 * (products + cached / machine.bandwidth) + layers * machine.layerMs;
}

function routed(target, experts) {
  return target.experts.reduce((sum, group) => sum + group.layers * group.weights * experts(group), 0);
}

function weightBytes(machine, target, tokens) {
  const touched = (group) => group.experts * (1 - (1 - group.chosen / group.experts) ** tokens);
  return machine.weightBytes * (target.layer_weights + routed(target, touched)) + machine.otherBytes * target.head_weights;
}

function activeWeights(target) {
  return target.layer_weights + target.head_weights + routed(target, (group) => group.chosen);
}

function keptBytes(machine, target, context) {
  const seen = (group) => group.layers * group.values * Math.min(context, group.window || context);
  return machine.assumptions.cache_bytes * target.caches.reduce((sum, group) => sum + seen(group), 0) + target.state_bytes;
}

function movedBytes(machine, target, context) {
  return keptBytes(machine, target, context) + target.state_bytes;
}

function verifyMs(machine, target, nodes, batch, context) {
  const tokens = batch * (nodes + 1);
  const cached = batch * movedBytes(machine, target, context);
  return passMs(machine, weightBytes(machine, target, tokens), cached, 2 * tokens * activeWeights(target), target.layers);
}

function draftMs(machine, drafter, length, batch, context) {
  if (drafter.passes === "none" || length === 0) return 0;
  const block = drafter.passes === "block", rows = block ? batch * length : batch;
  const weights = drafter.passes === "head" ? drafter.weights / (drafter.longest || 1) : drafter.weights;
  const cache = batch * context * drafter.cache_values * machine.assumptions.cache_bytes;
  const one = passMs(machine, machine.otherBytes * weights, cache, 2 * rows * weights, drafter.layers);
  return (block ? 1 : length) * (one + machine.assumptions.draft_pass_ms);
}

// Times of rounds of up to `longest` tokens in plain steps, beside the milliseconds of a plain step.
function planCosts(machine, target, drafter, batch, context, longest) {
  const { step_ms: step } = machine.assumptions, plain = verifyMs(machine, target, 0, batch, context) + step;
  const lengths = Array.from({ length: Math.min(longest, drafter.longest || longest) + 1 }, (_, length) => length);
  return {
    batch_size: batch, plain_ms: plain, host: step / plain,
    draft: lengths.map((length) => draftMs(machine, drafter, length, batch, context) / plain),
    verify: lengths.map((length) => verifyMs(machine, target, length, batch, context) / plain),
  };
}

function rowsThatFit(machine, target, context) {
  const ends = target.head_weights + target.other_weights;
  const layers = target.layer_weights + routed(target, (group) => group.experts);
  const room = machine.numGpus * machine.assumptions.memory_share * machine.memory;
  const left = room - machine.weightBytes * layers - machine.otherBytes * ends;
  return Math.max(0, Math.floor(left / Math.max(1, keptBytes(machine, target, context))));
}

function dollarsPerMillion(price, numGpus, batch, msPerToken) {
  return price * numGpus / 3600 / (batch / (msPerToken / 1000)) * 1e6;
}

// --- the panel

const LONGEST_PLANNED = 16, BATCHES = Array.from({ length: 10 }, (_, power) => 2 ** power);

function startPlan(root, plan) {
  const input = (name) => root.elements[name], [byLength, byBatch, timeline] = root.querySelectorAll("svg.drawn");
  const output = (name, text) => { root.querySelector(`[data-output=${name}]`).textContent = text; };
  const fill = (select, names) => select.append(...names.map((name, i) => new Option(name, i)));
  fill(input("gpu"), plan.gpus.map((gpu) => gpu.name));
  fill(input("drafter"), plan.shapes.map((shape) => shape.name));
  input("gpu").value = plan.gpus.findIndex((gpu) => gpu.name === plan.machine.gpu.name);

  function show() {
    const value = (name) => typedValue(root, name), { target } = plan;
    const batch = Math.max(1, Math.round(value("batch"))), context = Math.max(1, Math.round(value("context")));
    const numGpus = Math.max(1, Math.round(value("num_gpus"))), drafter = plan.shapes[value("drafter")];
    const machine = machineOf(plan, plan.gpus[value("gpu")], numGpus, input("weights").value);
    const profile = { rates: [value("rate") / 100] };
    const costsAt = (size) => planCosts(machine, target, drafter, size, context, LONGEST_PLANNED);
    const costs = costsAt(batch), predicted = speedups(profile, costs, UNCHANGED);
    const length = Math.min(predicted.length, Math.max(1, Math.round(value("draft_length"))));
    const speedup = predicted[length - 1], highest = Math.max(...predicted), best = predicted.indexOf(highest);
    const sizes = BATCHES.map((size) => speedups(profile, costsAt(size), UNCHANGED)[length - 1]);
    const ms = costs.plain_ms / speedup, rows = rowsThatFit(machine, target, context), price = value("price");
    const reply = (each) => `${(value("reply") * each / 1000).toFixed(2)} s`;
    const cost = (each) => `$${dollarsPerMillion(price, numGpus, batch, each).toFixed(3)}`;
    output("speedup", `${speedup.toFixed(2)}×`);
    root.querySelector("[data-output=speedup]").className = speedup > 1 ? "good" : "bad";
    output("best", highest > 1 ? `draft length ${best + 1} (${highest.toFixed(2)}×)` : "no speculation");
    output("cliff", `${cliffText("batch size", BATCHES, sizes)}, with draft length ${length}`);
    output("break_even", `breaks even at ${roundCost(costs, length, UNCHANGED).toFixed(2)} tokens a round; this acceptance gives ${acceptanceLength(profile.rates, length).toFixed(2)}`);
    output("step", `${costs.plain_ms.toFixed(2)} ms`);
    output("step_text", `of a plain step; a round ${(costs.plain_ms * roundCost(costs, length, UNCHANGED)).toFixed(2)} ms`);
    output("fits", rows >= batch ? `${rows} such texts fit` : `too little memory: ${rows ? `only ${rows} such texts fit` : "the weights do not fit"}`);
    root.querySelector("[data-output=fits]").className = rows >= batch ? "dim" : "bad";
    output("reply_with", reply(ms));
    output("reply_without", reply(costs.plain_ms));
    output("rate_with", (1000 * batch / ms).toFixed(0));
    output("rate_without", (1000 * batch / costs.plain_ms).toFixed(0));
    output("cost_with", price > 0 ? cost(ms) : "–");
    output("cost_without", price > 0 ? cost(costs.plain_ms) : "–");
    drawChart(byLength, {
      title: "Predicted speedup by draft length", axis: `draft length, at batch size ${batch}`,
      labels: predicted.map((_, i) => `${i + 1}`), predicted, chosen: length - 1, known: LONGEST_PLANNED, measured: [],
    });
    drawChart(byBatch, {
      title: "Predicted speedup by batch size", axis: `batch size, at draft length ${length}`,
      labels: BATCHES.map(String), predicted: sizes, chosen: BATCHES.findLastIndex((size) => size <= batch),
      known: LONGEST_PLANNED, measured: [],
    });
    drawTimeline(timeline, costs, length, acceptanceLength(profile.rates, length));
    root.dataset.speedups = JSON.stringify(predicted);
  }

  followInputs(root, show);
  show();
}

if (typeof document !== "undefined" && document.getElementById("plan-form")) {
  startPlan(document.getElementById("plan-form"), JSON.parse(document.getElementById("plan-data").textContent));
}
