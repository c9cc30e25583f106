"use strict";
// Heat maps: a row for each parameter or module. Larger numbers are lighter, so that the order is visible without
// colour; NaN and Inf are hatched.

const RAMP = [
  [26, 18, 62], [38, 40, 108], [32, 71, 141], [14, 104, 150], [8, 136, 148],
  [44, 166, 135], [104, 193, 112], [171, 214, 88], [243, 230, 92],
];

function rampColour(share) {
  const place = Math.min(0.9999, Math.max(0, share || 0)) * (RAMP.length - 1);
  const low = Math.floor(place);
  const mixed = RAMP[low].map((part, i) => Math.round(part + (place - low) * (RAMP[low + 1][i] - part)));
  return `rgb(${mixed.join(" ")})`;
}

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const drawing = tile.getContext("2d");
  drawing.fillStyle = "#fff";
  drawing.fillRect(0, 0, 6, 6);
  drawing.strokeStyle = "#b3261e";
  drawing.lineWidth = 2;
  for (const shift of [-6, 0, 6]) {
    drawing.beginPath();
    drawing.moveTo(shift, 6);
    drawing.lineTo(shift + 6, 0);
    drawing.stroke();
  }
  return context.createPattern(tile, "repeat");
}

class HeatChart extends RowPlot {
  constructor(data, spec, figure) {
    super(figure, spec.rows, spec.rows.length > 40 ? 7 : 15);
    this.spec = spec;
    this.steps = Float64Array.from(spec.at, (place) => data.steps[place]);
    this.logs = Float64Array.from(spec.values, Math.log10);
    const finite = this.logs.filter(Number.isFinite);
    const ordered = finite.slice().sort();
    // The lowest 2 % do not stretch the ramp, so that a single tiny number does not flatten the others.
    const at = (share) => ordered[Math.floor(share * (ordered.length - 1))] ?? 0;
    [this.low, this.high] = [at(0.02), at(1)];
    if (!(this.high > this.low)) [this.low, this.high] = [this.low - 0.5, this.low + 0.5];
    this.cells = spec.rows.map((_, row) => this.cellsOf(row));
    this.addScale();
    this.element.addEventListener("pointermove", (event) => {
      const y = event.clientY - this.element.getBoundingClientRect().top;
      this.row = Math.floor((y - this.top) / this.height);
      this.showCursor(view.cursor);
    });
  }

  get top() {
    return 18;
  }

  addScale() {
    const box = this.figure.querySelector(".legend");
    const bar = document.createElement("canvas");
    bar.width = 120;
    bar.height = 10;
    const context = bar.getContext("2d");
    for (let x = 0; x < 120; x++) {
      context.fillStyle = rampColour(x / 119);
      context.fillRect(x, 0, 1, 10);
    }
    bar.setAttribute("aria-hidden", "true");
    this.readout = document.createElement("span");
    this.readout.className = "readout";
    const hatched = document.createElement("span");
    hatched.className = "hatched";
    box.append(shownNumber(10 ** this.low), bar, shownNumber(10 ** this.high), hatched, "NaN or Inf", this.readout);
  }

  // Returns the measured columns of a row, each with the step up to which it is drawn: the next column, unless that is
  // much further away than usual.
  cellsOf(row) {
    const columns = [];
    for (let column = 0; column < this.steps.length; column++) {
      if (this.spec.values[row * this.steps.length + column] !== -1) columns.push(column);
    }
    const gaps = columns.slice(1).map((column, i) => this.steps[column] - this.steps[columns[i]]);
    const usual = gaps.slice().sort((a, b) => a - b)[Math.floor(0.9 * (gaps.length - 1))] || 1;
    const ends = columns.map((column, i) => this.steps[column] + Math.min(gaps[i] ?? usual, 1.5 * usual));
    return { columns, begins: Float64Array.from(columns, (column) => this.steps[column]), ends };
  }

  draw() {
    const context = this.begin();
    const { left, top, width, height } = this.box;
    const pattern = hatch(context);
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    this.cells.forEach((cells, row) => {
      const first = row * this.steps.length;
      const y = top + row * this.height;
      const tall = this.height - (this.height > 10 ? 1 : 0);
      for (let i = Math.max(0, lowerBound(cells.begins, view.from) - 1); i < cells.columns.length && cells.begins[i] <= view.to; i++) {
        const place = first + cells.columns[i];
        const x = view.toPixel(cells.begins[i], this.element);
        const wide = Math.max(1.2, view.toPixel(cells.ends[i], this.element) - x + 0.4);
        if (!Number.isFinite(this.spec.values[place])) continue;
        context.fillStyle = rampColour((this.logs[place] - this.low) / (this.high - this.low));
        context.fillRect(x, y, wide, tall);
      }
    });
    // NaN and Inf are drawn over the others, and wide enough to be seen.
    context.fillStyle = pattern;
    this.cells.forEach((cells, row) => cells.columns.forEach((column, i) => {
      if (Number.isFinite(this.spec.values[row * this.steps.length + column])) return;
      const x = view.toPixel(cells.begins[i], this.element);
      context.fillRect(x, top + row * this.height, Math.max(6, view.toPixel(cells.ends[i], this.element) - x), this.height);
    }));
    context.restore();
    for (const { x, row } of marks.spaced(marks.shown(this.spec.kinds), this.element)) drawEventShape(context, row[2], x, 8, 5);
    this.drawNames(context);
    this.drawAxis(context);
  }

  drawAxis(context) {
    const { left, top, width, height } = this.box;
    context.fillStyle = theme.colour("muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of linearTicks(view.from, view.to, width / 80)) {
      context.fillText(shownStep(step), Math.min(view.toPixel(step, this.element), left + width + 20), top + height + 7);
    }
    context.textAlign = "left";
  }

  clicked(x, y) {
    if (y !== null && y > this.top) return;
    const row = marks.near(marks.shown(this.spec.kinds), x, this.element);
    if (row) openEvent(row);
  }

  showCursor(step) {
    super.showCursor(step);
    const name = this.names[this.row];
    const cells = this.cells[this.row];
    const cell = step === null || !cells ? -1 : lowerBound(cells.begins, step + 1e-9) - 1;
    if (cell < 0) {
      this.readout.textContent = "";
      return;
    }
    const value = this.spec.values[this.row * this.steps.length + cells.columns[cell]];
    this.readout.textContent = `${name}, step ${shownStep(cells.begins[cell])}: ${shownNumber(value)}`;
  }
}
