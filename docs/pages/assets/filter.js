// A field above each table in div.filtered: its text hides the rows that do not hold it.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("div.filtered")) {
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Search this table";
    field.setAttribute("aria-label", field.placeholder);
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of box.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    box.prepend(field);
  }
});
