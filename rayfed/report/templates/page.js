// Draws the figures of the page from its data. Names of runs, classes and clients are set as text only, never as HTML.
"use strict";
(async () => {
  const DASHES = ["", "6 3", "2 2", "8 3 2 3"];
  const SYMBOLS = ["circle", "square2", "triangle2", "diamond2", "star", "times", "plus"];
  const FEW = 40;  // points of a line that have a mark each
  const LETTER = 7;  // pixels, on average
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set();  // names of lines that are switched off, in all figures
  const colour = (number) => `var(--line-${(number % 6) + 1})`;
  const dash = (number) => DASHES[(number + Math.floor(number / 6)) % DASHES.length];
  // The room for names beside an axis, up to a third of the width, and a name cut to it: the ends of runs' names differ.
  const room = (names, width) => Math.min(12 + LETTER * d3.max(names, (name) => name.length), width / 3);
  const short = (name, left) => (name.length * LETTER > left - 10 ? `…${name.slice(1 - Math.floor((left - 10) / LETTER))}` : name);
  const number = (value, digits) => (value == null ? "n/a" : value.toFixed(digits));
  const missing = (value) => value ?? NaN;  // not drawn
  const whole = (low, high, width) => d3.ticks(low, high, Math.max(2, width / 60)).filter(Number.isInteger);

  // The libraries are compressed; the policy of the page lets a script run only if it has their hash.
  async function load() {
    const bytes = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const text = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = await text;
    document.head.append(script);
  }

  function element(name, attributes = {}, ...children) {
    const space = ["svg", "line"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const frame = (chart, width, more) => ({
    width, ariaLabel: `${chart.title}. The numbers are in the table below.`, style: { fontSize: "12px" },
    marginTop: 30, marginBottom: 44, ...more,
  });

  const hover = (points, places) => Plot.tip(points, Plot.pointer({ ...places, maxRadius: 60, lineHeight: 1.3 }));

  function lines(chart, width) {
    const shown = chart.series.filter((line) => !hidden.has(line.name));
    const points = shown.flatMap((line) => line.x.map((x, i) => ({
      x, y: line.y[i],
      text: [
        ...(chart.series.length > 1 ? [line.name] : []), `round ${x}`,
        number(line.y[i], chart.digits) + chart.unit + (line.low == null ? "" :
          ` (${number(line.low[i], chart.digits)} to ${number(line.high[i], chart.digits)})`),
      ].join("\n"),
    }))).filter((point) => point.y != null);
    const rounds = points.map((point) => point.x);
    const marks = shown.flatMap((line) => {
      const at = line.x.map((x, i) => ({ x, y: line.y[i], low: line.low?.[i], high: line.high?.[i] }));
      const some = at.filter((_, i) => i % Math.ceil(at.length / FEW) === 0);
      const look = { x: "x", y: "y", stroke: colour(line.number) };
      return [
        ...(line.low ? [Plot.areaY(at, { x: "x", y1: "low", y2: "high", fill: look.stroke, fillOpacity: 0.5 / Math.max(3, shown.length) })] : []),
        Plot.lineY(at, { ...look, strokeWidth: 2, strokeDasharray: dash(line.number) }),
        Plot.dot(some, { ...look, r: 3, fill: look.stroke, symbol: SYMBOLS[line.number % SYMBOLS.length] }),
      ];
    });
    const rules = chart.rules.flatMap((rule) => [
      Plot.ruleY([rule.y], { stroke: "currentColor", strokeOpacity: 0.6, strokeDasharray: rule.name ? "2 3" : null }),
      Plot.text(rule.name ? [rule] : [],
        { y: "y", text: "name", frameAnchor: "right", dy: -7, fillOpacity: 0.8, textAnchor: "end" }),
    ]);
    const marked = chart.marked ? [chart.marked] : [];
    return Plot.plot(frame(chart, width, {
      height: 250, marginLeft: 48,
      x: { label: "round", ticks: whole(d3.min(rounds) ?? 0, d3.max(rounds) ?? 1, width), tickFormat: "d" },
      y: { label: chart.y, grid: true, nice: true, zero: chart.zero },
      marks: [
        ...rules, ...marks,
        Plot.dot(marked, { x: "x", y: "y", r: 6, stroke: "var(--line-2)", strokeWidth: 2.5 }),
        hover(points, { x: "x", y: "y", title: "text" }),
      ],
    }));
  }

  function heat(chart, width, at) {
    const [rows, columns] = [chart.rows.length, chart.columns.length];
    const named = rows <= 60;
    const left = named ? room(chart.rows, width) : 30;
    const cells = chart.values.flatMap((row, r) => row.map((value, c) => ({
      x: c + 0.5, y: r + 0.5, value,
      text: `${chart.rows[r]}\n${chart.x} ${chart.columns[c]}\n${chart.unit}: ${value == null ? "none" : +value.toFixed(1)}`,
    })));
    const centre = (places) => ({ ticks: places.map((place) => place + 0.5), tickSize: 0 });
    const numbers = chart.columns.map((name) => parseInt(name, 10));  // of rounds or clients: the round ones have ticks
    const round = whole(numbers[0], numbers[columns - 1], width).map((value) => d3.bisectLeft(numbers, value));
    return Plot.plot(frame(chart, width, {
      height: Math.min(Math.max(18 * rows, 110), 700) + 50, marginLeft: left,
      x: { label: chart.x, domain: [0, columns], ...centre(round),
           tickFormat: (place) => chart.columns[Math.floor(place)].split(" ")[0] },
      y: { label: null, domain: [rows, 0], ...centre(named ? d3.range(rows) : whole(0, rows - 1, 300)),
           tickFormat: (place) => (named ? short(chart.rows[Math.floor(place)], left) : String(Math.floor(place))) },
      color: { scheme: "viridis", domain: [0, chart.top] },
      opacity: { domain: [0, chart.top], range: [0.15, 1] },
      marks: [
        Plot.raster(chart.values.flat(), {
          width: columns, height: rows, x1: 0, y1: 0, x2: columns, y2: rows, imageRendering: "pixelated",
          ...(chart.faint ? { fill: "#2b8cd6", fillOpacity: missing } : { fill: missing }),
        }),
        ...(at == null ? [] : [Plot.rect([at], { x1: at, x2: at + 1, y1: 0, y2: rows, stroke: "currentColor", strokeWidth: 2 })]),
        hover(cells, { x: "x", y: "y", title: "text" }),
      ],
    }));
  }

  // A column of a heat map by itself: a bar per row, and a line at its best so far.
  function column(chart, width, at) {
    const rows = chart.values.map((row, r) => ({ name: chart.rows[r], value: row[at], best: d3.max(row.slice(0, at + 1)), r }));
    const left = room(chart.rows, width);
    return Plot.plot(frame(chart, width, {
      height: Math.min(Math.max(18 * rows.length, 110), 700) + 50,
      marginLeft: left,
      x: { label: chart.unit, domain: [0, chart.top], grid: true },
      y: { label: null, domain: d3.range(rows.length), tickSize: 0, tickFormat: (r) => short(chart.rows[r], left),
           ...(rows.length > 60 ? { ticks: [] } : {}) },
      marks: [
        Plot.barX(rows, { y: "r", x: "value", fill: "var(--line-1)", inset: 1 }),
        Plot.tickX(rows, { y: "r", x: "best", stroke: "var(--line-2)", strokeWidth: 3 }),
      ],
    }));
  }

  function dots(chart, width) {
    const points = chart.points.map(([name, x, y, round]) => ({ x, y, round, text: `${name}\n${chart.x}: ${x}\n${chart.y}: ${y}` }));
    const [first, last] = d3.extent(points, (point) => point.round);
    const place = { x: "x", y: "y" };
    return Plot.plot(frame(chart, width, {
      height: 250, marginLeft: 48, x: { label: chart.x }, y: { label: chart.y, grid: true, zero: true },
      marks: [
        Plot.dot(points, { ...place, r: 3, fill: "var(--line-1)",
          fillOpacity: (point) => (last > first ? 0.2 + (0.8 * (point.round - first)) / (last - first) : 1) }),
        hover(points, { ...place, title: "text" }),
      ],
    }));
  }

  function gaps(chart, width) {
    const rows = chart.points.map((point, r) => ({ ...point, r, low: point.ends?.[0], high: point.ends?.[1] }));
    const left = room(rows.map((row) => row.name), width);
    const differ = rows.some((row) => row.mean || row.low || row.high);
    return Plot.plot(frame(chart, width, {
      height: 26 * rows.length + 60, marginRight: 12,
      marginLeft: left,
      x: { label: `${chart.x} →`, grid: true, nice: true, ...(differ ? {} : { domain: [-1, 1] }) },
      y: { label: null, domain: d3.range(rows.length), tickSize: 0, tickFormat: (r) => short(rows[r].name, left), type: "point" },
      marks: [
        Plot.ruleX([0], { stroke: "currentColor" }),
        Plot.ruleY(rows.filter((row) => row.ends), { y: "r", x1: "low", x2: "high", stroke: "var(--line-1)", strokeWidth: 3 }),
        Plot.dot(rows, { y: "r", x: "mean", fill: "var(--line-1)", r: 5 }),
        hover(rows, { y: "r", x: "mean", title: (row) => [`${row.name} minus ${row.from}`,
          `${d3.format("+.2f")(row.mean)} points`, ...(row.ends ? [`${row.ends.map(d3.format("+.2f")).join(" to ")}`] : [])].join("\n") }),
      ],
    }));
  }

  const KINDS = { lines, heat, dots, gaps };
  const places = [...document.querySelectorAll("[data-chart]")];

  function draw(place) {
    const chart = charts[place.dataset.chart];
    const width = Math.max(place.clientWidth, 240);
    const at = chart.slider ? Number(place.parentElement.querySelector("input[type=range]").value) : null;
    const drawn = [KINDS[chart.kind](chart, width, at), ...(chart.slider ? [column(chart, width, at)] : [])];
    for (const svg of drawn) svg.setAttribute("role", "img");
    place.replaceChildren(...drawn.slice(0, 1), ...(chart.kind === "heat" ? [ramp(chart)] : []), ...drawn.slice(1));
  }

  const ramp = (chart) => element("p", { class: chart.faint ? "ramp faint" : "ramp" }, "0", element("span", { "aria-hidden": "true" }), `${+chart.top.toFixed(1)} ${chart.unit}`);

  // A piece of the n-th line, beside its name.
  function swatch(look) {
    const stroke = { x1: 0, y1: 6, x2: 32, y2: 6, "stroke-width": 3, "stroke-dasharray": dash(look), style: `stroke: ${colour(look)}` };
    return element("svg", { class: "swatch", viewBox: "0 0 32 12", "aria-hidden": "true" }, element("line", stroke));
  }

  // A check box for each line: once for the figures of a section if all have the same lines, else at each figure.
  function legends(panel) {
    const drawn = places.filter((place) => panel.contains(place) && charts[place.dataset.chart].kind === "lines");
    const names = drawn.map((place) => JSON.stringify(charts[place.dataset.chart].series.map((line) => line.name)));
    if (new Set(names).size === 1) legend((box) => panel.before(box), charts[drawn[0].dataset.chart].series);
    else for (const place of drawn) legend((box) => place.after(box), charts[place.dataset.chart].series);
  }

  function legend(put, series) {
    if (series.length < 2) return;
    const entries = series.map(({ name, number: look }) => {
      const box = element("input", { type: "checkbox" });
      box.checked = true;
      box.dataset.line = name;
      box.addEventListener("change", () => {
        hidden[box.checked ? "delete" : "add"](name);
        for (const other of document.querySelectorAll("input[data-line]"))
          if (other.dataset.line === name) other.checked = box.checked;
        for (const place of places)
          if (charts[place.dataset.chart].series?.some((line) => line.name === name)) draw(place);
      });
      return element("label", {}, box, swatch(look), element("bdi", {}, name));
    });
    put(element("fieldset", {}, element("legend", {}, "Lines shown"), ...entries));
  }

  // The head of a column sorts the table by it, largest first, and then the other way round; what is no number is last.
  function sortable(table) {
    const rows = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.append(element("button", { type: "button" }, ...head.childNodes));
      head.addEventListener("click", () => {
        const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", order);
        const sorted = d3.groups(rows, (row) => typeof quantity(row.cells[column])).sort(([a], [b]) => d3.ascending(a, b));
        for (const [, alike] of sorted)
          table.tBodies[0].append(...alike.sort((a, b) => d3[order](quantity(a.cells[column]), quantity(b.cells[column]))));
      });
    });
  }

  // The number with which a cell begins, also of bytes and of hours, minutes and seconds; else its text.
  function quantity(cell) {
    const text = cell.textContent.trim();
    const time = /(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)/.exec(text);
    if (time) return d3.sum([86400, 3600, 60, 1], (seconds, i) => seconds * (time[i + 1] ?? 0));
    const [, digits, unit] = /^([+-]?[\d,]*\.?\d+)\s*(kB|MB|GB|TB)?/.exec(text) ?? [];
    return digits ? Number(digits.replaceAll(",", "")) * 1000 ** ["", "kB", "MB", "GB", "TB"].indexOf(unit ?? "") : text;
  }

  function slider(place) {
    const chart = charts[place.dataset.chart];
    const most = chart.columns.length - 1;
    const range = element("input", { type: "range", min: 0, max: most, step: 1, value: most, id: `at-${place.dataset.chart}` });
    const output = element("output", { for: range.id });
    const isolated = ([value, name]) => `\u2068${name}\u2069, ${value.toFixed(1)}`;  // marks of direction end with a name
    const told = () => {
      const known = chart.values.map((row, r) => [row[range.value], chart.rows[r]]).filter(([value]) => value != null);
      const [low, high] = [d3.least(known, ([value]) => value), d3.greatest(known, ([value]) => value)];
      output.textContent = `${chart.x} ${chart.columns[range.value]}` + (known.length ?
        `: mean ${d3.mean(known, ([value]) => value).toFixed(1)}; lowest ${isolated(low)}; highest ${isolated(high)}` : "");
      range.setAttribute("aria-valuetext", `${chart.x} ${chart.columns[range.value]}`);
    };
    range.addEventListener("input", () => { told(); draw(place); });
    place.before(element("p", { class: "slider" }, element("label", { for: range.id }, `Show a ${chart.x}`), range, output));
    told();
  }

  await load();
  for (const run of document.querySelectorAll("[data-line-number]")) run.prepend(swatch(Number(run.dataset.lineNumber)));
  for (const panel of document.querySelectorAll(".panels")) legends(panel);
  for (const place of places) if (charts[place.dataset.chart].slider) slider(place);
  for (const place of places) draw(place);
  for (const table of document.querySelectorAll("table")) sortable(table);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;  // a phone's bar that hides changes the height only
    width = window.innerWidth;
    for (const place of places) draw(place);
  });
  document.documentElement.dataset.drawn = "yes";
})();
