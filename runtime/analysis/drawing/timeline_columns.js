"use strict";
// Unpacks a run's columns, searches them and sums them over stretches of time. A lane is one stage of one run.

// Reads the columns that `timeline_columns.py` packed: a deflated buffer in which each column is stored as planes of its
// bytes, lowest byte first. Of a column that ascends ("d32") it holds the differences.
async function unpack(layout, element) {
  const binary = atob(element.textContent.trim()), packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return Object.fromEntries(Object.entries(layout).map(([name, [kind, offset, n]]) => {
    if (kind === "u8") return [name, bytes.subarray(offset, offset + n)];
    const values = new Uint32Array(n);
    let last = 0;
    for (let i = 0; i < n; i++) {
      const j = offset + i;
      const value = bytes[j] | bytes[j + n] << 8 | bytes[j + 2 * n] << 16 | bytes[j + 3 * n] << 24;
      values[i] = last = kind === "d32" ? last + value >>> 0 : value;
    }
    return [name, values];
  }));
}

// The first index whose value is above x. The values must ascend.
function above(values, x) {
  let low = 0, high = values.length;
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] > x) high = mid; else low = mid + 1; }
  return low;
}

// The share of a micro-batch's tokens that belong to chunks.
function chunkShare(data, row) {
  const chunk = data.prefill[row], decode = data.decodes[row];
  return chunk + decode ? chunk / (chunk + decode) : 0;
}

// A micro-batch's composition as text: "chunk 256 + 9 decodes".
function composition(data, row) {
  const chunks = data.chunks[row], prefill = data.prefill[row], decodes = data.decodes[row], parts = [];
  if (chunks) parts.push((chunks === 1 ? "chunk " : chunks + " chunks ") + prefill);
  if (decodes) parts.push(decodes + (decodes === 1 ? " decode" : " decodes"));
  return parts.join(" + ") || "tokens unknown";
}

// The requests that the columns name for a micro-batch, as text; the others are counted.
function requestsOf(data, row) {
  const from = data.partsFrom[row], to = data.partsFrom[row + 1], named = [];
  for (let i = from; i < to; i++) named.push(data.parts[i]);
  const rest = data.chunks[row] + data.decodes[row] - named.length;
  return named.join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}

// Splits [from, to) into `columns` stretches. Returns, for each stretch and kind of time, the fraction of the stretch
// that the lane spends on that kind.
function accumulate(l, from, to, columns, kinds) {
  const sums = new Float32Array(columns * kinds), k = columns / (to - from), data = l.run.data;
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
  const stop = above(l.begin, to);
  for (let i = above(l.end, from); i < stop; i++) {
    const chunk = chunkShare(data, l.row[i]);
    if (chunk > 0) add(l.begin[i], l.end[i], 0, chunk);
    if (chunk < 1) add(l.begin[i], l.end[i], 1, 1 - chunk);
  }
  const idleStop = above(l.idleStart, to);
  for (let i = above(l.idleEnd, from); i < idleStop; i++) add(l.idleStart[i], l.idleEnd[i], 2 + l.cause[i], 1);
  return sums;
}

// Returns what `accumulate` returns. If a long run is zoomed out, it averages over sums that each lane computes once.
const SLOTS = 32768;
function sumsOf(l, from, to, columns, kinds, span) {
  const slots = (to - from) / span * SLOTS / columns;  // per column
  if (l.begin.length < SLOTS || slots < 2) return accumulate(l, from, to, columns, kinds);
  if (!l.coarse) l.coarse = accumulate(l, 0, span, SLOTS, kinds);
  const sums = new Float32Array(columns * kinds), first = from / span * SLOTS;
  for (let column = 0; column < columns; column++) {
    const a = Math.round(first + column * slots), b = Math.min(SLOTS, Math.round(first + (column + 1) * slots));
    for (let i = a; i < b; i++)
      for (let kind = 0; kind < kinds; kind++) sums[column * kinds + kind] += l.coarse[i * kinds + kind] / (b - a);
  }
  return sums;
}

// Splits [from, to] into `columns` stretches and returns the largest value of a counter in each. The counter keeps
// values[i] from at[i] to at[i + 1]. Where many rows fall into one column, they are read in blocks of BLOCK rows.
const BLOCK = 16, maxima = new WeakMap();
function peaks(values, at, from, to, columns) {
  const peak = new Float32Array(columns + 1), k = columns / (to - from);
  const low = Math.max(0, above(at, from) - 1), high = above(at, to), size = high - low > 20 * columns ? BLOCK : 1;
  if (size > 1 && !maxima.has(values)) {
    const largest = new Float32Array(Math.ceil(values.length / BLOCK));
    for (let i = 0; i < values.length; i++) if (values[i] > largest[i / BLOCK | 0]) largest[i / BLOCK | 0] = values[i];
    maxima.set(values, largest);
  }
  const highest = size > 1 ? maxima.get(values) : values;
  for (let i = Math.floor(low / size); i * size < high; i++) {
    const next = (i + 1) * size < at.length ? (at[(i + 1) * size] - from) * k : columns;
    const a = Math.max(0, Math.floor((at[i * size] - from) * k)), b = Math.min(columns, Math.max(a, Math.ceil(next)));
    for (let x = a; x <= b; x++) if (highest[i] > peak[x]) peak[x] = highest[i];
  }
  return peak;
}
