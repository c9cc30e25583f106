"use strict";
// The legend of a line chart: a button for each series, which shows or hides it, with the value at the cursor.

function lineSample(style) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
  for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: 0, y1: 5, x2: 26, y2: 5, "stroke-width": Math.max(1.6, style.width) })) line.setAttribute(name, value);
  const restyle = (dash) => {
    line.setAttribute("stroke", style.colour());
    line.setAttribute("stroke-dasharray", dash.join(" "));
  };
  return { svg, restyle };
}

function addLegend(chart) {
  const box = chart.figure.querySelector(".legend");
  const outputs = [];
  const samples = [];
  chart.spec.series.forEach((series, number) => {
    const button = document.createElement("button");
    const sample = lineSample(chart.styles[number]);
    const name = document.createElement("span");
    const value = document.createElement("span");
    button.type = "button";
    name.textContent = series.label;
    value.className = "value";
    button.append(sample.svg, name, value);
    button.setAttribute("aria-pressed", String(chart.shown[number]));
    button.addEventListener("click", () => {
      chart.shown[number] = !chart.shown[number];
      button.setAttribute("aria-pressed", String(chart.shown[number]));
      chart.plot?.setSeries(number + 1, { show: chart.shown[number] });
    });
    // The line of the hovered or focused button is emphasized.
    for (const [on, off] of [["pointerenter", "pointerleave"], ["focus", "blur"]]) {
      button.addEventListener(on, () => chart.emphasize(number));
      button.addEventListener(off, () => chart.emphasize(null));
    }
    box.append(button);
    outputs.push(value);
    samples.push(sample);
  });
  const restyle = (dashes) => samples.forEach((sample, i) => sample.restyle(dashes[i]));
  restyle(chart.styles.map((style) => style.dash));
  return { restyle, setValues: (texts) => texts.forEach((text, i) => { outputs[i].textContent = text; }) };
}
