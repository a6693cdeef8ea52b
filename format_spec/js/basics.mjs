// Errors, digests, integers and JSON of SPEC.md §A4, §A5 and §A14.
import { createXXHash128, createXXHash64 } from "hash-wasm";

export class SpecError extends Error {
  constructor(kind, message) {
    super(`${kind}: ${message}`);
    this.kind = kind;
  }
}

export const isUnsupported = (error) => error.kind?.startsWith("unsupported");

export function refuse(kind, message) {
  throw new SpecError(kind, message);
}

export function must(condition, message, kind = "bad-structure") {
  if (!condition) throw new SpecError(kind, message);
}

export const LIMITS = {
  block: 4096,
  partition: 2 ** 30,
  stored: 1082130432,
  aligned: 65536,
  inline: 4096,
  manifest: 2 ** 30,
  index: 268435456,
  recordJson: 4000,
  depth: 64,
  digits: 65536,
  step: 999999999999,
  generation: 99999999,
  world: 99999,
  metrics: 256,
  planes: 65536,
  chain: 8,
};

const xxh3 = await createXXHash128(0, 0);
const xxh64 = await createXXHash64(0, 0);

export const hex = (bytes) => Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length).toString("hex");
export const digest = (bytes) => xxh3.init().update(bytes).digest("hex");
export const sum8 = (bytes) => digest(bytes).slice(16);
export const xxh64Low = (bytes) => xxh64.init().update(bytes).digest("hex").slice(8);

// A view on bytes with little-endian fields. Integers above 2^53 stay exact as BigInt until they are compared.
export class Fields {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  }
  u8 = (at) => this.view.getUint8(at);
  u16 = (at) => this.view.getUint16(at, true);
  u32 = (at) => this.view.getUint32(at, true);
  u64 = (at) => this.view.getBigUint64(at, true);
  hex = (at, size) => hex(this.bytes.subarray(at, at + size));
  isZero = (at, end) => this.bytes.subarray(at, end).every((byte) => byte === 0);
}

// §A11.3: an unknown version whose checksum is right with a known version is damage of the version field.
export function checkVersion(bytes, at, sumAt, what) {
  const fields = new Fields(bytes);
  if (fields.u16(at) === 1) return;
  const start = sumAt.from ?? 0;
  const repaired = Uint8Array.from(bytes.subarray(start, sumAt.at));
  repaired[at - start] = 1;
  repaired[at - start + 1] = 0;
  must(sum8(repaired) !== fields.hex(sumAt.at, 8), `damaged version field of ${what}`, "bad-checksum");
  refuse("unsupported-version", `${what} has format ${fields.u16(at)}`);
}

export const isString = (value) => typeof value === "string";
export const isInteger = (value) => typeof value === "bigint";
export const isList = Array.isArray;
export const isObject = (value) => value instanceof Map;
export const inRange = (value, low, high) => isInteger(value) && value >= BigInt(low) && value <= BigInt(high);
export const isHex = (value, digits) => isString(value) && value.length === digits && /^[0-9a-f]*$/.test(value);
export const isRun = (value) =>
  isString(value) && /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/.test(value) && !value.endsWith(".tmp");
const isSurrogateFree = (text) => !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text);

// JSON of §A4: integers are BigInt, numbers with a fraction or an exponent are Number, and objects are Map.
export function parseJson(bytes, what) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    refuse("bad-structure", `${what} is not UTF-8`);
  }
  let at = 0;
  const fail = () => refuse("bad-structure", `${what} is not JSON at character ${at}`);
  const space = () => {
    while (" \t\n\r".includes(text[at]) && at < text.length) at += 1;
  };
  const token = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
  const number = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
  const string = () => {
    token.lastIndex = at;
    const found = token.exec(text) ?? fail();
    at += found[0].length;
    const value = JSON.parse(found[0]);
    must(isSurrogateFree(value), `${what} has a lone surrogate`);
    return value;
  };
  const value = (depth) => {
    must(depth < 2000, `${what} is nested too deeply`);
    space();
    const first = text[at];
    if (first === '"') return string();
    if (first === "[" || first === "{") {
      const close = first === "[" ? "]" : "}";
      const items = first === "[" ? [] : new Map();
      at += 1;
      space();
      if (text[at] === close) {
        at += 1;
        return items;
      }
      for (;;) {
        space();
        if (first === "[") items.push(value(depth + 1));
        else {
          const key = string();
          space();
          if (text[at] !== ":") fail();
          at += 1;
          must(!items.has(key), `${what} has the key ${key} twice`);
          items.set(key, value(depth + 1));
        }
        space();
        at += 1;
        if (text[at - 1] === close) return items;
        if (text[at - 1] !== ",") fail();
      }
    }
    for (const [word, constant] of [["true", true], ["false", false], ["null", null]]) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return constant;
      }
    }
    number.lastIndex = at;
    const found = number.exec(text) ?? fail();
    at += found[0].length;
    if (found[1] !== undefined || found[2] !== undefined) return Number(found[0]);
    must(found[0].length <= 70000, `${what} has an integer of too many digits`);
    return BigInt(found[0]);
  };
  const result = value(0);
  space();
  if (at !== text.length) fail();
  return result;
}

