"use strict";
// A canvas of rows over the steps, the base of the event timeline and the heat maps.

class RowPlot {
  constructor(figure, names, height) {
    this.figure = figure;
    this.element = figure.querySelector(".plot");
    this.names = names;
    this.height = height; // of a row
    this.canvas = this.element.appendChild(document.createElement("canvas"));
    this.element.style.minHeight = `${this.fullHeight}px`; // the page does not move when it is drawn
    this.overlay = addOverlay(this.element);
    addPointers(this.element, this.overlay, (x, y) => this.clicked(x, y));
    addKeys(this.element, () => this.clicked(view.toPixel(view.cursor ?? NaN, this.element), null));
    theme.listeners.push(() => view.draw(this));
  }

  // The plotting area in CSS pixels.
  get box() {
    return { left: view.gutters().left, top: this.top, width: view.width(this.element), height: this.names.length * this.height };
  }

  get top() {
    return 4;
  }

  get fullHeight() {
    return this.top + this.names.length * this.height + 24;
  }

  begin() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.element.clientWidth, this.fullHeight];
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    return context;
  }

  drawSteps(context) {
    const { left, top, width, height } = this.box;
    context.fillStyle = theme.colour("muted");
    context.strokeStyle = theme.colour("grid");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of linearTicks(view.from, view.to, width / 80)) {
      const x = view.toPixel(step, this.element);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.fillText(shownStep(step), Math.min(x, left + width + 20), top + height + 7);
    }
    context.textAlign = "left";
  }

  // On the right, like the labels of the line charts; as many as fit.
  drawNames(context) {
    const { left, top, width } = this.box;
    const every = Math.ceil(12 / this.height);
    context.textBaseline = "middle";
    context.fillStyle = theme.colour("text");
    for (let row = 0; row < this.names.length; row += every) {
      const text = fitText(context, this.names[row], view.gutters().right - 8, true);
      context.fillText(text, left + width + 6, top + (row + 0.5) * this.height);
    }
  }

  showCursor(step) {
    this.overlay.hair(step);
  }
}
