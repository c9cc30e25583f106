"use strict";
// Numbers of the page: decoding, and the few of them that a chart of so many pixels can show.

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes.buffer;
}

function decodeValues(coded) {
  return "f4" in coded ? new Float32Array(bytesOf(coded.f4)) : new Float64Array(bytesOf(coded.f8));
}

function decodePlaces(coded) {
  if (!coded) return new Float64Array(0);
  if ("u4" in coded) return new Uint32Array(bytesOf(coded.u4));
  const count = coded.runs.reduce((sum, run) => sum + run[2], 0);
  const places = new Float64Array(count);
  let next = 0;
  for (const [first, distance, length] of coded.runs) {
    for (let i = 0; i < length; i++) places[next++] = first + distance * i;
  }
  return places;
}

// The first index whose number is at least x.
function lowerBound(numbers, x) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The places in x of what will be drawn between two steps: each step where there is room, else two a column,
// for the lowest and the highest value in it. One beyond each edge, so that lines go on to the edge.
function makeSlots(steps, from, to, columns) {
  const first = Math.max(0, lowerBound(steps, from) - 1);
  const last = Math.min(steps.length - 1, lowerBound(steps, to));
  if (last - first < 2 * columns) {
    return { first, last, isExact: true, x: Array.from(steps.subarray(first, last + 1)), slot: (place) => place - first };
  }
  const start = steps[first];
  const width = (steps[last] - start) / columns;
  const x = [];
  for (let column = 0; column < columns; column++) x.push(start + width * (column + 0.25), start + width * (column + 0.75));
  const slot = (place) => 2 * Math.min(columns - 1, Math.floor((steps[place] - start) / width));
  return { first, last, isExact: false, x, slot };
}

function kindOf(value, isLog) {
  if (Number.isNaN(value)) return "nan";
  if (value === Infinity) return "inf";
  if (value === -Infinity || (isLog && value <= 0)) return "low";
  return null;
}

// A series in slots: numbers, null where the line is interrupted, undefined where it passes. What cannot be
// drawn as a number becomes a mark [step, kind].
function fillSlots(series, slots, steps, isLog) {
  const { at, values, breaks } = series;
  const y = new Array(slots.x.length).fill(undefined);
  const marks = [];
  const low = lowerBound(at, slots.first);
  const high = lowerBound(at, slots.last + 1);
  let nextBreak = lowerBound(breaks, low > 0 ? at[low - 1] + 1 : 0);
  let open = -1; // the slot that is being filled
  let lastUsed = -1;
  for (let i = low; i < high; i++) {
    const slot = slots.slot(at[i]);
    const isBroken = nextBreak < breaks.length && breaks[nextBreak] <= at[i];
    while (nextBreak < breaks.length && breaks[nextBreak] <= at[i]) nextBreak++;
    if (isBroken) for (let j = lastUsed + 1; j < slot; j++) y[j] = null;
    const kind = kindOf(values[i], isLog);
    if (kind) {
      marks.push([steps[at[i]], kind]);
      if (y[slot] === undefined) y[slot] = null;
    } else if (slots.isExact || slot !== open || y[slot] === null || y[slot] === undefined) {
      y[slot] = values[i];
      open = slot;
    } else {
      // Lowest and highest of the column, in the order in which they came.
      const second = slot + 1;
      if (y[second] === undefined) y[second] = values[i];
      else if (values[i] < Math.min(y[slot], y[second]) || values[i] > Math.max(y[slot], y[second])) {
        const isLow = values[i] < Math.min(y[slot], y[second]);
        const other = isLow ? Math.max(y[slot], y[second]) : Math.min(y[slot], y[second]);
        y[slot] = other;
        y[second] = values[i];
      }
    }
    lastUsed = slots.isExact ? slot : slot + (y[slot + 1] === undefined ? 0 : 1);
  }
  continueToEdges(series, slots, steps, y, [low - 1, high - 1], isLog);
  return { y, marks };
}

// A line between two values of which one is outside goes on to the edge, although no value lies there.
function continueToEdges({ at, values, breaks }, slots, steps, y, befores, isLog) {
  [0, slots.x.length - 1].forEach((slot, side) => {
    const before = befores[side];
    const after = before + 1;
    if (before < 0 || after >= at.length || y[slot] !== undefined) return;
    const broken = lowerBound(breaks, at[before] + 1);
    if (broken < breaks.length && breaks[broken] <= at[after]) return;
    const share = (slots.x[slot] - steps[at[before]]) / (steps[at[after]] - steps[at[before]]);
    const [from, to] = [values[before], values[after]];
    const value = isLog ? from * (to / from) ** share : from + share * (to - from);
    if (Number.isFinite(value) && !(isLog && value <= 0)) y[slot] = value;
  });
}

// The value of a series at a step: that of the last place not after it, or nothing before the first.
function valueAt(series, steps, step) {
  const place = lowerBound(steps, step + 1) - 1;
  const index = lowerBound(series.at, place + 1) - 1;
  return index < 0 ? undefined : series.values[index];
}

function loadData() {
  const data = JSON.parse(document.getElementById("data").textContent);
  data.steps = Float64Array.from(decodePlaces(data.steps));
  for (const chart of data.charts) {
    for (const series of chart.series) {
      series.at = decodePlaces(series.at);
      series.values = decodeValues(series.values);
      series.breaks = decodePlaces(series.breaks);
    }
  }
  for (const heat of data.heats) {
    heat.at = decodePlaces(heat.at);
    heat.values = decodeValues(heat.values);
  }
  return data;
}
