// Follow a run that goes on: ask the page's own server for what its files have gained, each second while the page is seen.

const POLL_MS = 1000, GONE_MS = 5000;
const KEPT_STEPS = 50; // of which the page holds groups and rollouts

class Live {
  constructor(page, state) {
    this.page = page;
    this.positions = state.positions;
    this.status = el("span", { class: "live", role: "status" });
    this.wanted = new Map(); // steps that are being asked for
    this.poll();
  }

  async ask(path, body = null) {
    const options = body === null ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
    const reply = await fetch(path, options);
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.error ?? `the server answers ${reply.status}`);
    return answer;
  }

  async poll() {
    let wait = POLL_MS;
    try {
      if (!document.hidden) this.take(await this.ask(`changes?${new URLSearchParams(this.positions)}`));
    } catch (error) {
      this.status.textContent = `\u26A0 ${error.message}`;
      wait = GONE_MS;
    }
    setTimeout(() => this.poll(), wait);
  }

  take(news) {
    if (news.is_rewritten) return location.reload();
    const run = this.page.data.runs[0];
    this.positions = news.positions;
    const isOther = run.is_running !== news.is_running || run.checkpoint !== news.checkpoint;
    [run.is_running, run.checkpoint] = [news.is_running, news.checkpoint];
    this.status.textContent = news.is_running ? "live" : "";
    for (const record of news.steps) if (run.last_step === null || record.step > run.last_step) addStep(run, record);
    for (const [name, points] of Object.entries(news.evaluations)) {
      const had = run.evaluations[name] ?? [], known = new Set(had.map(([step]) => step));
      run.evaluations[name] = [...had, ...points.filter(([step]) => !known.has(step))];
    }
    const isNew = (note) => !run.annotations.some((each) => each.time === note.time && each.uid === note.uid && each.text === note.text);
    run.annotations.push(...news.annotations.filter(isNew));
    if (news.steps.length || Object.keys(news.evaluations).length) this.page.grown();
    else if (isOther) this.page.head.replaceChildren(...this.page.headParts());
    if (news.annotations.length) this.page.rollouts.draw();
  }

  /** Ask for the groups and rollouts of a step that the page does not have yet. */
  async need(step) {
    const run = this.page.data.runs[0];
    if (run.job !== "rl" || !Number.isInteger(step) || run.read.steps?.includes(step) || this.wanted.has(step)) return;
    this.wanted.set(step, true);
    try {
      const found = await this.ask(`steps/${step}`);
      run.groups.push(...found.groups);
      run.rollouts.push(...found.rollouts);
      run.read.steps = [...(run.read.steps ?? []), step];
      if (run.read.steps.length > KEPT_STEPS) this.forget(run, run.read.steps.shift());
      run.read.num_groups = run.groups.length;
      this.page.stepCame();
    } catch (error) {
      this.status.textContent = `\u26A0 step ${step}: ${error.message}`;
    } finally {
      this.wanted.delete(step);
    }
  }

  forget(run, step) {
    for (const name of ["groups", "rollouts"]) run[name] = run[name].filter((each) => each.step !== step);
  }

  /** Return the form by which a person notes something of a rollout. */
  form(rollout) {
    const text = el("textarea", { "aria-label": "Your note on this rollout", placeholder: "Your note on this rollout; it is kept in the run's annotations.jsonl", rows: 1, maxlength: 4000 });
    const send = async () => {
      try {
        await this.ask("annotations", { step: rollout.step, uid: rollout.uid, sample: rollout.sample, text: text.value });
        text.value = ""; // the note itself comes with the next changes
      } catch (error) {
        this.status.textContent = `\u26A0 the note is not kept: ${error.message}`;
      }
    };
    return el("div", { class: "annotate" }, text, el("button", { on: { click: send } }, "Keep note"));
  }
}

/** Add a step's record to the columns of a run. */
function addStep(run, record) {
  record.samples += last(run.columns.samples?.mean ?? [0]) ?? 0;
  const length = run.columns.step?.mean.length ?? 0;
  for (const [key, value] of Object.entries(record)) {
    if (typeof value !== "number") continue;
    run.columns[key] ??= { mean: Array(length).fill(null) };
    for (const values of Object.values(run.columns[key])) values[length] = value;
  }
  for (const each of Object.values(run.columns)) for (const values of Object.values(each)) values[length] ??= null;
  for (const key of Object.keys(run.sums)) run.sums[key] += record[key] ?? 0;
  for (const row of run.summary) if (typeof record[row.name] === "number") addValue(row, record.step, record[row.name]);
  run.last_step = record.step;
  run.first_step ??= record.step;
  run.num_steps += 1;
}

function addValue(row, step, value) {
  row.last = value;
  if (row.better === "up" ? value > row.best : value < row.best) [row.best, row.best_step] = [value, step];
}
