"use strict";
// The timeline of all events, a row for each kind.

class Timeline extends RowPlot {
  constructor(figure) {
    super(figure, marks.kinds, 20);
  }

  draw() {
    const context = this.begin();
    this.drawSteps(context);
    const { left, top, width } = this.box;
    this.names.forEach((kind, number) => {
      const y = top + (number + 0.5) * this.height;
      context.strokeStyle = theme.colour("grid");
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
      for (const { x, row } of marks.spaced(marks.shown([kind]), this.element)) drawEventShape(context, row[2], x, y, 6);
    });
    this.drawNames(context);
  }

  clicked(x, y) {
    const number = y === null ? -1 : Math.floor((y - this.top) / this.height);
    const kinds = number >= 0 && number < this.names.length ? [this.names[number]] : this.names;
    const row = marks.near(marks.shown(kinds), x, this.element);
    if (row) openEvent(row);
  }
}
