// Show where the time went: shares of the trainers' time, each actor's parts, and the last seconds as lanes.

const WAITING = /wait|idle/;

function bars(parts, whole) {
  return el("div", { class: "share" }, parts.flatMap((part) => {
    const fillBar = el("div", { class: WAITING.test(part.name) ? "fill wait" : "fill" });
    fillBar.style.width = `${Math.min(100, (100 * part.seconds) / whole)}%`;
    return [
      el("span", { class: part.is_inside ? "name inner" : "name", title: part.name }, part.name), el("span", { class: "track", "aria-hidden": "true" }, fillBar),
      el("span", { class: "n" }, duration(part.seconds)), el("span", { class: "n" }, percent(part.seconds / whole)),
    ];
  }));
}

/** Return the shares of what the records of steps count. */
function stepShares(run) {
  const { step_s: whole, train_s: train = 0, rollout_wait_s: wait = 0, sync_s: sync = 0 } = run.sums;
  if (!whole) return null;
  const other = Math.max(0, whole - train - wait - sync);
  const parts = [["train", train], ["wait for work", wait], ["weight syncs", sync], ["other: evaluations, checkpoints, the loop", other]];
  return el("div", { class: "card" }, el("h3", {}, `Steps of the trainers: ${duration(whole)}`), bars(parts.map(([name, seconds]) => ({ name, seconds })), whole));
}

function actorShares(actor) {
  return el("div", { class: "card" }, el("h3", {}, `${actor.name}: ${duration(actor.seconds)}`), bars(actor.parts, actor.seconds));
}

/** Return a lane for each part of each actor over the last seconds of the timeline. */
function lanes(time) {
  const rows = time.actors.flatMap((actor) => actor.names.map((name, number) => ({ actor: actor.name, name, spans: actor.spans.filter((span) => span[2] === number) })));
  const height = rows.length * 15 + 18, drawing = svg("svg", { height, role: "img", "aria-label": `who was busy in the last ${duration(time.seconds)}` });
  const draw = () => {
    const width = drawing.clientWidth;
    if (!width) return;
    const left = Math.min(210, width * 0.42), x = (second) => left + (second / time.seconds) * (width - left - 4);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren(...rows.flatMap((row, i) => [
      svg("text", { class: "lane", x: 0, y: i * 15 + 11 }, `${i && rows[i - 1].actor === row.actor ? "\u00A0\u00A0" : ""}${width < 500 ? row.actor.replace(/^(.)\w*-/, "$1") : row.actor} ${row.name}`),
      svg("line", { class: "gridline", x1: left, x2: width - 4, y1: i * 15 + 14.5, y2: i * 15 + 14.5 }),
      svg("path", { class: WAITING.test(row.name) ? "waiting" : "busy", d: row.spans.map(([begin, end]) => `M${x(begin).toFixed(1)} ${i * 15 + 2}H${Math.max(x(begin) + 0.6, x(end)).toFixed(1)}V${i * 15 + 12}H${x(begin).toFixed(1)}Z`).join("") }),
    ]), ...ticks(0, time.seconds).map((second) => svg("text", { class: "tick", x: x(second), y: height - 4, "text-anchor": "middle" }, `${num(second)} s`)));
  };
  new ResizeObserver(draw).observe(drawing);
  return el("div", { class: "card lanes" }, el("h3", {}, `The last ${duration(time.seconds)} of the timeline`), drawing);
}

/** Return all of the above for a run. */
function timeParts(run) {
  const { time } = run;
  const actors = time.actors ?? [];
  const cards = [stepShares(run), ...actors.map(actorShares)].filter(Boolean);
  return [
    el("div", { class: "two" }, cards),
    actors.length ? lanes(time) : el("p", { class: "empty" }, "No timeline is recorded."),
    time.left_out ? el("p", { class: "soft" }, `${plural(time.left_out, "more actor")} not shown; timeline.json has all.`) : null,
  ];
}
