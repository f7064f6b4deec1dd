"use strict";
// Curves answer to the pointer: a line at the nearest step, and what each series is there.
for (const svg of document.querySelectorAll("svg.curve")) {
  const lines = JSON.parse(svg.dataset.lines);
  const card = svg.closest(".chart");
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const tip = document.createElement("div");
  cursor.setAttribute("class", "cursor");
  tip.className = "tip";
  const nearest = (points, x) => points.reduce((a, b) => (Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a));
  const leave = () => { cursor.remove(); tip.remove(); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    const hits = lines.map((line) => [line, nearest(line.points, x)]);
    const at = hits[0][1];
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, at[2]);
    cursor.setAttribute("y1", 8);
    cursor.setAttribute("y2", height - 22);
    tip.textContent = `step ${Math.round(at[0])}: ` +
      hits.map(([line, hit]) => (lines.length > 1 ? `${line.name} ` : "") + Number(hit[1].toPrecision(4))).join(", ");
    svg.append(cursor);
    card.append(tip);
    const home = card.getBoundingClientRect();
    const left = box.left - home.left + (at[2] / width) * box.width - tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(left, 4), home.width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${box.top - home.top - 2}px`;
  });
}
