// Theme, sorting, filtering and links into a filtered table. Without this script every page is complete.
"use strict";

const live = document.getElementById("live");
const say = (text) => { live.textContent = text; };

// --- theme ---

const themeButton = document.querySelector("button.theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const showTheme = () => themeButton.setAttribute("aria-pressed", String(isDark()));
themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("coda-agent-theme", theme); } catch { /* storage is blocked: the choice lasts for this page */ }
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
showTheme();

// --- sorting ---

const cellValue = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.sort !== undefined ? Number(cell.dataset.sort) : cell.classList.contains("none") ? null : cell.textContent.trim();
};

function sortBy(table, key, direction) {
  const headers = [...table.tHead.rows[0].cells];
  const column = headers.findIndex((h) => h.dataset.key === key);
  if (column < 0) return false;
  headers.forEach((h) => h.removeAttribute("aria-sort"));
  headers[column].setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [cellValue(row, column), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // what has no value stays last
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
  return true;
}

// --- one table with its filters; the state is the page's hash: #/task=...&sort=us,descending ---

function activate(table) {
  const form = document.querySelector(`form[data-for="${table.id}"]`);
  const initial = [...table.tBodies[0].rows];
  let sort = "";

  const state = () => {
    const found = new URLSearchParams();
    if (form) for (const [name, value] of new FormData(form)) if (value) found.set(name, value);
    if (sort) found.set("sort", sort);
    return found;
  };

  const filter = (note = "") => {
    if (!form) return;
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    let shown = 0;
    for (const row of initial) {
      row.hidden = !wanted.every(([name, value]) => name === "text"
        ? row.textContent.toLowerCase().includes(value.toLowerCase())
        : (row.dataset[name] || "").split("\n").includes(value));
      shown += !row.hidden;
    }
    const text = `${shown} of ${initial.length} rows${note}`;
    form.querySelector("output").textContent = text;
    say(text);
  };

  const remember = () => {
    const text = state().toString();
    try { history.replaceState(null, "", text ? `#/${text}` : location.pathname + location.search); } catch { location.hash = `/${text}`; }
  };

  const restore = () => {
    if (!location.hash.startsWith("#/")) return;
    const wanted = new URLSearchParams(location.hash.slice(2));
    if (form) for (const field of form.elements) if (field.name) field.value = wanted.get(field.name) || "";
    table.tBodies[0].append(...initial);
    const [key, direction] = (wanted.get("sort") || "").split(",");
    sort = key && sortBy(table, key, direction === "descending" ? direction : "ascending") ? wanted.get("sort") : "";
    const lost = [...wanted].filter(([name, value]) => name !== "sort" && form?.elements[name]?.value !== value);
    filter(lost.length ? `; the link asks for what is not here: ${lost.map((pair) => pair.join(" ")).join(", ")}` : "");
    if (form) table.closest("section").scrollIntoView();
  };

  for (const header of table.tHead.rows[0].cells) {
    if (!header.dataset.key) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const now = header.getAttribute("aria-sort");
      const first = header.classList.contains("num") ? "descending" : "ascending";
      const direction = now ? (now === "ascending" ? "descending" : "ascending") : first;
      sortBy(table, header.dataset.key, direction);
      sort = `${header.dataset.key},${direction}`;
      say(`sorted by ${button.textContent.trim()}, ${direction}`);
      if (form) remember();
    });
  }
  if (form) {
    form.addEventListener("input", () => { filter(); remember(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      sort = "";
      for (const h of table.tHead.rows[0].cells) h.removeAttribute("aria-sort");
      table.tBodies[0].append(...initial);
      filter();
      remember();
    }));
    form.querySelector(".copy").addEventListener("click", () => copyLink());
    addEventListener("hashchange", restore);
    form.querySelector("output").textContent = `${initial.length} rows`;
    restore();
  }
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    say("link copied");
  } catch {
    say("copying is not allowed here; the link is in the address bar");
  }
}

document.querySelectorAll("table.sortable").forEach(activate);
