"use strict";
// The range of steps and the cursor that all charts share, and their control by mouse, touch and keys.

const LEAST_STEPS = 4;

const view = {
  start: 0,
  end: 1,
  from: 0,
  to: 1,
  cursor: null,
  parts: [], // each with an element, draw() and showCursor(step)
  dirty: new Set(),
  scheduled: false,

  init(steps) {
    const pad = Math.max(0.5, 0.004 * (steps[steps.length - 1] - steps[0]));
    [this.first, this.last] = [steps[0], steps[steps.length - 1]];
    [this.start, this.end] = [steps[0] - pad, steps[steps.length - 1] + pad];
    [this.from, this.to] = [this.start, this.end];
    this.seen = new Set();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const part = this.parts.find((one) => one.element === entry.target);
        if (entry.isIntersecting) this.seen.add(part);
        else this.seen.delete(part);
      }
      this.schedule();
    }, { rootMargin: "300px" });
  },

  add(part) {
    this.parts.push(part);
    this.dirty.add(part);
    this.observer.observe(part.element);
  },

  // Margins beside the plots, the same for all, so that steps align vertically.
  gutters() {
    return innerWidth < 600 ? { left: 46, right: 68 } : { left: 60, right: 122 };
  },

  width(element) {
    const { left, right } = this.gutters();
    return Math.max(40, element.clientWidth - left - right);
  },

  toPixel(step, element) {
    return this.gutters().left + ((step - this.from) / (this.to - this.from)) * this.width(element);
  },

  toStep(pixel, element) {
    return this.from + ((pixel - this.gutters().left) / this.width(element)) * (this.to - this.from);
  },

  set(from, to) {
    const most = this.end - this.start;
    const span = Math.min(most, Math.max(Math.min(LEAST_STEPS, most), to - from));
    const middle = (from + to) / 2;
    const begin = Math.min(Math.max(this.start, middle - span / 2), this.end - span);
    [this.from, this.to] = [begin, begin + span];
    this.changed();
  },

  all() {
    [this.from, this.to] = [this.start, this.end];
    this.changed();
  },

  zoom(factor, around = this.cursor ?? (this.from + this.to) / 2) {
    this.set(around - (around - this.from) * factor, around + (this.to - around) * factor);
  },

  pan(share) {
    const by = share * (this.to - this.from);
    const room = by < 0 ? Math.max(by, this.start - this.from) : Math.min(by, this.end - this.to);
    this.set(this.from + room, this.to + room);
  },

  changed() {
    for (const part of this.parts) this.dirty.add(part);
    this.showRange();
    this.schedule();
  },

  showRange() {
    const [from, to] = [Math.max(this.from, this.first), Math.min(this.to, this.last)];
    const at = this.cursor === null ? "" : `, cursor at ${shownStep(this.cursor)}`;
    document.getElementById("range").textContent = `steps ${shownStep(from)} to ${shownStep(to)}${at}`;
  },

  // Charts off the screen are drawn when they scroll into view.
  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      for (const part of this.seen) if (this.dirty.has(part)) this.draw(part);
    });
  },

  draw(part) {
    this.dirty.delete(part);
    part.draw();
    part.showCursor(this.cursor);
  },

  drawAll() {
    for (const part of this.parts) this.draw(part);
  },

  setCursor(step) {
    this.cursor = step;
    for (const part of this.seen) part.showCursor(step);
    this.showRange();
  },
};

// The vertical line at the cursor and the marked range, for any plot.
function addOverlay(element) {
  const hair = element.appendChild(document.createElement("div"));
  const range = element.appendChild(document.createElement("div"));
  hair.className = "hair";
  range.className = "range";
  hair.hidden = range.hidden = true;
  return {
    hair(step) {
      hair.hidden = step === null || step < view.from || step > view.to;
      if (!hair.hidden) hair.style.transform = `translateX(${view.toPixel(step, element)}px)`;
    },
    range(a, b) {
      range.hidden = a === b;
      range.style.left = `${Math.min(a, b)}px`;
      range.style.width = `${Math.abs(a - b)}px`;
    },
  };
}

// Dragging zooms, two fingers pinch, and a click is passed to `clicked(pixel, y)`.
function addPointers(element, overlay, clicked) {
  const down = new Map();
  let begun = null;
  const place = (event) => {
    const box = element.getBoundingClientRect();
    const { left } = view.gutters();
    return [Math.min(Math.max(event.clientX - box.left, left), left + view.width(element)), event.clientY - box.top];
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x] = place(event);
    down.set(event.pointerId, x);
    element.setPointerCapture(event.pointerId);
    begun = down.size === 1 ? x : null;
    overlay.range(0, 0);
  });
  element.addEventListener("pointermove", (event) => {
    const [x] = place(event);
    if (down.size === 2 && down.has(event.pointerId)) {
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, its]) => its);
      const factor = Math.abs(down.get(event.pointerId) - other) / Math.max(1, Math.abs(x - other));
      if (Number.isFinite(factor) && factor > 0) view.zoom(factor, view.toStep((x + other) / 2, element));
      down.set(event.pointerId, x);
      return;
    }
    if (begun !== null) overlay.range(begun, x);
    if (event.pointerType !== "touch" || begun !== null) view.setCursor(view.toStep(x, element));
  });
  element.addEventListener("pointerup", (event) => {
    const [x, y] = place(event);
    down.delete(event.pointerId);
    overlay.range(0, 0);
    if (begun === null) return;
    if (Math.abs(x - begun) >= 6) view.set(...[begun, x].sort((a, b) => a - b).map((one) => view.toStep(one, element)));
    else {
      view.setCursor(view.toStep(x, element));
      clicked(x, y);
    }
    begun = null;
  });
  element.addEventListener("pointercancel", (event) => {
    down.delete(event.pointerId);
    begun = null;
    overlay.range(0, 0);
  });
  element.addEventListener("pointerleave", () => {
    if (!down.size && document.activeElement !== element) view.setCursor(null);
  });
  element.addEventListener("dblclick", () => view.all());
}

function addKeys(element, open) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (side && event.shiftKey) view.pan(side / 4);
    else if (side) {
      const by = Math.max(1, Math.round((view.to - view.from) / 200));
      const now = view.cursor ?? (view.from + view.to) / 2;
      view.setCursor(Math.min(view.to, Math.max(view.from, Math.round(now) + side * by)));
    } else if (event.key === "+" || event.key === "=") view.zoom(0.5);
    else if (event.key === "-") view.zoom(2);
    else if (event.key === "0") view.all();
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
  });
}
