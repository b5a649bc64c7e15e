// Draws the pipeline over time: one run, or several below each other on one time axis. The element `head` holds the runs
// and what they share (the tick, the span, the causes). Each run's columns are in an element of their own.
(async () => {
  const head = JSON.parse(document.getElementById("head").textContent);
  const NO_MICRO_BATCH = 0xFFFFFFFF;  // the row of idle time after a stage's last micro-batch
  const span = Math.max(1, head.span), several = head.runs.length > 1;
  const runs = await Promise.all(head.runs.map(async (run, n) =>
    ({ ...run, data: await unpack(run.arrays, document.getElementById("columns" + n)) })));
  const lanes = runs.flatMap(run => Array.from({ length: run.stages }, (_, s) => ({
    run, stage: s, begin: run.data["begin" + s], end: run.data["end" + s], row: run.data["row" + s],
    idleStart: run.data["idleStart" + s], idleEnd: run.data["idleEnd" + s], idleRow: run.data["idleRow" + s],
    cause: run.data["cause" + s], predicted: run.data["predicted" + s],
  })));
  const kinds = 2 + head.causes.length;  // how a stage spends time: on chunks, on decodes, idle by cause

  const picture = document.querySelector(".picture");
  const drawing = picture.querySelector(".drawing");
  const overlay = picture.querySelector(".overlay");
  const tip = picture.querySelector(".tip");
  const pen = drawing.getContext("2d", { alpha: false });
  const ink = overlay.getContext("2d");

  // Layout in CSS pixels, from the top: the overview strips, the axis, then each run with one lane per stage. Several
  // runs have a heading each. A single run has strips for its KV cache and its queue at the bottom.
  const AXIS = 24, GAP = 6, STRIP = 34, HEADING = 26, STRIPS = several ? 15 : 20;
  const OVERVIEW = 2 + runs.length * STRIPS;
  const isUnknown = (run, what) => (run.unknown || []).includes(what);
  const counters = several || !runs.length || !runs[0].data.microBatch.length || isUnknown(runs[0], "kv") ? null : runs[0];
  const stages = Math.max(1, ...runs.map(run => run.stages));
  const laneHeights = several ? [[2, 42], [4, 32], [Infinity, 22]] : [[2, 62], [4, 50], [8, 38], [Infinity, 26]];
  const lane = laneHeights.find(([limit]) => stages <= limit)[1];
  let at = OVERVIEW + AXIS;
  for (const run of runs) {
    run.top = at;
    if (several) at += HEADING;
    for (const l of lanes) if (l.run === run) { l.y = at; at += lane + (several ? 3 : GAP); }
    if (several) at += GAP;
  }
  const stripsTop = at, height = at + (counters ? 2 * (STRIP + GAP) : 0) + 4;
  let LEFT = 66, width = 0, ratio = 1, view = { from: 0, to: span }, colours = readColours(), hover = null;

  const cut = runs.filter(run => run.shown < run.microBatches);
  picture.parentElement.querySelector(".cut").textContent = cut.map(run =>
    `Shown are the first ${run.shown.toLocaleString("en")} of ${run.microBatches.toLocaleString("en")} micro-batches` +
    (several ? ` of ${run.label}.` : ".")).join(" ");

  // A stretch of about 60 micro-batches around the middle of the view.
  function nearView() {
    const middle = (view.from + view.to) / 2, sizes = lanes.filter(l => l.stage === 0 && l.begin.length).map(l => {
      const i = Math.min(l.begin.length - 1, above(l.begin, middle));
      return l.end[Math.min(l.end.length - 1, i + 30)] - l.begin[Math.max(0, i - 30)];
    });
    const half = sizes.length ? Math.max(...sizes) / 2 : span / 2;
    return [middle - half, middle + half];
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue("--" + name).trim();
    const names = ["chunk", "decode", ...head.causes.map(c => c.css)];
    return {
      fill: names.map(colour), pixel: names.map(name => pixel(colour(name))),
      panel: colour("panel"), pixelPanel: pixel(colour("panel")), ink: colour("ink"), soft: colour("soft"),
      line: colour("line"), strong: colour("strong"), mark: colour("mark"), onChunk: colour("on-chunk"),
      onDecode: colour("on-decode"), hatch: colour("hatch"), kv: colour("kv"), queue: colour("queue"),
      ground: colour("ground"), recovery: colour("recovery"), runs: Object.fromEntries(runs.map(run => [run.colour, colour(run.colour)])),
    };
  }

  const family = getComputedStyle(document.body).fontFamily;
  const scale = () => (width - LEFT) / (view.to - view.from);  // CSS pixels per tick
  const xOf = tick => LEFT + (tick - view.from) * scale();
  const tickOf = x => view.from + (x - LEFT) / scale();

  // Paints one column per device pixel: decodes, chunks and idle time by cause, stacked from the bottom, as the average
  // over the lanes `which`.
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
    const y = l.y, data = l.run.data;
    const idleStop = above(l.idleStart, view.to);
    for (let i = above(l.idleEnd, view.from); i < idleStop; i++) {
      const a = Math.max(LEFT, xOf(l.idleStart[i])), b = Math.min(width, xOf(l.idleEnd[i]));
      pen.fillStyle = colours.fill[2 + l.cause[i]];
      pen.fillRect(a, y, b - a, lane);
      pen.fillStyle = colours.pattern.hatches[head.causes[l.cause[i]].hatch];
      pen.fillRect(a, y, b - a, lane);
      if (b - a >= 16) label(head.causes[l.cause[i]].short, a, b, y + lane / 2, colours.ink, colours.fill[2 + l.cause[i]]);
    }
    for (let i = low; i < high; i++) {
      const a = Math.max(LEFT, xOf(l.begin[i])), b = Math.min(width, xOf(l.end[i]));
      const row = l.row[i], chunk = data.prefill[row], decode = data.decodes[row];
      let cut = y + lane * chunkShare(data, row);
      if (chunk && decode) cut = Math.max(y + 3, Math.min(y + lane - 3, cut));  // keeps both parts visible
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
      if (back && b - a >= 16 && w + 8 <= lane) upright(text, (a + b) / 2, y, w);
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

  // Writes a label from bottom to top, for an idle interval that is too narrow for it.
  function upright(text, x, y, w) {
    pen.save();
    pen.translate(x, y);
    pen.rotate(-Math.PI / 2);
    pen.font = "12px " + family;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.panel;
    pen.globalAlpha = 0.82;
    pen.fillRect(-w / 2 - 2, -7, w + 4, 14);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ink;
    pen.fillText(text, 0, 0.5);
    pen.restore();
  }

  function paintAxis() {
    const seconds = (view.to - view.from) * head.tick, interval = roundUp(seconds / Math.max(4, (width - LEFT) / 110));
    const from = view.from * head.tick;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (let n = Math.ceil(from / interval); n * interval <= view.to * head.tick; n++) {
      const x = xOf(n * interval / head.tick);
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(x), OVERVIEW + 4, 1, height - OVERVIEW - 4);
      pen.fillStyle = colours.soft;
      const text = timeText(n * interval, interval);
      if (x + 4 + pen.measureText(text).width < width) pen.fillText(text, x + 4, OVERVIEW + AXIS / 2);
    }
  }

  // Marks across a run's lanes where a fault began, or where the stages stood again.
  function paintFault(run, tick) {
    if (tick < view.from || tick > view.to) return;
    const own = lanes.filter(l => l.run === run);
    pen.fillStyle = colours.recovery;
    pen.fillRect(Math.round(xOf(tick)) - 1, own[0].y - 3, 2, own[own.length - 1].y + lane + 6 - own[0].y);
  }

  function duration(ticks) {
    const s = ticks * head.tick;
    return s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
  }

  // Paints a counter over time as a line, with the area below it filled where `filled` says so.
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
    pen.font = "12px " + family;
    if (several) LEFT = Math.min(0.24 * width, 18 + Math.max(...runs.map(run => pen.measureText(run.label).width)));
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, height);
    if (!colours.pattern || colours.pattern.ratio !== ratio) {
      const names = head.causes.map(c => c.hatch);
      colours.pattern = { ratio, hatches: Object.fromEntries(names.map(name => [name, makeHatch(pen, name, colours.hatch, ratio)])) };
    }
    paintAxis();
    paintOverview();
    for (const l of lanes) {
      const low = above(l.end, view.from), high = above(l.begin, view.to);
      if (high - low > (width - LEFT) / 3) paintColumns([l], view.from, view.to, LEFT, l.y, width - LEFT, lane);
      else paintBoxes(l, low, high);
      title("stage " + l.stage, l.y + lane / 2);
    }
    for (const run of runs) for (const times of run.faults || []) times.forEach(tick => paintFault(run, tick));
    if (several) for (const run of runs) heading(run);
    if (counters) {
      const y = stripsTop, z = y + STRIP + GAP, data = counters.data;
      paintCounter(data, data.kv, Math.max(1, counters.blocks), y, colours.kv, true);
      paintCounter(data, data.running, topQueue, z, colours.fill[0], true);
      paintCounter(data, data.waiting, topQueue, z, colours.queue, false);
      title("KV", y + STRIP / 2);
      stripScale(counters.blocks.toLocaleString("en") + " blocks", y);
      stripScale(topQueue.toLocaleString("en") + " requests", z);
      title("running", z + STRIP / 2 - 8, colours.fill[0]);
      title("waiting", z + STRIP / 2 + 9, colours.queue);
    }
    mark();
    picture.dataset.view = [view.from, view.to].join();  // in ticks
    picture.dataset.ms = (performance.now() - started).toFixed(1);  // milliseconds of this frame
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
    pen.font = "12px " + family;
    pen.fillStyle = colours.soft;
    if (after + pen.measureText(run.note).width < width) pen.fillText(run.note, after, y);
  }

  // Writes what a lane or a line is, with a sample of its colour where it has one.
  function title(text, y, colour) {
    pen.fillStyle = colours.panel;
    pen.fillRect(0, y - 9, LEFT - 2, 18);
    if (colour) { pen.fillStyle = colour; pen.fillRect(2, y - 4, 6, 8); }
    pen.fillStyle = colours.soft;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, 12, y);
  }

  // Writes the value that the top edge of a strip stands for.
  function stripScale(text, y) {
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

  let overviewImage = null;  // kept until the width or the colours change
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

  // Outlines the hovered micro-batch on every stage. Over idle time it outlines the micro-batch that comes next.
  function mark() {
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    if (pick) {
      ink.fillStyle = colours.mark;
      ink.globalAlpha = 0.2;
      ink.fillRect(Math.min(pick.from, pick.to), 0, Math.abs(pick.to - pick.from), OVERVIEW);
      ink.globalAlpha = 1;
    }
    if (!hover || hover.row === undefined || hover.row === NO_MICRO_BATCH) return;
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

  // What lies below the pointer: a box, idle time, or the counters at that moment; null where there is nothing.
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

  // Fills the tooltip with what `find` found.
  function describe(at) {
    const rows = [], l = at.lane, { data, blocks } = (l ? l.run : counters);
    let title, note = "";
    if (at.counters !== undefined) {
      const row = at.counters;
      title = `at the dispatch of micro-batch ${data.microBatch[row]}`;
      rows.push(["KV blocks", `${data.kv[row].toLocaleString("en")} of ${blocks.toLocaleString("en")}`],
        ["running", data.running[row]], ["waiting", data.waiting[row]]);
    } else if (at.box !== undefined) {
      const i = at.box, row = at.row, took = l.end[i] - l.begin[i];
      title = `micro-batch ${data.microBatch[row]} on stage ${l.stage}: ${composition(data, row)}`;
      if (!isUnknown(l.run, "requests")) rows.push(["requests", requestsOf(data, row)]);
      rows.push(["measured", duration(took)]);
      if (l.predicted && l.predicted[i]) {
        const off = 100 * (l.predicted[i] / Math.max(1, took) - 1);
        rows.push(["predicted", `${duration(l.predicted[i])} (${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(0)}%)`]);
      }
      rows.push(["began", (l.begin[i] * head.tick).toFixed(4) + " s"]);
      if (data.decodes[row] && !isUnknown(l.run, "context")) rows.push(["decode context", data.context[row].toLocaleString("en") + " tokens"]);
      const before = i ? l.begin[i] - l.end[i - 1] : 0;
      if (before > 0) rows.push(["idle before", duration(before)]);
    } else {
      const j = at.idle;
      title = `${head.causes[l.cause[j]].name}: ${duration(l.idleEnd[j] - l.idleStart[j])}`;
      note = head.causes[l.cause[j]].meaning;
      rows.push(["stage", l.stage], ["from", (l.idleStart[j] * head.tick).toFixed(4) + " s"]);
      if (at.row !== NO_MICRO_BATCH)
        rows.push(["before", `micro-batch ${data.microBatch[at.row]}: ${composition(data, at.row)}`]);
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

  // Moves the view to [from, to] ticks, within the run and no narrower than 20 µs.
  let frameRequested = false;
  function show(from, to) {
    const narrowest = Math.max(20, 2e-5 / head.tick), size = Math.min(span, Math.max(narrowest, to - from));
    from = Math.max(0, Math.min(span - size, from));
    view = { from, to: from + size };
    if (!frameRequested) {
      frameRequested = true;
      requestAnimationFrame(() => { frameRequested = false; draw(); });
    }
  }

  function zoom(factor, x) {
    const at = tickOf(x === undefined ? LEFT + (width - LEFT) / 2 : Math.max(LEFT, x));
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  const move = fraction => show(view.from + fraction * (view.to - view.from), view.to + fraction * (view.to - view.from));
  const act = { in: () => zoom(1 / 1.6), out: () => zoom(1.6), fit: () => show(0, span), near: () => show(...nearView()), left: () => move(-0.4), right: () => move(0.4) };

  const local = event => { const r = overlay.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  let drag = null, pick = null, pinch = null;
  const fingers = new Map();  // the x of each pointer that is down, by its id

  // The wheel alone scrolls the page. With Ctrl, which a touchpad's pinch sets too, it zooms; sideways it moves.
  overlay.addEventListener("wheel", event => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    tip.hidden = true;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), local(event)[0]);
    else move((event.deltaX || event.deltaY) / Math.max(200, width));
  }, { passive: false });
  overlay.addEventListener("pointerdown", event => {
    const [x, y] = local(event);
    overlay.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, x);
    if (fingers.size === 2) {
      const [a, b] = fingers.values();
      pinch = { apart: Math.max(10, Math.abs(a - b)), size: view.to - view.from, tick: tickOf((a + b) / 2) };
      drag = pick = null;
    } else if (y < OVERVIEW) pick = { from: x, to: x };
    else { drag = { x, from: view.from }; overlay.classList.add("moving"); }
  });
  overlay.addEventListener("pointermove", event => {
    const [x, y] = local(event);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, x);
    if (pinch && fingers.size === 2) {
      const [a, b] = fingers.values(), size = pinch.size * pinch.apart / Math.max(10, Math.abs(a - b));
      const from = pinch.tick - ((a + b) / 2 - LEFT) / (width - LEFT) * size;
      tip.hidden = true;
      show(from, from + size);
    } else if (pick) { pick.to = Math.max(LEFT, Math.min(width, x)); mark(); }
    else if (drag) {
      const from = drag.from - (x - drag.x) / scale();
      tip.hidden = true;
      show(from, from + (view.to - view.from));
    } else if (!pinch) point(x, y);
  });
  overlay.addEventListener("pointerup", event => {
    fingers.delete(event.pointerId);
    if (pick) {
      const ticks = [pick.from, pick.to].sort((a, b) => a - b).map(x => (x - LEFT) / (width - LEFT) * span);
      const half = (view.to - view.from) / 2, middle = (ticks[0] + ticks[1]) / 2;
      if (Math.abs(pick.to - pick.from) > 4) show(ticks[0], ticks[1]);
      else show(middle - half, middle + half);
    } else if (drag && Math.abs(local(event)[0] - drag.x) < 3) point(...local(event));  // a tap shows what is there
    release();
  });
  overlay.addEventListener("pointercancel", event => { fingers.delete(event.pointerId); release(); });
  function release() {
    pick = drag = null;
    if (!fingers.size) pinch = null;
    overlay.classList.remove("moving");
  }
  overlay.addEventListener("pointerleave", event => {
    if (event.pointerType === "touch") return;  // what a tap showed stays
    hover = null;
    tip.hidden = true;
    mark();
  });
  overlay.addEventListener("dblclick", act.fit);
  document.querySelectorAll(".buttons button").forEach(b => b.addEventListener("click", act[b.dataset.do]));
  picture.addEventListener("keydown", event => {
    const name = { "+": "in", "=": "in", "-": "out", "0": "fit", ArrowLeft: "left", ArrowRight: "right" }[event.key];
    if (name) { event.preventDefault(); act[name](); }
  });
  // `#t=12.3-12.9` after the page's address shows these seconds of the run.
  function showAddress() {
    const found = /^#t=([\d.]+)-([\d.]+)$/.exec(location.hash);
    if (!found) return;
    show(Number(found[1]) / head.tick, Number(found[2]) / head.tick);
    picture.parentElement.scrollIntoView({ block: "start" });
  }
  addEventListener("hashchange", showAddress);
  new ResizeObserver(() => { if (picture.clientWidth !== width) draw(); }).observe(picture);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = readColours(); draw(); });
  draw();
  showAddress();
  document.body.dataset.drawn = String(Math.round(performance.now()));
})();
