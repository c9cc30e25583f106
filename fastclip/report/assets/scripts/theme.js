"use strict";
// Colours come from the style sheet, light or dark; lines also differ by dashes, to be distinct without colour.

const DASHES = [[], [8, 3], [3, 3], [10, 3, 2, 3], [1.5, 3], [14, 4], [6, 2, 2, 2], [2, 6]];

const theme = {
  listeners: [],
  cache: new Map(),

  colour(name) {
    if (!this.cache.has(name)) {
      this.cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    }
    return this.cache.get(name);
  },

  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },

  changed() {
    this.cache.clear();
    document.getElementById("theme").textContent = this.isDark() ? "Light" : "Dark";
    for (const listener of this.listeners) listener();
  },

  set(name) {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    this.changed();
  },

  start() {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.addEventListener("click", () => this.set(this.isDark() ? "light" : "dark"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.changed());
    // Paper is white.
    let before;
    addEventListener("beforeprint", () => {
      before = document.documentElement.dataset.theme;
      this.set("light");
      view.drawAll();
    });
    addEventListener("afterprint", () => this.set(before));
    this.changed();
  },
};

// Returns how a series is drawn, by its role and its number in the chart.
function styleOf(series, number) {
  const { role } = series;
  const guide = Math.max(0, number - 1);
  const name = { limit: "limit", faint: "faint", guide: `line-${2 * (guide % 4)}` }[role] || `line-${number % 8}`;
  const dash = { limit: [10, 5], main: DASHES[number % 8], rank: DASHES[number % 8], guide: DASHES[guide % 2] }[role] || [];
  const width = { faint: 1, rank: 1.2, limit: 1.6 }[role] || 1.8;
  return { colour: () => theme.colour(name), dash, width };
}
