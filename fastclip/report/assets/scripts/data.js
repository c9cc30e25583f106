"use strict";
// Decoding of the page's numbers, and selection of those that a chart's pixels can show.

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
  if ("first" in coded) {
    const distances = "u1" in coded ? new Uint8Array(bytesOf(coded.u1)) : new Uint32Array(bytesOf(coded.u4));
    const sums = new Float64Array(distances.length + 1);
    sums[0] = coded.first;
    distances.forEach((distance, i) => { sums[i + 1] = sums[i] + distance; });
    return sums;
  }
  const count = coded.runs.reduce((sum, run) => sum + run[2], 0);
  const places = new Float64Array(count);
  let next = 0;
  for (const [first, distance, length] of coded.runs) {
    for (let i = 0; i < length; i++) places[next++] = first + distance * i;
  }
  return places;
}

// Returns the first index whose number is at least x.
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

// Returns the x positions to draw between two steps: each step if there is room, else four in each pixel column,
// for its first, lowest, highest and last value. One step beyond each edge is included, so that lines reach the
// edge.
function makeSlots(steps, from, to, columns) {
  const first = Math.max(0, lowerBound(steps, from) - 1);
  const last = Math.min(steps.length - 1, lowerBound(steps, to));
  if (last - first < 4 * columns) {
    return { first, last, size: 1, x: Array.from(steps.subarray(first, last + 1)), slot: (place) => place - first };
  }
  const start = steps[first];
  const width = (steps[last] - start) / columns;
  const x = [];
  for (let quarter = 0; quarter < 4 * columns; quarter++) x.push(start + (width * (quarter + 0.5)) / 4);
  const slot = (place) => 4 * Math.min(columns - 1, Math.floor((steps[place] - start) / width));
  return { first, last, size: 4, x, slot };
}

function kindOf(value, isLog) {
  if (Number.isNaN(value)) return "nan";
  if (value === Infinity) return "inf";
  if (value === -Infinity || (isLog && value <= 0)) return "low";
  return null;
}

// Puts a series into slots: numbers, null where the line is interrupted, undefined where it continues. Values that
// cannot be drawn become marks [step, kind].
function fillSlots(series, slots, steps, isLog) {
  const { at, values, breaks } = series;
  const y = new Array(slots.x.length).fill(undefined);
  const found = [];
  const low = lowerBound(at, slots.first);
  const high = lowerBound(at, slots.last + 1);
  let nextBreak = lowerBound(breaks, low > 0 ? at[low - 1] + 1 : 0);
  let begun = low; // the first sample of the column that is being read
  let free = 0; // the first slot behind what has been written
  for (let i = low; i < high; i++) {
    const slot = slots.slot(at[i]);
    if (nextBreak < breaks.length && breaks[nextBreak] <= at[i]) {
      while (nextBreak < breaks.length && breaks[nextBreak] <= at[i]) nextBreak++;
      for (let j = free; j < slot; j++) y[j] = null;
    }
    if (i + 1 < high && slots.slot(at[i + 1]) === slot) continue;
    free = slot + fillColumn(values, begun, i, slot, y, isLog, (j, kind) => found.push([steps[at[j]], kind]));
    begun = i + 1;
  }
  continueToEdges(series, slots, steps, y, [low - 1, high - 1], isLog);
  return { y, marks: found };
}

// Writes the first, the lowest and highest in their order, and the last of the samples from `first` to `last`.
// Returns how many slots they took.
function fillColumn(values, first, last, slot, y, isLog, mark) {
  const chosen = new Set();
  let low = -1;
  let high = -1;
  let end = -1;
  for (let i = first; i <= last; i++) {
    const kind = kindOf(values[i], isLog);
    if (kind) {
      mark(i, kind);
      continue;
    }
    if (end < 0) chosen.add(i);
    if (low < 0 || values[i] < values[low]) low = i;
    if (high < 0 || values[i] > values[high]) high = i;
    end = i;
  }
  if (end < 0) {
    y[slot] = null;
    return 1;
  }
  chosen.add(Math.min(low, high)).add(Math.max(low, high)).add(end);
  let place = slot;
  for (const i of chosen) y[place++] = values[i];
  return place - slot;
}

// Continues a line to the edge if one of its two values lies outside.
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

// Returns the value of a series at the last place up to the nearest step, undefined before the first.
function valueAt(series, steps, step) {
  const place = lowerBound(steps, Math.round(step) + 0.5) - 1;
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
