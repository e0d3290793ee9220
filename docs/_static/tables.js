// Tables sort by the column whose title is clicked: numbers by value, the rest by name; a second click turns the order.
"use strict";

const value = (row, column) => row.cells[column].textContent.trim();
const number = (text) => {
  const first = text.replaceAll(",", "").match(/^[^\w+-]*([+-]?\d+(\.\d+)?)/);
  return first ? parseFloat(first[1]) : NaN;
};

function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
}

function sortable(table) {
  const titles = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const down = title.ariaSort === "ascending";
      titles.forEach((other) => other.removeAttribute("aria-sort"));
      title.ariaSort = down ? "descending" : "ascending";
      const [full, empty] = [[], []]; // empty cells come last in both orders
      for (const row of body.rows) (value(row, column) ? full : empty).push(row);
      full.sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
      body.append(...full, ...empty);
    });
  });
}

function keepTogether(cell) { // "+17.6 [+1.6, +33.5]" stays in a line
  const text = cell.textContent.trim();
  if (!isNaN(number(text)) && text.length < 25) cell.style.whiteSpace = "nowrap";
}

const hasNumber = (row) => [...row.cells].some((_, column) => !isNaN(number(value(row, column))));

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    table.querySelectorAll("td").forEach(keepTogether);
    if (table.tHead && [...table.tBodies[0].rows].filter(hasNumber).length > 4) sortable(table);
  }
});
