// Streams from a jaxserve server, cancels, and runs into a deadline; prints what happened as one JSON object.
// Usage: node client.js HOST:PORT PATH_OF_REPOSITORY TOKENS
// TOKENS is more than the server can generate in 0.3 seconds.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, root, tokens] = process.argv.slice(2);
const endless = { prompt: "ab", max_tokens: Number(tokens), ignore_eos: true };
const definition = loader.loadSync("server/proto/jaxserve/v1/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  enums: String,
});
const { Inference } = grpc.loadPackageDefinition(definition).jaxserve.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

// Reads a stream to its end, whichever that is.
function read(request, { deadline, cancelAfter } = {}) {
  return new Promise((resolve) => {
    const call = client.GenerateStream(request, deadline ? { deadline: Date.now() + deadline } : {});
    const messages = [];
    call.on("data", (message) => {
      messages.push(message);
      if (messages.length === cancelAfter) call.cancel();
    });
    call.on("error", () => {}); // comes beside the status, which says the same
    call.on("status", (status) => resolve({ messages, code: grpc.status[status.code] }));
  });
}

const text = (messages) => messages.map((message) => message.text).join("");

async function main() {
  const whole = await read({ prompt: "héllo €! ", max_tokens: 24 });
  const last = whole.messages.at(-1);
  const cancelled = await read(endless, { cancelAfter: 2 });
  const late = await read(endless, { deadline: 300 });
  const refused = await read({ prompt: "ab", top_p: 7 });
  console.log(
    JSON.stringify({
      whole: { code: whole.code, text: text(whole.messages), finish: last.finish_reason, usage: last.usage },
      cancelled: { code: cancelled.code, text: text(cancelled.messages.slice(0, 1)) },
      late: { code: late.code },
      refused: { code: refused.code },
    }),
  );
  client.close();
}

main();