const ESCAPES = { 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\" };

export function canonical(value) {
  if (isString(value)) {
    const units = Array.from({ length: value.length }, (_, index) => value.charCodeAt(index));
    const escaped = units.map((unit) => {
      if (ESCAPES[unit]) return ESCAPES[unit];
      return unit < 32 || unit > 126 ? `\\u${unit.toString(16).padStart(4, "0")}` : String.fromCharCode(unit);
    });
    return `"${escaped.join("")}"`;
  }
  if (isList(value)) return `[${value.map(canonical).join(",")}]`;
  if (isObject(value)) {
    const points = (text) => Array.from(text, (char) => char.codePointAt(0));
    const compare = ([one], [other]) => {
      const [left, right] = [points(one), points(other)];
      const index = left.findIndex((point, i) => point !== right[i]);
      return index < 0 ? left.length - right.length : left[index] - (right[index] ?? -1);
    };
    const items = [...value].sort(compare);
    return `{${items.map(([key, item]) => `${canonical(key)}:${canonical(item)}`).join(",")}}`;
  }
  must(typeof value !== "number", "canonical JSON has integers only");
  return String(value);
}

// A JSON value for people: integers beyond 2^53 would lose digits, so they are not expected here.
export function plain(value) {
  if (isInteger(value)) return Number(value);
  if (isList(value)) return value.map(plain);
  return isObject(value) ? Object.fromEntries([...value].map(([key, item]) => [key, plain(item)])) : value;
}

// Returns the JSON of a block of a record, or null if the block is not intact.
function blockText(block) {
  const end = block.indexOf(10);
  const isForm =
    end >= 0 &&
    end <= LIMITS.recordJson &&
    block[end + 33] === 10 &&
    block[4095] === 10 &&
    block.subarray(end + 34, 4095).every((byte) => byte === 32);
  const text = block.subarray(0, Math.max(end, 0));
  const stated = Buffer.from(block.subarray(end + 1, end + 33)).toString("latin1");
  return isForm && stated === digest(text) ? Buffer.from(text) : null;
}

// §A5: returns the object of a record file.
export function readRecord(bytes, kind) {
  must(bytes.length === 8192, `the record has ${bytes.length} bytes`, "truncated");
  const [first, second] = [0, 4096].map((start) => blockText(bytes.subarray(start, start + 4096)));
  const text = first ?? second;
  must(text !== null, "no copy of the record is intact", "bad-checksum");
  must(second === null || text.equals(second), "the copies of the record differ");
  const record = parseJson(text, "record");
  must(isObject(record), "a record is no object");
  must(canonical(record) === text.toString("latin1"), "the JSON of a record is not canonical");
  const format = record.get("format");
  must(isInteger(format), "a record has no format");
  must(format === 1n, `a record has format ${format}`, "unsupported-version");
  must(record.get("kind") === kind, `the record is no ${kind}`);
  return record;
}

export function checkTime(record) {
  must(inRange(record.get("created_ns"), 0, 2n ** 64n - 1n), "created_ns is no time");
  must(isString(record.get("writer")), "writer is no string");
}

const isNames = (value) => isList(value) && value.every(isString);

export function checkFeatures(record, key, known) {
  const features = record.get(key);
  must(isNames(features), `${key} is no list of strings`);
  for (const feature of known === null ? [] : features)
    must(known.includes(feature), `reader feature ${feature} is unknown`, "unsupported-feature");
}

export function readDescriptor(bytes) {
  const record = readRecord(bytes, "store");
  checkFeatures(record, "reader_features", ["shifted-payload"]);
  checkFeatures(record, "writer_features", null);
  must(isHex(record.get("store_id"), 32), "store_id is no id");
  must(!record.has("layout") || ["store", "remote"].includes(record.get("layout")), "the layout is unknown");
  checkTime(record);
  return record;
}

export function checkParent(parent, generation, what) {
  if (parent === null) return;
  must(isObject(parent), `the parent of ${what} is no object`);
  must(inRange(parent.get("generation"), 1, LIMITS.generation), `the parent of ${what} has no generation`);
  must(inRange(parent.get("step"), 0, LIMITS.step), `the parent of ${what} has no step`);
  must(isHex(parent.get("save_id"), 32), `the parent of ${what} has no save id`);
  must(parent.get("generation") <= generation, `the parent of ${what} is of a later generation`);
}

export function readHead(bytes, run, generation) {
  const record = readRecord(bytes, "head");
  must(record.get("run") === run && isRun(run), "the head is of another run");
  must(record.get("generation") === BigInt(generation), "the head is of another generation");
  must(record.has("parent"), "the head has no parent");
  checkParent(record.get("parent"), BigInt(generation) - 1n, "the head");
  checkTime(record);
  return record;
}
