// The prompt box: streams as any other client would. A model with a chat template is sent the whole conversation each
// time, until a new one begins; another model continues a text.
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
    this.prompt = document.getElementById("prompt");
    this.anew = document.getElementById("anew");
    this.messages = null;
    this.anew.addEventListener("click", () => {
      this.abort?.abort();
      this.messages = [];
      this.answer.replaceChildren();
    });
  }

  begin(chat) {
    if (chat === (this.messages !== null)) return;
    this.messages = chat ? [] : null;
    this.anew.hidden = !chat;
    this.send.textContent = chat ? "Send" : "Continue";
    document.getElementById("prompt-label").textContent = chat ? "Message" : "Prompt";
    if (chat) this.prompt.value = "What is the capital of France?";
    this.note.textContent = `It goes to /${this.path}, as any client's.`;
  }

  get path() {
    return this.messages ? "v1/chat/completions" : "v1/completions";
  }

  async run() {
    if (this.abort) return;
    const prompt = this.prompt.value, messages = this.messages;
    const echo = document.createElement("b");
    if (messages) {
      if (!prompt.trim()) return;
      echo.textContent = `${messages.length ? "\n\n" : ""}${prompt}\n`;
      this.answer.append(echo);
      this.prompt.value = "";
    } else {
      echo.textContent = prompt;
      this.answer.replaceChildren(echo);
    }
    const asked = messages ? { messages: [...messages, { role: "user", content: prompt }] } : { prompt };
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.note.textContent = "waits for the first token";
    const began = performance.now();
    let first = 0, tokens = 0, reason = "", text = "";
    try {
      const response = await fetch(this.path, {
        method: "POST", signal: this.abort.signal, headers: { "content-type": "application/json", ...this.headers() },
        body: JSON.stringify({
          ...asked, stream: true, max_tokens: Number(document.getElementById("max-tokens").value),
          temperature: Number(document.getElementById("temperature").value),
        }),
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const { data } of eventsOf(response)) {
        if (data === "[DONE]") break;
        const body = JSON.parse(data);
        if (body.error) throw new Error(body.error.message);
        const [choice] = body.choices;
        if (!choice) continue;
        const piece = choice.text ?? choice.delta.content ?? "";
        reason = choice.finish_reason ?? reason;
        if (choice.delta?.role && !piece) continue;
        first ||= performance.now();
        tokens++;
        text += piece;
        this.answer.append(piece);
        this.answer.scrollTop = this.answer.scrollHeight;
      }
      const seconds = (performance.now() - first) / 1e3;
      const rate = tokens > 1 ? `, then ${numberText((tokens - 1) / seconds)} tok/s` : "";
      this.note.textContent = `${counted(tokens, "token")}, ended by ${reason}; first after ${numberText(first - began)} ms${rate}`;
    } catch (error) {
      this.note.textContent = error.name === "AbortError" ? `stopped after ${counted(tokens, "token")}` : error.message;
    } finally {
      if (text && this.messages === messages) messages?.push(...asked.messages.slice(-1), { role: "assistant", content: text });
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
