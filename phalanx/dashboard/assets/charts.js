"use strict";
// Small SVG charts. Everything that comes from a job is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["--blue", "--amber", "--teal", "--violet", "--pink", "--green", "--red"];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made[name] = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// Make the children of a container like these, without replacing what has not changed: it may be clicked just now.
function fill(container, ...wanted) {
  wanted = wanted.filter((each) => each != null);
  wanted.forEach((each, index) => {
    const old = container.childNodes[index];
    if (!old) container.append(each);
    else patch(old, each);
  });
  while (container.childNodes.length > wanted.length) container.lastChild.remove();
}

function patch(old, wanted) {
  if (typeof wanted === "string") wanted = document.createTextNode(wanted);
  if (old.nodeName !== wanted.nodeName) return old.replaceWith(wanted);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const name of new Set([...old.getAttributeNames(), ...wanted.getAttributeNames()])) {
    if (name === "style") continue;
    if (!wanted.hasAttribute(name)) old.removeAttribute(name);
    else if (old.getAttribute(name) !== wanted.getAttribute(name)) old.setAttribute(name, wanted.getAttribute(name));
  }
  if (old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
  old.onclick = wanted.onclick;
  fill(old, ...wanted.childNodes);
}

function shape(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  if (text != null) made.textContent = text;
  return made;
}

// Numbers for an axis; `least` is the smallest distance that its labels can show.
function ticks(low, high, count, least = 0) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || power);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function timeTicks(high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800];
  const within = steps.filter((each) => each <= high); // or 0:00 would be the only one
  const step = within.find((each) => high / each <= count) || within[within.length - 1] || high;
  const found = [];
  for (let at = 0; at <= high && step > 0; at += step) found.push(at);
  return found;
}

const show = {
  number(value) {
    if (value == null) return "NaN";
    const size = Math.abs(value);
    for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
      if (size >= factor) return short(value / (unit === "k" ? 1e3 : factor)) + unit;
    }
    return short(value);
  },
  bytes(value) {
    for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (value >= factor) return `${short(value / factor)} ${unit}`;
    }
    return `${Math.round(value || 0)} B`;
  },
  duration(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const two = (number) => String(number).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
  },
  span(seconds) {
    return seconds < 60 ? `${short(seconds >= 10 ? Math.round(seconds) : Math.round(seconds * 10) / 10)} s` : show.duration(seconds);
  },
  ms(seconds) {
    const ms = seconds * 1000;
    return ms >= 1000 ? `${short(ms / 1000)} s` : `${short(ms)} ms`;
  },
};

function short(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e15)) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

