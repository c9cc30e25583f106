"use strict";
// Line charts, drawn by uPlot, which gets only as many values as its pixels can show.

const TOP = 18; // pixels for the marks of events

class LineChart {
  constructor(data, spec, figure) {
    this.steps = data.steps;
    this.spec = spec;
    this.figure = figure;
    this.element = figure.querySelector(".plot");
    this.scale = spec.scale;
    this.height = ["loss", "norm"].includes(spec.key) ? 236 : 176;
    this.element.style.minHeight = `${this.height}px`; // the page does not move when it is drawn
    this.shown = spec.series.map((series) => !series.hidden);
    this.styles = spec.series.map(styleOf);
    this.dashes = this.styles.map((style) => style.dash);
    this.legend = addLegend(this);
    this.overlay = addOverlay(this.element);
    addPointers(this.element, this.overlay, (x) => this.openNear(x));
    addKeys(this.element, () => this.openNear(view.toPixel(view.cursor ?? NaN, this.element)));
    this.addToggle();
    theme.listeners.push(() => this.redraw());
  }

  get isLog() {
    return this.scale === "log";
  }

  addToggle() {
    const button = this.figure.querySelector("button.scale");
    if (!button) return;
    const showPressed = () => button.setAttribute("aria-pressed", String(this.isLog));
    button.setAttribute("aria-label", `Logarithmic axis of ${this.figure.querySelector("h3").textContent}`);
    button.addEventListener("click", () => {
      this.scale = this.isLog ? "linear" : "log";
      showPressed();
      this.rebuild();
    });
    showPressed();
  }

  openNear(pixel) {
    const row = marks.near(marks.shown(this.spec.kinds), pixel, this.element);
    if (row) openEvent(row);
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    view.draw(this);
  }

  redraw() {
    this.legend.restyle(this.dashes);
    if (this.plot) this.plot.redraw(false);
  }

  emphasize(number) {
    this.plot?.setSeries(number === null ? null : number + 1, { focus: true });
  }

  // Returns the values that are drawn between the steps of the view.
  fill() {
    const slots = makeSlots(this.steps, view.from, view.to, view.width(this.element));
    const filled = this.spec.series.map((series) => fillSlots(series, slots, this.steps, this.isLog));
    this.marks = filled.map((one) => one.marks);
    this.points = filled.map((one) => pointsOf(one.y, slots.x));
    // Dashes would be unreadable on many noisy lines.
    const isDense = slots.x.length > 300;
    this.dashes = this.styles.map((style, i) => (isDense && this.spec.series[i].role === "rank" ? [] : style.dash));
    return [slots.x, ...filled.map((one) => one.y)];
  }

  draw() {
    const width = this.element.clientWidth;
    if (this.plot && this.plot.width !== width) {
      this.plot.destroy();
      this.plot = null;
    }
    const lines = this.fill();
    this.legend.restyle(this.dashes);
    this.plot?.series.slice(1).forEach((series, i) => { series.dash = this.dashes[i]; });
    if (this.plot) this.plot.setData(lines);
    else this.plot = new uPlot(this.options(width), lines, this.element);
  }

