"use strict";
// Formatting of numbers, and the ticks of an axis.

function shownNumber(value) {
  if (value === undefined || value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "−Inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  }
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 }).replace("-", "−");
}

function shownShare(value) {
  return Number.isFinite(value) ? `${Number((100 * value).toPrecision(3))} %` : shownNumber(value);
}

function shownStep(step) {
  return Math.round(step).toLocaleString("en-US");
}

function linearTicks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / distance); i * distance <= high; i++) ticks.push(Number((i * distance).toPrecision(12)));
  return ticks;
}

// Returns powers of ten if there are enough of them, else 1, 2, 5; within a decade ticks of a linear axis.
function logTicks(low, high, most) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  const decades = to - from + 1;
  if (decades >= 3) {
    const stride = Math.ceil(decades / Math.max(2, most));
    const ticks = [];
    for (let power = from; power <= to; power += stride) ticks.push(Number(`1e${power}`));
    return ticks;
  }
  const ticks = [];
  for (let power = from - 1; power <= to; power++) {
    for (const digit of [1, 2, 5]) {
      const tick = Number(`${digit}e${power}`);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(low, high, most);
}

// Returns ticks for counts: 0, then powers of ten.
function countTicks(high, most) {
  if (high < 10) return [0, 1, 2, 5].filter((tick) => tick <= high);
  const decades = Math.max(0, Math.floor(Math.log10(Math.max(1, high))));
  const stride = Math.ceil((decades + 1) / Math.max(1, most - 1));
  const ticks = [0];
  for (let power = 0; power <= decades; power += stride) ticks.push(10 ** power);
  return ticks;
}