// A chart in a card: title, legend, lines, and what is under the pointer.
class LineChart {
  constructor(title, format, least = 0) {
    this.format = format;
    this.least = least;
    this.legend = element("div", { class: "legend" });
    this.svg = shape("svg", { role: "img", "aria-label": title });
    this.tip = element("div", { class: "tip", hidden: true });
    this.body = element("div", { style: { position: "relative" } }, this.svg, this.tip);
    this.root = element("div", { class: "card chart" }, element("h2", {}, title, this.legend), this.body);
    this.series = [];
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  // series: [{name, points: [[x, y or null], ...], dots}]; axis: {time: bool, high}
  update(series, axis) {
    this.series = series.filter((each) => each.points.length);
    this.axis = axis;
    fill(
      this.legend,
      ...this.series.map((each, index) => {
        const last = each.points[each.points.length - 1][1];
        const mark = element("i", { style: { background: `var(${COLORS[index % COLORS.length]})` } });
        return element("span", {}, mark, this.series.length > 1 ? `${each.name} ` : "", element("b", { style: { color: "var(--text)" } }, this.format(last)));
      }),
    );
    this.draw();
  }

  draw() {
    const width = this.body.clientWidth, height = 190;
    const known = this.series.flatMap((each) => each.points.filter((point) => point[1] != null));
    this.svg.replaceChildren();
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    if (!known.length) {
      this.svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show yet"));
      return;
    }
    const values = known.map((point) => point[1]);
    let low = Math.min(...values), high = Math.max(...values);
    if (low >= 0 && low < high * 0.5) low = 0;
    if (low === 0 && high === 0) high = 1;
    if (high - low < Math.abs(high) * 1e-6 + 1e-12) [low, high] = [low - Math.abs(low) * 0.1 - 1e-9, high + Math.abs(high) * 0.1 + 1e-9];
    const span = high - low;
    high += span * 0.06;
    if (low !== 0) low -= span * 0.06;
    const left = 46, right = width - 8, top = 8, bottom = height - 22;
    const xs = known.map((point) => point[0]);
    const first = this.axis.time ? 0 : Math.min(...xs), last = Math.max(...xs, first + 1);
    this.x = (value) => left + ((value - first) / (last - first)) * (right - left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
    for (const at of ticks(low, high, 4, this.least)) {
      this.svg.append(shape("line", { class: "gridline", x1: left, x2: right, y1: this.y(at), y2: this.y(at) }));
      this.svg.append(shape("text", { x: left - 7, y: this.y(at) + 4, "text-anchor": "end" }, this.format(at)));
    }
    const columns = Math.max(2, Math.floor(width / 110));
    for (const at of this.axis.time ? timeTicks(last, columns) : ticks(first, last, columns, 1)) {
      const label = this.axis.time ? show.duration(at) : show.number(at);
      this.svg.append(shape("text", { x: Math.min(right - 12, Math.max(left, this.x(at))), y: height - 5, "text-anchor": "middle" }, label));
    }
    this.series.forEach((each, index) => this.line(each, COLORS[index % COLORS.length], bottom, this.series.length === 1));
  }

  line(series, color, bottom, fill) {
    let path = "", open = false, begin = 0, end = 0;
    for (const [x, y] of series.points) {
      if (y == null) { open = false; continue; }
      if (!path) begin = this.x(x);
      path += `${open ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
      open = true;
      end = this.x(x);
    }
    if (fill && path.indexOf("M", 1) < 0) {
      this.svg.append(shape("path", { d: `${path}L${end} ${bottom}L${begin} ${bottom}Z`, style: { fill: `var(${color})`, opacity: 0.09 } }));
    }
    this.svg.append(shape("path", { d: path, fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round", style: { stroke: `var(${color})` } }));
    if (series.dots || series.points.length === 1) {
      for (const [x, y] of series.points) {
        if (y != null) this.svg.append(shape("circle", { cx: this.x(x), cy: this.y(y), r: 2.2, style: { fill: `var(${color})` } }));
      }
    }
  }

  point(event) {
    if (!this.x || !this.series.length) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const nearest = this.series.map((each) => each.points.reduce((a, b) => (Math.abs(this.x(a[0]) - at) <= Math.abs(this.x(b[0]) - at) ? a : b)));
    const x = nearest.reduce((a, b) => (Math.abs(this.x(a[0]) - at) <= Math.abs(this.x(b[0]) - at) ? a : b))[0];
    this.leave();
    this.svg.append(shape("line", { class: "cross", x1: this.x(x), x2: this.x(x), y1: 8, y2: 168 }));
    const label = this.axis.time ? show.duration(x) : `step ${Math.round(x).toLocaleString("en")}`;
    const lines = this.series.map((each, index) =>
      element("div", {}, element("i", { style: { background: `var(${COLORS[index % COLORS.length]})` } }), `${each.name}  ${this.format(nearest[index][1])}`),
    );
    this.tip.replaceChildren(element("div", {}, label), ...lines);
    this.tip.hidden = false;
    const space = this.body.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(space, this.x(x) > space - 12 ? this.x(x) - this.tip.offsetWidth - 12 : this.x(x) + 12))}px`;
    this.tip.style.top = "8px";
  }

  leave() {
    this.tip.hidden = true;
    this.svg.querySelectorAll(".cross").forEach((each) => each.remove());
  }
}

// The lives of all processes, with generations and checkpoints.
function drawTimeline(container, job) {
  const width = container.clientWidth;
  const tasks = job.head.members.map((member) => member.task);
  if (!width || !tasks.length) return;
  const row = 22, top = 6, left = Math.min(96, width * 0.25), right = width - 8;
  const height = top + tasks.length * row + 24;
  const begin = job.head.began, end = Math.max(job.head.now, begin + 1);
  const x = (at) => left + ((at - begin) / (end - begin)) * (right - left);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, width: "100%", role: "img", "aria-label": "Timeline of the processes" });
  for (const at of timeTicks(end - begin, Math.max(2, Math.floor(width / 130)))) {
    svg.append(shape("line", { class: "gridline", x1: x(begin + at), x2: x(begin + at), y1: top, y2: height - 20 }));
    svg.append(shape("text", { x: Math.min(right - 12, x(begin + at)), y: height - 6, "text-anchor": "middle" }, show.duration(at)));
  }
  tasks.forEach((task, index) => {
    svg.append(shape("text", { x: left - 8, y: top + index * row + 14, "text-anchor": "end" }, task));
  });
  const fill = { info: "--blue", good: "--green", warning: "--amber", bad: "--red" };
  for (const [task, start, stop, level, how] of job.spans) {
    const index = tasks.indexOf(task);
    if (index < 0) continue;
    const y = top + index * row + 4, to = x(stop == null ? end : stop);
    const bar = shape("rect", { x: x(start), y, width: Math.max(2, to - x(start)), height: row - 9, rx: 3, style: { fill: "var(--blue)", opacity: stop == null ? 0.85 : 0.55 } });
    bar.append(shape("title", {}, `${task}: ${show.duration(start - begin)} to ${stop == null ? "now" : show.duration(stop - begin)}${how ? `, ${how}` : ""}`));
    svg.append(bar);
    if (stop != null && level === "bad") svg.append(shape("circle", { cx: to, cy: y + 6.5, r: 5, style: { fill: `var(${fill[level]})` } }));
  }
  for (const [at, number, count] of job.generations) {
    const line = shape("line", { x1: x(at), x2: x(at), y1: top, y2: height - 20, "stroke-width": 1.5, style: { stroke: "var(--violet)" } });
    line.append(shape("title", {}, `generation ${number}: ${workers(count)}`));
    svg.append(line);
  }
  for (const [at, step] of job.checkpoints) {
    const mark = shape("path", { d: `M${x(at) - 5} ${height - 20}l5 -7l5 7z`, style: { fill: "var(--green)" } });
    mark.append(shape("title", {}, `checkpoint after ${step} steps`));
    svg.append(mark);
  }
  container.replaceChildren(svg);
}
