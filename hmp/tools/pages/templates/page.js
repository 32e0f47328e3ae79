"use strict";
(() => {
  const root = document.documentElement;
  const remember = (value) => { try { localStorage.setItem("hmp-theme", value); } catch { /* a file may not have storage */ } };
  const remembered = () => { try { return localStorage.getItem("hmp-theme"); } catch { return null; } };

  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const say = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(dark()));
    theme.setAttribute("aria-label", "Dark theme");
  };
  const kept = remembered();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    say();
  });
  system.addEventListener("change", say);
  say();

  // A header sorts by its column: numbers largest first, text from a to z, and the other way round at the second click.
  const value = (row, at) => {
    const cell = row.cells[at];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, at) => head.firstElementChild.addEventListener("click", () => {
      const numbers = head.classList.contains("n");
      const before = head.getAttribute("aria-sort");
      const up = before === "none" ? !numbers : before === "descending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [value(row, at), row]);
      const compare = numbers ? (a, b) => a[0] - b[0] : (a, b) => a[0].localeCompare(b[0], "en", { numeric: true });
      rows.sort((a, b) => (up ? compare(a, b) : compare(b, a)));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    }));
  }

  // Every word of the filter has to be in the row, in any column.
  const table = document.getElementById("table");
  if (table) {
    const filter = document.getElementById("filter");
    const rule = document.getElementById("rule");
    const shown = document.getElementById("shown");
    const rows = [...table.tBodies[0].rows];
    const texts = rows.map((row) => [...row.cells].map((cell) => `${cell.textContent} ${cell.title}`).join(" ").toLowerCase());
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      rows.forEach((row, at) => {
        row.hidden = !(words.every((word) => texts[at].includes(word)) && (!rule.value || row.dataset.rule.split(" ").includes(rule.value)));
        count += row.hidden ? 0 : 1;
      });
      shown.textContent = `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
    };
    filter.addEventListener("input", apply);
    rule.addEventListener("change", apply);
    apply(); // what the browser kept in the fields over a reload
  }

  for (const button of document.querySelectorAll("[data-open]")) {
    button.addEventListener("click", () => {
      const open = button.dataset.open === "1";
      document.querySelectorAll(".tree .node").forEach((each, at) => { each.open = open || at === 0; });
    });
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // where a page may not write to the clipboard
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
})();
