// What scripts add to a page that reads without them: sorting, a filter, charts that answer the pointer, details in print.
"use strict";
(() => {
  const compare = (a, b) => {
    // Cells without a value (a run without figures) come last in both directions.
    if (a === b) return 0;
    if (a === "" || b === "") return a === "" ? 1 : -1;
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (!("value" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.value === "" ? "" : Number(cell.dataset.value);
  };

  const sort = (table, column, header) => {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
    const empty = (value) => value === "";
    rows.sort(([a], [b]) => (ascending || empty(a) || empty(b) ? compare(a, b) : compare(b, a)));
    body.append(...rows.map(([, row]) => row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.title = "Sort by this column";
      button.addEventListener("click", () => sort(table, column, header));
      header.replaceChildren(button);
    });
  }

  for (const place of document.querySelectorAll("[data-filter]")) {
    const table = document.getElementById(place.dataset.filter);
    const label = document.createElement("label");
    const input = document.createElement("input");
    input.type = "search";
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    label.append("Show runs with: ", input);
    place.append(label);
    place.hidden = false;
  }

  // Paper has no switches: the numbers of the charts are open while it is printed.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".chart details:not([open])")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    opened = [];
  });

  if (typeof window.vegaEmbed !== "function") return;
  const { config, charts } = JSON.parse(document.getElementById("chart-specs").textContent);
  const options = {
    config,
    mode: "vega-lite",
    renderer: "svg",
    ast: true, // interprets expressions, so that the page's policy need not allow eval
    actions: false,
    tooltip: { theme: window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" },
    loader: { load: () => Promise.reject(new Error("a report loads nothing")) },
  };
  const enliven = (figure) => {
    const live = figure.querySelector(".live");
    window.vegaEmbed(live, charts[figure.dataset.chart], options).then(
      () => {
        live.hidden = false;
        figure.classList.add("is-live");
      },
      // The static chart stays.
      (error) => console.warn(`${figure.id}: ${error.message}`),
    );
  };
  // Compiling a chart costs time; those out of sight wait.
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        observer.unobserve(entry.target);
        enliven(entry.target);
      }
    },
    { rootMargin: "200px" },
  );
  for (const figure of document.querySelectorAll("figure[data-chart]")) observer.observe(figure);
})();
