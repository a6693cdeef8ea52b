// The Arrow IPC file of SPEC.md §A8: one schema, one record batch, every offset checked.
import { Fields, must } from "./basics.mjs";

const list = (item) => ({ type: 12, children: [{ name: "item", nullable: false, ...item }] });
const [utf8, binary, int64] = [{ type: 5 }, { type: 4 }, { type: 2, width: 64 }];
const fixed16 = { type: 15, width: 16 };
const column = (name, type, nullable = false) => ({ name, nullable, children: [], ...type });
const member = (name, type) => column(name, type);
const extent = {
  type: 13,
  children: [
    member("digest", fixed16),
    member("offset", int64),
    member("length", int64),
    member("partition_length", int64),
  ],
};
const SCHEMA = [
  column("name", utf8),
  column("aliases", list(utf8)),
  column("dtype", utf8),
  column("role", utf8),
  column("shape", list(int64)),
  column("global_shape", list(int64)),
  column("offset", list(int64)),
  column("nbytes", int64),
  column("inline", binary, true),
  column("inline_digest", fixed16, true),
  column("extents", list(extent)),
];

// A table of a flatbuffer. Reads outside the buffer throw RangeError, which the caller turns into bad-structure.
class Table {
  constructor(view, at) {
    this.view = view;
    this.at = at;
    this.vtable = at - view.getInt32(at, true);
    this.size = view.getUint16(this.vtable, true);
  }
  where(field) {
    const slot = 4 + 2 * field;
    const offset = slot < this.size ? this.view.getUint16(this.vtable + slot, true) : 0;
    return offset ? this.at + offset : 0;
  }
  number(field, method, fallback = 0) {
    const at = this.where(field);
    return at ? this.view[method](at, true) : fallback;
  }
  pointer(field) {
    const at = this.where(field);
    return at ? at + this.view.getUint32(at, true) : 0;
  }
  table(field) {
    const at = this.pointer(field);
    return at ? new Table(this.view, at) : null;
  }
  // Positions of the items of a vector.
  vector(field, itemBytes) {
    const at = this.pointer(field);
    if (!at) return [];
    const count = this.view.getUint32(at, true);
    must(at + 4 + count * itemBytes <= this.view.byteLength, "a vector of the flatbuffer is cut");
    return Array.from({ length: count }, (_, index) => at + 4 + index * itemBytes);
  }
  tables(field) {
    return this.vector(field, 4).map((at) => new Table(this.view, at + this.view.getUint32(at, true)));
  }
  bytes(field) {
    const places = this.vector(field, 1);
    const start = this.view.byteOffset + (places[0] ?? 0);
    return new Uint8Array(this.view.buffer, start, places.length);
  }
}

function root(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return new Table(view, view.getUint32(0, true));
}

const isMagic = (bytes) => Buffer.from(bytes).toString("latin1") === "ARROW1";
const text = (bytes) => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
const pairs = (table, field) => table.tables(field).map((pair) => [text(pair.bytes(0)), pair.bytes(1)]);

function readField(table, depth = 0) {
  must(depth < 4 && !table.where(4), "a column is nested too deeply, or has a dictionary");
  const type = table.number(2, "getUint8");
  const details = table.table(3);
  const field = {
    name: text(table.bytes(0)),
    nullable: table.number(1, "getUint8") !== 0,
    children: table.tables(5).map((child) => readField(child, depth + 1)),
    type,
  };
  if (type === 2) {
    must(details.number(1, "getUint8") !== 0, "a column has no sign");
    field.width = details.number(0, "getInt32");
  }
  if (type === 15) field.width = details.number(0, "getInt32");
  must(pairs(table, 6).length === 0, "a column has metadata");
  return field;
}

function readSchema(table) {
  must(table.number(0, "getInt16") === 0, "the byte order is big-endian");
  return { fields: table.tables(1).map((field) => readField(field)), metadata: pairs(table, 2) };
}

const described = (field) => {
  const { name, nullable, type, width = 0, children = [] } = field;
  return [name, nullable, type, width, children.map(described)];
};
const same = (one, other) => JSON.stringify(one.map(described)) === JSON.stringify(other.map(described));

function readMessage(bytes, at) {
  const fields = new Fields(bytes);
  must(at + 8 <= bytes.length && fields.u32(at) === 0xffffffff, "no message");
  const length = fields.u32(at + 4);
  must(length >= 4 && at + 8 + length <= bytes.length, "a message is cut");
  const table = root(bytes.subarray(at + 8, at + 8 + length));
  must(table.number(0, "getInt16") === 4, "the metadata version is not V5");
  const body = table.number(3, "getBigInt64", 0n);
  const start = at + 8 + length;
  must(body >= 0n && BigInt(start) + body <= BigInt(bytes.length), "the body of a message is cut");
  const end = start + Number(body);
  return { kind: table.number(1, "getUint8"), header: table.table(2), body: bytes.subarray(start, end), start, end };
}

