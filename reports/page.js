// What scripts add to a page that reads without them: one group at a time, the scheme of colours, sorting and filters of
// tables, files of tables and charts, charts that answer the pointer, switches of axes, links that open what they point at.
"use strict";
(() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const button = (text, action, properties = {}) => {
    const made = make("button", { type: "button", textContent: text, ...properties });
    made.addEventListener("click", () => action(made));
    return made;
  };
  const unseen = (text) => make("span", { className: "unseen", textContent: text });

  // Colours: as the system says, until somebody chooses. A page that may store nothing forgets the choice.
  const SCHEMES = { auto: "Colours: auto", light: "Colours: light", dark: "Colours: dark" };
  const root = document.documentElement;
  const remembered = (write) => {
    try {
      if (write) localStorage.setItem("dlbench-scheme", write);
      return localStorage.getItem("dlbench-scheme");
    } catch {
      return null;
    }
  };
  const isDark = () =>
    root.dataset.scheme === "dark" || (!root.dataset.scheme && matchMedia("(prefers-color-scheme: dark)").matches);
  const choose = (scheme) => {
    if (scheme === "auto") delete root.dataset.scheme;
    else root.dataset.scheme = scheme;
  };
  const chooser = (() => {
    let scheme = remembered();
    if (!(scheme in SCHEMES)) scheme = "auto";
    choose(scheme);
    return button(
      SCHEMES[scheme],
      (self) => {
        const names = Object.keys(SCHEMES);
        scheme = names[(names.indexOf(scheme) + 1) % names.length];
        choose(scheme);
        remembered(scheme);
        self.textContent = SCHEMES[scheme];
      },
      { className: "scheme", title: "Switch between the system's colours, light and dark" },
    );
  })();
  document.getElementById("controls")?.append(chooser);

  // Files that the page itself makes; nothing leaves it.
  const save = (name, type, text) => {
    const link = make("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const words = (cell) => cell.textContent.replaceAll("\u00a0", " ").trim().replace(/\s+/g, " ");
  const quoted = (text) => {
    // A spreadsheet would read these as formulas; a number keeps its sign.
    const safe = /^[=+\-@]/.test(text) && !/^[+-]?[\d.]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const csvOf = (rows) => rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  const cellsOf = (table) => [...table.rows].map((row) => [...row.cells].map(words));
  const saveTable = (rows, name) => save(`dlbench-${name}.csv`, "text/csv;charset=utf-8", csvOf(rows));

  // Tables: a cell's own value, or the number its text begins with, in seconds or bytes where it has such a unit.
  const UNITS = { ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, B: 1 };
  ["Ki", "Mi", "Gi", "Ti", "Pi"].forEach((prefix, k) => (UNITS[`${prefix}B`] = 1024 ** (k + 1)));
  ["k", "M", "G", "T", "P"].forEach((prefix, k) => (UNITS[`${prefix}B`] = 1000 ** (k + 1)));
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return "";
    if ("value" in cell.dataset) return cell.dataset.value === "" ? "" : Number(cell.dataset.value);
    const text = words(cell);
    if (text === "" || text === "–" || text === "n/a") return "";
    const found = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([^\d\s[(]+))?/i.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : text;
  };
  const compare = (a, b) => {
    if (a === b) return 0;
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  };
  // A line "of it" stays under the line it belongs to, sums stay at the end.
  const bundles = (body) => {
    const found = [];
    for (const row of body.rows) {
      if (row.classList.contains("of") && found.length) found.at(-1).push(row);
      else found.push([row]);
    }
    return found;
  };
  const sort = (table, column, header) => {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const keyed = bundles(body).map((rows) => ({ rows, value: valueOf(rows[0], column) }));
    const rank = ({ rows, value }) => (rows[0].classList.contains("sum") ? 2 : value === "" ? 1 : 0);
    keyed.sort((a, b) => rank(a) - rank(b) || (rank(a) ? 0 : ascending ? compare(a.value, b.value) : compare(b.value, a.value)));
    body.append(...keyed.flatMap(({ rows }) => rows));
  };
  const filter = (table, name) => {
    const shownRows = make("output", { className: "count" });
    const input = make("input", { type: "search" });
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const text = row.textContent.replaceAll("\u00a0", " ").toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word));
      }
      shownRows.textContent = wanted.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
    });
    return [make("label", {}, "Show lines with: ", unseen(name), input), shownRows];
  };
  const MANY = 20;
  for (const table of document.querySelectorAll("main table")) {
    const region = table.closest(".scroll");
    const rows = table.tBodies[0]?.rows.length ?? 0;
    const name = region?.getAttribute("aria-label") ?? "";
    if (table.tHead && rows > 2 && !table.querySelector("[rowspan], [colspan]")) {
      [...table.tHead.rows[0].cells].forEach((header, column) => {
        const sorter = button(header.textContent, () => sort(table, column, header), { title: "Sort by this column" });
        header.replaceChildren(sorter);
      });
      table.classList.add("sorts");
    }
    const tools = make("div", { className: "tools" });
    if (rows > MANY) tools.append(...filter(table, name));
    if (!table.closest("figure") && !table.closest(".sheet")?.querySelector("a.raw")) {
      const file = (table.closest("[id]")?.id ?? "table").replace(/^(table|title)-/, "");
      tools.append(button("CSV of this table", () => saveTable(cellsOf(table), file), {}));
      tools.lastChild.append(unseen(`: ${name}`));
    }
    if (tools.childNodes.length) region?.before(tools);
  }

  // "Raw numbers" of a table are a file in the footer.
  for (const link of document.querySelectorAll("a.raw")) {
    link.addEventListener("click", (event) => {
      const file = document.querySelector(`${link.getAttribute("href")} a[download]`);
      if (!file) return;
      event.preventDefault();
      file.click();
    });
  }

  // One panel at a time: the list at the side says which. Without scripts all stand below each other.
  const panels = [...document.querySelectorAll("main > .panel")];
  const entries = [...document.querySelectorAll(".side a")];
  const show = (wanted) => {
    for (const panel of panels) panel.hidden = panel !== wanted;
    for (const entry of entries) {
      if (entry.hash === `#${wanted.dataset.panel}`) {
        entry.setAttribute("aria-current", "page");
        entry.scrollIntoView({ block: "nearest", inline: "nearest" });
      } else entry.removeAttribute("aria-current");
    }
  };
  // A link opens what it points at: its panel, and everything closed around and right inside it.
  const follow = () => {
    const wanted = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const panel = wanted?.closest(".panel") ?? (location.hash === "#main" ? panels.find((one) => !one.hidden) : panels[0]);
    if (panel) show(panel);
    if (!wanted) return;
    for (let at = wanted; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    const own = wanted.matches("section, .sheet") ? wanted.querySelector(":scope > details:not(.all-conditions, .not-measured)") : null;
    if (own) own.open = true;
    if (panel && wanted.id === panel.dataset.panel) scrollTo({ top: 0, behavior: "instant" });
    else wanted.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  if (panels.length || location.hash) follow();
  document.querySelector(".side")?.addEventListener("keydown", (event) => {
    const at = entries.indexOf(event.target);
    const last = entries.length - 1;
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = entries[Math.min(last, Math.max(0, to))];
    next.focus();
    // Every key a step of its own in the browser's history would bury the page before.
    if (next.hash !== location.hash) history.replaceState(null, "", next.hash);
    follow();
  });
  const contents = document.querySelector(".toc details");
  contents?.addEventListener("click", (event) => {
    if (event.target.closest("a")) contents.open = false;
  });
  contents?.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    contents.open = false;
    contents.querySelector("summary").focus();
  });

  // Paper has no switches: everything closed is open while it is printed, and all groups are there.
  let opened = [];
  let shut = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")];
    shut = panels.filter((panel) => panel.hidden);
    for (const details of opened) details.open = true;
    for (const panel of shut) panel.hidden = false;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    for (const panel of shut) panel.hidden = true;
    opened = shut = [];
  });

  // Charts.
  const { config, charts, tables } = JSON.parse(document.getElementById("chart-specs").textContent);
  const units = (spec) => (spec.layer ? spec.layer.flatMap(units) : [spec]);
  const isLog = (spec, channel) => units(spec).some((unit) => unit.encoding?.[channel]?.scale?.type === "log");
  const turned = (spec, channel) => {
    const toLog = !isLog(spec, channel);
    const quantities = units(spec).map((unit) => unit.encoding?.[channel]).filter((one) => one?.type === "quantitative");
    for (const one of quantities) if (one.scale) one.scale = { ...one.scale, type: toLog ? "log" : "linear" };
    const first = quantities.find((one) => one.scale) ?? quantities[0];
    first.scale = { ...first.scale, type: toLog ? "log" : "linear" };
    for (const one of quantities.filter((one) => one.scale)) {
      delete one.scale.base;
      // What was laid out for one kind of axis does not suit the other, but a linear axis of ranks keeps its room.
      if (channel === "y" || toLog) delete one.scale.domain;
      one.scale.nice = true;
      if (toLog) delete one.scale.zero;
      else one.scale.zero = channel === "y";
    }
  };
  // Text of a chart that was scaled down would be too small to read: it is drawn again as wide as its place, all of it,
  // whatever its labels take here. One that nearly fills its place fills it.
  const LEAST = 300;
  const lines = (text, length) =>
    text.split(" ").reduce((done, word) => {
      if (done.length && done.at(-1).length + word.length < length) done.push(`${done.pop()} ${word}`);
      else done.push(word);
      return done;
    }, []);
  const fit = (figure, spec) => {
    const still = Number(figure.querySelector(".still svg")?.getAttribute("width"));
    const natural = typeof spec.width === "number" ? Math.max(still, spec.width) : still;
    const room = figure.clientWidth;
    if (typeof spec.width === "number" && natural > 0.8 * room) {
      spec.width = Math.max(LEAST, room);
      spec.autosize = { type: "fit-x", contains: "padding" };
    }
    if (natural <= room) return;
    spec.title.text = lines(spec.title.text, room / 8);
    if (spec.title.subtitle) spec.title.subtitle = lines([spec.title.subtitle].flat().join(" "), room / 6.5);
    for (const { encoding = {} } of units(spec)) {
      if (encoding.y?.axis?.labelLimit) encoding.y.axis.labelLimit = Math.min(encoding.y.axis.labelLimit, 0.4 * room);
      for (const { legend } of Object.values(encoding)) if (legend?.columns > 2) legend.columns = 2;
    }
  };
  const loader = { load: () => Promise.reject(new Error("a report loads nothing")) };
  const draw = (figure, state) => {
    const spec = structuredClone(charts[figure.dataset.chart]);
    // The group above says it.
    if (figure.closest("section.group")) delete spec.title.subtitle;
    if (state.turned) for (const channel of spec.usermeta.axes) turned(spec, channel);
    fit(figure, spec);
    // "ast" interprets expressions, so that the page's policy need not allow eval.
    const tooltip = { theme: isDark() ? "dark" : "light" };
    const options = { config, mode: "vega-lite", renderer: "svg", ast: true, actions: false, tooltip, loader };
    const live = figure.querySelector(".live");
    state.turn = window.vegaEmbed(live, spec, options).then(
      () => {
        // The frame around is one image with its finding in words; Vega's roles for single marks have none.
        for (const child of live.children) child.setAttribute("aria-hidden", "true");
        live.hidden = false;
        if (live.scrollWidth > live.clientWidth) live.tabIndex = 0;
        figure.classList.add("is-live");
        figure.dataset.drawn = String(Number(figure.dataset.drawn ?? 0) + 1);
      },
      // The static chart stays.
      (error) => console.warn(`${figure.id}: ${error.message}`),
    );
  };
  const switches = (figure, state) => {
    const { axes = "" } = charts[figure.dataset.chart]?.usermeta ?? {};
    const found = [];
    if (axes) {
      const log = isLog(charts[figure.dataset.chart], axes[0]);
      const text = () => (log !== state.turned ? "Linear axes" : "Logarithmic axes");
      found.push(
        button(text(), (self) => {
          state.turned = !state.turned;
          self.textContent = text();
          draw(figure, state);
        }, { className: "axes" }),
      );
    }
    return found;
  };
  const numbersOf = (figure) => tables[figure.dataset.chart] ?? cellsOf(figure.querySelector("table"));
  const canDraw = typeof window.vegaEmbed === "function";
  const saveSvg = (figure, text) => save(`dlbench-${figure.id}.svg`, "image/svg+xml;charset=utf-8", text);
  // A picture alone needs the line below its title, which says what it is about.
  const picture = (figure) => {
    const still = () => saveSvg(figure, new XMLSerializer().serializeToString(figure.querySelector(".still svg")));
    if (!canDraw) return still();
    const spec = structuredClone(charts[figure.dataset.chart]);
    const options = { config, mode: "vega-lite", renderer: "none", ast: true, actions: false, loader };
    return window
      .vegaEmbed(document.createElement("div"), spec, options)
      .then((result) => result.view.toSVG())
      .then((text) => saveSvg(figure, text), still);
  };
  const states = new Map();
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const state = { turned: false };
    states.set(figure, state);
    const title = figure.dataset.title ?? "";
    const tools = figure.querySelector(".tools");
    if (!tools) continue;
    const files = [button("SVG", () => picture(figure)), button("CSV", () => saveTable(numbersOf(figure), figure.id))];
    for (const one of files) one.append(unseen(` of the chart ${title}`));
    tools.prepend(...(canDraw ? switches(figure, state) : []), ...files);
    tools.setAttribute("role", "group");
    tools.setAttribute("aria-label", `Switches of the chart ${title}`);
  }
  if (!canDraw) return;
  // Compiling a chart costs time; those out of sight wait.
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        observer.unobserve(entry.target);
        draw(entry.target, states.get(entry.target));
      }
    },
    { rootMargin: "200px" },
  );
  for (const figure of states.keys()) observer.observe(figure);
})();
