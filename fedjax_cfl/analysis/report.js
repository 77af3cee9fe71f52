"use strict";
// A table of clients: sorted by its headings, filtered by name and conditions, 25 rows at a time.
const PAGE = 25;

function condition(text, names) {
  // accuracy<0.5, group=2, true group>=1: the longest name that fits
  const found = /^(.+?)(<=|>=|!=|<|>|=)(.+)$/.exec(text);
  const column = found ? names.indexOf(found[1].trim().toLowerCase()) : -1;
  if (found && column < 0) {
    // a name may have such a sign in it: whoever has one is still found
    const wrong = (row) => String(row[0] ?? "").toLowerCase().includes(text.toLowerCase());
    wrong.unknown = found[1].trim();
    return wrong;
  }
  if (column < 0) {
    const word = text.toLowerCase();
    return (row) => String(row[0] ?? "").toLowerCase().includes(word);
  }
  const operator = found[2], text_value = found[3].trim(), number = Number(text_value);
  return (row) => {
    const value = row[column];
    const same = String(value ?? "") === text_value || (typeof value === "number" && value === number);
    if (operator === "=") return same;
    if (operator === "!=") return !same;
    if (typeof value !== "number" || Number.isNaN(number)) return false;
    if (operator === "<") return value < number;
    if (operator === ">") return value > number;
    return operator === "<=" ? value <= number : value >= number;
  };
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null); // unknown last
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, {numeric: true});
}

function element(name, parent, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function show(place) {
  const data = JSON.parse(document.getElementById(place.dataset.source).textContent);
  const names = data.names.map((name) => name.toLowerCase());
  const fractions = names.map((_, column) => data.rows.some((row) => row[column] % 1));
  const write = (value, column) => {
    if (value === null) return "-";
    return fractions[column] && typeof value === "number" ? value.toFixed(4) : value;
  };
  const state = {column: -1, down: false, page: 0, rows: data.rows, said: ""};
  const search = element("input", place);
  search.type = "search";
  search.placeholder = "filter: a name, or accuracy<0.5 & group=2";
  search.setAttribute("aria-label", "filter clients");
  const count = element("span", place);
  const wide = element("div", place);
  wide.className = "wide";
  const table = element("table", wide), heading = element("tr", element("thead", table));
  const body = element("tbody", table), pages = element("nav", place);
  data.names.forEach((name, column) => {
    const cell = element("th", heading), button = element("button", cell, name);
    button.addEventListener("click", () => {
      state.down = state.column === column ? !state.down : false;
      state.column = column;
      state.page = 0;
      heading.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      draw();
    });
  });
  const turn = (step) => () => { state.page += step; draw(); };
  const back = element("button", pages, "previous"), on = element("button", pages, "next");
  back.addEventListener("click", turn(-1));
  on.addEventListener("click", turn(1));
  search.addEventListener("input", () => {
    const asked = search.value.split("&").map((part) => part.trim()).filter(Boolean);
    const tests = asked.map((part) => condition(part, names));
    state.rows = data.rows.filter((row) => tests.every((test) => test(row)));
    const unknown = state.rows.length ? [] : tests.map((test) => test.unknown).filter(Boolean);
    state.said = unknown.length ? `: no column ${unknown.join(", ")}; there are ${data.names.join(", ")}` : "";
    state.page = 0;
    draw();
  });

  function draw() {
    const rows = [...state.rows];
    if (state.column >= 0) {
      const sign = state.down ? -1 : 1;
      rows.sort((a, b) => {
        const x = a[state.column], y = b[state.column];
        return x === null || y === null ? compare(x, y) : sign * compare(x, y);
      });
    }
    const first = state.page * PAGE;
    body.replaceChildren();
    for (const row of rows.slice(first, first + PAGE)) {
      const line = element("tr", body);
      row.forEach((value, column) => element("td", line, write(value, column)));
    }
    count.textContent = ` ${rows.length} of ${data.rows.length} clients${state.said}`;
    back.disabled = state.page === 0;
    on.disabled = first + PAGE >= rows.length;
    pages.hidden = rows.length <= PAGE;
  }
  draw();
}

// what is wider than the window gets a sign that it scrolls
function mark() {
  document.querySelectorAll(".wide").forEach((wide) => wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1));
}

document.querySelectorAll("[data-source]").forEach(show);
for (const when of ["load", "resize"]) window.addEventListener(when, mark);
document.addEventListener("toggle", mark, true);
