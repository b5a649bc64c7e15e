// Connects the page with the server's events. fetch takes the place of EventSource, which cannot send a key.
(() => {
  const element = id => document.getElementById(id);
  const status = element("status"), alert = element("alert"), pause = element("pause"), key = element("key");
  const replica = element("replica");
  const lanes = new Lanes(element("picture")), charts = new Charts(element("charts"));
  const faults = new Faults(element("faults-section"), element("fault-list"), element("fault-parts"));
  let apiKey = "", hello = null, offset = 0, latest = null, attempt = null;
  const box = new PromptBox(() => apiKey ? { authorization: `Bearer ${apiKey}` } : {});

  element("access").addEventListener("submit", event => {
    event.preventDefault();
    apiKey = key.value.trim();
    connect();
  });
  replica.addEventListener("change", connect);
  element("explain").addEventListener("click", explain);
  pause.addEventListener("click", () => hold(lanes.frozen === null));
  element("zoom").addEventListener("change", event => {
    lanes.seconds = Number(event.target.value);
    element("lanes-seconds").textContent = `${lanes.seconds} s`;
    if (lanes.to !== undefined) lanes.draw(lanes.to);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    lanes.readColours();
    if (lanes.to !== undefined) lanes.draw(lanes.to);
    charts.make();
  });

  // Holds lanes, numbers and words at the seconds that they show, or lets them go on.
  function hold(isHeld) {
    lanes.frozen = isHeld ? lanes.to ?? null : null;
    pause.setAttribute("aria-pressed", String(isHeld));
    pause.textContent = isHeld ? "Go on" : "Pause";
    element("until").textContent = isHeld ? ` before ${new Date().toLocaleTimeString()}` : "";
    element("explained").hidden ||= !isHeld;
  }

  function say(state, text) {
    status.dataset.state = state;
    status.querySelector("span").textContent = text;
  }

  function slowText(state) {
    return (state.slow ?? []).map(each =>
      `Stage ${each.stage} is slow: ${each.slowdown.toFixed(1)} times its usual for ${Math.round(state.time - each.since)} s; `
      + `${hello?.stages === 2 ? "the other has" : "the others have"} waited ${each.waited.toFixed(1)} s for it.`).join(" ");
  }

  function warn(text, isBad = false) {
    alert.hidden = !text;
    if (alert.textContent !== text) alert.textContent = text;
    alert.classList.toggle("bad", isBad);
  }

  // Takes events until the server ends or asks for a key, and tries again where the connection is lost.
  async function connect() {
    attempt?.abort();
    const own = attempt = new AbortController();
    for (let wait = 500; !own.signal.aborted; wait = Math.min(2 * wait, 8000)) {
      try {
        const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
        const response = await fetch(`live/events?replica=${replica.value || 0}`, { headers, signal: own.signal, cache: "no-store" });
        if (response.status === 401) {
          say("lost", "needs a key");
          warn(apiKey ? "The server does not know this API key." : "This server asks for an API key; type it in above.");
          key.focus();
          return;
        }
        if (!response.ok) throw new Error((await response.json()).error.message);
        warn("");
        for await (const { name, data } of eventsOf(response)) {
          wait = 500;
          take(name, JSON.parse(data));
        }
        throw new Error("the server has ended the connection");
      } catch (error) {
        if (own.signal.aborted) return;
        say("lost", "not connected");
        warn(`No connection: ${error.message}. The page tries again.`, true);
      }
      await new Promise(done => setTimeout(done, wait));
    }
  }

  function take(name, body) {
    if (name === "hello") {
      hello = body;
      if (replica.length !== body.replicas) {
        replica.replaceChildren(...Array.from({ length: body.replicas }, (_, n) => new Option(String(n), String(n))));
        replica.value = String(body.replica);
        element("replicas").hidden = body.replicas === 1;
      }
      box.begin(body.chat);
      lanes.begin(body.stages, body.causes);
      charts.begin(body.rows);
      legend();
      showState(body);
      showWindow(body);
      document.title = `${body.model}, gapless`;
      element("model").textContent = body.model;
      element("about").textContent = body.stages
        ? `gapless serve, ${counted(body.stages, "stage")}, ${counted(body.where.length || 1, "rank")}` : "gapless serve";
    } else if (name === "spans") {
      lanes.add(body);
      element("left-out").textContent = body.left_out ? `Too many to be drawn: ${counted(body.left_out, "micro-batch", "micro-batches")}.` : "";
    } else if (name === "state") showState(body);
    else if (name === "second") {
      charts.add(body.row);
      showWindow(body);
    }
  }

  function showState(state) {
    latest = state;
    offset = state.time - performance.now() / 1e3;
    const words = { ready: "takes requests", starting: "is starting", recovering: "recovering", draining: "shuts down", failed: "has failed" };
    say(state.state, words[state.state] ?? state.state);
    warn(state.state === "ready" ? slowText(state) : state.reason, state.state === "failed");
    const unfinished = (state.running ?? 0) + (state.waiting ?? 0);
    element("unfinished").textContent = unfinished.toLocaleString("en");
    element("unfinished-unit").textContent = unfinished === 1 ? "request" : "requests";
    element("running").textContent = state.running ?? 0;
    element("waiting").textContent = state.waiting ?? 0;
    element("short").textContent = state.waiting && state.is_short_of_kv ? " for KV" : "";
    const used = state.kv_blocks_used ?? 0;
    element("kv").textContent = hello?.blocks ? (100 * used / hello.blocks).toFixed(used ? 1 : 0) : "–";
    element("blocks").textContent = hello?.blocks ? `${used.toLocaleString("en")} of ${hello.blocks.toLocaleString("en")}` : "–";
    element("faults").textContent = state.faults ? `, ${counted(state.faults, "fault")}` : "";
    const down = state.fault_since ?? null, ends = state.ends ?? [];
    lanes.tail = down !== null ? ends.map(end => Math.max(end, down)) : state.is_idle === false ? null : ends;
    lanes.tailCause = down !== null ? "recovery" : "starved-no-request";
    if (!document.hidden && lanes.stages) lanes.draw(state.time);
  }

  // Shows what the last seconds came to: those of the lanes, so that a pause holds them too.
  function showWindow(minute) {
    if (lanes.frozen !== null) return;
    for (const span of document.querySelectorAll(".window")) span.textContent = `${minute.window_s} s`;
    const { ttft, tbt } = minute.percentiles_ms;
    element("rate").textContent = numberText(minute.tokens_per_s);
    for (const [id, value] of [["ttft50", ttft[0]], ["ttft99", ttft[1]], ["tbt50", tbt[0]], ["tbt99", tbt[1]]]) {
      element(id).textContent = value === null ? "–" : value >= 1000 ? `${numberText(value / 1e3)} s` : `${numberText(value)} ms`;
    }
    showWords(minute);
    showStages(minute.stage_seconds);
    faults.show(minute.newest_faults, latest.time);
  }

  // The last seconds in sentences, the first one the largest, and the list of causes where there are several.
  function showWords({ words: [first = "", ...rest], cause_heads: heads, cause_rows: rows }) {
    const words = element("words"), more = words.querySelector("p + p"), list = element("listed");
    const line = (tag, cells) => {
      const row = document.createElement("tr");
      row.append(...cells.map(text => Object.assign(document.createElement(tag), { textContent: text })));
      return row;
    };
    list.hidden = rows.length < 2;
    list.tHead.replaceChildren(line("th", heads));
    list.tBodies[0].replaceChildren(...rows.map(cells => line("td", cells)));
    words.hidden = !first && element("explained").hidden;
    words.querySelector("b").textContent = first;
    more.textContent = rest.join(" ");
    more.hidden = !rest.length;
  }

  // Records the next seconds, then holds the page at them: their words, of replays too, stand over their numbers.
  async function explain() {
    const button = element("explain"), answer = element("explained");
    hold(false);
    button.disabled = true;
    element("words").hidden = answer.hidden = false;
    answer.textContent = "Recording 10 s.";
    const end = setTimeout(() => hold(true), 10e3);
    try {
      const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
      const response = await fetch(`record?seconds=10&replica=${replica.value || 0}`, { method: "POST", headers });
      const found = await response.json();
      if (!response.ok) throw new Error(found.error.message);
      showWords(found);
      const link = document.createElement("a");
      [link.href, link.target, link.textContent] = [found.url, "_blank", "Open the report"];
      answer.replaceChildren(link, `, recorded in ${found.folder}.`);
    } catch (error) {
      clearTimeout(end);
      hold(false);
      answer.hidden = false;
      answer.textContent = `Not recorded: ${error.message}`;
    }
    button.disabled = false;
  }

  // The seconds of a stage: those busy, then those idle by cause.
  function showStages(stages) {
    const causes = hello.causes, bars = element("stages"), total = stages.flat().reduce((a, b) => a + b, 0);
    const sums = causes.map((_, n) => stages.reduce((sum, row) => sum + row[n + 1], 0));
    const percent = (seconds, whole) => whole > 0 ? `${(100 * seconds / whole).toFixed(1)}%` : "–";
    const idle = sums.reduce((a, b) => a + b, 0);
    element("idle").textContent = total > 0 ? (100 * idle / total).toFixed(1) : "–";
    const inner = causes.reduce((sum, cause, n) => sum + (/^(starved|unknown|recovery|fill)/.test(cause.css) ? 0 : sums[n]), 0);
    element("bubbles").textContent = percent(inner, total);
    if (bars.children.length !== stages.length) bars.replaceChildren(...stages.map((_, stage) => bar(stage, causes)));
    stages.forEach((row, stage) => {
      const whole = row.reduce((a, b) => a + b, 0), parts = bars.children[stage].querySelectorAll(".bar i");
      row.forEach((seconds, n) => {
        parts[n].style.width = whole > 0 ? `${100 * seconds / whole}%` : "0";
        parts[n].title = `${n ? causes[n - 1].name : "compute"}: ${percent(seconds, whole)}`;
      });
      bars.children[stage].lastElementChild.textContent = `${percent(row[0], whole)} busy`;
    });
    const few = stages.length <= 4, names = stages.map((_, stage) => `stage ${stage}`);
    const rows = causes.map((cause, n) => [cause, n]).filter(([, n]) => sums[n] > 5e-4 * total).sort((a, b) => sums[b[1]] - sums[a[1]]);
    const row = (head, title, own, all) => {
      const line = document.createElement("tr"), name = document.createElement("th");
      name.scope = "row";
      name.append(...head);
      name.title = title;
      line.append(name, ...[all, ...(few ? own : [])].map(text => Object.assign(document.createElement("td"), { textContent: text })));
      return line;
    };
    const heads = ["idle because of", "of stage time", ...(few ? names : [])];
    const top = document.createElement("tr");
    top.append(...heads.map(text => Object.assign(document.createElement("th"), { textContent: text, scope: "col" })));
    element("causes").tHead.replaceChildren(top);
    const wholes = stages.map(one => one.reduce((a, b) => a + b, 0));
    const lines = rows.map(([cause, n]) => row([swatch(cause.css, cause.hatch), cause.name], cause.meaning,
      stages.map((one, stage) => percent(one[n + 1], wholes[stage])), percent(sums[n], total)));
    lines.push(row(["idle"], "With the compute time, all of the stage's time.",
      stages.map((one, stage) => percent(wholes[stage] - one[0], wholes[stage])), percent(idle, total)));
    element("causes").tBodies[0].replaceChildren(...lines);
  }

  function bar(stage, causes) {
    const line = document.createElement("div"), name = document.createElement("span"), whole = document.createElement("div");
    line.className = "stage";
    name.textContent = `stage ${stage}`;
    whole.className = "bar";
    whole.append(swatch("busy", "", ""), ...causes.map(cause => swatch(cause.css, cause.hatch, "")));
    line.append(name, whole, document.createElement("span"));
    return line;
  }

  function swatch(css, hatch = "", kind = "swatch") {
    const sample = document.createElement("i");
    sample.className = `${kind} ${hatch}`.trim();
    sample.style.backgroundColor = `var(--${css})`;
    return sample;
  }

  function legend() {
    const items = [["chunk", "", "chunk tokens", "Prompt tokens."], ["decode", "", "decode tokens", "One token of one request each."],
      ...hello.causes.filter(cause => cause.css !== "fill-drain").map(cause => [cause.css, cause.hatch, cause.name, cause.meaning])];
    element("legend").replaceChildren(...items.map(([css, hatch, name, meaning]) => {
      const item = document.createElement("li");
      item.title = meaning;
      item.append(swatch(css, hatch), name);
      return item;
    }));
  }

  // Between events the lanes move on by the page's own clock, where nothing is in flight or spans are late.
  setInterval(() => {
    if (latest && !document.hidden && lanes.stages && ["ready", "recovering"].includes(status.dataset.state)) {
      lanes.draw(Math.min(performance.now() / 1e3 + offset, latest.time + 1));
    }
  }, 125);
  connect();
})();
