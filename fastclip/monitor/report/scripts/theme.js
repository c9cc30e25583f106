"use strict";
// Colours come from the style sheet, light or dark; lines also differ by dashes, so that none depends on colour.

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

// How a series is drawn, by its role and its number in the chart.
function styleOf(series, number) {
  const colour = () => theme.colour({ limit: "limit", faint: "faint" }[series.role] || `line-${number % 8}`);
  const dash = { limit: [10, 5], main: DASHES[number % 8], rank: DASHES[number % 8], guide: DASHES[number % 2] }[series.role] || [];
  const width = { faint: 1, rank: 1.2, limit: 1.6, guide: 1.8, main: 1.8 }[series.role];
  return { colour, dash, width };
}
