"use strict";

// --- the formula of recipes/reports/what_if.py, for acceptance and costs that the sliders change

function acceptanceLength(rates, draftLength) {
  let total = 1, survival = 1;
  for (let i = 0; i < draftLength; i++) {
    survival *= rates[Math.min(i, rates.length - 1)];
    total += survival;
  }
  return total;
}

function within(rate) {
  return Math.min(Math.max(rate, 0.001), 0.999);
}

function changedRates(rates, first) {
  if (first === null) return rates;
  const power = Math.log(within(first)) / Math.log(within(rates[0]));
  return rates.map((rate) => rate ** power);
}

function roundCost(costs, draftLength, change) {
  return change.draft_scale * costs.draft[draftLength] + change.verify_scale * costs.verify[draftLength] + costs.host;
}

function speedups(profile, costs, change) {
  const rates = changedRates(profile.rates, change.first_rate);
  const lengths = costs.draft.slice(1).map((_, i) => i + 1);
  return lengths.map((length) => acceptanceLength(rates, length) / roundCost(costs, length, change));
}

const UNCHANGED = { first_rate: null, draft_scale: 1, verify_scale: 1 };

// --- drawing: plain SVG in the colours of the page

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// A chart of speedups over categories (draft lengths, batch sizes) that stand side by side.
function drawChart(svg, chart) {
  const width = Math.max(260, svg.clientWidth), height = 280;
  const left = 50, right = width - 14, top = 14, bottom = height - 44;
  const heights = chart.measured.map((point) => point.speedup_ci95?.[1] ?? point.speedup);
  const highest = Math.max(1.2, ...chart.predicted, ...heights) * 1.08;
  const x = (i) => left + (right - left) * (i + 0.5) / chart.labels.length;
  const y = (value) => bottom - (bottom - top) * value / highest;
  const add = (name, attributes, text) => svg.appendChild(element(name, attributes, text));
  const line = (kind, x1, y1, x2, y2) => add("line", { class: kind, x1, y1, x2, y2 });
  const words = (kind, x, y, anchor, text) => add("text", { class: kind, x, y, "text-anchor": anchor }, text);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();

  const step = [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10].find((step) => highest / step <= 7) || highest / 5;
  for (let value = 0; value <= highest; value += step) {
    line("grid", left, y(value), right, y(value));
    words("tick", left - 7, y(value) + 4, "end", `${+value.toFixed(2)}×`);
  }
  const every = Math.ceil(22 * chart.labels.length / (right - left)); // labels that would touch are left out
  chart.labels.forEach((label, i) => { if (i % every === 0) words("tick", x(i), bottom + 17, "middle", label); });
  words("axis", (left + right) / 2, height - 6, "middle", chart.axis);
  const cell = (right - left) / chart.labels.length;
  chart.predicted.forEach((value, i) => { // where speculation costs more than it brings
    if (value < 1) add("rect", { class: "loss", x: x(i) - cell / 2, y: top, width: cell, height: bottom - top });
  });
  line("plain", left, y(1), right, y(1));
  line("chosen", x(chart.chosen), top, x(chart.chosen), bottom);
  chart.predicted.slice(1).forEach((value, i) => {
    line(i + 1 > chart.known ? "curve guess" : "curve", x(i), y(chart.predicted[i]), x(i + 1), y(value));
  });
  chart.predicted.forEach((value, i) => {
    const isChosen = i === chart.chosen;
    add("circle", { class: isChosen ? "dot on" : "dot", cx: x(i), cy: y(value), r: isChosen ? 6 : 3.5 });
  });
  for (const { at, speedup, speedup_ci95: interval } of chart.measured) { // null where too little was measured for one
    const cx = x(at) + 9;
    if (interval) line("interval", cx, y(interval[0]), cx, y(interval[1]));
    const text = `measured ${speedup.toFixed(2)}×${interval ? ` [${interval.map((end) => end.toFixed(2)).join(", ")}]` : ""}`;
    add("rect", { class: "point", x: cx - 4, y: y(speedup) - 4, width: 8, height: 8 }).appendChild(element("title", {}, text));
  }
  const values = chart.labels.map((label, i) => `${label}: ${chart.predicted[i].toFixed(2)}`);
  svg.setAttribute("aria-label", `${chart.title}: ${values.join(", ")}`);
}

// Where speculation stops to pay: the names of the places with their predicted speedups.
function cliffText(what, names, predicted) {
  const paying = predicted.map((value, i) => [value > 1, names[i]]).filter(([pays]) => pays).map(([, name]) => name);
  if (!paying.length) return `pays at no ${what} shown`;
  const last = paying[paying.length - 1];
  return last === names[names.length - 1] ? `pays at ${what} ${last}, the end of the scale` : `pays up to ${what} ${last}`;
}

// --- the panel: its state is what the sliders say, kept in the address behind # so that a view can be passed on

