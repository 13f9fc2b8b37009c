// The same agent with nothing but fetch.
let input = "";
for await (const piece of process.stdin) input += piece;
const { OPENAI_BASE_URL: url, OPENAI_API_KEY: key } = process.env;
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tool = { name: "add", description: "The sum of two numbers.", parameters };

async function ask(body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const reply = await fetch(`${url}/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(await reply.text());
  return (await reply.json()).choices[0];
}

const messages = [{ role: "user", content: JSON.parse(input) }];
for (;;) {
  const { message, finish_reason } = await ask({ messages, tools: [{ type: "function", function: tool }] });
  messages.push(message);
  if (finish_reason !== "tool_calls") break;
  for (const call of message.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
console.log((await ask({ messages: [{ role: "user", content: "So?" }] })).message.content);
