"use strict";
// The page shows documents that `asymcheck COMMAND --json` prints (docs/schemas). Text from a store is only ever set as
// textContent or as an attribute, never parsed as HTML.

const POLL_MS = 2000, ROWS = 20, AUTOMATIC_DU = 2000, LANES_SHOWN = 30, PAD = {left: 76, right: 20, top: 8, bottom: 22};
const $ = (id) => document.getElementById(id);
const dataElement = $("data");
const STATIC = dataElement ? JSON.parse(dataElement.textContent) : null;
const view = {state: null, run: null, logs: {}, remote: {}, memory: null, du: null, trace: null, paused: false,
  from: null, to: null, abandoned: true};

// ---- elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers and times

const whole = new Intl.NumberFormat("en");
const count = (number, thing) => `${whole.format(number)} ${thing}${number === 1 ? "" : "s"}`;
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
const number = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(5))));
const time = (ns) => new Date(ns / 1e6).toISOString().slice(0, 19).replace("T", " ");
const milliseconds = (ms) => (ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`);
function age(ns) {
  const seconds = Math.max(0, (view.state.now_ns - ns) / 1e9);
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  }
  return `${Math.floor(seconds)} s ago`;
}

// ---- documents

async function get(name, query = {}) {
  if (STATIC) {
    const found = name === "log" || name === "remote" ? STATIC[name][query.run] : STATIC[name];
    if (!found || found.error) throw new Error(found ? found.error : `this file has no ${name}`);
    return found;
  }
  const response = await fetch(`api/${name}?${new URLSearchParams(query)}`);
  const found = await response.json();
  if (found && found.error) throw new Error(found.error);
  return found;
}

function tell(error) {
  $("message").hidden = !error;
  $("message").textContent = error ? error.message : "";
}

// ---- charts

function ticks(low, high, wanted, unit = 1) {
  const rough = (high - low || 1) / wanted / unit, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power * unit;
  const first = Math.ceil(low / step), found = [];
  // A loop that adds the step to the tick would not end if the step is too small to change a large number.
  for (let index = 0; index <= (high - first * step) / step + 1e-6; index += 1) found.push((first + index) * step);
  return found;
}

// Draw axes and return scales. `points` are the places of the cursor: {x, text}, sorted by x.
function chart(figure, {caption, summary, height, x, y, formatX, formatY, points}) {
  const width = Math.max(260, figure.clientWidth || 600), inner = width - PAD.left - PAD.right;
  const sx = (value) => PAD.left + ((value - x[0]) / (x[1] - x[0] || 1)) * inner;
  const sy = (value) => height - PAD.bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (height - PAD.top - PAD.bottom);
  const cursor = s("line", {class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden"});
  const output = h("output");
  const svg = s("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": `${caption}. ${summary} Arrow keys read the values.`});
  for (const tick of formatY ? ticks(y[0], y[1], height / 45, formatY === size ? 1024 ** Math.max(0, Math.floor(Math.log2(y[1] || 1) / 10)) : 1) : []) {
    svg.append(s("line", {class: "axis", x1: PAD.left, x2: width - PAD.right, y1: sy(tick), y2: sy(tick)}),
      s("text", {x: PAD.left - 6, y: sy(tick) + 4, "text-anchor": "end"}, formatY(tick)));
  }
  for (const tick of ticks(x[0], x[1], inner / 110)) {
    svg.append(s("text", {x: sx(tick), y: height - 6, "text-anchor": "middle"}, (formatX || whole.format)(tick)));
  }
  let at = points.length;
  const move = (index) => {
    if (!points.length) return;
    at = Math.min(points.length - 1, Math.max(0, index));
    cursor.setAttribute("x1", sx(points[at].x));
    cursor.setAttribute("x2", sx(points[at].x));
    cursor.setAttribute("visibility", "visible");
    output.textContent = points[at].text;
  };
  svg.addEventListener("pointermove", (event) => {
    const place = x[0] + ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / inner) * (x[1] - x[0]);
    let low = 0, high = points.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (points[middle].x < place) low = middle + 1; else high = middle; }
    move(low > 0 && place - points[low - 1].x < points[low].x - place ? low - 1 : low);
  });
  svg.addEventListener("keydown", (event) => {
    const steps = {ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 100, PageDown: at + 100, Home: 0, End: points.length - 1};
    if (event.key in steps) { event.preventDefault(); move(steps[event.key]); }
  });
  svg.append(cursor);
  figure.replaceChildren(h("figcaption", {}, h("b", {}, caption), ` ${summary}`), svg, output);
  return {svg, sx, sy, width};
}

// A path through points of ascending x, with the first, lowest, highest and last point of each pixel column.
function path(points, sx, sy) {
  let text = "", column = null, kept = [];
  const flush = () => {
    const low = kept.reduce((a, b) => (b[1] < a[1] ? b : a)), high = kept.reduce((a, b) => (b[1] > a[1] ? b : a));
    for (const point of new Set([kept[0], ...(low[0] < high[0] ? [low, high] : [high, low]), kept[kept.length - 1]])) {
      text += `${text ? "L" : "M"}${sx(point[0]).toFixed(1)} ${sy(point[1]).toFixed(1)}`;
    }
  };
  for (const point of points) {
    const here = Math.round(sx(point[0]));
    if (here !== column && kept.length) { flush(); kept = []; }
    column = here;
    kept.push(point);
  }
  if (kept.length) flush();
  return text;
}

// ---- tables

// A table with pages. Columns: {title, cell(row), number, sort(row)}. A cell is text or an element.
function table(container, caption, columns, rows, options = {}) {
  const kept = container.kept || (container.kept = {page: 0, sort: null, down: true, filter: ""});
  if (!rows.length && !options.filters) { container.replaceChildren(h("p", {}, options.empty || "")); return; }
  const filter = options.filters && options.filters[kept.filter];
  let shown = filter ? rows.filter(filter) : rows.slice();
  if (kept.sort !== null) {
    const key = columns[kept.sort].sort, sign = kept.down ? -1 : 1;
    const value = (row) => { const found = key(row); return found === null || found === undefined ? -Infinity : found; };
    shown.sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
  }
  const pages = Math.max(1, Math.ceil(shown.length / ROWS));
  kept.page = Math.min(kept.page, pages - 1);
  const again = (changes, focus) => () => {
    Object.assign(kept, changes());
    table(container, caption, columns, rows, options);
    const target = container.querySelector(focus);
    if (target) target.focus();
  };
  const head = columns.map((column, index) => {
    const sorted = kept.sort === index;
    const title = column.sort ? h("button", {type: "button", "data-sort": index,
      onclick: again(() => ({sort: index, down: sorted ? !kept.down : true, page: 0}), `[data-sort="${index}"]`)},
      column.title, sorted ? (kept.down ? " ↓" : " ↑") : "") : column.title;
    return h("th", {scope: "col", class: column.number ? "number" : null,
      "aria-sort": sorted ? (kept.down ? "descending" : "ascending") : null}, title);
  });
  const first = kept.page * ROWS, page = shown.slice(first, first + ROWS);
  const body = page.map((row) => h("tr", {}, ...columns.map((column) =>
    h("td", {class: column.number ? "number" : column.wide ? "wide" : null}, column.cell(row)))));
  const total = `${whole.format(first + 1)} – ${whole.format(first + page.length)} of ${whole.format(shown.length)}`;
  const turn = (label, target) => h("button", {type: "button", "data-turn": label, disabled: target === kept.page || target < 0
    || target >= pages, onclick: again(() => ({page: target}), `[data-turn="${label}"]`)}, label);
  const controls = [];
  if (options.filters) {
    controls.push(h("label", {}, "Show ", h("select", {onchange: (event) =>
      again(() => ({filter: event.target.value, page: 0}), "select")()}, ...Object.keys(options.filters).map((name) =>
      h("option", {value: name, selected: name === kept.filter}, name || "all")))));
  }
  if (pages > 1) {
    controls.push(turn("First", 0), turn("Previous", kept.page - 1), turn("Next", kept.page + 1), turn("Last", pages - 1));
  }
  container.replaceChildren(...(controls.length ? [h("div", {class: "controls"}, ...controls)] : []),
    h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, h("table", {},
      h("caption", {}, page.length ? `${caption}: ${total}` : `${caption}: none`), h("thead", {}, h("tr", {}, ...head)),
      h("tbody", {}, ...body))));
}

// ---- the selected run

const isDamaged = (entry) => !entry.checkpoint.complete || lost().has(nameOf(entry.checkpoint));
const isAbandoned = (entry) => entry.checkpoint.on_line === false;
const nameOf = (item) => `run ${item.run}, step ${item.step} (generation ${item.generation}, save ${item.save_id.slice(0, 12)})`;
const lost = () => new Set(view.state.verified ? view.state.verified.document.lost : []);

// Entries of the run, oldest first, within the chosen steps.
function chosen() {
  const log = view.logs[view.run];
  return log ? log.entries.filter(({checkpoint}) => (view.from === null || checkpoint.step >= view.from)
    && (view.to === null || checkpoint.step <= view.to) && (view.abandoned || checkpoint.on_line !== false)) : [];
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return low <= high ? [low, high] : [0, 1];
}

// Lines of the chart: for each generation the part on the line, and the abandoned part that continues it.
function branches(entries, valueOf) {
  const byGeneration = new Map();
  for (const entry of entries) {
    const {generation, step} = entry.checkpoint, point = [step, valueOf(entry)];
    if (!byGeneration.has(generation)) byGeneration.set(generation, {line: [], gone: []});
    const {line, gone} = byGeneration.get(generation);
    if (!isAbandoned(entry)) line.push(point);
    else gone.push(...(gone.length ? [] : line.slice(-1)), point);
  }
  return byGeneration;
}

function drawLines(entries, history) {
  const figure = $("lines-chart"), openings = new Map(history.openings.map((opening) => [opening.generation, opening]));
  const generations = [...new Set([...entries.map((entry) => entry.checkpoint.generation), ...openings.keys()])].sort((a, b) => a - b);
  const all = branches(entries, (entry) => entry.checkpoint.generation), drawn = generations.slice(-LANES_SHOWN);
  const rows = new Map(drawn.map((generation, index) => [generation, index]));
  if (!entries.length) { figure.replaceChildren(); $("lines").replaceChildren(h("p", {}, "No checkpoints in these steps.")); return; }
  const gone = entries.filter(isAbandoned).length;
  const by = entries.filter((entry) => rows.has(entry.checkpoint.generation));
  const points = by.map((entry) => ({x: entry.checkpoint.step, text: describe(entry)})).sort((a, b) => a.x - b.x);
  const {svg, sx, width} = chart(figure, {caption: "Generations over steps", height: 40 + 24 * drawn.length,
    summary: `${count(generations.length, "generation")}, ${count(entries.length - gone, "checkpoint")} on the line or unknown, `
      + `${whole.format(gone)} abandoned (dashed).`, x: extent(points.map((point) => point.x)), y: [0, 1], points});
  const sy = (row) => PAD.top + 12 + 24 * row;
  for (const generation of drawn) {
    const y = sy(rows.get(generation)), opening = openings.get(generation), {line = [], gone: left = []} = all.get(generation) || {};
    const start = line.length ? line[0][0] : left.length ? left[0][0] : null;
    svg.append(s("text", {x: PAD.left - 6, y: y + 4, "text-anchor": "end"}, `gen ${generation}`));
    if (opening && opening.parent_step !== null && rows.has(opening.parent_generation)) {
      const from = Math.max(PAD.left, Math.min(width - PAD.right, sx(opening.parent_step)));
      svg.append(s("path", {class: opening.on_line ? "line" : "abandoned",
        d: `M${from} ${sy(rows.get(opening.parent_generation))}V${y}${start === null ? "" : `H${sx(start)}`}`}));
    }
    for (const [part, kind] of [[line, "line"], [left, "abandoned"]]) {
      if (part.length) svg.append(s("path", {class: kind, d: `M${sx(part[0][0])} ${y}H${sx(part[part.length - 1][0])}`}));
    }
  }
  for (const entry of by.length <= 400 ? by : by.filter(isDamaged)) {
    const cx = sx(entry.checkpoint.step), cy = sy(rows.get(entry.checkpoint.generation));
    svg.append(isDamaged(entry) ? s("path", {class: "cross", d: `M${cx - 5} ${cy - 5}l10 10m0 -10l-10 10`})
      : s("circle", {cx, cy, r: 3.5, class: isAbandoned(entry) ? "dot-abandoned" : "dot"}));
  }
  $("lines").replaceChildren(h("details", {open: generations.length <= 12}, h("summary", {}, "The same as a list"),
    tree(generations, openings, entries)));
}

function tree(generations, openings, entries) {
  const byGeneration = new Map(generations.map((generation) => [generation, []]));
  for (const entry of entries) byGeneration.get(entry.checkpoint.generation).push(entry);
  const parentOf = (generation) => { const opening = openings.get(generation); return opening ? opening.parent_generation : null; };
  const item = (generation) => {
    const opening = openings.get(generation), own = byGeneration.get(generation), [low, high] = extent(own.map((entry) => entry.checkpoint.step));
    const gone = own.filter(isAbandoned).length, damaged = own.filter(isDamaged).length;
    const words = [`generation ${generation}`, own.length ? `steps ${whole.format(low)} – ${whole.format(high)}` : null,
      count(own.length, "checkpoint"), gone ? `${whole.format(gone)} abandoned` : null, damaged ? `${whole.format(damaged)} damaged or incomplete` : null,
      opening && opening.parent_step !== null ? `continued from step ${whole.format(opening.parent_step)} of generation ${opening.parent_generation}` : null,
      opening && opening.opened_ns ? `started ${time(opening.opened_ns)} UTC` : null, opening && opening.problem ? opening.problem : null];
    return h("li", {}, words.filter(Boolean).join(", "), list(generations.filter((other) => other !== generation && parentOf(other) === generation)));
  };
  const list = (numbers) => (numbers.length ? h("ul", {class: "tree"}, ...numbers.map(item)) : null);
  return list(generations.filter((generation) => !byGeneration.has(parentOf(generation)) || parentOf(generation) >= generation)) || h("p");
}

function describe(entry) {
  const item = entry.checkpoint, metrics = Object.entries(item.metrics).slice(0, 3).map(([name, value]) => `${name} ${number(value)}`);
  return [`step ${whole.format(item.step)}, generation ${item.generation}`, ...metrics, statusOf(entry)].filter(Boolean).join(", ");
}

function statusOf(entry) {
  if (!entry.checkpoint.complete) return "incomplete or damaged";
  if (lost().has(nameOf(entry.checkpoint))) return "damaged";
  return entry.checkpoint.on_line === null ? "line unknown" : entry.checkpoint.on_line ? "" : "abandoned";
}

function drawMetrics(entries) {
  const names = [...new Set(entries.flatMap((entry) => Object.keys(entry.checkpoint.metrics)))].slice(0, 24);
  const known = new Map([...$("metrics").children].map((figure) => [figure.dataset.metric, figure]));
  $("metrics").replaceChildren(...(names.length ? names.map((name) => known.get(name) || h("figure", {"data-metric": name}))
    : [h("p", {}, "No metrics. Pass metrics={\"loss\": …} to Checkpointer.step() or Store.save().")]));
  for (const [index, name] of names.entries()) {
    const having = entries.filter((entry) => typeof entry.checkpoint.metrics[name] === "number");
    const values = having.map((entry) => entry.checkpoint.metrics[name]), [low, high] = extent(values);
    const current = having.filter((entry) => !isAbandoned(entry)), last = current[current.length - 1];
    const {svg, sx, sy} = chart($("metrics").children[index], {caption: name, height: 180, x: extent(having.map((entry) => entry.checkpoint.step)),
      summary: !values.length ? "No finite numbers." : `Lowest ${number(low)}, highest ${number(high)}`
        + (last ? `, newest ${number(last.checkpoint.metrics[name])} at step ${whole.format(last.checkpoint.step)}.` : "."),
      y: low === high ? [low - 1, high + 1] : [low, high], formatY: number,
      points: having.map((entry) => ({x: entry.checkpoint.step,
        text: `step ${whole.format(entry.checkpoint.step)}: ${number(entry.checkpoint.metrics[name])}${isAbandoned(entry) ? ", abandoned" : ""}`}))
        .sort((a, b) => a.x - b.x)});
    const parts = [...branches(having, (entry) => entry.checkpoint.metrics[name]).values()], line = parts.flatMap((part) => part.line);
    for (const {gone} of parts) svg.append(s("path", {class: "abandoned", d: path(gone, sx, sy)}));
    svg.append(s("path", {class: "line", d: path(line, sx, sy)}));
    if (line.length === 1) svg.append(s("circle", {class: "dot", cx: sx(line[0][0]), cy: sy(line[0][1]), r: 3}));
  }
}

function bytesOf(checkpoint) {
  const used = view.du && view.du.bySave.get(checkpoint.save_id);
  return used && {fresh: used.new_bytes, shared: used.stored_bytes - used.new_bytes, saved: Math.max(0, used.state_bytes - used.new_bytes)};
}

function drawBytes(entries) {
  $("compute-du").hidden = Boolean(STATIC) || !view.state || view.state.is_remote || Boolean(view.du && !view.du.stale);
  if (view.state.is_remote) { $("bytes-chart").replaceChildren(h("p", {}, "Only a local store has a disk usage.")); return; }
  const having = entries.filter((entry) => bytesOf(entry.checkpoint)).sort((a, b) => a.checkpoint.created_ns - b.checkpoint.created_ns);
  if (!having.length) { $("bytes-chart").replaceChildren(); return; }
  const columns = Math.min(having.length, Math.max(40, Math.floor(($("bytes-chart").clientWidth || 600) / 6))), group = Math.ceil(having.length / columns);
  const bars = [];
  for (let start = 0; start < having.length; start += group) {
    const part = having.slice(start, start + group), mean = (key) => part.reduce((sum, entry) => sum + bytesOf(entry.checkpoint)[key], 0) / part.length;
    const steps = [part[0], part[part.length - 1]].map((entry) => whole.format(entry.checkpoint.step));
    bars.push({fresh: mean("fresh"), shared: mean("shared"), saved: mean("saved"), state: part.reduce((sum, entry) => sum + entry.checkpoint.state_bytes, 0) / part.length,
      name: part.length === 1 ? `step ${steps[0]}` : `mean of steps ${steps.join(" – ")}`});
  }
  const sum = (key) => having.reduce((total, entry) => total + bytesOf(entry.checkpoint)[key], 0);
  const {svg, sx, sy} = chart($("bytes-chart"), {caption: "New and shared bytes of each checkpoint, in the order of saving", height: 200,
    summary: `${size(sum("fresh"))} new, ${size(sum("saved"))} not written in ${count(having.length, "checkpoint")}.${group > 1 ? ` Each bar is the mean of ${group} checkpoints.` : ""}`,
    x: [0, bars.length], formatX: (tick) => (Number.isInteger(tick) ? whole.format(tick * group) : ""),
    y: [0, extent(bars.flatMap((bar) => [bar.fresh + bar.shared, bar.state]))[1]], formatY: size,
    points: bars.map((bar, index) => ({x: index + 0.5, text: `${bar.name}: ${size(bar.fresh)} new, ${size(bar.shared)} shared, ${size(bar.saved)} not written`}))});
  bars.forEach((bar, index) => {
    const x = sx(index) + 0.5, width = Math.max(1, sx(index + 1) - sx(index) - 1);
    svg.append(s("rect", {class: "new", x, width, y: sy(bar.fresh), height: Math.max(0, sy(0) - sy(bar.fresh))}),
      s("rect", {class: "shared", x, width, y: sy(bar.fresh + bar.shared), height: Math.max(0, sy(bar.fresh) - sy(bar.fresh + bar.shared))}));
  });
  svg.append(s("path", {class: "state", d: path(bars.map((bar, index) => [index + 0.5, bar.state]), sx, sy)}));
  $("bytes-chart").firstChild.append(h("span", {class: "key new"}), "new", h("span", {class: "key shared"}), "shared", " (dashed: size of the state)");
  const {accounting} = view.du;
  table($("totals"), "Files of the store", [{title: "files", cell: (row) => row[0]}, {title: "bytes", number: true, cell: (row) => size(row[1])}],
    [["packs", accounting.pack_bytes], ["frames that checkpoints need", accounting.live_bytes], ["garbage that gc would free", accounting.freeable_bytes],
      ["garbage in packs with live frames", accounting.locked_bytes], ["recyclable packs", accounting.pooled_bytes], ["manifests", accounting.manifest_bytes],
      ["catalog", accounting.catalog_bytes]]);
}

function copiesOf(checkpoint) {
  const places = [];
  if (view.memory && view.memory.rings.some((ring) => ring.captures.some((capture) => capture.save_id === checkpoint.save_id))) places.push("memory");
  if (checkpoint.complete && !checkpoint.remoteOnly) places.push(view.state.is_remote ? "remote" : "local");
  if (view.remote[view.run] && view.remote[view.run].has(checkpoint.save_id)) places.push("remote");
  return places;
}

function drawCheckpoints(entries) {
  const has = view.du !== null, bytes = (key) => ({number: true, cell: (entry) => { const found = bytesOf(entry.checkpoint); return found ? size(found[key]) : "–"; },
    sort: (entry) => (bytesOf(entry.checkpoint) || {})[key]});
  const metrics = [...new Set(entries.flatMap((entry) => Object.keys(entry.checkpoint.metrics)))].slice(0, 3);
  const item = (entry) => entry.checkpoint;
  const here = new Set(entries.map((entry) => item(entry).save_id));
  const far = [...(view.remote[view.run] || new Map()).values()].filter((entry) => !here.has(item(entry).save_id) && view.logs[view.run].all.has(item(entry).save_id) === false)
    .map((entry) => ({...entry, checkpoint: {...item(entry), remoteOnly: true}}));
  table($("checkpoints"), "Checkpoints, newest first", [
    {title: "step", number: true, cell: (entry) => whole.format(item(entry).step), sort: (entry) => item(entry).step},
    {title: "generation", number: true, cell: (entry) => whole.format(item(entry).generation)},
    {title: "save", cell: (entry) => item(entry).save_id.slice(0, 12)},
    {title: "saved (UTC)", cell: (entry) => time(item(entry).created_ns), sort: (entry) => item(entry).created_ns},
    {title: "size", number: true, cell: (entry) => size(item(entry).state_bytes), sort: (entry) => item(entry).state_bytes},
    ...(has ? [{title: "new", ...bytes("fresh")}, {title: "shared", ...bytes("shared")}, {title: "not written", ...bytes("saved")}] : []),
    {title: "copies", cell: (entry) => copiesOf(item(entry)).join(", ") || h("span", {class: "bad"}, "none complete")},
    {title: "status", wide: true, cell: (entry) => h("span", {class: isDamaged(entry) ? "bad" : "warn"}, [statusOf(entry), entry.problem].filter(Boolean).join(": "))},
    ...metrics.map((name) => ({title: name, number: true, cell: (entry) => number(item(entry).metrics[name]), sort: (entry) => item(entry).metrics[name]})),
  ], entries.slice().reverse().concat(far), {filters: {"": null, "on the line": (entry) => item(entry).on_line === true, abandoned: isAbandoned, damaged: isDamaged}});
  const captures = view.memory ? view.memory.rings.flatMap((ring) => ring.captures.map((capture) => ({ring, capture}))) : [];
  table($("rings"), "Captures in memory", [
    {title: "step", number: true, cell: ({capture}) => (capture.step === null ? "?" : whole.format(capture.step))},
    {title: "run", cell: ({ring}) => ring.run || "?"}, {title: "rank", number: true, cell: ({ring}) => String(ring.rank)},
    {title: "process", cell: ({ring}) => `${ring.pid}, ${ring.is_alive ? "running" : "dead"}`},
    {title: "size", number: true, cell: ({capture}) => size(capture.state_bytes || 0)},
    {title: "stored", cell: ({capture}) => (capture.is_durable ? "durable, too" : "in memory only")}, {title: "problem", wide: true, cell: ({capture}) => capture.problem || ""},
  ], captures, {empty: view.memory ? "No captures in memory." : ""});
}

function drawSummary(log) {
  const entries = log.entries, current = entries.filter((entry) => entry.checkpoint.on_line && !isDamaged(entry)), newest = current[current.length - 1];
  const damaged = entries.filter(isDamaged).length, {verified} = view.state;
  const facts = [["Newest checkpoint", newest ? `step ${whole.format(newest.checkpoint.step)}` : "none", newest ? `${time(newest.checkpoint.created_ns)} UTC, ${age(newest.checkpoint.created_ns)}` : ""],
    ["Checkpoints", whole.format(entries.length), `${whole.format(entries.filter(isAbandoned).length)} abandoned, ${whole.format(damaged)} damaged or incomplete`],
    ["Size of the state", newest ? size(newest.checkpoint.state_bytes) : "–", newest ? `${count(newest.checkpoint.world_size, "rank")}` : ""],
    ["Copies of the newest", newest ? copiesOf(newest.checkpoint).join(", ") : "–", view.remoteProblem || (view.state.remote ? `remote: ${view.state.remote}` : "")],
    ["Health", verified ? (verified.document.findings.length ? count(verified.document.findings.length, "finding") : "verified") : "not verified yet",
      verified ? `${time(verified.ended_ns)} UTC` : "manifests of this run were read"]];
  $("summary").replaceChildren(...facts.map(([term, value, detail]) => h("div", {}, h("dt", {}, term), h("dd", {}, value, h("small", {}, detail)))));
}

function drawHealth() {
  if ($("verify").disabled) return; // A verification runs.
  const {verified} = view.state, report = verified && verified.document;
  $("health").className = !report ? "" : report.lost.length ? "bad" : report.findings.length ? "warn" : "good";
  $("health").textContent = !report ? "The store was not verified since this page was started."
    : `${count(report.checkpoints, "checkpoint")} checked in ${milliseconds((verified.ended_ns - verified.started_ns) / 1e6)}, ended ${time(verified.ended_ns)} UTC: `
      + (report.findings.length ? `${count(report.findings.length, "finding")}, ${count(report.lost.length, "checkpoint")} cannot be restored.` : "no damage.");
  table($("findings"), "Findings", [{title: "severity", cell: (row) => h("span", {class: row.severity === "error" ? "bad" : "warn"}, row.severity)},
    {title: "code", cell: (row) => row.kind}, {title: "where", wide: true, cell: (row) => row.where}, {title: "message", wide: true, cell: (row) => row.message},
    {title: "checkpoints", wide: true, cell: (row) => row.checkpoints.join(", ")}], report ? report.findings : []);
}

function drawDiff(difference) {
  const name = (item) => `run ${item.run}, step ${whole.format(item.step)}, generation ${item.generation}`;
  $("diff-summary").textContent = `A: ${name(difference.a)}. B: ${name(difference.b)}. ${count(difference.tensors.length, "tensor")} changed, `
    + `${whole.format(difference.unchanged_tensors)} unchanged. ${size(difference.shared_bytes)} of ${size(difference.bytes_b)} shared.`;
  const norm = (title, key) => ({title, number: true, cell: (row) => number(row.norms && row.norms[key]), sort: (row) => row.norms && row.norms[key]});
  const largest = extent(difference.tensors.map((row) => (row.norms && row.norms.relative) || 0))[1];
  table($("diff"), "Changed tensors", [
    {title: "tensor", wide: true, cell: (row) => [row.name, ...row.aliases].join(" = "), sort: (row) => row.name}, {title: "rank", number: true, cell: (row) => String(row.rank)},
    {title: "change", cell: (row) => row.change}, {title: "dtype", cell: (row) => row.dtype_b || row.dtype_a},
    {title: "shape", cell: (row) => (row.shape_b || row.shape_a).join("×") || "scalar"}, {title: "size", number: true, cell: (row) => size(row.bytes_b || row.bytes_a), sort: (row) => row.bytes_b},
    norm("|A|", "l2_a"), norm("|B − A|", "l2_difference"),
    {...norm("relative", "relative"), cell: (row) => h("span", {}, number(row.norms && row.norms.relative), row.norms && row.norms.relative !== null
      ? h("meter", {min: 0, max: largest || 1, value: row.norms.relative, "aria-hidden": "true"}) : null)},
    norm("max change", "largest"), norm("changed elements", "differing"), {title: "note", wide: true, cell: (row) => (row.norms ? row.norms.note : "")},
  ], difference.tensors, {empty: "No tensor changed."});
  table($("values"), "Changed values", [{title: "value", wide: true, cell: (row) => row.name}, {title: "A", wide: true, cell: (row) => row.a || "(none)"}, {title: "B", wide: true, cell: (row) => row.b || "(none)"}], difference.values);
}

function drawTrace() {
  const {trace} = view;
  $("trace-buttons").hidden = !trace;
  if (!trace) { $("trace-summary").textContent = "No trace. Record a trace with asymcheck.trace(), and pass the file as --trace."; return; }
  const total = trace.stalls.reduce((sum, stall) => sum + stall.stall_ms, 0), worst = trace.stalls.reduce((a, b) => (a && a.stall_ms >= b.stall_ms ? a : b), null);
  $("trace-summary").textContent = worst ? `${count(trace.stalls.length, "checkpoint")} held up the training for ${milliseconds(total)} of ${milliseconds(trace.end_ms)}. `
    + `Longest stall: ${milliseconds(worst.stall_ms)} at step ${whole.format(worst.step)}.` : "The trace has no stalls.";
  const lanes = Object.entries(trace.lanes), spans = lanes.flatMap(([, items]) => items);
  const {svg, sx, width} = chart($("timeline"), {caption: "Timeline in milliseconds", summary: `From ${number(trace.from_ms)} to ${number(trace.to_ms)} ms. Close intervals are drawn as one.`,
    height: 30 + 34 * lanes.length, x: [trace.from_ms, trace.to_ms], y: [0, 1], formatX: number, points: spans.map((span) => ({x: span.start_ms,
      text: `${span.name} at ${number(span.start_ms)} ms: ${milliseconds(span.busy_ms)}${span.count > 1 ? ` in ${whole.format(span.count)} intervals` : ""}`})).sort((a, b) => a.x - b.x)});
  lanes.forEach(([lane, items], row) => {
    const top = 6 + 34 * row;
    svg.append(s("rect", {class: "lane", x: PAD.left, y: top + 13, width: width - PAD.left - PAD.right, height: 15}), s("text", {x: PAD.left, y: top + 10}, lane));
    for (const span of items) {
      const start = Math.max(PAD.left, sx(span.start_ms)), end = Math.min(width - PAD.right, sx(span.end_ms));
      svg.append(s("rect", {class: row ? "span" : "stall", x: start, y: top + 13, width: Math.max(0.7, end - start), height: 15,
        "fill-opacity": Math.max(0.3, Math.min(1, span.busy_ms / (span.end_ms - span.start_ms || 1)))}));
    }
  });
  if (!trace.stalls.length) { $("stalls-chart").replaceChildren(); return; }
  const {svg: bars, sx: bx, sy} = chart($("stalls-chart"), {caption: "Stall of each checkpoint, in the order of saving", summary: `Median ${milliseconds(trace.stalls.map((stall) => stall.stall_ms).sort((a, b) => a - b)[trace.stalls.length >> 1])}.`,
    height: 150, x: [0, trace.stalls.length - 1], y: [0, worst.stall_ms || 1], formatY: milliseconds,
    points: trace.stalls.map((stall, index) => ({x: index, text: `step ${whole.format(stall.step)}: ${milliseconds(stall.stall_ms)}`}))});
  bars.append(s("path", {class: "line", d: path(trace.stalls.map((stall, index) => [index, stall.stall_ms]), bx, sy)}));
}

function drawRuns() {
  $("runs").replaceChildren(...view.state.runs.map((run) => h("li", {}, h("a", {href: `#run=${encodeURIComponent(run.run)}`, title: run.run,
    "aria-current": run.run === view.run ? "page" : null}, run.run, h("small", {}, `${count(run.checkpoints, "checkpoint")}${run.newest_step === null ? "" : `, newest: step ${whole.format(run.newest_step)}`}`)))));
}

