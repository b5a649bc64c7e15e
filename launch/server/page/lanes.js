// The lanes: what each stage did in the last seconds. Boxes where they are wide enough to see, else shares by column.
class Lanes {
  static LONGEST = 10;  // seconds
  static COLUMN = 3;  // CSS pixels
  static UNITS_PER_S = 1e5;  // of the engine's times

  constructor(picture) {
    this.canvas = picture.querySelector("canvas");
    this.tip = picture.querySelector(".tip");
    this.pen = this.canvas.getContext("2d", { alpha: false });
    this.seconds = Lanes.LONGEST;  // that are shown
    this.parts = [];  // messages of spans, oldest first
    this.stages = 0;
    this.causes = [];
    this.left = 62;
    this.frozen = null;  // the right end of the time axis while it stands still
    this.tail = null;  // the ends of the stages since which they wait for a request, or for a repair
    this.tailCause = "starved-no-request";
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.resize()).observe(picture);
    this.readColours();
  }

  begin(stages, causes) {
    this.parts = [];
    this.stages = stages;
    this.causes = causes;
    this.readColours();
    this.resize();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue("--" + name).trim();
    const names = ["chunk", "decode", ...this.causes.map(cause => cause.css)];
    this.colours = {
      fill: names.map(colour), panel: colour("panel"), ink: colour("ink"), soft: colour("soft"), line: colour("line"),
      onChunk: colour("on-chunk"), onDecode: colour("on-decode"), hatch: colour("hatch"),
    };
    const ratio = devicePixelRatio || 1;
    this.hatches = {};
    for (const { hatch } of this.causes) this.hatches[hatch] ??= makeHatch(this.pen, hatch, this.colours.hatch, ratio);
    this.family = getComputedStyle(document.body).fontFamily;
  }

  add(part) {
    this.parts.push(part);
    const oldest = part.origin - 2 * Lanes.LONGEST;
    while (this.parts.length && this.parts[0].origin < oldest && this.frozen === null) this.parts.shift();
    while (this.parts.length > 600) this.parts.shift();
  }

  resize() {
    const width = this.canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    const found = [[2, 56], [4, 44], [8, 32], [Infinity, 20]].find(([most]) => this.stages <= most);
    this.lane = found[1];
    this.axis = 24;
    this.width = width;
    this.height = this.axis + Math.max(1, this.stages) * (this.lane + 6);
    this.left = width < 500 ? 50 : 62;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = this.height + "px";
    if (this.to !== undefined) this.draw(this.to);
  }

  top(stage) { return this.axis + stage * (this.lane + 6); }
  xOf(time) { return this.left + (time - this.from) / this.seconds * (this.width - this.left); }

  // The last end of a computation that has come.
  get newest() {
    const part = this.parts[this.parts.length - 1];
    return Math.max(...part.end.map(end => part.origin + end[end.length - 1] / Lanes.UNITS_PER_S));
  }

  // Draws the seconds before `now`, on the engine's clock; of a shorter time those before the newest span.
  draw(now) {
    let to = now;
    if (this.frozen !== null) to = this.frozen;
    else if (this.seconds < Lanes.LONGEST && !this.tail && this.parts.length) to = this.newest;
    this.to = to;
    this.from = to - this.seconds;
    const pen = this.pen, ratio = devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = this.colours.panel;
    pen.fillRect(0, 0, this.width, this.height);
    this.drawAxis();
    for (let stage = 0; stage < this.stages; stage++) this.drawLane(stage);
    this.canvas.dataset.boxes = this.drawn;
  }

  drawAxis() {
    const pen = this.pen;
    pen.font = "12px " + this.family;
    pen.textBaseline = "middle";
    const step = roundUp(this.seconds / (this.width < 500 ? 2 : this.width < 900 ? 5 : 10));
    for (let n = 0; n * step <= this.seconds * 1.001; n++) {
      const back = n * step;
      const x = this.xOf(this.to - back);
      pen.fillStyle = this.colours.line;
      pen.fillRect(Math.min(x, this.width - 1), this.axis - 5, 1, this.height);
      pen.fillStyle = this.colours.soft;
      pen.textAlign = back === 0 ? "right" : back >= this.seconds * 0.999 ? "left" : "center";
      pen.fillText(back === 0 ? (this.frozen === null ? "now" : "held") : "−" + timeText(back, step), x, 10);
    }
    pen.textAlign = "left";
    for (let stage = 0; stage < this.stages; stage++) {
      pen.fillStyle = this.colours.ink;
      pen.fillText(`stage ${stage}`, 4, this.top(stage) + this.lane / 2);
    }
    this.drawn = 0;
  }

  // Whether the stage's boxes are wide enough to be drawn one by one.
  isCoarse(stage) {
    let count = 0, busy = 0;
    for (const { begin, end } of this.parts) {
      count += begin[stage].length;
      for (let i = 0; i < begin[stage].length; i++) busy += end[stage][i] - begin[stage][i];
    }
    return count > 0 && busy / Lanes.UNITS_PER_S / count / this.seconds * (this.width - this.left) >= 2;
  }

  drawLane(stage) {
    const y = this.top(stage), kinds = 2 + this.causes.length, isCoarse = this.isCoarse(stage);
    const columns = Math.max(0, Math.ceil((this.width - this.left) / Lanes.COLUMN)), sums = new Float32Array(columns * kinds);
    const scale = (this.width - this.left) / Lanes.COLUMN / this.seconds;
    let last = -Infinity;
    const share = (from, to, kind, weight) => {
      let a = Math.max(0, (from - this.from) * scale);
      const b = Math.min(columns, (to - this.from) * scale);
      for (let i = Math.floor(a); a < b; i++, a = i) sums[i * kinds + kind] += weight * (Math.min(i + 1, b) - a);
    };
    for (const part of this.parts) {
      const at = units => part.origin + units / Lanes.UNITS_PER_S;
      const begin = part.begin[stage], end = part.end[stage];
      if (!begin.length) continue;
      last = at(end[end.length - 1]);
      if (last < this.from || at(Math.min(begin[0], part.idle_start[stage][0] ?? begin[0])) > this.to) continue;
      if (isCoarse) {
        this.drawIdle(part, stage, at, y);
        this.drawBoxes(part, stage, at, y);
        continue;
      }
      for (let i = 0; i < begin.length; i++) {
        const prefill = part.prefill[i], tokens = prefill + part.decodes[i] || 1;
        if (prefill) share(at(begin[i]), at(end[i]), 0, prefill / tokens);
        if (prefill < tokens) share(at(begin[i]), at(end[i]), 1, 1 - prefill / tokens);
      }
      const starts = part.idle_start[stage], ends = part.idle_end[stage], causes = part.cause[stage];
      for (let i = 0; i < starts.length; i++) share(at(starts[i]), at(ends[i]), 2 + causes[i], 1);
      this.drawn += begin.length;
    }
    if (!isCoarse) this.drawShares(sums, columns, kinds, y);
    const since = this.tail && this.tail.length ? Math.max(this.tail[stage], last) : this.tail ? this.from : null;
    if (since !== null && since < this.to) {
      this.fillIdle(this.causes.findIndex(cause => cause.css === this.tailCause), since, this.to, y);
    }
  }

  drawShares(sums, columns, kinds, y) {
    const pen = this.pen, order = [1, 0];
    for (let kind = 2; kind < kinds; kind++) order.push(kind);
    for (const kind of order) {
      pen.fillStyle = this.colours.fill[kind];
      for (let i = 0; i < columns; i++) {
        const value = Math.min(1, sums[i * kinds + kind]);
        if (value < 0.004) continue;
        let below = 0;
        for (const before of order) {
          if (before === kind) break;
          below += sums[i * kinds + before];
        }
        const bottom = y + this.lane * (1 - Math.min(1, below));
        pen.fillRect(this.left + i * Lanes.COLUMN, bottom - this.lane * value, Lanes.COLUMN, this.lane * value);
      }
    }
  }

  drawIdle(part, stage, at, y) {
    const starts = part.idle_start[stage], ends = part.idle_end[stage], causes = part.cause[stage];
    for (let i = 0; i < starts.length; i++) this.fillIdle(causes[i], at(starts[i]), at(ends[i]), y);
  }

  fillIdle(cause, start, end, y) {
    const a = Math.max(this.left, this.xOf(start)), b = Math.min(this.width, this.xOf(end)), pen = this.pen;
    if (b <= a) return;
    pen.fillStyle = this.colours.fill[2 + cause];
    pen.fillRect(a, y, b - a, this.lane);
    pen.fillStyle = this.hatches[this.causes[cause].hatch];
    pen.fillRect(a, y, b - a, this.lane);
    if (b - a > 76) this.label(this.causes[cause].short, a, b, y + this.lane / 2, this.colours.ink, this.colours.panel);
  }

  drawBoxes(part, stage, at, y) {
    const begin = part.begin[stage], end = part.end[stage], pen = this.pen;
    for (let i = 0; i < begin.length; i++) {
      const a = Math.max(this.left, this.xOf(at(begin[i]))), b = Math.min(this.width, this.xOf(at(end[i])));
      if (b <= a) continue;
      const chunk = part.prefill[i], decodes = part.decodes[i], w = Math.max(0.5, b - a - (b - a > 5 ? 1 : 0));
      let cut = y + this.lane * chunk / (chunk + decodes || 1);
      if (chunk && decodes) cut = Math.max(y + 3, Math.min(y + this.lane - 3, cut));  // both parts stay visible
      pen.fillStyle = this.colours.fill[0];
      pen.fillRect(a, y, w, cut - y);
      pen.fillStyle = this.colours.fill[1];
      pen.fillRect(a, cut, w, y + this.lane - cut);
      if (w > 30 && chunk && cut - y >= 14) this.label(String(chunk), a, a + w, (y + cut) / 2, this.colours.onChunk);
      if (w > 30 && decodes && y + this.lane - cut >= 14) {
        this.label(decodes + "d", a, a + w, (cut + y + this.lane) / 2, this.colours.onDecode);
      }
      this.drawn++;
    }
  }

  label(text, a, b, y, colour, ground) {
    const pen = this.pen;
    pen.font = "11px " + this.family;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const w = pen.measureText(text).width;
    if (w + 4 > b - a) return;
    if (ground) {
      pen.fillStyle = ground;
      pen.fillRect((a + b - w) / 2 - 4, y - 8, w + 8, 16);
    }
    pen.fillStyle = colour;
    pen.fillText(text, (a + b) / 2, y);
  }

  // Tells what is under the pointer.
  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const stage = Math.floor((y - this.axis) / (this.lane + 6));
    const time = this.from + (x - this.left) / (this.width - this.left) * this.seconds;
    const found = stage >= 0 && stage < this.stages && x >= this.left ? this.find(stage, time) : null;
    this.tip.hidden = !found;
    if (!found) return;
    const heading = document.createElement("b");
    heading.textContent = found[0];
    const text = document.createElement("p");
    text.textContent = found[1];
    this.tip.replaceChildren(heading, text);
    this.tip.style.left = Math.max(4, Math.min(x + 14, this.width - this.tip.offsetWidth - 4)) + "px";
    this.tip.style.top = Math.max(2, Math.min(y + 14, this.height - this.tip.offsetHeight - 2)) + "px";
  }

  find(stage, time) {
    const ms = seconds => timeText(seconds, seconds / 100);
    for (const part of this.parts) {
      const units = (time - part.origin) * Lanes.UNITS_PER_S, begin = part.begin[stage], end = part.end[stage];
      const i = begin.findIndex((start, n) => start <= units && units < end[n]);
      if (i >= 0) {
        const tokens = [];
        if (part.prefill[i]) tokens.push(counted(part.prefill[i], "chunk token"));
        if (part.decodes[i]) tokens.push(counted(part.decodes[i], "decode"));
        const name = `micro-batch ${(part.first + i).toLocaleString("en")} on stage ${stage}`;
        return [name, `${tokens.join(", ")}; ${ms((end[i] - begin[i]) / Lanes.UNITS_PER_S)}`];
      }
      const starts = part.idle_start[stage], ends = part.idle_end[stage];
      const gap = starts.findIndex((start, n) => start <= units && units < ends[n]);
      if (gap >= 0) {
        const cause = this.causes[part.cause[stage][gap]];
        return [`idle: ${cause.name}, ${ms((ends[gap] - starts[gap]) / Lanes.UNITS_PER_S)}`, cause.meaning];
      }
    }
    return null;
  }
}
