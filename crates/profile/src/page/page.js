// The page is complete without this script, which sorts tables and shows tooltips at once.
"use strict";

for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.classList.add("sortable");
    const sort = () => {
      const words = head.classList.contains("words");
      // Numbers are first sorted with the largest on top.
      const down = head.ariaSort ? head.ariaSort !== "descending" : !words;
      heads.forEach((other) => { other.ariaSort = null; });
      head.ariaSort = down ? "descending" : "ascending";
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
      };
      const order = (one, other) => (typeof one === "number" ? one - other : one.localeCompare(other));
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => (down ? -1 : 1) * order(key(one), key(other)));
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  });
}

const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("svg title")) {
  const shape = title.parentElement;
  const text = title.textContent;
  title.remove();
  shape.addEventListener("mousemove", (event) => {
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(left, 4) + "px";
    tip.style.top = event.clientY + 18 + "px";
  });
  shape.addEventListener("mouseleave", () => { tip.hidden = true; });
}
