// Put the page together: its state is the axis, the step that is chosen and the run whose rollouts are shown.

const ASK_MS = 120; // that a step stays chosen before its rollouts are asked for

class Page {
  constructor(data) {
    this.data = data;
    this.axis = "step";
    this.isSmooth = false;
    this.pinned = null; // a step that a person has chosen
    this.hovered = null;
    this.runNumber = 0;
    this.groups = data.seed_groups.map((members, number) => ({
      number, isShown: true, runs: members.map((each) => data.runs[each]),
      label: members.length > 1 ? `${data.runs[members[0]].label} +${plural(members.length - 1, "seed")}` : data.runs[members[0]].label,
    }));
    this.live = data.live ? new Live(this, data.live) : null;
    this.build();
  }

  run() { return this.data.runs[this.runNumber]; }
  step() { return this.hovered ?? this.pinned ?? this.run().last_step; }
  lead() { return this.groups.find((group) => group.isShown)?.runs[0] ?? this.data.runs[0]; }
  axisLabel(value) { return this.axis === "time" ? duration(value) : num(Math.round(value)); }

  /** Return where a step is on the axis; null while the last one is shown, which needs no line. */
  placeOf(step) {
    if (this.hovered === null && this.pinned === null) return null;
    return step === null ? null : placeOfStep(this.lead(), step, this);
  }

  stepAt(place) {
    const steps = column(this.lead(), "step"), xs = places(this.lead(), this);
    if (!steps?.length) return null;
    const left = indexAt(xs, place), right = Math.min(left + 1, steps.length - 1);
    return steps[Math.abs(xs[right] - place) < Math.abs(xs[left] - place) ? right : left];
  }

  hover(step) {
    if (step === this.hovered) return;
    this.hovered = step;
    this.readOut();
  }

  pin() {
    this.choose(this.hovered ?? this.pinned);
    this.hovered = null;
  }

