"use strict";
// The list of events: opening from a mark, filtering by kind, and the way back to the charts.

function bringIntoView(element, block) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block, behavior: calm ? "auto" : "smooth" });
}

// The row of a mark: step, kind, severity, number in the list.
function openEvent([step, kind, severity, number]) {
  const details = document.getElementById(`event-${number}`);
  if (!details) {
    document.getElementById("range").textContent =
      `step ${shownStep(step)}: ${marks.kinds[kind]} (${SEVERITIES[severity]}) is not in the list below`;
    return;
  }
  if (details.parentElement.hidden) showKind(null);
  details.open = true;
  details.querySelector("summary").focus({ preventScroll: true });
  bringIntoView(details, "center");
}

function showKind(kind) {
  for (const button of document.querySelectorAll(".kinds button")) {
    button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
  }
  for (const item of document.querySelectorAll(".events > li")) {
    item.hidden = kind !== null && item.dataset.kind !== kind;
  }
}

function startEvents() {
  document.querySelector(".kinds")?.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) showKind(button.getAttribute("aria-pressed") === "true" ? null : button.dataset.kind);
  });
  document.querySelector(".events")?.addEventListener("click", (event) => {
    if (!event.target.matches("button.show")) return;
    const step = Number(event.target.closest("details").dataset.step);
    view.set(step - 60, step + 20);
    view.setCursor(step);
    bringIntoView(document.getElementById("charts"), "start");
  });
}
