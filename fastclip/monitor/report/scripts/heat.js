"use strict";
// Heat maps: a row for each parameter or module. From dark to light as the number grows, so that the order
// is the same without colour; what is not finite is hatched.

const RAMP = [
  [26, 18, 62], [38, 40, 108], [32, 71, 141], [14, 104, 150], [8, 136, 148],
  [44, 166, 135], [104, 193, 112], [171, 214, 88], [243, 230, 92],
];

function rampColour(share) {
  const place = Math.min(0.9999, Math.max(0, share)) * (RAMP.length - 1);
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
    // One number far below all others does not take the ramp from them.
    const at = (share) => ordered[Math.floor(share * (ordered.length - 1))] ?? 0;
    [this.low, this.high] = [at(0.02), at(1)];
    if (!(this.high > this.low)) [this.low, this.high] = [this.low - 0.5, this.low + 0.5];
    const gaps = Array.from(this.steps.subarray(1), (step, i) => step - this.steps[i]).sort((a, b) => a - b);
    this.usual = gaps[gaps.length >> 1] || 1;
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

  // Of a column: as wide as such columns usually are, but not over the next.
  span(column) {
    const begin = this.steps[column];
    const next = column + 1 < this.steps.length ? this.steps[column + 1] : Infinity;
    return [begin, Math.min(next, begin + 1.5 * this.usual)];
  }

  draw() {
    const context = this.begin();
    const { left, top, width, height } = this.box;
    const pattern = hatch(context);
    const columns = this.steps.length;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    for (let column = Math.max(0, lowerBound(this.steps, view.from) - 1); column < columns; column++) {
      const [from, to] = this.span(column);
      if (from > view.to) break;
      const x = view.toPixel(from, this.element);
      const wide = Math.max(1.2, view.toPixel(to, this.element) - x + 0.4);
      for (let row = 0; row < this.names.length; row++) {
        const value = this.spec.values[row * columns + column];
        if (value === -1) continue;
        const isBad = !Number.isFinite(value);
        context.fillStyle = isBad ? pattern : rampColour((this.logs[row * columns + column] - this.low) / (this.high - this.low));
        context.fillRect(x, top + row * this.height, isBad ? Math.max(5, wide) : wide, this.height - (this.height > 10 ? 1 : 0));
      }
    }
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
    for (const step of linearTicks(view.from, view.to, width / 90)) {
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
    const column = step === null ? -1 : lowerBound(this.steps, step + 1e-9) - 1;
    const name = this.names[this.row];
    if (column < 0 || name === undefined) {
      this.readout.textContent = "";
      return;
    }
    const value = this.spec.values[this.row * this.steps.length + column];
    this.readout.textContent = `${name}, step ${shownStep(this.steps[column])}: ${value === -1 ? "not measured" : shownNumber(value)}`;
  }
}
