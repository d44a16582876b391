// Plots over time, drawn as SVG. `Chart` owns one card; `draw` is called with the samples of the page.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 44, BOTTOM = 18, TOP = 8;

function element(name, attributes, parent) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// The smallest of 1, 2, 5 times a power of ten that is at least `value`.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  // `series`: [{name, color, of(sample, before)}], null where there is no value; `form` words a value.
  constructor(parent, title, series, form) {
    this.series = series;
    this.form = form;
    this.card = document.createElement("article");
    this.card.className = "chart";
    const header = document.createElement("header");
    const heading = document.createElement("h3");
    heading.textContent = title;
    header.append(heading);
    this.keys = series.map((line) => {
      const key = document.createElement("span");
      key.className = "key";
      key.style.setProperty("--c", `var(--${line.color})`);
      key.append(document.createElement("i"), line.name, document.createElement("b"));
      header.append(key);
      return key.lastChild;
    });
    this.svg = element("svg", { role: "img", "aria-label": title });
    this.card.append(header, this.svg);
    parent.append(this.card);
    this.pointer = null;
    this.svg.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.redraw(); });
    this.svg.addEventListener("pointerleave", () => { this.pointer = null; this.redraw(); });
  }

  draw(samples, begin, end) {
    this.last = [samples, begin, end];
    this.redraw();
  }

  redraw() {
    if (!this.last) return;
    const [samples, begin, end] = this.last;
    const width = this.svg.clientWidth || 400;
    const svg = this.svg;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const points = [];
    for (let i = 1; i < samples.length; i += 1) {
      if (samples[i].at < begin) continue;
      points.push({ at: samples[i].at, values: this.series.map((line) => line.of(samples[i], samples[i - 1])) });
    }
    const most = ceiling(Math.max(0, ...points.flatMap((point) => point.values.map((value) => value ?? 0))));
    const x = (at) => LEFT + (width - LEFT) * (at - begin) / (end - begin);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
    for (const part of [0, 0.5, 1]) {
      const line = y(most * part);
      element("line", { class: "grid", x1: LEFT, x2: width, y1: line, y2: line }, svg);
      element("text", { x: LEFT - 7, y: line + 3.5, "text-anchor": "end" }, svg).textContent = this.form(most * part);
    }
    const span = end - begin;
    for (const part of [0, 0.5, 1]) {
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const ago = Math.round(span * (1 - part));
      const text = ago === 0 ? "now" : ago < 120 ? `−${ago} s` : `−${Math.round(ago / 6) / 10} min`;
      element("text", { x: LEFT + (width - LEFT) * part, y: HEIGHT - 3, "text-anchor": anchor }, svg).textContent = text;
    }
    this.series.forEach((line, index) => {
      const known = points.filter((point) => point.values[index] !== null);
      if (!known.length) return;
      const way = known.map((point, i) => `${i ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point.values[index]).toFixed(1)}`).join("");
      const color = `var(--${line.color})`;
      const area = `${way}L${x(known.at(-1).at).toFixed(1)} ${y(0)}L${x(known[0].at).toFixed(1)} ${y(0)}Z`;
      element("path", { d: area, fill: color, opacity: this.series.length > 1 ? 0.08 : 0.14 }, svg);
      element("path", { class: "path", d: way, stroke: color }, svg);
      if (known.length === 1) element("circle", { cx: x(known[0].at), cy: y(known[0].values[index]), r: 2.5, fill: color }, svg);
    });
    let shown = points.at(-1);
    if (this.pointer !== null && points.length) {
      shown = points.reduce((best, point) => (Math.abs(x(point.at) - this.pointer) < Math.abs(x(best.at) - this.pointer) ? point : best));
      element("line", { class: "cursor", x1: x(shown.at), x2: x(shown.at), y1: TOP, y2: y(0) }, svg);
      this.series.forEach((line, index) => {
        if (shown.values[index] !== null) element("circle", { cx: x(shown.at), cy: y(shown.values[index]), r: 3.5, fill: `var(--${line.color})` }, svg);
      });
    }
    this.keys.forEach((key, index) => { key.textContent = shown && shown.values[index] !== null ? this.form(shown.values[index]) : "–"; });
  }
}
