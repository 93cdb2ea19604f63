// Draw one chart: lines with their bands, evaluations with a mark each, the step that the pointer or the arrow keys choose.

const HEIGHT = 118, LEFT = 42, RIGHT = 8, TOP = 7, BOTTOM = 17;

class Chart {
  /** Take a chart's description (charts.py) and the page's state; what is drawn comes from `linesOf`. */
  constructor(spec, page) {
    this.spec = spec;
    this.page = page;
    this.drawing = svg("svg", { role: "img", height: HEIGHT });
    this.keys = el("div", { class: "keys" });
    this.peakNote = el("span", { class: "soft" });
    this.element = el("div", { class: "card chart" }, el("h3", {}, spec.title, this.peakNote), el("p", {}, spec.note), this.drawing, this.keys);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => page.hover(null));
    this.drawing.addEventListener("click", () => page.pin());
    new ResizeObserver(() => this.draw()).observe(this.drawing);
  }

  draw() {
    const width = this.drawing.clientWidth;
    if (!width) return;
    const lines = (this.lines = linesOf(this.spec, this.page));
    const xs = lines.flatMap((line) => line.xs);
    const ys = lines.flatMap((line) => [...line.low, ...line.high]).filter((y) => y !== null);
    this.element.hidden = !ys.length;
    if (!ys.length) return;
    this.scale(xs, ys, width);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.replaceChildren(...this.axes(width), ...lines.flatMap((line) => this.line(line)));
    this.drawing.setAttribute("aria-label", `${this.spec.title}: ${lines.map((line) => `${line.name} from ${num(line.ys.find((y) => y !== null))} to ${num(line.ys.findLast((y) => y !== null))}`).join("; ")}`);
    this.cursor = svg("line", { class: "cursorline", y1: TOP, y2: HEIGHT - BOTTOM });
    this.drawing.append(this.cursor);
    this.readOut();
  }

  scale(xs, ys, width) {
    let low = minimum(ys), high = maximum(ys);
    if (low === high) [low, high] = low < 0 ? [1.2 * low, 0] : [0, 1.2 * high || 1]; // a figure that never changes
    if (low > 0 && low < 0.4 * high) low = 0;
    this.peak = null;
    const usual = this.spec.section === "time" ? 4 * quantile(ys, 0.75) : high; // the first step has the start in it
    if (usual > 0 && high > usual) [this.peak, high] = [high, usual];
    [this.low, this.high, this.first, this.end] = [low, high, minimum(xs), maximum(xs)];
    const span = this.end - this.first || 1;
    this.x = (value) => LEFT + ((value - this.first) / span) * (width - LEFT - RIGHT);
    this.y = (value) => TOP + ((high - Math.min(value, high)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.place = (pixel) => this.first + ((pixel - LEFT) / (width - LEFT - RIGHT)) * span;
  }

  axes(width) {
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const levels = ticks(this.low, this.high).flatMap((value) => [
      svg("line", { class: "gridline", x1: LEFT, x2: right, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick", x: LEFT - 5, y: this.y(value) + 3.5, "text-anchor": "end" }, num(value)),
    ]);
    const ends = [[this.first, "start"], [this.end, "end"]].map(([value, anchor]) =>
      svg("text", { class: "tick", x: this.x(value), y: bottom + 13, "text-anchor": anchor }, this.page.axisLabel(value)));
    this.peakNote.textContent = this.peak === null ? "" : `beyond the scale: ${num(this.peak)}`;
    return [...levels, ...ends];
  }

  line(line) {
    const stroke = `var(--run${line.colour % COLOURS})`;
    const known = line.xs.map((x, i) => [x, line.low[i], line.high[i], line.ys[i]]).filter((point) => point[3] !== null);
    const parts = [];
    if (known.some((point) => point[1] !== point[2])) {
      const there = known.map(([x, , high]) => `${this.x(x).toFixed(1)},${this.y(high).toFixed(1)}`);
      const back = known.map(([x, low]) => `${this.x(x).toFixed(1)},${this.y(low).toFixed(1)}`).reverse();
      parts.push(svg("polygon", { class: "band", fill: stroke, points: [...there, ...back].join(" ") }));
    }
    const path = known.map(([x, , , y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    parts.push(svg("path", { class: line.isEvaluation ? "line thin" : "line", d: path, stroke, "stroke-dasharray": DASHES[line.dash] || null }));
    if (line.isEvaluation) return [...parts, ...known.map(([x, , , y]) => markAt(line.mark, this.x(x), this.y(y), line.colour))];
    if (known.length === 1) parts.push(markAt(0, this.x(known[0][0]), this.y(known[0][3]), line.colour, 2.4));
    if (line.mark !== null && known.length) parts.push(markAt(line.mark, this.x(last(known)[0]), this.y(last(known)[3]), line.colour));
    return parts;
  }

  point(event) {
    if (!this.place) return;
    this.page.hover(this.page.stepAt(this.place(event.clientX - this.drawing.getBoundingClientRect().left)));
  }

  /** Show the values at the chosen step, or the last ones. */
  readOut() {
    if (this.element.hidden || !this.lines) return;
    const at = this.page.placeOf(this.page.step());
    this.cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, this.x(Math.min(Math.max(at, this.first), this.end)));
    this.keys.replaceChildren(...this.lines.slice(0, 6).map((line) => {
      const index = at === null ? line.ys.findLastIndex((y) => y !== null) : indexAt(line.xs, at);
      return el("span", { class: "key" }, lineSample(line.colour % COLOURS, line.dash, line.mark), el("span", { class: "mono" }, line.name), el("b", {}, num(line.ys[index])));
    }));
  }
}

const minimum = (values) => values.reduce((least, each) => (each < least ? each : least), Infinity);
const maximum = (values) => values.reduce((most, each) => (each > most ? each : most), -Infinity);
const quantile = (values, share) => [...values].sort((one, other) => one - other)[Math.floor(share * (values.length - 1))];
