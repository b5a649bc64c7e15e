// The newest faults of the pipeline: what failed, what is computed again, and how long each part of the repair took.
class Faults {
  constructor(section, list, legend) {
    Object.assign(this, { section, list, legend, shown: "" });
  }

  // faults: of the engine's record, oldest first. now: on its clock, in seconds.
  show(faults, now) {
    this.section.hidden = !faults.length;
    const rows = faults.map((fault, n) => {
      const parts = { detect: fault.detected - fault.since, ...fault.parts };
      const seconds = (fault.up ?? now) - fault.since, known = Object.values(parts).reduce((a, b) => a + b, 0);
      if (seconds - known > 1e-3) parts[fault.up === null ? "so far" : "other"] = seconds - known;
      return { ...fault, parts, seconds, metNext: fault.up !== null && faults[n + 1]?.since === fault.up };
    }).reverse();
    const names = [...new Set(rows.flatMap(row => Object.keys(row.parts)))];
    const colour = name => `var(--s${Faults.COLOURS[name] ?? 7})`;
    const longest = Math.max(...rows.map(row => row.seconds), 1e-9);
    this.legend.replaceChildren(...names.map(name => {
      const item = document.createElement("li"), sample = document.createElement("i");
      sample.className = "swatch";
      sample.style.backgroundColor = colour(name);
      item.append(sample, name);
      return item;
    }));
    this.list.replaceChildren(...rows.map(row => {
      const item = document.createElement("li"), text = document.createElement("p"), bar = document.createElement("div");
      const again = `${counted(row.requests, "request")} started over, ${counted(row.tokens, "token")} to compute again`;
      const how = row.metNext ? "the next fault came after" : row.up === null ? "recovering for" : "recovered after";
      const stages = row.stages === null ? "" : `, with ${counted(row.stages, "stage")}`;
      text.textContent = `${ago(now - row.detected)}: ${row.text} (${row.reason}); ${how} ${numberText(row.seconds)} s${stages}; ${again}`;
      bar.className = "bar";
      bar.style.width = `${100 * row.seconds / longest}%`;
      for (const [name, seconds] of Object.entries(row.parts)) {
        const part = document.createElement("i");
        part.style.width = `${100 * seconds / row.seconds}%`;
        part.style.backgroundColor = colour(name);
        part.title = `${name}: ${numberText(seconds)} s`;
        bar.append(part);
      }
      item.append(text, bar);
      return item;
    }));
  }
}
Faults.COLOURS = { detect: 1, stop: 3, start: 0, rendezvous: 5, weights: 2 };

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  return `${seconds < 5400 ? counted(Math.round(seconds / 60), "minute") : counted(Math.round(seconds / 3600), "hour")} ago`;
}
