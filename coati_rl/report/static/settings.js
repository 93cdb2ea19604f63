// Show settings, what differs between runs, the machine and its packages, and what the log warns of.

function settings(page) {
  const { data } = page, names = Object.keys(data.runs[0].config), isCompared = data.runs.length > 1;
  const row = (name) => [named(name), ...data.runs.map((run) => run.config[name] ?? "not there"), isCompared ? null : data.defaults[name] ?? "-"].filter((cell) => cell !== null);
  const headings = isCompared ? ["", ...data.runs.map((run) => run.label)] : ["", "value", "default"];
  const changed = names.filter((name) => data.runs.some((run) => run.config[name] !== data.defaults[name]));
  const parts = [];
  if (isCompared) parts.push(el("div", { class: "card" }, el("h3", {}, `Settings that differ: ${data.differences.length}`), data.differences.length ? table(headings, data.differences.map(row)) : el("p", { class: "empty" }, "none")));
  parts.push(el("div", { class: "card" }, el("h3", {}, `Settings other than the default: ${changed.length}`), table(headings, changed.map(row))));
  parts.push(el("details", { class: "card" }, el("summary", {}, `All ${plural(names.length, "setting")}`), table(headings, names.map(row))));
  return parts;
}

/** Return on what each run was started, and with which versions. */
function machines(data) {
  const rows = data.runs.flatMap((run) => run.starts.map((start) => [run.label, start.time, start.coati_rl, start.python, start.system, `${start.cpu}, ${start.cores} cores, ${start.memory_gib} GiB`, start.gpus || "none", start.packages]));
  const missing = data.runs.filter((run) => !run.starts.length).map((run) => run.label);
  return el("div", { class: "card" }, el("h3", {}, "Machine and versions"),
    rows.length ? table(["run", "started", "Coati-RL", "Python", "system", "machine", "GPUs", "packages"], rows) : null,
    missing.length ? el("p", { class: "empty" }, `Not recorded by ${missing.join(", ")}: of an earlier version.`) : null);
}

function events(run) {
  const items = [...run.resumptions.map((each) => `${each.time}: resumed from step ${each.step}; ${each.changes === "[]" ? "no setting changed" : each.changes}`), ...run.problems];
  return items.length ? el("div", { class: "card" }, el("h3", {}, "Resumptions, warnings and errors"), el("ul", { class: "notes" }, items.map((text) => el("li", {}, text)))) : null;
}