function draw() {
  const log = view.logs[view.run];
  if (!log) return;
  const entries = chosen();
  $("title").textContent = `Run ${view.run}`;
  drawSummary(log);
  if (log.history.line_problem) tell(new Error(log.history.line_problem));
  drawLines(entries, log.history);
  drawMetrics(entries);
  drawBytes(entries);
  drawCheckpoints(entries);
  drawHealth();
}

// ---- following the store

async function optional(name, query) {
  try { return await get(name, query); } catch (error) { return {problem: error.message}; }
}

async function loadDu() {
  const found = await optional("du");
  if (found.problem) { if (!view.state.is_remote) tell(new Error(found.problem)); return; }
  view.du = {accounting: found.accounting, bySave: new Map(found.accounting.checkpoints.map((item) => [item.save_id, item]))};
}

async function loadRun(state) {
  const {run, version, checkpoints} = state.runs.find((item) => item.run === view.run);
  const log = await get("log", {run}), entries = log.history.entries.slice().reverse();
  view.logs = {[run]: {version, history: log.history, entries, all: new Set(entries.map((entry) => entry.checkpoint.save_id))}};
  if (view.du) view.du.stale = true;
  if (!state.is_remote && (STATIC || checkpoints <= AUTOMATIC_DU)) await loadDu();
  const current = entries.filter((entry) => entry.checkpoint.on_line && entry.checkpoint.complete).slice(-2), form = $("diff-form");
  if (current.length === 2 && !form.touched) [form.a.value, form.b.value] = current.map((entry) => entry.checkpoint.step);
}

