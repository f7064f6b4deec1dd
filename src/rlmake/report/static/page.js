"use strict";
// Variants of a grid are switched on and off in all charts at once.
const hidden = new Set();
for (const box of document.querySelectorAll(".switches input")) {
  box.addEventListener("change", () => {
    const group = box.dataset.group;
    if (box.checked) hidden.delete(group); else hidden.add(group);
    for (const path of document.querySelectorAll(`svg.curve [data-group="${group}"]`)) {
      path.style.display = box.checked ? "" : "none";
    }
  });
}
// A click on the head of a column sorts by it, the next click the other way round; cells without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value ?? (row.cells[column].textContent.trim() || undefined);
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined || x === "–" || y === "–") {
        return (x === undefined || x === "–") - (y === undefined || y === "–");
      }
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(compare));
  }));
}
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
    const y = ((event.clientY - box.top) / box.height) * height;
    let hits = lines.filter((line) => !hidden.has(line.group)).map((line) => [line, nearest(line.points, x)]);
    if (svg.classList.contains("many")) {  // too many to list: the one that is pointed at
      hits = hits.sort((a, b) => Math.abs(a[1][3] - y) - Math.abs(b[1][3] - y)).slice(0, 1);
    }
    if (!hits.length) return leave();
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
