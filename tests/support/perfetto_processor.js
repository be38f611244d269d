// Loads a trace into Perfetto's own trace processor (its WebAssembly build) and prints the rows of queries as JSON.
// Use: node perfetto_processor.js FOLDER_OF_THE_ENGINE TRACE QUERY...
"use strict";
const fs = require("fs");
const path = require("path");

const [folder, trace, ...queries] = process.argv.slice(2);
const PIECE_BYTES = 16 << 20;

// The processor speaks protocol buffers (Perfetto's trace_processor.proto): numbers of the fields used here.
const RPC = { message: 1, sequence: 1, request: 2, fatal: 5, append: 101, query: 103, appended: 201, rows: 203 };
const METHOD = { append: 1, finalize: 2, query: 3 };
const CELL = { integer: 2n, float: 3n, text: 4n };

function varint(value) {
  const bytes = [];
  let rest = BigInt(value);
  do {
    const low = Number(rest & 127n);
    rest >>= 7n;
    bytes.push(rest ? low | 128 : low);
  } while (rest);
  return Buffer.from(bytes);
}

const numberField = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const bytesField = (field, value) => Buffer.concat([varint((field << 3) | 2), varint(value.length), value]);

class Reader {
  constructor(buffer) {
    this.buffer = buffer;
    this.at = 0;
  }
  get isDone() {
    return this.at >= this.buffer.length;
  }
  varint() {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = this.buffer[this.at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  }
  bytes(size) {
    this.at += size;
    return this.buffer.subarray(this.at - size, this.at);
  }
}

function fields(buffer) {
  const reader = new Reader(buffer);
  const found = [];
  while (!reader.isDone) {
    const key = Number(reader.varint());
    const kind = key & 7;
    if (kind === 0) found.push([key >> 3, reader.varint()]);
    else if (kind === 1) found.push([key >> 3, reader.bytes(8)]);
    else if (kind === 2) found.push([key >> 3, reader.bytes(Number(reader.varint()))]);
    else throw new Error(`wire type ${kind}`);
  }
  return found;
}

function varints(buffer) {
  const reader = new Reader(buffer);
  const values = [];
  while (!reader.isDone) values.push(reader.varint());
  return values;
}

// The engine is made for a web worker: what it asks of one, and no sign of node, which it refuses.
const worker = { location: { href: "http://localhost/engine_bundle.js" } };
class FileRequest {
  open(method, name) {
    this.name = name;
  }
  send() {
    const content = fs.readFileSync(path.join(folder, path.basename(this.name)));
    this.response = content.buffer.slice(content.byteOffset, content.byteOffset + content.length);
  }
}
const talk = { log() {}, warn: console.error, error: console.error };
const source = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function("self", "process", "WorkerGlobalScope", "XMLHttpRequest", "console", source)(
  worker, undefined, Object, FileRequest, talk,
);

let answered = [];
const port = { postMessage: (data) => answered.push(Buffer.from(data)) };
worker.onmessage({ data: port });
let sequence = 0;

function call(method, ...content) {
  const message = Buffer.concat([numberField(RPC.sequence, ++sequence), numberField(RPC.request, method), ...content]);
  answered = [];
  port.onmessage({ data: Uint8Array.from(bytesField(RPC.message, message)) });
  const replies = fields(Buffer.concat(answered)).flatMap(([, reply]) => fields(reply));
  const fatal = replies.find(([field]) => field === RPC.fatal);
  if (fatal) throw new Error(fatal[1].toString());
  return replies;
}

const query = (text) => call(METHOD.query, bytesField(RPC.query, bytesField(1, Buffer.from(text))));

function load() {
  const content = fs.readFileSync(trace);
  const errors = [];
  for (let at = 0; at < content.length; at += PIECE_BYTES) {
    for (const [field, value] of call(METHOD.append, bytesField(RPC.append, content.subarray(at, at + PIECE_BYTES)))) {
      if (field !== RPC.appended) continue;
      for (const [part, text] of fields(value)) if (part === 2) errors.push(text.toString());
    }
  }
  call(METHOD.finalize);
  return errors;
}

function cellsOf(batch) {
  const parts = fields(batch);
  const of = (wanted) => parts.filter(([part]) => part === wanted).map(([, content]) => content);
  const integers = of(2).flatMap(varints);
  const floats = Buffer.concat(of(3));
  const texts = of(5).flatMap((content) => content.toString().split("\0"));
  let [integer, float, text] = [0, 0, 0];
  return of(1).flatMap(varints).map((kind) => {
    if (kind === CELL.integer) return Number(BigInt.asIntN(64, integers[integer++]));
    if (kind === CELL.float) return floats.readDoubleLE(8 * float++);
    return kind === CELL.text ? texts[text++] : null;
  });
}

function rowsOf(replies) {
  const results = replies.filter(([field]) => field === RPC.rows).flatMap(([, value]) => fields(value));
  const error = results.find(([field]) => field === 2);
  if (error) throw new Error(error[1].toString());
  const width = results.filter(([field]) => field === 1).length;
  const cells = results.filter(([field]) => field === 3).flatMap(([, batch]) => cellsOf(batch));
  const rows = [];
  for (let at = 0; at < cells.length; at += width) rows.push(cells.slice(at, at + width));
  return rows;
}

async function main() {
  for (let tries = 0; ; tries++) {
    await new Promise((go) => setTimeout(go, 20));
    try {
      if (query("select 1").length) break;
    } catch (error) {
      // Until the processor stands, calls of it throw.
      if (tries > 500) throw error;
    }
  }
  const errors = load();
  return JSON.stringify({ errors, answers: queries.map((text) => rowsOf(query(text))) });
}

main().then(
  (text) => process.stdout.write(text, () => process.exit(0)),
  (error) => process.stderr.write(`${error.stack}\n`, () => process.exit(1)),
);
