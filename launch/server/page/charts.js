// The charts of the last minute, a value a second.
class Charts {
  // Each chart: its title, its unit, its series (name, colour, column of a row), and the largest value of its axis.
  static ALL = [
    { title: "Output", unit: "tok/s", series: [["tokens", "chunk", 1]] },
    { title: "Requests", unit: "", series: [["running", "busy", 2], ["waiting", "queue", 3]] },
    { title: "KV cache in use", unit: "%", series: [["blocks", "kv", 4]], factor: 100, top: 100 },
    { title: "TTFT", unit: "ms", series: [["p50", "busy", 5], ["p99", "s1", 6]] },
    { title: "TBT", unit: "ms", series: [["p50", "busy", 7], ["p99", "s1", 8]] },
  ];
  static SECONDS = 60;
  static STEPS = Array.from({ length: 27 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));

  constructor(element) {
    this.element = element;
    this.rows = [];
    new ResizeObserver(() => this.resize()).observe(element);
    this.make();
  }

  begin(rows) {
    this.rows = rows;
    this.show();
  }

  add(row) {
    this.rows.push(row);
    while (this.rows.length > Charts.SECONDS) this.rows.shift();
    this.show();
  }

  // Makes all charts, in the colours of the moment.
  make() {
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue("--" + name).trim();
    for (const one of this.charts ?? []) one.plot.destroy();
    this.element.replaceChildren();
    this.charts = Charts.ALL.map(chart => {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      caption.textContent = chart.unit ? `${chart.title}, ${chart.unit}` : chart.title;
      const key = document.createElement("ul");
      key.className = "key";
      const values = chart.series.map(([name, css]) => {
        const item = document.createElement("li"), sample = document.createElement("i"), value = document.createElement("b");
        sample.className = "swatch";
        sample.style.background = `var(--${css})`;
        item.append(sample, name + " ", value);
        key.append(item);
        return value;
      });
      figure.append(caption, key);
      this.element.append(figure);
      const axis = {
        stroke: colour("soft"), font: "12px system-ui, sans-serif", grid: { stroke: colour("line"), width: 1 },
        ticks: { show: false },
      };
      const plot = new uPlot({
        width: Math.max(200, figure.clientWidth), height: 150, legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } }, padding: [8, 18, 0, 0],
        scales: {
          x: { time: false, range: () => [-Charts.SECONDS, 0] },
          y: { range: (plot, least, most) => [0, chart.top ?? Charts.top(most)] },
        },
        axes: [
          { ...axis, size: 26, values: (plot, ticks) => ticks.map(tick => tick ? `−${-tick} s` : "now"), space: 60 },
          { ...axis, size: 52, values: (plot, ticks) => ticks.map(tick => tick.toLocaleString("en")), space: 22, incrs: Charts.STEPS },
        ],
        series: [{}, ...chart.series.map(([name, css]) => ({
          label: name, stroke: colour(css), width: 1.8, spanGaps: true, points: { show: false },
          fill: chart.series.length === 1 ? colour(css) + "26" : undefined,
        }))],
        hooks: { setCursor: [plot => this.tell(plot, chart, values)] },
      }, [[], ...chart.series.map(() => [])], figure);
      plot.ctx.canvas.role = "img";
      plot.ctx.canvas.ariaLabel = `${chart.title} over the last minute`;
      return { plot, chart, values, figure };
    });
    this.show();
  }

  static top(most) {
    if (!(most > 2)) return 2;
    const step = 10 ** Math.floor(Math.log10(most)) / 2;
    return Math.ceil(most * 1.05 / step) * step;
  }

  resize() {
    for (const { plot, figure } of this.charts) plot.setSize({ width: Math.max(200, figure.clientWidth), height: 150 });
  }

  show() {
    const rows = this.rows, now = rows.length ? rows[rows.length - 1][0] : 0;
    for (const { plot, chart, values } of this.charts) {
      const of = column => rows.map(row => row[column] === null ? null : row[column] * (chart.factor ?? 1));
      plot.setData([rows.map(row => row[0] - now), ...chart.series.map(([, , column]) => of(column))]);
      this.tell(plot, chart, values);
    }
  }

  // Writes the values at the cursor into the key; without a cursor the newest that there are.
  tell(plot, chart, values) {
    const place = plot.cursor.idx;
    values.forEach((element, i) => {
      const column = plot.data[i + 1] ?? [];
      const value = place === null || place === undefined ? column.findLast(one => one !== null) : column[place];
      element.textContent = value === null || value === undefined ? "–" : numberText(value);
    });
  }
}

// A count of things: "1 request", "2 requests".
function counted(count, noun, plural = noun + "s") {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;
}

// A number with about three significant digits.
function numberText(value) {
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}
