// npm: ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4
// Vercel's AI SDK: a text, a stream, an object by a schema, and embeddings.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText } from "ai";
import { z } from "zod";

const served = createOpenAICompatible({ name: "jaxserve", baseURL: `${process.argv[2]}/v1`, supportsStructuredOutputs: true });
const asked = { model: served("demo"), prompt: "It was a", temperature: 0, maxOutputTokens: 12 };

const whole = await generateText(asked);
assert.equal(whole.usage.outputTokens, 12);
const stream = streamText(asked);
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);

const schema = z.object({ city: z.enum(["Bath", "London"]), days: z.number().int().min(1).max(9) });
const made = await generateText({ ...asked, output: Output.object({ schema }), maxOutputTokens: 100 });
schema.parse(made.output);

const { embeddings } = await embedMany({ model: served.textEmbeddingModel("demo"), values: ["Mr. Darcy", "a day"] });
assert.equal(embeddings.length, 2);
assert.ok(Math.abs(Math.hypot(...embeddings[0]) - 1) < 1e-3);