  /** Choose a step, which all parts of the page then show. The last one, or null: whichever is the last. */
  choose(step) {
    const { first_step: first, last_step: end } = this.run();
    this.pinned = step === null || first === null || step >= end ? null : Math.max(Math.round(step), first);
    this.hovered = null;
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.live?.need(this.step()), ASK_MS); // the slider passes many steps
    this.readOut();
    this.rollouts.draw();
    this.table.draw();
  }

  open(row) {
    this.rollouts.uid = row.uid;
    this.rollouts.chosen = 0;
    this.choose(row.step);
    this.rollouts.element.scrollIntoView();
    this.rollouts.list.querySelector("button")?.focus({ preventScroll: true });
  }

  readOut() {
    const run = this.run();
    this.slider.value = this.step() ?? 0;
    this.output.textContent = this.step() === null ? "no step yet" : `step ${num(this.step())} of ${num(run.last_step)}`;
    for (const chart of this.charts) chart.readOut();
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
    this.readOut();
  }

  /** Take what a live run has gained. */
  grown() {
    const keys = new Set(this.data.charts.flatMap((chart) => chart.keys));
    if (this.data.runs[0].num_steps && !keys.size) return location.reload(); // its first step
    this.head.replaceChildren(...this.headParts());
    this.setRange();
    this.summaryPart.replaceChildren(summary(this));
    this.live.need(this.step());
    this.redraw();
  }

  /** Show groups and rollouts that were asked for, but do not take away what a person writes or has the focus on. */
  stepCame() {
    if (!this.rollouts.isWritten()) this.rollouts.draw();
    if (!this.table.body.contains(document.activeElement)) this.table.draw();
  }

  notesOf(rollout) {
    return this.run().annotations.filter((note) => note.step === rollout.step && note.uid === rollout.uid && note.sample === rollout.sample);
  }

  notes(rollout) {
    const found = this.notesOf(rollout);
    const list = found.length ? el("ul", { class: "notes" }, found.map((note) => el("li", {}, el("span", { class: "soft" }, `\u270E ${note.time}  `), note.text))) : null;
    return [list, this.live ? this.live.form(rollout) : null].filter(Boolean);
  }

  setRange() {
    const { first_step: first, last_step: end } = this.run();
    Object.assign(this.slider, { min: first ?? 0, max: end ?? 0 });
    this.slider.disabled = first === null;
  }

  build() {
    this.charts = this.data.charts.map((spec) => new Chart(spec, this));
    this.table = new Groups(this);
    this.rollouts = new Rollouts(this);
    this.head = el("div", { class: "head" }, this.headParts());
    document.getElementById("top").replaceWith(this.head, this.bar());
    const grid = (name) => el("div", { class: "grid" }, this.charts.filter((chart) => chart.spec.section === name).map((chart) => chart.element));
    this.summaryPart = el("div", {}, summary(this));
    this.timePart = el("div", { class: "stack" });
    this.causePart = el("div", { class: "stack" });
    this.eventPart = el("div", { class: "stack" });
    const others = Object.entries(this.data.constants).map(([key, value]) => `${key} ${num(value)}`).join(", ");
    document.getElementById("main").replaceChildren(
      section("summary", "Summary", this.data.runs.length > 1 ? "runs compared where all have been" : null, this.summaryPart),
      section("learning", "Learning", "lines are steps, marks are evaluations", grid("learning")),
      section("health", "Health", "what goes wrong shows here first", grid("health"), this.causePart),
      section("time", "Time", this.live ? "the timeline below is that of when the page was loaded" : null, grid("time"), this.timePart),
      this.table.element, this.rollouts.element,
      section("other", "Other figures", null, grid("other"), others ? el("p", { class: "soft" }, `The same in all steps: ${others}.`) : null),
      section("settings", "Settings", null, el("div", { class: "stack" }, settings(this), machines(this.data)), this.eventPart),
      el("footer", {}, leftOut(this.data).map((text) => el("span", {}, text))),
    );
    this.setRange();
    this.showRun();
    this.hideEmpty();
    document.addEventListener("keydown", (event) => this.key(event));
  }

  /** Hide sections, and the links to them, that no run has anything for. */
  hideEmpty() {
    const hasRollouts = this.data.runs.some((run) => run.job === "rl" || run.groups.length);
    const hasCharts = (name) => this.data.charts.some((chart) => chart.section === name);
    const isEmpty = { groups: !hasRollouts, rollouts: !hasRollouts, health: !hasCharts("health"), learning: !hasCharts("learning"), other: !hasCharts("other") };
    for (const [name, hidden] of Object.entries(isEmpty)) {
      document.getElementById(name).hidden = hidden;
      for (const link of document.querySelectorAll(`nav a[href="#${name}"]`)) link.hidden = hidden;
    }
  }

  /** Show the parts that are of one run. */
  showRun() {
    const run = this.run();
    this.timePart.replaceChildren(...timeParts(run).filter(Boolean));
    this.causePart.replaceChildren(...[causes(run)].filter(Boolean));
    this.eventPart.replaceChildren(...[events(run)].filter(Boolean));
    this.choose(this.pinned);
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.("input, select, textarea, .scroll, pre")) return;
    event.preventDefault();
    this.choose((this.step() ?? 0) + by);
  }

  headParts() {
    const { runs } = this.data;
    const facts = (run) => [
      el("span", { class: run.is_running ? "state running" : "state ended" }, run.is_running ? "running" : "not running"),
      fact("job", run.job), fact("steps", run.num_steps ? `${num(run.num_steps)}${run.first_step > 1 ? ` from ${run.first_step} on` : ""}` : "none yet"), fact("checkpoint", run.checkpoint ?? "none"),
      run.sums.num_response_tokens ? fact("response tokens", num(run.sums.num_response_tokens)) : null,
      run.sums.step_s ? fact("time", duration(last(column(run, "time_s") ?? [run.sums.step_s]))) : null,
    ];
    if (runs.length === 1) return [el("h1", {}, runs[0].label), el("div", { class: "facts" }, facts(runs[0]), this.live?.status)];
    return [el("h1", {}, `${runs.length} runs compared`), ...runs.map((run) => el("div", { class: "facts" }, el("b", {}, run.label), facts(run)))];
  }

  bar() {
    const choose = (axis) => { this.axis = axis; this.redraw(); };
    const axes = Object.entries(AXES).filter(([, [key]]) => this.data.runs.some((run) => column(run, key)));
    const axis = el("span", { class: "axis", role: "radiogroup", "aria-label": "Horizontal axis" }, axes.map(([name, [, label]]) =>
      el("label", {}, el("input", { type: "radio", name: "axis", checked: name === "step", on: { change: () => choose(name) } }), label)));
    const smooth = el("label", {}, el("input", { type: "checkbox", on: { change: (event) => { this.isSmooth = event.target.checked; this.redraw(); } } }), " smooth");
    this.slider = el("input", { type: "range", "aria-label": "Step", on: { input: () => this.choose(Number(this.slider.value)) } });
    this.output = el("output", {});
    const links = ["summary", "learning", "health", "time", "groups", "rollouts", "settings"].map((name) => el("a", { href: `#${name}` }, name[0].toUpperCase() + name.slice(1)));
    return el("div", { class: "bar" }, el("div", {}, el("nav", { "aria-label": "Sections" }, links), axis, smooth, el("div", { class: "cursor" }, this.slider, this.output), this.legend()));
  }

  /** Return the switches of runs, and which one's rollouts are shown; nothing for a single run. */
  legend() {
    const { runs } = this.data;
    if (runs.length === 1) return null;
    const switches = this.groups.map((group) => el("label", {}, el("input", { type: "checkbox", checked: true, on: { change: (event) => { group.isShown = event.target.checked; this.redraw(); } } }),
      lineSample(group.number % COLOURS, 0, group.number), group.label));
    const choice = el("select", { on: { change: () => { this.runNumber = choice.selectedIndex; this.setRange(); this.showRun(); } } }, runs.map((run) => el("option", {}, run.label)));
    return el("div", { class: "legend" }, switches, el("label", {}, "time and rollouts of ", choice));
  }
}

