"use strict";
// Marks on a canvas: events by severity, NaN, Inf and values off a log axis. Each kind has its own shape.

const SEVERITIES = ["info", "warning", "error"];

function drawEventShape(context, severity, x, y, size) {
  context.beginPath();
  if (severity === 2) {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.lineTo(x - size, y);
  } else if (severity === 1) {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y + 0.8 * size);
    context.lineTo(x - size, y + 0.8 * size);
  } else context.arc(x, y, 0.7 * size, 0, 2 * Math.PI);
  context.closePath();
  context.fillStyle = theme.colour(SEVERITIES[severity]);
  context.fill();
}

function drawValueMark(context, kind, x, y, size) {
  context.beginPath();
  if (kind === "nan") {
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
  } else {
    const up = kind === "inf" ? -1 : 1;
    context.moveTo(x, y + up * size);
    context.lineTo(x + size, y - up * size);
    context.lineTo(x - size, y - up * size);
    context.closePath();
  }
  context.stroke();
}

// Events in the order of the steps. Within a few pixels only the most severe one is drawn.
const marks = {
  rows: [],
  kinds: [],

  init(events) {
    this.kinds = events.kinds;
    this.rows = events.rows;
    this.steps = Float64Array.from(events.rows, (row) => row[0]);
  },

  shown(kinds) {
    const numbers = new Set(kinds.map((kind) => this.kinds.indexOf(kind)));
    const [first, last] = [lowerBound(this.steps, view.from), lowerBound(this.steps, view.to)];
    return this.rows.slice(first, last).filter((row) => numbers.has(row[1]));
  },

  spaced(rows, element, distance = 7) {
    const kept = [];
    for (const row of rows) {
      const x = view.toPixel(row[0], element);
      const last = kept[kept.length - 1];
      if (!last || x - last.x >= distance) kept.push({ x, row });
      else if (row[2] > last.row[2]) last.row = row;
    }
    return kept;
  },

  // Returns the nearest event within a few pixels; at the same distance the most severe.
  near(rows, pixel, element, reach = 9) {
    let best = null;
    for (const row of rows) {
      const away = Math.abs(view.toPixel(row[0], element) - pixel);
      if (away <= reach && (!best || away < best.away || (away === best.away && row[2] > best.row[2]))) best = { row, away };
    }
    return best && best.row;
  },
};