  options(width) {
    const { left, right } = view.gutters();
    const colour = (name) => () => theme.colour(name);
    const axis = { stroke: colour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const form = this.scale === "share" ? shownShare : shownNumber;
    return {
      width,
      height: this.height,
      padding: [TOP, right, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      focus: { alpha: 0.15 },
      scales: {
        x: { time: false, range: () => [view.from, view.to] },
        y: { distr: { log: 3, counts: 4 }[this.scale] || 1, asinh: 1, range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, size: 26, gap: 4, splits: (_, __, low, high) => linearTicks(low, high, view.width(this.element) / 80), values: (_, ticks) => ticks.map(shownStep) },
        { ...axis, size: left, gap: 6, splits: (_, __, low, high) => this.ticks(low, high), filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map(form) },
      ],
      series: [{}, ...this.spec.series.map((series, i) => this.seriesOptions(i))],
      hooks: { drawAxes: [(plot) => this.drawLines(plot)], draw: [(plot) => this.drawMarks(plot)] },
    };
  }

  seriesOptions(number) {
    const { colour, width } = this.styles[number];
    const points = { show: true, size: 4, fill: colour, filter: () => this.points[number] };
    return { scale: "y", show: this.shown[number], stroke: colour, width, dash: this.dashes[number], points };
  }

  ticks(low, high) {
    if (this.scale === "share") return [0, 0.25, 0.5, 0.75, 1];
    if (this.scale === "counts") return countTicks(high, 5);
    return this.isLog ? logTicks(low, high, 6) : linearTicks(low, high, 5);
  }

  // The range follows the values only; fixed lines appear if the values come near them.
  range(low, high) {
    if (this.scale === "share") return [0, 1];
    if (this.scale === "counts") return [0, Math.max(1, high ?? 1) * 1.5];
    if (low === null || high === null) return this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) {
      const factor = Math.max(1.08, (high / low) ** 0.06);
      return [low / factor, high * factor];
    }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  // Draws the fixed lines under the series.
  drawLines(plot) {
    const { ctx: context, bbox: box } = plot;
    const ratio = uPlot.pxRatio;
    context.save();
    context.font = `${10 * ratio}px system-ui, sans-serif`;
    context.textAlign = "right";
    context.textBaseline = "alphabetic";
    for (const [height, label] of this.spec.lines) {
      const y = plot.valToPos(height, "y", true);
      if (!(y >= box.top && y <= box.top + box.height)) continue;
      context.strokeStyle = context.fillStyle = theme.colour("muted");
      context.setLineDash([2 * ratio, 4 * ratio]);
      context.lineWidth = ratio;
      context.beginPath();
      context.moveTo(box.left, y);
      context.lineTo(box.left + box.width, y);
      context.stroke();
      context.fillText(label, box.left + box.width - 4 * ratio, y - 3 * ratio);
    }
    context.restore();
  }

  drawMarks(plot) {
    const { ctx: context } = plot;
    const ratio = uPlot.pxRatio;
    context.save();
    context.scale(ratio, ratio);
    const box = { left: plot.bbox.left / ratio, top: plot.bbox.top / ratio, width: plot.bbox.width / ratio, height: plot.bbox.height / ratio };
    this.drawEvents(context, box);
    this.drawValues(context, box);
    this.drawLabels(context, box, plot);
    context.restore();
  }

  drawEvents(context, box) {
    for (const { x, row } of marks.spaced(marks.shown(this.spec.kinds), this.element)) {
      context.strokeStyle = theme.colour(SEVERITIES[row[2]]);
      context.globalAlpha = 0.45;
      context.setLineDash(row[2] === 2 ? [] : [3, 3]);
      context.beginPath();
      context.moveTo(x, box.top);
      context.lineTo(x, box.top + box.height);
      context.stroke();
      context.globalAlpha = 1;
      context.setLineDash([]);
      drawEventShape(context, row[2], x, TOP / 2, 5);
    }
  }

  drawValues(context, box) {
    this.marks.forEach((its, number) => {
      if (!this.shown[number]) return;
      context.strokeStyle = this.styles[number].colour();
      context.lineWidth = 1.6;
      const last = {};
      for (const [step, kind] of its) {
        const x = view.toPixel(step, this.element);
        if (step < view.from || step > view.to || x - (last[kind] ?? -99) < 6) continue;
        last[kind] = x;
        const row = 6 + 8 * (number % 4);
        drawValueMark(context, kind, x, kind === "low" ? box.top + box.height - row : box.top + row, 3);
      }
    });
  }

  // Labels each line at its right end.
  drawLabels(context, box, plot) {
    const labels = [];
    this.spec.series.forEach((series, number) => {
      const line = plot.data[number + 1];
      let end = line.length - 1;
      while (end >= 0 && !Number.isFinite(line[end])) end--;
      if (!this.shown[number] || end < 0) return;
      const y = plot.valToPos(line[end], "y");
      labels.push({ number, text: series.label, y: box.top + Math.min(box.height, Math.max(0, y)) });
    });
    if (labels.length < 2 || labels.length > Math.floor(box.height / 12)) return;
    placeLabels(labels, 12, box.top + 4, box.top + box.height - 2);
    const { right } = view.gutters();
    const start = box.left + box.width + 5;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { number, text, y } of labels) {
      context.strokeStyle = this.styles[number].colour();
      context.lineWidth = 2;
      context.setLineDash(this.dashes[number].map((length) => length / 1.5));
      context.beginPath();
      context.moveTo(start, y);
      context.lineTo(start + 12, y);
      context.stroke();
      context.fillStyle = theme.colour("text");
      context.fillText(fitText(context, text, right - 22), start + 16, y);
    }
  }

  showCursor(step) {
    this.overlay.hair(step);
    const at = step ?? this.steps[this.steps.length - 1];
    const form = this.scale === "share" ? shownShare : shownNumber;
    this.legend.setValues(this.spec.series.map((series) => form(valueAt(series, this.steps, at))));
  }
}

// Returns the values that are drawn as points: all if there are few, else those without a line on either side.
function pointsOf(y, x) {
  const known = [];
  for (let i = 0; i < y.length; i++) if (y[i] !== undefined && x[i] >= view.from && x[i] <= view.to) known.push(i);
  const values = known.filter((i) => y[i] !== null);
  if (values.length <= 40) return values;
  return known.filter((i, place) => y[i] !== null && (y[known[place - 1]] ?? null) === null && (y[known[place + 1]] ?? null) === null);
}

// Moves labels apart, each as near to its line as the others allow.
function placeLabels(labels, height, top, bottom) {
  labels.sort((a, b) => a.y - b.y);
  let limit = top;
  for (const label of labels) {
    label.y = Math.max(label.y, limit);
    limit = label.y + height;
  }
  limit = bottom;
  for (const label of labels.reverse()) {
    label.y = Math.min(label.y, limit);
    limit = label.y - height;
  }
}

// The end of a long parameter name identifies it better than the beginning.
function fitText(context, text, width, keepsEnd = false) {
  if (context.measureText(text).width <= width) return text;
  let less = text;
  while (less.length > 1 && context.measureText(`${less}…`).width > width) less = keepsEnd ? less.slice(1) : less.slice(0, -1);
  return keepsEnd ? `…${less}` : `${less}…`;
}