async function loadPlaces(state) {
  if (!state.is_remote) { const found = await optional("memory"); view.memory = found.problem ? null : found; }
  if (state.remote) {
    const found = await optional("remote", {run: view.run});
    view.remoteProblem = found.problem ? `remote: ${found.problem}` : "";
    view.remote = found.problem ? {} : {[view.run]: new Map(found.history.entries.filter((entry) => entry.checkpoint.complete).map((entry) => [entry.checkpoint.save_id, entry]))};
  }
}

async function poll(round) {
  const state = view.state = await get("state");
  $("store").textContent = state.store;
  const wanted = decodeURIComponent(location.hash.replace(/^#run=/, "")), runs = state.runs.map((item) => item.run);
  view.run = runs.includes(wanted) ? wanted : runs.includes(view.run) ? view.run : runs[0] || null;
  drawRuns();
  let changed = false;
  const current = state.runs.find((item) => item.run === view.run);
  if (current && (!view.logs[view.run] || view.logs[view.run].version !== current.version)) {
    const watch = STATIC ? 0 : setInterval(async () => {
      const now = (await get("state")).runs.find((item) => item.run === view.run);
      $("reading").hidden = false;
      $("reading").textContent = now ? `Reading manifests: ${whole.format(now.read)} of ${whole.format(now.checkpoints)} …` : "";
    }, 1000);
    try { await loadRun(state); } finally { clearInterval(watch); $("reading").hidden = true; }
    changed = true;
  }
  // A remote location that does not answer takes a minute.
  if (changed && state.remote) draw();
  if (current && (changed || (round % 10 === 0 && !(view.memory && view.memory.rings.some((ring) => !ring.is_alive))))) { await loadPlaces(state); changed = true; }
  if (changed || round === 0) { tell(null); draw(); }
  $("live").textContent = STATIC ? `as of ${time(state.now_ns)} UTC` : `following, checked ${time(state.now_ns).slice(11)} UTC`;
  if (state.trace !== null && (!view.trace || (view.traceSize !== state.trace && !view.window))) { view.trace = await get("trace"); view.traceSize = state.trace; drawTrace(); }
}

async function follow() {
  for (let round = 0; ; round += 1) {
    if (!view.paused && !document.hidden) {
      try {
        await poll(round);
        if (view.failed) { tell(null); view.failed = false; }
      } catch (error) {
        view.failed = true;
        tell(error instanceof TypeError ? new Error("asymcheck view does not answer. Start it again.") : error);
      }
    }
    if (STATIC) return;
    await new Promise((resolve) => { view.wake = resolve; setTimeout(resolve, POLL_MS); });
  }
}

// ---- controls

async function whileBusy(button, status, text, work) {
  button.disabled = true;
  status.textContent = text;
  try { await work(); tell(null); } catch (error) { status.textContent = error.message; } finally { button.disabled = false; }
}

$("range").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target, step = (field) => (field.value.trim() === "" ? null : Number(field.value));
  Object.assign(view, {from: step(form.from), to: step(form.to), abandoned: form.abandoned.checked});
  draw();
});
$("diff-form").addEventListener("input", (event) => { event.currentTarget.touched = true; });
$("diff-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target, query = {run: view.run, a: form.a.value, b: form.b.value, tensors: form.tensors.value, norms: form.norms.checked ? "yes" : "no"};
  whileBusy(form.querySelector("button"), $("diff-summary"), "Reading tensors …", async () => drawDiff((await get("diff", query)).difference));
});
$("verify").addEventListener("click", (event) => whileBusy(event.target, $("health"), "Reading every byte of the store …", async () => {
  view.state.verified = await get("verify");
  event.target.disabled = false;
  draw();
}));
$("compute-du").addEventListener("click", (event) => whileBusy(event.target, $("reading"), "", async () => { await loadDu(); draw(); }));
$("pause").addEventListener("click", (event) => {
  view.paused = !view.paused;
  event.target.setAttribute("aria-pressed", view.paused);
  $("live").textContent = view.paused ? "paused" : "";
});
$("trace-buttons").addEventListener("click", async (event) => {
  const kind = event.target.dataset.zoom, {trace} = view;
  if (!kind) return;
  const width = trace.to_ms - trace.from_ms, worst = trace.stalls.reduce((a, b) => (a && a.stall_ms >= b.stall_ms ? a : b), {at_ms: 0, stall_ms: 1});
  const [from, to] = {worst: [worst.at_ms - worst.stall_ms, worst.at_ms + 3 * worst.stall_ms], in: [trace.from_ms + width / 4, trace.to_ms - width / 4],
    out: [trace.from_ms - width / 2, trace.to_ms + width / 2], earlier: [trace.from_ms - width / 2, trace.to_ms - width / 2],
    later: [trace.from_ms + width / 2, trace.to_ms + width / 2], all: [0, trace.end_ms]}[kind];
  view.window = kind !== "all";
  view.trace = await get("trace", {from: Math.max(0, from), to: Math.min(trace.end_ms, to)});
  drawTrace();
});
addEventListener("hashchange", () => { $("diff-form").touched = false; if (view.wake) view.wake(); });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { draw(); drawTrace(); }, 150); });

if (STATIC) {
  document.documentElement.classList.add("static");
  $("pause").hidden = true;
  addEventListener("hashchange", follow);
  if (STATIC.diff && !STATIC.diff.error) drawDiff(STATIC.diff.difference);
  else $("diff-summary").textContent = STATIC.diff ? STATIC.diff.error : "Pass --compare A B to compare two checkpoints.";
}
drawTrace();
follow();
