// --- the formulas of inference/planning/roofline.py

function passTime(model, tokens, cached) {
  return Math.max(1 + cached * model.cache_share, tokens / model.ridge);
}

function rooflineCosts(model, batchSize, context, longest) {
  const cached = batchSize * context, plain = passTime(model, batchSize, cached);
  const draftPass = model.draft_cost * Math.max(1, batchSize / model.ridge);
  const lengths = Array.from({ length: longest + 1 }, (_, length) => length);
  return {
    batch_size: batchSize,
    draft: lengths.map((length) => (model.parallel ? Math.min(length, 1) : length) * draftPass / plain),
    verify: lengths.map((length) => passTime(model, batchSize * (length + 1), cached) / plain),
    host: model.host / plain,
  };
}

// --- the playground

const LONGEST_PLAYED = 16;

// A round's parts, and below it the plain steps that emit as many tokens, both to one scale of time.
function drawTimeline(svg, costs, length, tokens) {
  const width = Math.max(280, svg.clientWidth), height = 118, left = 4, right = width - 4;
  const parts = [["draft", costs.draft[length]], ["verify", costs.verify[length]], ["host", costs.host]];
  const round = parts.reduce((sum, [, cost]) => sum + cost, 0);
  const scale = (right - left) / Math.max(round, tokens);
  const add = (name, attributes, text) => svg.appendChild(element(name, attributes, text));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  add("text", { class: "tick", x: left, y: 12 }, `one round: ${tokens.toFixed(2)} tokens in ${round.toFixed(2)} plain steps`);
  let start = left;
  for (const [name, cost] of parts) {
    add("rect", { class: `part ${name}`, x: start, y: 18, width: cost * scale, height: 26 });
    if (cost * scale > 44) add("text", { class: "inside", x: start + 6, y: 35 }, name);
    start += cost * scale;
  }
  add("text", { class: "tick", x: left, y: 70 }, "plain decoding of as many tokens");
  for (let step = 0; step < tokens; step++) {
    const share = Math.min(1, tokens - step);
    add("rect", { class: "part plainstep", x: left + step * scale, y: 76, width: Math.max(0, share * scale - 1.5), height: 26 });
  }
  svg.setAttribute("aria-label", `A round of ${round.toFixed(2)} plain steps beside ${tokens.toFixed(2)} of plain decoding`);
}

// What is typed and what is slid follow each other; then all is shown anew. What is typed counts: it may lie between notches.
function typedValue(root, name) {
  return +(root.elements[`${name}_typed`] ?? root.elements[name]).value;
}

function followInputs(root, show) {
  root.addEventListener("input", ({ target }) => {
    if (target.type === "range") {
      root.elements[`${target.name}_typed`].value = "powers" in target.dataset ? 2 ** target.value : target.value;
    } else if (target.type === "number" && target.name.endsWith("_typed")) {
      const range = root.elements[target.name.replace("_typed", "")];
      range.value = "powers" in range.dataset ? Math.log2(target.value) : target.value;
    }
    show(target);
  });
  window.addEventListener("resize", () => show());
}

function startPlayground(root, data) {
  const input = (name) => root.elements[name];
  const [chart, timeline] = root.querySelectorAll("svg.drawn");
  const output = (name, text) => { root.querySelector(`[data-output=${name}]`).textContent = text; };
  const fill = (select, names) => select.append(...names.map((name, i) => new Option(name, i)));
  fill(input("family"), data.families.map((family) => family.name));
  fill(input("device"), data.devices.map((device) => device.name));

  function chooseFamily(index) {
    const family = data.families[index];
    input("draft_cost").value = input("draft_cost_typed").value = (100 * family.draft_cost).toFixed(1);
    output("note", family.note);
  }

  function show() {
    const value = (name) => typedValue(root, name);
    const batch = Math.max(1, value("batch")), context = value("context");
    const length = Math.min(LONGEST_PLAYED, Math.max(1, Math.round(value("draft_length"))));
    const model = {
      draft_cost: value("draft_cost") / 100, parallel: data.families[value("family")].parallel,
      ridge: data.ridges[value("device")], cache_share: data.cache_share, host: value("host") / 100,
    };
    const costs = rooflineCosts(model, batch, context, LONGEST_PLAYED), profile = { rates: [value("rate") / 100] };
    const predicted = speedups(profile, costs, UNCHANGED), highest = Math.max(...predicted);
    const best = predicted.indexOf(highest) + 1;
    output("speedup", `${predicted[length - 1].toFixed(2)}×`);
    root.querySelector("[data-output=speedup]").className = predicted[length - 1] > 1 ? "good" : "bad";
    output("best", highest > 1 ? `draft length ${best} (${highest.toFixed(2)}×)` : "no speculation");
    output("cliff", cliffText("draft length", predicted.map((_, i) => i + 1), predicted));
    output("room", `${Math.round(model.ridge)} tokens of a pass are as fast as one; this one has ${batch * (length + 1)}`);
    drawChart(chart, {
      title: "Predicted speedup by draft length", axis: "draft length", labels: predicted.map((_, i) => `${i + 1}`),
      predicted, chosen: length - 1, known: LONGEST_PLAYED, measured: [],
    });
    drawTimeline(timeline, costs, length, acceptanceLength(profile.rates, length));
    root.dataset.speedups = JSON.stringify(predicted);
  }

  followInputs(root, (changed) => {
    if (changed?.name === "family") chooseFamily(changed.value);
    show();
  });
  for (const button of document.querySelectorAll("[data-rate]")) {
    button.addEventListener("click", () => {
      input("rate").value = input("rate_typed").value = button.dataset.rate;
      show();
      root.scrollIntoView({ behavior: "smooth" });
    });
  }
  root.closest("details")?.addEventListener("toggle", show); // a closed one has no width to draw in
  input("family").value = 1;
  chooseFamily(1);
  show();
}

if (typeof document !== "undefined" && document.getElementById("playground-form")) {
  const data = JSON.parse(document.getElementById("playground-data").textContent);
  startPlayground(document.getElementById("playground-form"), data);
}