function startPanel(root, profiles) {
  const input = (name) => root.elements[name];
  const charts = root.querySelectorAll("svg");
  let profile, moved;

  function chooseDrafter(index) {
    profile = profiles[index];
    moved = new Set(); // a slider that was not moved stands for the measured value exactly, not for its nearest notch
    const smallest = profile.measured.filter((point) => point.batch_size === profile.costs[0].batch_size);
    const predicted = speedups(profile, profile.costs[0], UNCHANGED).map((speedup, i) => ({ speedup, draft_length: i + 1 }));
    const best = (smallest.length ? smallest : predicted).reduce((a, b) => (b.speedup > a.speedup ? b : a));
    input("draft_length").max = profile.costs[0].draft.length - 1;
    input("batch").max = profile.costs.length - 1;
    input("batch").closest("label").hidden = profile.costs.length < 2; // nothing is known of other batch sizes
    const values = {
      drafter: index, draft_length: best.draft_length, batch: 0,
      first_rate: 100 * within(profile.rates[0]), draft_scale: 100, verify_scale: 100,
    };
    for (const [name, value] of Object.entries(values)) input(name).value = value;
  }

  function change() {
    const share = (name, unmoved) => moved.has(name) ? input(name).value / 100 : unmoved;
    return { first_rate: share("first_rate", null), draft_scale: share("draft_scale", 1), verify_scale: share("verify_scale", 1) };
  }

  function show() {
    const chosen = change(), batch = +input("batch").value, length = +input("draft_length").value;
    const costs = profile.costs[batch], predicted = speedups(profile, costs, chosen);
    const rates = changedRates(profile.rates, chosen.first_rate);
    const sizes = profile.costs.map((each) => each.batch_size);
    const bySize = profile.costs.map((each) => speedups(profile, each, chosen)[length - 1]);
    const speedup = predicted[length - 1], highest = Math.max(...predicted), best = predicted.indexOf(highest) + 1;
    const draft = chosen.draft_scale * costs.draft[length], verify = chosen.verify_scale * costs.verify[length];
    const texts = {
      draft_length: `${length}`,
      batch: `${costs.batch_size}`,
      first_rate: `${(100 * rates[0]).toFixed(1)} % of first tokens`,
      draft_scale: `${(draft / length).toFixed(3)} plain steps a token`,
      verify_scale: `${verify.toFixed(2)} plain steps a round`,
      speedup: `${speedup.toFixed(2)}×`,
      tokens: acceptanceLength(rates, length).toFixed(2),
      cost: roundCost(costs, length, chosen).toFixed(2),
      split: `${draft.toFixed(2)} draft + ${verify.toFixed(2)} verify + ${costs.host.toFixed(2)} host`,
      best: highest > 1 ? `draft length ${best} (${highest.toFixed(2)}×)${best > profile.known ? ", beyond what was measured" : ""}` : "no speculation",
      cliff: cliffText("draft length", predicted.map((_, i) => i + 1), predicted),
      batch_cliff: sizes.length > 1 ? `${cliffText("batch size", sizes, bySize)}, with draft length ${length}` : "",
      basis: profile.basis,
    };
    for (const [name, text] of Object.entries(texts)) {
      root.querySelector(`[data-output=${name}]`).textContent = text;
      input(name)?.setAttribute("aria-valuetext", text);
    }
    root.querySelector("[data-output=speedup]").className = speedup > 1 ? "good" : "bad";

    const points = moved.size ? [] : profile.measured; // they say nothing about other acceptance or costs
    drawChart(charts[0], {
      title: "Predicted speedup by draft length", axis: `draft length, at batch size ${costs.batch_size}`,
      labels: predicted.map((_, i) => `${i + 1}`), predicted, chosen: length - 1, known: profile.known - 1,
      measured: points.filter((point) => point.batch_size === costs.batch_size)
        .map((point) => ({ ...point, at: point.draft_length - 1 })),
    });
    charts[1].closest("figure").hidden = sizes.length < 2;
    drawChart(charts[1], {
      title: "Predicted speedup by batch size", axis: `batch size, at draft length ${length}`,
      labels: sizes, predicted: bySize, chosen: batch, known: sizes.indexOf(profile.known_batch),
      measured: points.filter((point) => point.draft_length === length)
        .map((point) => ({ ...point, at: sizes.indexOf(point.batch_size) })),
    });
    root.dataset.speedups = JSON.stringify(predicted);
  }

  function readAddress() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (![...state.keys()].some(input)) return;
    chooseDrafter(Math.max(0, profiles.findIndex((each) => each.name === state.get("drafter"))));
    state.delete("drafter");
    for (const [name, value] of state) {
      if (!input(name)) continue;
      input(name).value = name === "batch" ? profile.costs.findIndex((costs) => `${costs.batch_size}` === value) : value;
      if ("scale" in input(name).dataset) moved.add(name);
    }
  }

  function update() {
    show();
    const state = new URLSearchParams({ drafter: profile.name, draft_length: input("draft_length").value });
    state.set("batch", profile.costs[input("batch").value].batch_size);
    for (const name of moved) state.set(name, input(name).value);
    history.replaceState(null, "", `#${state}`);
  }

  root.addEventListener("input", ({ target }) => {
    if (target.name === "drafter") chooseDrafter(target.value);
    else if ("scale" in target.dataset) moved.add(target.name);
    update();
  });
  root.querySelector("button").addEventListener("click", () => {
    chooseDrafter(input("drafter").value);
    update();
  });
  window.addEventListener("hashchange", () => { readAddress(); show(); });
  window.addEventListener("resize", show);
  chooseDrafter(0);
  readAddress();
  show();
}

if (typeof document !== "undefined" && document.getElementById("panel")) {
  startPanel(document.getElementById("panel"), JSON.parse(document.getElementById("profiles").textContent));
}
