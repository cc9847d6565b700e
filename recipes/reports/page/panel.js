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

// --- drawing: plain SVG in the colours of the page

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function tickStep(top) {
  return [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10].find((step) => top / step <= 7) || top / 5;
}

// A chart of speedups over categories (draft lengths, batch sizes) that stand side by side.
function drawChart(svg, chart) {
  const width = Math.max(260, svg.clientWidth), height = 280;
  const left = 42, right = width - 14, top = 14, bottom = height - 44;
  const highest = Math.max(1.2, ...chart.predicted, ...chart.measured.map((point) => point.speedup_ci95?.[1] ?? point.speedup)) * 1.08;
  const x = (i) => left + (right - left) * (i + 0.5) / chart.labels.length;
  const y = (value) => bottom - (bottom - top) * value / highest;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const add = (name, attributes, text) => svg.appendChild(element(name, attributes, text));

  const step = tickStep(highest);
  for (let value = 0; value <= highest; value += step) {
    add("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
    add("text", { class: "tick", x: left - 7, y: y(value) + 4, "text-anchor": "end" }, `${+value.toFixed(2)}×`);
  }
  chart.labels.forEach((label, i) => {
    add("text", { class: "tick", x: x(i), y: bottom + 17, "text-anchor": "middle" }, label);
  });
  add("text", { class: "axis", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, chart.axis);
  add("line", { class: "plain", x1: left, x2: right, y1: y(1), y2: y(1) });
  add("line", { class: "chosen", x1: x(chart.chosen), x2: x(chart.chosen), y1: top, y2: bottom });

  for (let i = 1; i < chart.predicted.length; i++) {
    const place = { x1: x(i - 1), y1: y(chart.predicted[i - 1]), x2: x(i), y2: y(chart.predicted[i]) };
    add("line", { class: i > chart.known ? "curve guess" : "curve", ...place });
  }
  chart.predicted.forEach((value, i) => {
    add("circle", { class: i === chart.chosen ? "dot on" : "dot", cx: x(i), cy: y(value), r: i === chart.chosen ? 6 : 3.5 });
  });
  for (const point of chart.measured) {
    const interval = point.speedup_ci95, cx = x(point.at) + 9; // null where too little was measured for one
    if (interval) add("line", { class: "interval", x1: cx, x2: cx, y1: y(interval[0]), y2: y(interval[1]) });
    const mark = add("rect", { class: "point", x: cx - 4, y: y(point.speedup) - 4, width: 8, height: 8 });
    mark.appendChild(element("title", {}, `measured ${point.speedup.toFixed(2)}×` +
      (interval ? ` [${interval[0].toFixed(2)}, ${interval[1].toFixed(2)}]` : "")));
  }
  svg.setAttribute("aria-label", `${chart.title}: ` +
    chart.labels.map((label, i) => `${label}: ${chart.predicted[i].toFixed(2)}`).join(", "));
}

// --- the panel: its state is what the sliders say, kept in the address behind # so that a view can be passed on

function startPanel(root, profiles) {
  const input = (name) => root.elements[name];
  const output = (name) => root.querySelector(`[data-output=${name}]`);
  const charts = root.querySelectorAll("svg");
  let profile, moved;

  function chooseDrafter(index) {
    profile = profiles[index];
    moved = new Set(); // a slider that was not moved stands for the measured value exactly, not for its nearest notch
    const best = profile.measured.filter((point) => point.batch_size === profile.costs[0].batch_size)
      .reduce((a, b) => (b.speedup > a.speedup ? b : a));
    input("drafter").value = index;
    input("draft_length").max = profile.costs[0].draft.length - 1;
    input("draft_length").value = best.draft_length;
    input("batch").max = profile.costs.length - 1;
    input("batch").value = 0;
    input("batch").disabled = profile.costs.length < 2;
    input("first_rate").value = 100 * within(profile.rates[0]);
    input("draft_scale").value = input("verify_scale").value = 100;
  }

  function change() {
    return {
      first_rate: moved.has("first_rate") ? input("first_rate").value / 100 : null,
      draft_scale: moved.has("draft_scale") ? input("draft_scale").value / 100 : 1,
      verify_scale: moved.has("verify_scale") ? input("verify_scale").value / 100 : 1,
    };
  }

  function show() {
    const chosen = change(), batch = +input("batch").value, length = +input("draft_length").value;
    const costs = profile.costs[batch], predicted = speedups(profile, costs, chosen);
    const rates = changedRates(profile.rates, chosen.first_rate);
    const speedup = predicted[length - 1], best = predicted.indexOf(Math.max(...predicted)) + 1;
    const cost = roundCost(costs, length, chosen);
    const draft = chosen.draft_scale * costs.draft[length], verify = chosen.verify_scale * costs.verify[length];

    const texts = {
      draft_length: `${length}`,
      batch: `${costs.batch_size}`,
      first_rate: `${(100 * rates[0]).toFixed(1)} % of first tokens`,
      draft_scale: `${(draft / length).toFixed(3)} plain steps a token`,
      verify_scale: `${verify.toFixed(2)} plain steps a round`,
    };
    for (const [name, text] of Object.entries(texts)) {
      output(name).textContent = text;
      input(name).setAttribute("aria-valuetext", text);
    }
    output("speedup").textContent = `${speedup.toFixed(2)}×`;
    output("speedup").className = speedup > 1 ? "good" : "bad";
    output("tokens").textContent = acceptanceLength(rates, length).toFixed(2);
    output("cost").textContent = cost.toFixed(2);
    output("split").textContent = `${draft.toFixed(2)} draft + ${verify.toFixed(2)} verify + ${costs.host.toFixed(2)} host`;
    output("best").textContent = predicted[best - 1] > 1 ? `draft length ${best} (${predicted[best - 1].toFixed(2)}×)` : "no speculation";
    output("basis").textContent = profile.basis;

    const unmoved = moved.size === 0; // measured points say nothing about other acceptance or costs
    drawChart(charts[0], {
      title: "Predicted speedup by draft length", axis: `draft length, at batch size ${costs.batch_size}`,
      labels: predicted.map((_, i) => `${i + 1}`), predicted, chosen: length - 1, known: profile.known - 1,
      measured: unmoved ? profile.measured.filter((point) => point.batch_size === costs.batch_size)
        .map((point) => ({ ...point, at: point.draft_length - 1 })) : [],
    });
    charts[1].closest("figure").hidden = profile.costs.length < 2;
    drawChart(charts[1], {
      title: "Predicted speedup by batch size", axis: `batch size, at draft length ${length}`,
      labels: profile.costs.map((one) => `${one.batch_size}`),
      predicted: profile.costs.map((one) => speedups(profile, one, chosen)[length - 1]),
      chosen: batch, known: profile.costs.length,
      measured: unmoved ? profile.measured.filter((point) => point.draft_length === length)
        .map((point) => ({ ...point, at: profile.costs.findIndex((one) => one.batch_size === point.batch_size) })) : [],
    });
    root.dataset.speedups = JSON.stringify(predicted);
    root.dataset.drafter = profile.name;
  }

  function readAddress() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (![...state.keys()].some(input)) return;
    const named = profiles.findIndex((one) => one.name === state.get("drafter"));
    chooseDrafter(Math.max(0, named));
    for (const [name, value] of state) {
      if (name === "drafter" || !input(name)) continue;
      input(name).value = name === "batch" ? profile.costs.findIndex((one) => `${one.batch_size}` === value) : value;
      if ("scale" in input(name).dataset) moved.add(name);
    }
  }

  function writeAddress() {
    const state = new URLSearchParams({ drafter: profile.name, draft_length: input("draft_length").value });
    state.set("batch", profile.costs[input("batch").value].batch_size);
    for (const name of moved) state.set(name, input(name).value);
    history.replaceState(null, "", `#${state}`);
  }

  root.addEventListener("input", (event) => {
    if (event.target.name === "drafter") chooseDrafter(event.target.value);
    else if ("scale" in event.target.dataset) moved.add(event.target.name);
    show();
    writeAddress();
  });
  root.querySelector("button").addEventListener("click", () => {
    chooseDrafter(input("drafter").value);
    show();
    writeAddress();
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
