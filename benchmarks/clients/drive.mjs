// Drive the AI SDK: `drive.mjs PROVIDER CASE URL PROMPT`. Prints the last answer, or the error, as the library has it.
import { createRequire } from "node:module";
const require = createRequire(process.env.NODE_PATH + "/");
const { generateText, streamText, tool, stepCountIs, Output } = require("ai");
const { z } = require("zod");
const [, , provider, which, url, prompt] = process.argv;
const made = {
  compatible: () => require("@ai-sdk/openai-compatible").createOpenAICompatible({
    name: "gapless", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("model"),
  anthropic: () => require("@ai-sdk/anthropic").createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("model"),
  openai: () => require("@ai-sdk/openai").createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("model"),
};
const get_weather = tool({ description: "d", inputSchema: z.object({ city: z.string() }), execute: async () => "R41N" });
const asked = { model: made[provider](), prompt, maxRetries: 0, maxOutputTokens: 300, stopWhen: stepCountIs(3) };
if (which === "stream") {
  let pieces = 0;
  for await (const piece of streamText(asked).textStream) { pieces++; process.stdout.write(piece); }
  if (pieces < 3) process.exit(3);
} else if (which === "schema") {
  const output = Output.object({ schema: z.object({ city: z.string() }) });
  console.log((await generateText({ ...asked, output, tools: { get_weather } })).output);
} else {
  console.log((await generateText({ ...asked, tools: { get_weather } })).text);
}
