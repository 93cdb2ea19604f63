// Turn the columns of runs into the lines of charts, and write the summary and the comparison of runs.

const AXES = { step: ["step", "Steps"], samples: ["samples", "Samples"], time: ["time_s", "Time"] };

const column = (run, key, kind = "mean") => run.columns[key]?.[kind] ?? null;

/** Return the places of a run's steps on the page's axis; those without one are null. */
function places(run, page) {
  return column(run, AXES[page.axis][0]) ?? (page.axis === "step" ? [] : column(run, "step").map(() => null));
}

/** Return the lines of a chart: a line for each figure of each run, or of all seeds of one experiment together. */
function linesOf(spec, page) {
  const groups = page.groups.filter((group) => group.isShown);
  const isOne = page.groups.length === 1;
  const lines = [];
  groups.forEach((group) => {
    const name = (key) => {
      if (isOne) return key;
      if (key.startsWith("eval/")) return `${key.split("/")[1]}: ${group.label}`;
      return spec.keys.length > 1 ? `${group.label} ${key}` : group.label;
    };
    spec.keys.forEach((key, number) => {
      const style = { name: name(key), colour: isOne ? number : group.number, dash: number, mark: isOne ? null : group.number };
      const each = group.runs.map((run) => stepsOf(run, key, page)).filter(Boolean);
      if (each.length) lines.push({ ...style, ...(each.length > 1 ? banded(each) : smoothed(each[0], page)) });
    });
    evaluationsOf(spec, group).forEach((set, number) => {
      const style = { name: name(set), colour: isOne ? number + 1 : group.number, dash: number + 1, mark: isOne ? number + 3 : group.number, isEvaluation: true };
      const each = group.runs.map((run) => pointsOf(run, set, page)).filter(Boolean);
      if (each.length) lines.push({ ...style, ...(each.length > 1 ? banded(each) : each[0]) });
    });
  });
  return lines;
}

function stepsOf(run, key, page) {
  const ys = column(run, key), xs = places(run, page);
  if (!ys || !ys.some((y) => y !== null)) return null;
  const kept = ys.map((_, i) => i).filter((i) => xs[i] !== null && xs[i] !== undefined);
  const of = (values) => kept.map((i) => values[i]);
  return { xs: of(xs), ys: of(ys), low: of(column(run, key, "min") ?? ys), high: of(column(run, key, "max") ?? ys) };
}

/** Return the names of evaluation figures that belong into a chart: eval/SET/FIGURE. */
function evaluationsOf(spec, group) {
  const names = new Set(group.runs.flatMap((run) => Object.keys(run.evaluations)));
  return [...names].filter((name) => spec.evaluations.includes(name.split("/").slice(2).join("/")));
}

function pointsOf(run, name, page) {
  const points = (run.evaluations[name] ?? []).map(([step, value]) => [placeOfStep(run, step, page), value]).filter(([x, y]) => x !== null && y !== null);
  const ys = points.map(([, y]) => y);
  return points.length ? { xs: points.map(([x]) => x), ys, low: ys, high: ys } : null;
}

/** Return where a step is on the page's axis; before the first one all is at its beginning. */
function placeOfStep(run, step, page) {
  if (page.axis === "step") return step;
  const steps = column(run, "step"), xs = places(run, page);
  return step < steps[0] ? 0 : between(steps, xs, Math.min(step, last(steps)));
}

/** Return the mean of several runs at the places of the shortest, and between which values they lie. */
function banded(each) {
  const reach = minimum(each.map((line) => last(line.xs)));
  const xs = each[0].xs.filter((x) => x <= reach);
  const values = xs.map((x) => each.map((line) => between(line.xs, line.ys, x)).filter((y) => y !== null));
  const of = (function_) => values.map((found) => (found.length ? function_(found) : null));
  return { xs, ys: of((found) => found.reduce((sum, y) => sum + y, 0) / found.length), low: of(minimum), high: of(maximum) };
}

/** Return a line, smoothed if the page is: an exponential mean, with the values themselves as the band. */
function smoothed(line, page) {
  if (!page.isSmooth) return line;
  const weight = Math.min(0.9, 1 - 4 / Math.max(8, line.ys.length));
  let mean = null;
  const ys = line.ys.map((y) => (y === null ? null : (mean = mean === null ? y : weight * mean + (1 - weight) * y)));
  return { ...line, ys };
}

/** Return the table of one run's main figures, or of several at equal steps and at equal samples. */
function summary(page) {
  const { data } = page;
  if (data.runs.length === 1) {
    const rows = data.runs[0].summary.map((row) => [named(row.name), row.first, row.best, row.best_step, row.last]);
    return rows.length ? el("div", { class: "card narrow" }, table(["", "first", "best", "of step", "last"], rows)) : el("p", { class: "empty" }, "No step and no evaluation is recorded yet.");
  }
  return el("div", { class: "two" }, data.comparison.map((each) => {
    const rows = each.rows.map((row) => [named(row.name), ...row.values]);
    const at = each.axis === "step" ? `At step ${num(each.limit)}` : `At ${num(each.limit)} samples`;
    return el("div", { class: "card" }, el("h3", {}, at), el("p", { class: "soft" }, "which all have reached; of steps the mean of the last ten up to there"),
      table(["", ...data.runs.map((run) => run.label)], rows));
  }));
}
