// Show the groups of prompts in a table that can be filtered and sorted.

const KINDS = {
  all: ["all groups", () => true],
  mixed: ["rewards differ", (row) => new Set(known(row)).size > 1],
  high: ["all equal, above 0", (row) => isEqual(row) && known(row)[0] > 0],
  low: ["all equal, 0 or below", (row) => isEqual(row) && known(row)[0] <= 0],
  untrained: ["none trained", (row) => row.trained === 0],
  invalid: ["some invalid", (row) => row.invalid > 0],
  truncated: ["some truncated", (row) => row.truncated > 0],
};
const ROWS = 60;
const COLUMNS = [
  ["step", (row) => row.step], ["prompt", (row) => row.uid], ["asked", (row) => row.prompt], ["truth", (row) => row.truth],
  ["rewards", (row) => mean(row)], ["mean", (row) => mean(row)], ["trained", (row) => row.trained / row.size], ["tokens", (row) => row.tokens], ["what", (row) => kindOf(row)],
];

const known = (row) => row.rewards.filter((reward) => reward !== null);
const isEqual = (row) => known(row).length > 1 && new Set(known(row)).size === 1;
const mean = (row) => (known(row).length ? known(row).reduce((sum, each) => sum + each, 0) / known(row).length : null);

/** Return in words what a group teaches. */
function kindOf(row) {
  const words = [];
  if (isEqual(row)) words.push(known(row)[0] > 0 ? "= equal" : "= equal, 0");
  if (!row.trained) words.push("not trained");
  if (row.invalid) words.push(`${row.invalid} invalid`);
  if (row.truncated) words.push(`${row.truncated} truncated`);
  return words.join(", ");
}

/** Return a bar for each reward; one that is missing is hatched. */
function strip(row) {
  const low = Math.min(0, ...known(row)), high = Math.max(1, ...known(row));
  const bars = row.rewards.map((reward) => {
    const bar = el("i", { class: reward === null ? "none" : null });
    if (reward !== null) bar.style.height = `${Math.max(1, (14 * (reward - low)) / (high - low))}px`;
    return bar;
  });
  return el("span", { class: "strip", role: "img", "aria-label": `rewards ${row.rewards.map(num).join(" ")}`, title: row.rewards.map(num).join("  ") }, bars);
}

class Groups {
  constructor(page) {
    this.page = page;
    this.sort = { column: 0, sign: page.live ? -1 : 1 };
    this.limit = ROWS;
    this.text = el("input", { type: "search", placeholder: "prompt, its name or its truth", "aria-label": "Search groups", on: { input: () => this.again() } });
    this.kind = el("select", { "aria-label": "Kind of group", on: { change: () => this.again() } }, Object.entries(KINDS).map(([value, [label]]) => el("option", { value }, label)));
    this.only = el("input", { type: "checkbox", on: { change: () => this.again() } });
    this.count = el("span", { class: "soft", role: "status" });
    this.body = el("div", {});
    const filters = el("div", { class: "filters" }, this.text, this.kind, el("label", {}, this.only, " this step only"), this.count);
    this.element = section("groups", "Groups", "the answers to one prompt; what is equal teaches nothing by group-relative advantages", el("div", { class: "card" }, filters, this.body));
  }

  again() {
    this.limit = ROWS;
    this.draw();
  }

  /** Show what the filters leave; called when the run, the step or the data change. */
  draw() {
    const run = this.page.run(), words = this.text.value.toLowerCase(), step = this.page.step();
    const isKind = KINDS[this.kind.value][1], [, value] = COLUMNS[this.sort.column];
    const rows = (run.groups ?? [])
      .filter((row) => isKind(row) && (!this.only.checked || row.step === step))
      .filter((row) => !words || `${row.uid} ${row.task ?? ""} ${row.prompt} ${row.truth}`.toLowerCase().includes(words))
      .sort((one, other) => this.sort.sign * compare(value(one), value(other)));
    this.count.textContent = `${plural(rows.length, "group")} of ${num(run.read?.num_groups ?? run.groups?.length ?? 0)}`;
    this.body.replaceChildren(rows.length ? this.table(rows.slice(0, this.limit)) : el("p", { class: "empty" }, emptyText(run)));
    if (rows.length > this.limit) this.body.append(el("button", { on: { click: () => { this.limit += 5 * ROWS; this.draw(); } } }, `Show more of ${plural(rows.length, "group")}`));
  }

  table(rows) {
    const heads = COLUMNS.map(([name], number) => {
      const isSorted = this.sort.column === number;
      const click = () => { this.sort = { column: number, sign: isSorted ? -this.sort.sign : 1 }; this.draw(); };
      return el("span", { "aria-label": name }, el("button", { on: { click } }, name, isSorted ? (this.sort.sign > 0 ? " \u2191" : " \u2193") : ""));
    });
    return table(heads, rows.map((row) => [
      row.step,
      el("button", { class: "link mono", title: "Show its answers", on: { click: () => this.page.open(row) } }, row.uid),
      row.prompt, row.truth || "-", strip(row), mean(row) ?? "-", `${row.trained} of ${row.size}`, row.tokens, el("span", { class: "kind" }, kindOf(row)),
    ]));
  }
}

function compare(one, other) {
  if (one === other) return 0;
  if (one === null) return 1;
  if (other === null) return -1;
  return one < other ? -1 : 1;
}

function emptyText(run) {
  if (run.groups?.length) return "No group is left by these filters.";
  return run.job === "rl" ? "No rollout is recorded yet." : "A job on a dataset has no rollouts.";
}