function fact(name, value) {
  return el("span", {}, `${name} `, el("b", {}, value));
}

/** Return why samples could not be scored, in the steps that are in the page. */
function causes(run) {
  if (!run.read?.causes?.length) return null;
  const rows = run.read.causes.map(([cause, number]) => [cause || "no cause noted", number, percent(number / run.read.num_rollouts)]);
  return el("div", { class: "card" }, el("h3", {}, "Invalid samples by cause"), el("p", { class: "soft" }, `among ${plural(run.read.num_rollouts, "rollout")} of ${plural(run.read.steps.length, "step")}`), table(["cause", "samples", "share"], rows));
}

/** Return in sentences what the page does not have. */
function leftOut(data) {
  return data.runs.flatMap((run) => {
    const points = run.columns.step?.mean.length ?? 0, said = [];
    if (!data.live && points < run.num_steps) said.push(`${run.label}: curves have ${num(points)} points for ${plural(run.num_steps, "step")}: each is a mean, its band the least and the largest value.`);
    if (!data.live && run.read?.steps?.length < run.num_steps) said.push(`${run.label}: groups and rollouts are of ${plural(run.read.steps.length, "step")} of ${num(run.num_steps)}; --steps N,M adds others.`);
    if (run.read?.num_groups > run.groups.length) said.push(`${run.label}: ${num(run.groups.length)} of ${plural(run.read.num_groups, "group")} are in this page.`);
    if (run.num_notes > run.annotations.length) said.push(`${run.label}: the last ${num(run.annotations.length)} of ${plural(run.num_notes, "note")} are in this page.`);
    if (run.read?.is_halved) said.push(`${run.label}: rollouts were left out to keep the page small.`);
    if (run.read?.num_rollouts && !run.read.has_tokenizer) said.push(`${run.label}: no tokenizer.json of its model was found; tokens are shown by number.`);
    if (run.first_step > 1) said.push(`${run.label}: begins at step ${run.first_step}, as it was resumed from another directory; samples are counted from there.`);
    return said;
  });
}

new Page(JSON.parse(document.getElementById("data").textContent));
