// The pipeline over time: one run, or several under each other on one axis. `head` holds what all share (the tick, the
// span, the causes) and the runs; each run's columns lie in an element of their own.
(async () => {
  const head = JSON.parse(document.getElementById("head").textContent);
  const NONE = 0xFFFFFFFF;
  const span = Math.max(1, head.span), several = head.runs.length > 1;
  const runs = await Promise.all(head.runs.map(async (run, n) =>
    ({ ...run, data: await unpack(run.arrays, document.getElementById("columns" + n)) })));
  const lanes = runs.flatMap(run => Array.from({ length: run.stages }, (_, s) => ({
    run, stage: s, begin: run.data["begin" + s], end: run.data["end" + s], row: run.data["row" + s],
    idleStart: run.data["idleStart" + s], idleEnd: run.data["idleEnd" + s], idleRow: run.data["idleRow" + s],
    cause: run.data["cause" + s], predicted: run.data["predicted" + s],
  })));
  const kinds = 2 + head.causes.length;  // what a stage is at: chunk, decode, idle by cause

  const picture = document.querySelector(".picture");
  const drawing = picture.querySelector(".drawing");
  const overlay = picture.querySelector(".overlay");
  const tip = picture.querySelector(".tip");
  const pen = drawing.getContext("2d", { alpha: false });
  const ink = overlay.getContext("2d");

  // Layout in CSS pixels, from the top: overview strips, axis, then the runs: a heading where there are several, a
  // lane a stage, and of a single one strips of KV cache and queue.
  const AXIS = 24, GAP = 6, STRIP = 34, HEADING = 26, STRIPS = several ? 15 : 20;
  const OVERVIEW = 2 + runs.length * STRIPS;
  const counters = several || !runs.length || !runs[0].data.step.length ? null : runs[0];
  const most = Math.max(1, ...runs.map(run => run.stages));
  const lane = several ? (most <= 2 ? 42 : most <= 4 ? 32 : 22) : most <= 2 ? 62 : most <= 4 ? 50 : most <= 8 ? 38 : 26;
  let at = OVERVIEW + AXIS;
  for (const run of runs) {
    run.top = at;
    if (several) at += HEADING;
    for (const l of lanes) if (l.run === run) { l.y = at; at += lane + (several ? 3 : GAP); }
    if (several) at += GAP;
  }
  const stripsTop = at, height = at + (counters ? 2 * (STRIP + GAP) : 0) + 4;
  let LEFT = 66, width = 0, ratio = 1, view = firstView(), colours = readColours(), hover = null;

  const cut = runs.filter(run => run.shown < run.steps);
  picture.parentElement.querySelector(".cut").textContent = cut.map(run =>
    `Shown are the first ${run.shown.toLocaleString("en")} of ${run.steps.toLocaleString("en")} micro-batches` +
    (several ? ` of ${run.label}.` : ".")).join(" ");

  function firstView() {
    const ends = lanes.filter(l => l.stage === 0 && l.end.length > 90).map(l => l.end[60] * 1.02);
    return { from: 0, to: ends.length ? Math.min(span, Math.max(...ends)) : span };
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const of = name => style.getPropertyValue("--" + name).trim();
    const names = ["chunk", "decode", ...head.causes.map(c => c.css)];
    return {
      fill: names.map(of), pixel: names.map(n => pixel(of(n))),
      panel: of("panel"), pixelPanel: pixel(of("panel")), ink: of("ink"), soft: of("soft"), line: of("line"), strong: of("strong"), mark: of("mark"),
      onChunk: of("on-chunk"), onDecode: of("on-decode"), hatch: of("hatch"), kv: of("kv"), queue: of("queue"),
      ground: of("ground"), runs: Object.fromEntries(runs.map(run => [run.colour, of(run.colour)])),
    };
  }

  function pixel(hex) {  // little-endian RGBA
    const n = parseInt(hex.slice(1), 16);
    return ((255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
  }

  const family = getComputedStyle(document.body).fontFamily;
  const scale = () => (width - LEFT) / (view.to - view.from);  // CSS pixels a tick
  const xOf = tick => LEFT + (tick - view.from) * scale();
  const tickOf = x => view.from + (x - LEFT) / scale();

  // Columns stacked from the bottom: decodes, chunks, idle by cause; lanes averaged.
  function paintColumns(which, from, to, x, y, w, h) {
    const W = Math.max(1, Math.round(w * ratio)), H = Math.max(1, Math.round(h * ratio));
    const all = which.map(l => sumsOf(l, from, to, W, kinds, span));
    const image = pen.createImageData(W, H), out = new Uint32Array(image.data.buffer).fill(colours.pixelPanel);
    const order = [1, 0, ...head.causes.map((_, i) => i + 2)];
    for (let column = 0; column < W; column++) {
      let total = 0, at = H;
      for (const kind of order) {
        for (const sums of all) total += sums[column * kinds + kind] / all.length;
        const top = Math.max(0, Math.round(H * (1 - total)));
        for (let py = top; py < at; py++) out[py * W + column] = colours.pixel[kind];
        if (top < at) at = top;
      }
    }
    pen.putImageData(image, Math.round(x * ratio), Math.round(y * ratio));
  }

  function paintBoxes(l, low, high) {
    const y = l.y, data = l.run.data, patterns = colours.pattern.hatch;
    const idleStop = above(l.idleStart, view.to);
    for (let i = above(l.idleEnd, view.from); i < idleStop; i++) {
      const a = Math.max(LEFT, xOf(l.idleStart[i])), b = Math.min(width, xOf(l.idleEnd[i]));
      pen.fillStyle = colours.fill[2 + l.cause[i]];
      pen.fillRect(a, y, b - a, lane);
      pen.fillStyle = patterns;
      pen.fillRect(a, y, b - a, lane);
      if (b - a >= 13) label(head.causes[l.cause[i]].short, a, b, y + lane / 2, colours.ink, colours.fill[2 + l.cause[i]]);
    }
    for (let i = low; i < high; i++) {
      const a = Math.max(LEFT, xOf(l.begin[i])), b = Math.min(width, xOf(l.end[i]));
      const row = l.row[i], chunk = data.prefill[row], decode = data.decodes[row];
      let cut = y + lane * share(data, row);
      if (chunk && decode) cut = Math.max(y + 3, Math.min(y + lane - 3, cut));  // a few decodes beside a chunk still show
      const w = Math.max(0.5, b - a - (b - a > 5 ? 1 : 0));
      pen.fillStyle = colours.fill[0];
      pen.fillRect(a, y, w, cut - y);
      pen.fillStyle = colours.fill[1];
      pen.fillRect(a, cut, w, y + lane - cut);
      if (w > 30) {
        const above = cut - y, below = y + lane - cut;
        if (chunk && above >= 13) label(String(chunk), a, a + w, y + above / 2, colours.onChunk);
        if (decode && below >= 13) label(decode + "d", a, a + w, cut + below / 2, colours.onDecode);
      }
    }
  }

  function label(text, a, b, y, colour, back) {
    const w = pen.measureText(text).width;
    if (w + 8 > b - a) {
      if (back && b - a >= 13 && w + 8 <= lane) upright(text, (a + b) / 2, y, w);
      return;
    }
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    if (back) {
      pen.fillStyle = colours.panel;
      pen.globalAlpha = 0.82;
      pen.beginPath();
      pen.roundRect((a + b) / 2 - w / 2 - 5, y - 9, w + 10, 18, 4);
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colour;
    pen.fillText(text, (a + b) / 2, y + 0.5);
  }

  function upright(text, x, y, w) {  // along a narrow gap
    pen.save();
    pen.translate(x, y);
    pen.rotate(-Math.PI / 2);
    pen.font = "10px " + family;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.panel;
    pen.globalAlpha = 0.82;
    pen.fillRect(-w / 2 - 2, -6, w + 4, 12);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ink;
    pen.fillText(text, 0, 0.5);
    pen.restore();
  }

  function makeHatch() {
    const tile = document.createElement("canvas"), size = Math.round(7 * ratio);
    tile.width = tile.height = size;
    const t = tile.getContext("2d");
    t.strokeStyle = colours.hatch;
    t.lineWidth = 1.6 * ratio;
    for (const shift of [-size, 0, size]) { t.beginPath(); t.moveTo(shift, size); t.lineTo(shift + size, 0); t.stroke(); }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  function nice(step) {
    const power = 10 ** Math.floor(Math.log10(step)), n = step / power;
    return power * (n <= 1 ? 1 : n <= 2 ? 2 : n <= 5 ? 5 : 10);
  }

  function paintAxis() {
    const seconds = (view.to - view.from) * head.tick, step = nice(seconds / Math.max(2, (width - LEFT) / 110));
    const from = view.from * head.tick;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (let n = Math.ceil(from / step); n * step <= view.to * head.tick; n++) {
      const x = xOf(n * step / head.tick);
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(x), OVERVIEW + 4, 1, height - OVERVIEW - 4);
      pen.fillStyle = colours.soft;
      pen.fillText(time(n * step, step), x + 4, OVERVIEW + AXIS / 2);
    }
  }

  function time(seconds, step) {
    if (seconds === 0) return "0";
    const unit = step >= 0.1 || seconds >= 100 ? ["s", 1] : step >= 1e-4 ? ["ms", 1e3] : ["µs", 1e6];
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step * unit[1]) + 1e-9)));
    return (seconds * unit[1]).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " " + unit[0];
  }

  function duration(ticks) {
    const s = ticks * head.tick;
    return s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
  }

  // A counter over time as a filled step line.
  function paintCounter(data, values, top, y, colour, filled) {
    const peak = peaks(values, data.dispatched, view.from, view.to, Math.ceil(width - LEFT));
    pen.beginPath();
    pen.moveTo(LEFT, y + STRIP);
    for (let x = 0; x < peak.length; x++) pen.lineTo(LEFT + x, y + STRIP - (STRIP - 2) * Math.min(1, peak[x] / top));
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1.4;
    pen.stroke();
    if (filled) { pen.lineTo(width, y + STRIP); pen.globalAlpha = 0.25; pen.fill(); pen.globalAlpha = 1; }
  }

  const topQueue = counters ? Math.max(largest(counters.data.running), largest(counters.data.waiting)) : 1;
  function largest(values) {
    let top = 1;
    for (let i = 0; i < values.length; i++) if (values[i] > top) top = values[i];
    return top;
  }

  function draw() {
    const started = performance.now();
    const now = window.devicePixelRatio || 1, across = picture.clientWidth;
    if (across !== width || now !== ratio) {
      ratio = now;
      width = across;
      for (const canvas of [drawing, overlay]) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.height = height + "px";
      }
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11.5px " + family;
    if (several) LEFT = Math.min(0.24 * width, 18 + Math.max(...runs.map(run => pen.measureText(run.label).width)));
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, height);
    if (!colours.pattern || colours.pattern.ratio !== ratio) colours.pattern = { ratio, hatch: makeHatch() };
    paintAxis();
    paintOverview();
    for (const l of lanes) {
      const low = above(l.end, view.from), high = above(l.begin, view.to);
      if (high - low > (width - LEFT) / 3) paintColumns([l], view.from, view.to, LEFT, l.y, width - LEFT, lane);
      else paintBoxes(l, low, high);
      title("stage " + l.stage, l.y + lane / 2);
    }
    if (several) for (const run of runs) heading(run);
    if (counters) {
      const y = stripsTop, z = y + STRIP + GAP, data = counters.data;
      paintCounter(data, data.kv, Math.max(1, counters.blocks), y, colours.kv, true);
      paintCounter(data, data.running, topQueue, z, colours.fill[0], true);
      paintCounter(data, data.waiting, topQueue, z, colours.queue, false);
      title("KV", y + STRIP / 2);
      scaleOf(counters.blocks.toLocaleString("en") + " blocks", y);
      scaleOf(topQueue.toLocaleString("en") + " requests", z);
      title("running", z + STRIP / 2 - 7, colours.fill[0]);
      title("waiting", z + STRIP / 2 + 7, colours.queue);
    }
    mark();
    picture.dataset.ms = (performance.now() - started).toFixed(1);  // what the frame took
  }

  function heading(run) {
    const y = run.top + HEADING / 2 + 2;
    pen.fillStyle = colours.panel;
    pen.fillRect(0, run.top, width, HEADING);
    pen.fillStyle = colours.line;
    pen.fillRect(0, run.top, width, 1);
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.ink;
    pen.font = "600 13px " + family;
    pen.fillText(run.label, 28, y);
    const after = 28 + pen.measureText(run.label).width + 14;
    pen.fillStyle = colours.runs[run.colour];
    pen.beginPath();
    pen.roundRect(10, y - 6, 12, 12, 3);
    pen.fill();
    pen.font = "11.5px " + family;
    pen.fillStyle = colours.soft;
    if (after + pen.measureText(run.note).width < width) pen.fillText(run.note, after, y);
  }

  function title(text, y, colour) {
    pen.fillStyle = colours.panel;
    pen.fillRect(0, y - 9, LEFT - 2, 18);
    pen.fillStyle = colour || colours.soft;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, 10, y);
  }

  function scaleOf(text, y) {  // what the top of a strip stands for
    pen.fillStyle = colours.strong;
    pen.fillRect(LEFT, y, width - LEFT, 1);
    const w = pen.measureText(text).width;
    pen.fillStyle = colours.panel;
    pen.globalAlpha = 0.8;
    pen.fillRect(width - 10 - w, y + 1, w + 10, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.soft;
    pen.textAlign = "right";
    pen.textBaseline = "top";
    pen.fillText(text, width - 6, y + 3);
  }

  let overviewImage = null;  // drawn once a width
  function paintOverview() {
    const key = [width, ratio, colours.panel].join();
    if (!overviewImage || overviewImage.key !== key) {
      runs.forEach((run, n) => {
        const mine = lanes.filter(l => l.run === run);
        if (mine.length) paintColumns(mine, 0, span, LEFT, 2 + n * STRIPS, width - LEFT, STRIPS - 3);
      });
      const w = Math.max(1, Math.round((width - LEFT) * ratio)), h = Math.round(OVERVIEW * ratio);
      overviewImage = { key, data: pen.getImageData(Math.round(LEFT * ratio), 0, w, h) };
    } else pen.putImageData(overviewImage.data, Math.round(LEFT * ratio), 0);
    if (several) runs.forEach((run, n) => title(fitting(run.label, LEFT - 14), 1 + (n + 0.5) * STRIPS));
    else title("all", OVERVIEW / 2);
    const a = LEFT + view.from / span * (width - LEFT), b = LEFT + view.to / span * (width - LEFT);
    pen.fillStyle = colours.panel;
    pen.globalAlpha = 0.55;
    pen.fillRect(LEFT, 0, a - LEFT, OVERVIEW);
    pen.fillRect(b, 0, width - b, OVERVIEW);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.mark;
    pen.lineWidth = 1.5;
    pen.strokeRect(a + 0.75, 0.75, Math.max(2, b - a - 1.5), OVERVIEW - 1.5);
  }

  function fitting(text, room) {
    while (text.length > 2 && pen.measureText(text).width > room) text = text.slice(0, -2).trimEnd() + "…";
    return text;
  }

  // The hovered micro-batch (or the one awaited) is outlined on every stage.
  function mark() {
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    if (pick) {
      ink.fillStyle = colours.mark;
      ink.globalAlpha = 0.2;
      ink.fillRect(Math.min(pick.from, pick.to), 0, Math.abs(pick.to - pick.from), OVERVIEW);
      ink.globalAlpha = 1;
    }
    if (!hover || hover.row === undefined || hover.row === NONE) return;
    ink.strokeStyle = colours.mark;
    ink.lineWidth = 2;
    for (const l of lanes) {
      const i = above(l.row, hover.row) - 1;
      if (l.run !== hover.lane.run || i < 0 || l.row[i] !== hover.row) continue;
      const a = Math.max(LEFT, xOf(l.begin[i])), b = Math.min(width, xOf(l.end[i]));
      if (b >= LEFT && a <= width) ink.strokeRect(a, l.y - 1, Math.max(1.5, b - a), lane + 2);
    }
    if (hover.idle !== undefined) {
      const l = hover.lane, a = Math.max(LEFT, xOf(l.idleStart[hover.idle])), b = Math.min(width, xOf(l.idleEnd[hover.idle]));
      ink.setLineDash([4, 3]);
      ink.strokeRect(a, l.y - 1, Math.max(1.5, b - a), lane + 2);
      ink.setLineDash([]);
    }
  }

  function find(x, y) {
    if (x < LEFT) return null;
    const tick = tickOf(x);
    if (counters && y >= stripsTop) {
      const row = above(counters.data.dispatched, tick) - 1;
      return row >= 0 ? { counters: row } : null;
    }
    const l = lanes.find(l => y >= l.y && y <= l.y + lane);
    if (!l) return null;
    const i = above(l.begin, tick) - 1;
    if (i >= 0 && l.end[i] > tick) return { lane: l, box: i, row: l.row[i] };
    const j = above(l.idleStart, tick) - 1;
    return j >= 0 && l.idleEnd[j] > tick ? { lane: l, idle: j, row: l.idleRow[j] } : null;
  }

  function madeOf(data, row) {
    const chunks = data.chunks[row], prefill = data.prefill[row], decodes = data.decodes[row], parts = [];
    if (chunks) parts.push((chunks === 1 ? "chunk " : chunks + " chunks ") + prefill);
    if (decodes) parts.push(decodes + (decodes === 1 ? " decode" : " decodes"));
    return parts.join(" + ") || "empty";
  }

  function requestsOf(data, row) {
    const from = data.partsFrom[row], to = data.partsFrom[row + 1], named = [];
    for (let i = from; i < to; i++) named.push(data.parts[i]);
    const rest = data.chunks[row] + data.decodes[row] - named.length;
    return named.join(", ") + (rest > 0 ? ` and ${rest} more` : "");
  }

  function describe(at) {
    const rows = [], l = at.lane, { data, blocks } = (l ? l.run : counters);
    let title, note = "";
    if (at.counters !== undefined) {
      const row = at.counters;
      title = `at the dispatch of step ${data.step[row]}`;
      rows.push(["KV blocks", `${data.kv[row].toLocaleString("en")} of ${blocks.toLocaleString("en")}`],
        ["running", data.running[row]], ["waiting", data.waiting[row]]);
    } else if (at.box !== undefined) {
      const i = at.box, row = at.row, took = l.end[i] - l.begin[i];
      title = `step ${data.step[row]} on stage ${l.stage}: ${madeOf(data, row)}`;
      rows.push(["requests", requestsOf(data, row)], ["measured", duration(took)]);
      if (l.predicted && l.predicted[i]) {
        const off = 100 * (l.predicted[i] / Math.max(1, took) - 1);
        rows.push(["predicted", `${duration(l.predicted[i])} (${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(0)}%)`]);
      }
      rows.push(["began", (l.begin[i] * head.tick).toFixed(4) + " s"]);
      if (data.decodes[row]) rows.push(["decode context", data.context[row].toLocaleString("en") + " tokens"]);
      const before = i ? l.begin[i] - l.end[i - 1] : 0;
      if (before > 0) rows.push(["idle before", duration(before)]);
    } else {
      const j = at.idle;
      title = `${head.causes[l.cause[j]].name}: ${duration(l.idleEnd[j] - l.idleStart[j])}`;
      note = head.causes[l.cause[j]].meaning;
      rows.push(["stage", l.stage], ["from", (l.idleStart[j] * head.tick).toFixed(4) + " s"]);
      if (at.row !== NONE) rows.push(["before", `step ${data.step[at.row]}: ${madeOf(data, at.row)}`]);
    }
    if (several) rows.unshift(["run", l.run.label]);
    tip.replaceChildren();
    const add = (parent, tag, text) => { const e = document.createElement(tag); e.textContent = text; parent.append(e); return e; };
    add(tip, "b", title);
    const list = add(tip, "dl", "");
    for (const [name, value] of rows) { add(list, "dt", name); add(list, "dd", value); }
    if (note) add(tip, "p", note);
  }

  function point(x, y) {
    hover = find(x, y);
    tip.hidden = !hover;
    if (hover) {
      describe(hover);
      const w = tip.offsetWidth, h = tip.offsetHeight;
      tip.style.left = Math.max(4, x + 16 + w > width ? x - w - 12 : x + 16) + "px";
      tip.style.top = Math.max(4, Math.min(height - h - 4, y + 14)) + "px";
    }
    mark();
  }

  let waiting = false;
  function show(from, to) {
    const least = Math.max(20, 2e-5 / head.tick), size = Math.min(span, Math.max(least, to - from));
    from = Math.max(0, Math.min(span - size, from));
    view = { from, to: from + size };
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    }
  }

  function zoom(factor, x) {
    const at = tickOf(x === undefined ? LEFT + (width - LEFT) / 2 : Math.max(LEFT, x));
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  const move = share => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  const act = { in: () => zoom(1 / 1.6), out: () => zoom(1.6), fit: () => show(0, span), left: () => move(-0.4), right: () => move(0.4) };

  const local = event => { const r = overlay.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  let drag = null, pick = null;
  overlay.addEventListener("wheel", event => {
    event.preventDefault();
    tip.hidden = true;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      move((event.deltaX || event.deltaY) / Math.max(200, width));
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), local(event)[0]);
  }, { passive: false });
  overlay.addEventListener("pointerdown", event => {
    const [x, y] = local(event);
    overlay.setPointerCapture(event.pointerId);
    if (y < OVERVIEW) pick = { from: x, to: x };
    else { drag = { x, from: view.from }; overlay.classList.add("moving"); }
  });
  overlay.addEventListener("pointermove", event => {
    const [x, y] = local(event);
    if (pick) { pick.to = Math.max(LEFT, Math.min(width, x)); mark(); }
    else if (drag) {
      const from = drag.from - (x - drag.x) / scale();
      tip.hidden = true;
      show(from, from + (view.to - view.from));
    } else point(x, y);
  });
  overlay.addEventListener("pointerup", () => {
    if (pick) {
      const ticks = [pick.from, pick.to].sort((a, b) => a - b).map(x => (x - LEFT) / (width - LEFT) * span);
      const half = (view.to - view.from) / 2, middle = (ticks[0] + ticks[1]) / 2;
      if (Math.abs(pick.to - pick.from) > 4) show(ticks[0], ticks[1]);
      else show(middle - half, middle + half);
    }
    pick = drag = null;
    overlay.classList.remove("moving");
  });
  overlay.addEventListener("pointerleave", () => { hover = null; tip.hidden = true; mark(); });
  overlay.addEventListener("dblclick", act.fit);
  document.querySelectorAll(".buttons button").forEach(b => b.addEventListener("click", act[b.dataset.do]));
  picture.addEventListener("keydown", event => {
    const name = { "+": "in", "=": "in", "-": "out", "0": "fit", ArrowLeft: "left", ArrowRight: "right" }[event.key];
    if (name) { event.preventDefault(); act[name](); }
  });
  new ResizeObserver(() => { if (picture.clientWidth !== width) draw(); }).observe(picture);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = readColours(); draw(); });
  draw();
  document.body.dataset.drawn = String(Math.round(performance.now()));
})();
