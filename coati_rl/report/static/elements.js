// Build elements and format numbers. Text reaches the page as text alone: nothing here, or elsewhere, parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "5 3", "2 2", "8 3 2 3", "1 3", "10 4"];
const COLOURS = 6;

/** Return an element; `on` are listeners, other attributes with a value of null or false are left out. */
function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a number with four significant digits; a dash for what has no value. */
function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return String(value).replace(/\B(?=(\d{3})+$)/g, "\u2009");
  return size >= 1000 ? num(Math.round(value)) : String(Number(value.toPrecision(4)));
}

const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);
const duration = (seconds) => (seconds > 0 && seconds < 0.0995 ? `${brief(seconds * 1000)} ms` : seconds >= 5400 ? `${brief(seconds / 3600)} h` : seconds >= 90 ? `${brief(seconds / 60)} min` : `${brief(seconds)} s`);
const brief = (value) => Number(value.toPrecision(3));
const plural = (number, noun) => `${num(number)} ${noun}${number === 1 ? "" : "s"}`;
const last = (values) => values[values.length - 1];

/** Return the index of the largest of ascending values that is not above a limit; 0 if all are. */
function indexAt(values, limit) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= limit) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return the value at x of a line through points, straight between them; null outside of them. */
function between(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > last(xs)) return null;
  const left = indexAt(xs, x), right = Math.min(left + 1, xs.length - 1);
  if (ys[left] === null || ys[right] === null || xs[left] === xs[right]) return ys[left];
  return ys[left] + ((ys[right] - ys[left]) * (x - xs[left])) / (xs[right] - xs[left]);
}

/** Return two to four round numbers within a range. */
function ticks(low, high) {
  const rough = (high - low) / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

/** Return the name of a figure or setting, which may be broken behind "/" and "_". */
function named(text) {
  return el("code", {}, text.split(/(?<=[/_])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])));
}

function section(id, title, note, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("header", {}, el("h2", { id: `${id}-title` }, title), note ? el("p", {}, note) : null), children);
}

/** Return a table; cells that are numbers are right-aligned, cells may be elements. */
function table(headings, rows, rowClass = () => null) {
  const isNumber = headings.map((_, column) => rows.some((row) => typeof row[column] === "number"));
  const cell = (value, column) => el("td", { class: isNumber[column] ? "n" : null }, typeof value === "number" ? num(value) : value ?? "-");
  const head = el("tr", {}, headings.map((each, column) => el("th", { scope: "col", class: isNumber[column] ? "n" : null }, each)));
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" });
  scroll.append(el("table", {}, el("thead", {}, head), el("tbody", {}, rows.map((row) => el("tr", { class: rowClass(row) }, row.map(cell))))));
  return scroll;
}

/** Return a sample of a line: its colour, dash and, of a run among several, its mark. */
function lineSample(colour, dash, mark = null) {
  const line = svg("line", { x1: 0, y1: 5, x2: 20, y2: 5, stroke: `var(--run${colour})`, "stroke-width": 2, "stroke-dasharray": DASHES[dash] || null });
  return svg("svg", { width: 20, height: 10, "aria-hidden": "true" }, line, mark === null ? null : markAt(mark, 10, 5, colour));
}

/** Return one of six marks, so that runs can be told apart without colours. */
function markAt(kind, x, y, colour, size = 3.4) {
  const points = [
    null,
    [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    [[0, -1.3], [1.2, 1], [-1.2, 1]],
    [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
    [[0, 1.3], [1.2, -1], [-1.2, -1]],
    [[-0.5, -1.3], [0.5, -1.3], [0.5, 1.3], [-0.5, 1.3]],
  ][kind % 6];
  const attributes = { class: "eval", fill: `var(--run${colour % COLOURS})` };
  if (!points) return svg("circle", { ...attributes, cx: x, cy: y, r: size });
  return svg("polygon", { ...attributes, points: points.map(([dx, dy]) => `${(x + dx * size).toFixed(1)},${(y + dy * size).toFixed(1)}`).join(" ") });
}
