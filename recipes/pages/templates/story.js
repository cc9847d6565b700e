// --- a sample text as it was decoded, round by round, beside plain decoding on the same clock

// Where both stand after some milliseconds: rounds that are done, their tokens, and those of plain decoding.
function storyAt(story, milliseconds) {
  const { rounds, round_ms, plain_ms } = story;
  const count = (some) => some.reduce((sum, round) => sum + round.num_tokens, 0);
  const done = Math.min(rounds.length, Math.floor(milliseconds / round_ms + 1e-9));
  const total = count(rounds), plain = Math.min(total, Math.floor(milliseconds / plain_ms + 1e-9));
  return { done, total, plain, tokens: count(rounds.slice(0, done)) };
}

// The tokens of a round as [text, class, note]: those drafted, then the target's own.
function tokensOf(round) {
  const share = (p) => (p < 1e-4 ? "< 0.01 %" : `${p < 0.0995 ? (100 * p).toPrecision(2) : (100 * p).toFixed(0)} %`);
  const tokens = round.drafted.map((token, i) => [
    token.text,
    i < round.num_accepted ? "accepted" : i === round.num_accepted ? "rejected" : "unread",
    `p ${share(token.target_probability)}` + (token.drafter_probability === null ? "" : `, q ${share(token.drafter_probability)}`),
  ]);
  const own = round.pieces.filter((piece) => !piece.accepted).map((piece) => piece.text).join("");
  return own ? [...tokens, [own, "own", "the target's"]] : tokens;
}

function startStory(root) {
  const story = JSON.parse(root.querySelector("script").textContent), rounds = story.rounds;
  const part = (name) => root.querySelector(`[data-part=${name}]`);
  const end = Math.max(rounds.length * story.round_ms, storyAt(story, 0).total * story.plain_ms);
  let clock = 0, playing = null;

  function showDraft(round) {
    part("draft").replaceChildren(...(round ? tokensOf(round) : []).map(([text, kind, note]) => {
      const token = document.createElement("span"), small = document.createElement("small");
      const shown = document.createElement(kind === "rejected" ? "s" : "b");
      shown.textContent = text.replace(/\n/g, "⏎").replace(/ /g, "␣");
      small.textContent = note;
      token.className = kind;
      token.append(shown, small);
      return token;
    }));
  }

  function show() {
    const { done, total, plain, tokens } = storyAt(story, clock);
    part("clock").textContent = `${clock.toFixed(0)} ms`;
    part("speculative").value = tokens / total;
    part("plain").value = plain / total;
    part("counts").textContent = `speculative ${tokens}, plain ${plain} of ${total} tokens`;
    showDraft(clock > 0 && done > 0 ? rounds[done - 1] : null);
    root.querySelectorAll(".round").forEach((round, i) => {
      round.classList.toggle("ahead", clock > 0 && i >= done);
      round.classList.toggle("now", clock > 0 && i === done - 1 && done < rounds.length);
    });
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    part("play").textContent = "Play";
  }

  function play() {
    if (clock >= end) clock = 0;
    part("play").textContent = "Stop";
    playing = setInterval(() => {
      clock = Math.min(end, clock + 40 * part("speed").value);
      show();
      if (clock >= end) stop();
    }, 40);
  }

  part("play").addEventListener("click", () => (playing ? stop() : play()));
  part("step").addEventListener("click", () => {
    stop();
    const next = clock >= end ? 0 : storyAt(story, clock).done;
    clock = Math.min(end, (next + 1) * story.round_ms);
    show();
  });
  show();
}

if (typeof document !== "undefined") document.querySelectorAll(".story").forEach(startStory);
