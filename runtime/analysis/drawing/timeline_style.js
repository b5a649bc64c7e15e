// What the timeline's picture is made with and that depends on nothing else: colours, hatches, times as text.

// The colour as a pixel of ImageData read as Uint32: RGBA, lowest byte first.
function pixel(hex) {
  const n = parseInt(hex.slice(1), 16);
  return ((255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
}

// The pattern of a hatch, by the name that the style sheet has for it.
function makeHatch(pen, name, colour, ratio) {
  const tile = document.createElement("canvas"), size = Math.round(7 * ratio), half = size / 2;
  tile.width = tile.height = size;
  const t = tile.getContext("2d");
  t.strokeStyle = t.fillStyle = colour;
  t.lineWidth = 1.6 * ratio;
  const line = (...ends) => { t.beginPath(); t.moveTo(ends[0], ends[1]); t.lineTo(ends[2], ends[3]); t.stroke(); };
  for (const shift of [-size, 0, size]) {
    if (name === "slash" || name === "cross") line(shift, size, shift + size, 0);
    if (name === "backslash" || name === "cross") line(shift, 0, shift + size, size);
  }
  if (name === "upright") line(half, 0, half, size);
  if (name === "level") line(0, half, size, half);
  if (name === "dots") { t.beginPath(); t.arc(half, half, 1.5 * ratio, 0, 7); t.fill(); }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// The next value of 1, 2, 5, 10, 20, ... at or above `interval`.
function roundUp(interval) {
  const power = 10 ** Math.floor(Math.log10(interval)), n = interval / power;
  return power * (n <= 1 ? 1 : n <= 2 ? 2 : n <= 5 ? 5 : 10);
}

// A moment on an axis whose labels are `interval` seconds apart.
function timeText(seconds, interval) {
  if (seconds === 0) return "0";
  const unit = interval >= 0.1 || seconds >= 100 ? ["s", 1] : interval >= 1e-4 ? ["ms", 1e3] : ["µs", 1e6];
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(interval * unit[1]) + 1e-9)));
  return (seconds * unit[1]).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " " + unit[0];
}

// The largest value, at least 1.
function largest(values) {
  let top = 1;
  for (let i = 0; i < values.length; i++) if (values[i] > top) top = values[i];
  return top;
}
