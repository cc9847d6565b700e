// --- a sample text as it was decoded, round by round, beside plain decoding on the same clock

// Where both stand after some milliseconds: rounds that are done, their tokens, and those of plain decoding.
function storyAt(rounds, times, milliseconds) {
  const count = (some) => some.reduce((sum, round) => sum + round.num_tokens, 0);
  const done = Math.min(rounds.length, Math.floor(milliseconds / times.round_ms + 1e-9));
  const total = count(rounds), plain = Math.min(total, Math.floor(milliseconds / times.plain_ms + 1e-9));
  return { done, total, plain, tokens: count(rounds.slice(0, done)) };
}

function startStory(root, rounds, times) {
  const part = (name) => root.querySelector(`[data-part=${name}]`);
  const end = Math.max(rounds.length * times.round_ms, storyAt(rounds, times, 0).total * times.plain_ms);
  let clock = 0, playing = null;

  function show() {
    const { done, total, plain, tokens } = storyAt(rounds, times, clock);
    part("clock").textContent = `${clock.toFixed(0)} ms`;
    part("speculative").value = tokens / total;
    part("plain").value = plain / total;
    part("counts").textContent = `speculative ${tokens}, plain ${plain} of ${total} tokens`;
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
    const next = clock >= end ? 0 : storyAt(rounds, times, clock).done;
    clock = Math.min(end, (next + 1) * times.round_ms);
    show();
  });
  show();
}

if (typeof document !== "undefined" && document.getElementById("stories")) {
  const { samples, times } = JSON.parse(document.getElementById("stories").textContent);
  document.querySelectorAll(".story").forEach((root, i) => startStory(root, samples[i], times));
}
