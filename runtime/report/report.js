"use strict";
(async () => {
  const head = JSON.parse(document.getElementById("head").textContent);
  const data = await unpack(head.arrays, document.getElementById("columns").textContent);
  const NONE = 0xFFFFFFFF;
  const stages = head.stages;
  const span = Math.max(1, head.span);
  const lanes = Array.from({ length: stages }, (_, s) => ({
    begin: data["begin" + s], end: data["end" + s], row: data["row" + s],
    idleStart: data["idleStart" + s], idleEnd: data["idleEnd" + s], idleRow: data["idleRow" + s], cause: data["cause" + s],
  }));

  const picture = document.querySelector(".picture");
  const drawing = picture.querySelector(".drawing");
  const overlay = picture.querySelector(".overlay");
  const tip = picture.querySelector(".tip");
  const pen = drawing.getContext("2d");
  const ink = overlay.getContext("2d");
  const hasCounters = data.step.length > 0;

  // Layout in CSS pixels, from the top: overview strip, axis, a lane a stage, KV and queue strips.
  const LEFT = 66, OVERVIEW = 22, AXIS = 24, GAP = 6, STRIP = 34;
  const lane = stages <= 2 ? 62 : stages <= 4 ? 50 : stages <= 8 ? 38 : 26;
  const lanesTop = OVERVIEW + AXIS;
  const stripsTop = lanesTop + stages * (lane + GAP);
  const height = stripsTop + (hasCounters ? 2 * (STRIP + GAP) : 0) + 4;
  const laneTop = s => lanesTop + s * (lane + GAP);
  let width = 0, ratio = 1, view = firstView(), colours = readColours(), hover = null;

  if (head.shown < head.steps)
    picture.parentElement.querySelector(".cut").textContent =
      `Shown are the first ${head.shown.toLocaleString()} of ${head.steps.toLocaleString()} micro-batches.`;

  async function unpack(layout, text) {
    const binary = atob(text.trim());
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const kinds = { u32: Uint32Array, u8: Uint8Array };
    return Object.fromEntries(Object.entries(layout).map(([name, [kind, offset, length]]) =>
      [name, new kinds[kind](buffer, offset, length)]));
  }

  function firstView() {
    const first = lanes[0];
    if (!first || first.end.length <= 120) return { from: 0, to: span };
    return { from: 0, to: Math.min(span, first.end[80] * 1.02) };
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const of = name => style.getPropertyValue("--" + name).trim();
    const names = ["chunk", "decode", ...head.causes.map(c => c.css)];
    return {
      fill: names.map(of), pixel: names.map(n => pixel(of(n))),
      panel: of("panel"), ink: of("ink"), soft: of("soft"), line: of("line"), strong: of("strong"), mark: of("mark"),
      onChunk: of("on-chunk"), onDecode: of("on-decode"), hatch: of("hatch"), kv: of("kv"), queue: of("queue"),
      ground: of("ground"),
    };
  }

  function pixel(hex) {  // little-endian RGBA
    const n = parseInt(hex.slice(1), 16);
    return ((255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
  }

  // First index whose value is above x (values ascend).
  function above(values, x) {
    let low = 0, high = values.length;
    while (low < high) { const mid = (low + high) >> 1; if (values[mid] > x) high = mid; else low = mid + 1; }
    return low;
  }

  const scale = () => (width - LEFT) / (view.to - view.from);  // CSS pixels a tick
  const xOf = tick => LEFT + (tick - view.from) * scale();
  const tickOf = x => view.from + (x - LEFT) / scale();

  function share(row) {  // of a micro-batch's tokens, those of chunks
    const chunk = data.prefill[row], decode = data.decodes[row];
    return chunk + decode ? chunk / (chunk + decode) : 0;
  }

  // Seconds of each kind in each pixel column, as a fraction of the column: chunk, decode, then the causes.
  function accumulate(which, from, to, columns) {
    const kinds = 2 + head.causes.length, sums = new Float32Array(columns * kinds), k = columns / (to - from);
    const add = (start, end, kind, weight) => {
      let a = (start - from) * k, b = (end - from) * k;
      if (a < 0) a = 0;
      if (b > columns) b = columns;
      if (b <= a) return;
      let i = a | 0;
      const last = Math.min(columns - 1, b | 0);
      if (i === last) { sums[i * kinds + kind] += (b - a) * weight; return; }
      sums[i * kinds + kind] += (i + 1 - a) * weight;
      for (i++; i < last; i++) sums[i * kinds + kind] += weight;
      sums[last * kinds + kind] += (b - last) * weight;
    };
    for (const l of which) {
      const stop = above(l.begin, to);
      for (let i = above(l.end, from); i < stop; i++) {
        const chunk = share(l.row[i]);
        if (chunk > 0) add(l.begin[i], l.end[i], 0, chunk);
        if (chunk < 1) add(l.begin[i], l.end[i], 1, 1 - chunk);
      }
      const idleStop = above(l.idleStart, to);
      for (let i = above(l.idleEnd, from); i < idleStop; i++) add(l.idleStart[i], l.idleEnd[i], 2 + l.cause[i], 1);
    }
    return sums;
  }

  // Columns stacked from the bottom: decodes, chunks, idle by cause.
  function paintColumns(which, from, to, x, y, w, h) {
    const W = Math.max(1, Math.round(w * ratio)), H = Math.max(1, Math.round(h * ratio));
    const kinds = 2 + head.causes.length, sums = accumulate(which, from, to, W);
    const image = pen.createImageData(W, H), out = new Uint32Array(image.data.buffer);
    const order = [1, 0, ...head.causes.map((_, i) => i + 2)];
    for (let column = 0; column < W; column++) {
      let total = 0, at = H;
      for (const kind of order) {
        total += sums[column * kinds + kind] / which.length;
        const top = Math.max(0, Math.round(H * (1 - total)));
        for (let py = top; py < at; py++) out[py * W + column] = colours.pixel[kind];
        if (top < at) at = top;
      }
    }
    pen.putImageData(image, Math.round(x * ratio), Math.round(y * ratio));
  }

  function paintBoxes(l, low, high, y) {
    const patterns = paintBoxes.patterns;
    const idleStop = above(l.idleStart, view.to);
    for (let i = above(l.idleEnd, view.from); i < idleStop; i++) {
      const a = Math.max(LEFT, xOf(l.idleStart[i])), b = Math.min(width, xOf(l.idleEnd[i]));
      pen.fillStyle = colours.fill[2 + l.cause[i]];
      pen.fillRect(a, y, b - a, lane);
      pen.fillStyle = patterns;
      pen.fillRect(a, y, b - a, lane);
      if (b - a > 74) label(shortCause(l.cause[i]), a, b, y + lane / 2, colours.ink, colours.fill[2 + l.cause[i]]);
    }
    for (let i = low; i < high; i++) {
      const a = Math.max(LEFT, xOf(l.begin[i])), b = Math.min(width, xOf(l.end[i]));
      const row = l.row[i], chunk = data.prefill[row], decode = data.decodes[row];
      let cut = y + lane * share(row);
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

  function shortCause(code) { return head.causes[code].name.replace(/^starved: /, "").replace(/^(PB\d).*/, "$1"); }

  function label(text, a, b, y, colour, back) {
    const w = pen.measureText(text).width;
    if (w + 8 > b - a) return;
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

  function rowsInView() {
    const low = Math.max(0, above(data.dispatched, view.from) - 1);
    return [low, above(data.dispatched, view.to)];
  }

  // A counter over time as a filled step line; of what falls in one pixel the largest.
  function paintCounter(values, top, y, colour, filled) {
    const [low, high] = rowsInView(), peak = new Float32Array(Math.ceil(width - LEFT) + 1);
    for (let row = low; row < high; row++) {
      const a = Math.max(0, Math.floor(xOf(data.dispatched[row]) - LEFT));
      const next = row + 1 < values.length ? xOf(data.dispatched[row + 1]) - LEFT : width - LEFT;
      const b = Math.min(peak.length - 1, Math.max(a, Math.ceil(next)));
      for (let x = a; x <= b; x++) if (values[row] > peak[x]) peak[x] = values[row];
    }
    pen.beginPath();
    pen.moveTo(LEFT, y + STRIP);
    for (let x = 0; x < peak.length; x++) pen.lineTo(LEFT + x, y + STRIP - (STRIP - 2) * Math.min(1, peak[x] / top));
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1.4;
    pen.stroke();
    if (filled) { pen.lineTo(width, y + STRIP); pen.globalAlpha = 0.25; pen.fill(); pen.globalAlpha = 1; }
  }

  function most(values) {
    let top = 1;
    for (let i = 0; i < values.length; i++) if (values[i] > top) top = values[i];
    return top;
  }
  const topQueue = Math.max(most(data.running), most(data.waiting));

  function draw() {
    ratio = window.devicePixelRatio || 1;
    width = picture.clientWidth;
    for (const canvas of [drawing, overlay]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11.5px " + getComputedStyle(document.body).fontFamily;
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, height);
    paintBoxes.patterns = makeHatch();
    paintAxis();
    paintOverview();
    lanes.forEach((l, s) => {
      const y = laneTop(s), low = above(l.end, view.from), high = above(l.begin, view.to);
      if (high - low > (width - LEFT) / 3) paintColumns([l], view.from, view.to, LEFT, y, width - LEFT, lane);
      else paintBoxes(l, low, high, y);
      title("stage " + s, y + lane / 2);
    });
    if (hasCounters) {
      const y = stripsTop, z = y + STRIP + GAP;
      paintCounter(data.kv, Math.max(1, head.blocks), y, colours.kv, true);
      paintCounter(data.running, topQueue, z, colours.fill[0], true);
      paintCounter(data.waiting, topQueue, z, colours.queue, false);
      title("KV", y + STRIP / 2);
      scaleOf(head.blocks.toLocaleString("en") + " blocks", y);
      scaleOf(topQueue.toLocaleString("en") + " requests", z);
      title("running", z + STRIP / 2 - 7, colours.fill[0]);
      title("waiting", z + STRIP / 2 + 7, colours.queue);
    }
    mark();
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
      if (stages) paintColumns(lanes, 0, span, LEFT, 2, width - LEFT, OVERVIEW - 4);
      const w = Math.max(1, Math.round((width - LEFT) * ratio)), h = Math.round((OVERVIEW - 2) * ratio);
      overviewImage = { key, data: pen.getImageData(Math.round(LEFT * ratio), 0, w, h) };
    } else pen.putImageData(overviewImage.data, Math.round(LEFT * ratio), 0);
    title("all", OVERVIEW / 2);
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
    lanes.forEach((l, s) => {
      let i = above(l.row, hover.row) - 1;
      if (i < 0 || l.row[i] !== hover.row) return;
      const a = Math.max(LEFT, xOf(l.begin[i])), b = Math.min(width, xOf(l.end[i]));
      if (b >= LEFT && a <= width) ink.strokeRect(a, laneTop(s) - 1, Math.max(1.5, b - a), lane + 2);
    });
    if (hover.idle !== undefined) {
      const l = lanes[hover.stage], a = Math.max(LEFT, xOf(l.idleStart[hover.idle])), b = Math.min(width, xOf(l.idleEnd[hover.idle]));
      ink.setLineDash([4, 3]);
      ink.strokeRect(a, laneTop(hover.stage) - 1, Math.max(1.5, b - a), lane + 2);
      ink.setLineDash([]);
    }
  }

  function find(x, y) {
    if (x < LEFT || y < lanesTop) return null;
    const tick = tickOf(x), stage = Math.floor((y - lanesTop) / (lane + GAP));
    if (stage >= stages) {
      const row = above(data.dispatched, tick) - 1;
      return hasCounters && row >= 0 ? { counters: row } : null;
    }
    if (y - laneTop(stage) > lane) return null;
    const l = lanes[stage], i = above(l.begin, tick) - 1;
    if (i >= 0 && l.end[i] > tick) return { stage, box: i, row: l.row[i] };
    const j = above(l.idleStart, tick) - 1;
    return j >= 0 && l.idleEnd[j] > tick ? { stage, idle: j, row: l.idleRow[j] } : null;
  }

  function madeOf(row) {
    const chunks = data.chunks[row], prefill = data.prefill[row], decodes = data.decodes[row], parts = [];
    if (chunks) parts.push((chunks === 1 ? "chunk " : chunks + " chunks ") + prefill);
    if (decodes) parts.push(decodes + (decodes === 1 ? " decode" : " decodes"));
    return parts.join(" + ") || "empty";
  }

  function requestsOf(row) {
    const from = data.partsFrom[row], to = data.partsFrom[row + 1], named = [];
    for (let i = from; i < to; i++) named.push(data.parts[i]);
    const rest = data.chunks[row] + data.decodes[row] - named.length;
    return named.join(", ") + (rest > 0 ? ` and ${rest} more` : "");
  }

  function describe(at) {
    const rows = [];
    let title, note = "";
    if (at.counters !== undefined) {
      const row = at.counters;
      title = `at the dispatch of step ${data.step[row]}`;
      rows.push(["KV blocks", `${data.kv[row].toLocaleString()} of ${head.blocks.toLocaleString()}`],
        ["running", data.running[row]], ["waiting", data.waiting[row]]);
    } else if (at.box !== undefined) {
      const l = lanes[at.stage], i = at.box, row = at.row;
      title = `step ${data.step[row]} on stage ${at.stage}: ${madeOf(row)}`;
      rows.push(["requests", requestsOf(row)], ["computed", duration(l.end[i] - l.begin[i])],
        ["began", (l.begin[i] * head.tick).toFixed(4) + " s"]);
      if (data.decodes[row]) rows.push(["decode context", data.context[row].toLocaleString() + " tokens"]);
      const before = i ? l.begin[i] - l.end[i - 1] : 0;
      if (before > 0) rows.push(["idle before", duration(before)]);
    } else {
      const l = lanes[at.stage], j = at.idle;
      title = `${head.causes[l.cause[j]].name}: ${duration(l.idleEnd[j] - l.idleStart[j])}`;
      note = head.causes[l.cause[j]].meaning;
      rows.push(["stage", at.stage], ["from", (l.idleStart[j] * head.tick).toFixed(4) + " s"]);
      if (at.row !== NONE) rows.push(["before", `step ${data.step[at.row]}: ${madeOf(at.row)}`]);
    }
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
