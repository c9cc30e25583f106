"use strict";
// Starts the page.

function startToolbar() {
  const does = {
    back: () => view.pan(-0.5),
    on: () => view.pan(0.5),
    in: () => view.zoom(0.5),
    out: () => view.zoom(2),
    all: () => view.all(),
  };
  document.getElementById("toolbar").addEventListener("click", (event) => does[event.target.dataset?.do]?.());
}

function start() {
  const data = loadData();
  view.init(data.steps);
  marks.init(data.events);
  theme.start();
  const timeline = document.getElementById("chart-timeline");
  if (timeline) view.add(new Timeline(timeline));
  for (const spec of data.charts) view.add(new LineChart(data, spec, document.getElementById(`chart-${spec.key}`)));
  for (const spec of data.heats) view.add(new HeatChart(data, spec, document.getElementById(`chart-${spec.key}`)));
  startToolbar();
  startEvents();
  view.showRange();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    view.changed();
  });
}

start();