// Reads columns in the order of nodes and buffers.
class Batch {
  constructor(message) {
    const { header, body } = message;
    must(!header.where(3), "the body is compressed");
    const { view } = header;
    const pair = (at) => [view.getBigInt64(at, true), view.getBigInt64(at + 8, true)];
    this.length = Number(header.number(0, "getBigInt64", 0n));
    this.nodes = header.vector(1, 16).map(pair);
    this.buffers = header.vector(2, 16).map((at) => {
      const [offset, length] = pair(at);
      const isInside = offset >= 0n && length >= 0n && offset + length <= BigInt(body.length);
      must(isInside, "a buffer is outside the body");
      return body.subarray(Number(offset), Number(offset + length));
    });
    this.node = 0;
    this.buffer = 0;
  }

  nextBuffer(bytes) {
    must(this.buffer < this.buffers.length, "buffers are missing");
    const buffer = this.buffers[this.buffer];
    this.buffer += 1;
    must(buffer.length >= bytes, "a buffer is too short");
    return buffer;
  }

  // Returns a function from a position to a value; null where a nullable column has none.
  column(field, atLeast, exact) {
    must(this.node < this.nodes.length, "nodes are missing");
    const [length, nulls] = this.nodes[this.node].map(Number);
    this.node += 1;
    must(exact ? length === atLeast : length >= atLeast, "a column has another length");
    must(nulls >= 0 && nulls <= length, "no number of nulls");
    const bits = this.nextBuffer(nulls ? Math.ceil(length / 8) : 0);
    const isNull = (index) => nulls > 0 && !((bits[index >> 3] >> (index & 7)) & 1);
    for (let index = 0; index < length && !field.nullable; index += 1) must(!isNull(index), `${field.name} has a null`);
    const value = this.values(field, length);
    return (index) => (isNull(index) ? null : value(index));
  }

  values(field, length) {
    if (field.type === 13) {
      const members = field.children.map((child) => [child.name, this.column(child, length, true)]);
      return (index) => Object.fromEntries(members.map(([name, value]) => [name, value(index)]));
    }
    if (field.type === 2) {
      const fields = new Fields(this.nextBuffer(8 * length));
      return (index) => fields.view.getBigInt64(8 * index, true);
    }
    if (field.type === 15) {
      const data = new Fields(this.nextBuffer(field.width * length));
      return (index) => data.hex(field.width * index, field.width);
    }
    const offsets = new Fields(this.nextBuffer(length ? 4 * (length + 1) : 0));
    const offset = (index) => (length ? offsets.view.getInt32(4 * index, true) : 0);
    must(offset(0) >= 0, "an offset is negative");
    for (let index = 0; index < length; index += 1) must(offset(index) <= offset(index + 1), "offsets fall");
    if (field.type === 12) {
      const item = this.column(field.children[0], offset(length), false);
      return (index) => Array.from({ length: offset(index + 1) - offset(index) }, (_, at) => item(offset(index) + at));
    }
    const data = this.nextBuffer(offset(length));
    const bytes = (index) => data.subarray(offset(index), offset(index + 1));
    if (field.type === 4) return bytes;
    for (let index = 0; index < length; index += 1) text(bytes(index));
    return (index) => text(bytes(index));
  }
}

// Turns any fault of a flatbuffer into bad-structure.
function guarded(read, bytes) {
  try {
    return read(bytes);
  } catch (error) {
    must(error.kind, `the Arrow file is damaged: ${error.message}`);
    throw error;
  }
}

// Returns the header, the value of the metadata entry `asymcheck`, without any other check of the schema.
function metadata(bytes) {
  must(isMagic(bytes.subarray(0, 6)), "no Arrow file", "bad-magic");
  const first = readMessage(bytes, 8);
  must(first.kind === 1, "the first message is no schema");
  const entry = pairs(first.header, 2).find(([key]) => key === "asymcheck");
  must(entry, "the schema has no header");
  return entry[1];
}

function rows(bytes) {
  must(bytes.length >= 18 && isMagic(bytes.subarray(-6)), "the Arrow file has no end");
  const footerLength = new Fields(bytes).view.getInt32(bytes.length - 10, true);
  must(footerLength >= 4 && footerLength <= bytes.length - 18, "no length of the footer");
  const footer = root(bytes.subarray(bytes.length - 10 - footerLength, bytes.length - 10));
  must(footer.vector(2, 24).length === 0, "the file has dictionaries");
  must(footer.vector(3, 24).length === 1, "the file has not exactly one record batch");
  const first = readMessage(bytes, 8);
  const schemas = [footer.table(1), first.header].map(readSchema);
  for (const schema of schemas) {
    must(same(schema.fields, SCHEMA), "the columns are others");
    must(schema.metadata.length === 1 && schema.metadata[0][0] === "asymcheck", "the metadata is other");
  }
  const [header, other] = schemas.map(({ metadata: [[, value]] }) => Buffer.from(value));
  must(header.equals(other), "the headers of the two schemas differ");
  const message = readMessage(bytes, first.end);
  must(message.kind === 3, "the second message is no record batch");
  const batch = new Batch(message);
  must(batch.length >= 0, "a negative number of rows");
  const columns = SCHEMA.map((field) => [field.name, batch.column(field, batch.length, true)]);
  must(batch.node === batch.nodes.length && batch.buffer === batch.buffers.length, "further nodes or buffers");
  return Array.from({ length: batch.length }, (_, index) =>
    Object.fromEntries(columns.map(([name, value]) => [name, value(index)])),
  );
}

export const readMetadata = (bytes) => guarded(metadata, bytes);
export const readRows = (bytes) => guarded(rows, bytes);
