// The prompt box: streams a completion as any other client would.
class PromptBox {
  constructor(headers) {
    this.headers = headers;
    const form = document.getElementById("prompt-form");
    this.send = document.getElementById("send");
    this.stop = document.getElementById("stop");
    this.answer = document.getElementById("answer");
    this.note = document.getElementById("answer-note");
    form.addEventListener("submit", event => {
      event.preventDefault();
      this.run();
    });
    document.getElementById("prompt").addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.abort?.abort());
  }

  async run() {
    if (this.abort) return;
    const prompt = document.getElementById("prompt").value;
    const echo = document.createElement("b");
    echo.textContent = prompt;
    this.answer.replaceChildren(echo);
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.note.textContent = "waits for the first token";
    const began = performance.now();
    let first = 0, tokens = 0, reason = "";
    try {
      const response = await fetch("/v1/completions", {
        method: "POST", signal: this.abort.signal, headers: { "content-type": "application/json", ...this.headers() },
        body: JSON.stringify({
          prompt, stream: true, max_tokens: Number(document.getElementById("max-tokens").value),
          temperature: Number(document.getElementById("temperature").value),
        }),
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const { data } of eventsOf(response)) {
        if (data === "[DONE]") break;
        const body = JSON.parse(data);
        if (body.error) throw new Error(body.error.message);
        first ||= performance.now();
        tokens++;
        this.answer.append(body.choices[0].text);
        this.answer.scrollTop = this.answer.scrollHeight;
        reason = body.choices[0].finish_reason ?? reason;
      }
      const seconds = (performance.now() - first) / 1e3;
      const rate = tokens > 1 ? `, then ${numberText((tokens - 1) / seconds)} tok/s` : "";
      this.note.textContent = `${counted(tokens, "token")}, ended by ${reason}; first after ${numberText(first - began)} ms${rate}`;
    } catch (error) {
      this.note.textContent = error.name === "AbortError" ? `stopped after ${counted(tokens, "token")}` : error.message;
    } finally {
      this.abort = null;
      this.send.disabled = false;
      this.stop.disabled = true;
    }
  }
}

// The server-sent events of a response, as they come.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const found = { name: "message", data: "" };
      for (const line of event.split("\n")) {
        if (line.startsWith("event: ")) found.name = line.slice(7);
        if (line.startsWith("data: ")) found.data += line.slice(6);
      }
      yield found;
    }
  }
}
