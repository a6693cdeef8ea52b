// The tree of SPEC.md §A9: plain values and typed values.
import { canonical, inRange, isHex, isInteger, isList, isString, LIMITS, must } from "./basics.mjs";

export const DTYPES = {
  bool: 1, uint8: 1, uint16: 2, uint32: 4, uint64: 8, int8: 1, int16: 2, int32: 4, int64: 8,
  float16: 2, bfloat16: 2, float32: 4, float64: 8,
  float8_e4m3fn: 1, float8_e4m3fnuz: 1, float8_e5m2: 1, float8_e5m2fnuz: 1, float8_e8m0fnu: 1, float4_e2m1fn_x2: 1,
  complex32: 4, complex64: 8, complex128: 16,
};
const FACTORIES = "bool bytes complex dict float frozenset int list set str tuple".split(" ");
const GENERATORS = "MT19937 PCG64 PCG64DXSM Philox SFC64".split(" ");
const SAFE = 2n ** 53n;

const isSmall = (node) => inRange(node, -SAFE + 1n, SAFE - 1n);
const isTagged = (node, tag) => isList(node) && node[0] === tag;

// Whether a node is an integer, `["i", …]` included; throws for a wrong form of it.
function isIntegerNode(node) {
  if (isInteger(node)) {
    must(isSmall(node), "an integer is too large for a number");
    return true;
  }
  if (!isTagged(node, "i")) return false;
  must(node.length === 2 && isString(node[1]) && /^-?[1-9][0-9]*$/.test(node[1]) && !/\n/.test(node[1]), "no integer");
  must(node[1].replace("-", "").length <= LIMITS.digits, "an integer has too many digits", "limit-exceeded");
  must(node[1].length > 18 || !isSmall(BigInt(node[1])), "a small integer is written as a large one");
  return true;
}

class Tree {
  constructor(rows) {
    this.rows = rows;
    this.named = new Set();
    this.hasTyped = false;
  }

  node(node, depth = 1) {
    must(depth <= LIMITS.depth, "the tree is too deep", "limit-exceeded");
    if (node === null || typeof node === "boolean" || isString(node)) return;
    if (isIntegerNode(node)) return;
    must(isList(node) && isString(node[0]), "no node");
    const [tag, ...rest] = node;
    const check = this[`_${tag}`];
    must(tag.length === 1 && check !== undefined, `the tag ${tag} is unknown`);
    must(rest.length === ({ c: 2, m: 2, n: 2, x: 3 }[tag] ?? 1), `a node ${tag} has another length`);
    check.call(this, rest, depth);
  }

  items(items, depth) {
    must(isList(items), "no list of nodes");
    for (const item of items) this.node(item, depth + 1);
  }

  mapping(items, depth) {
    must(isList(items), "no list of items");
    const keys = new Set();
    for (const item of items) {
      must(isList(item) && item.length === 2, "no key and value");
      must(isString(item[0]) || isIntegerNode(item[0]), "no key");
      const key = canonical(item[0]);
      must(!keys.has(key), "a key occurs twice");
      keys.add(key);
      this.node(item[1], depth + 1);
    }
  }

  row(row) {
    must(isInteger(row) && row >= 0n && row < BigInt(this.rows), "no row");
    this.named.add(Number(row));
  }

  _f([bits]) {
    must(isHex(bits, 16), "no float");
  }
  _c([real, imaginary]) {
    must(isHex(real, 16) && isHex(imaginary, 16), "no complex number");
  }
  _b([text]) {
    const isForm = isString(text) && /^[A-Za-z0-9+/]*={0,2}$/.test(text) && !text.includes("\n");
    must(isForm && Buffer.from(text, "base64").toString("base64") === text, "no base64");
  }
  _l([items], depth) {
    this.items(items, depth);
  }
  _t([items], depth) {
    this.items(items, depth);
  }
  _z([sizes]) {
    must(isList(sizes), "no sizes");
    for (const size of sizes) {
      must(isIntegerNode(size), "no size");
      must(inRange(isInteger(size) ? size : BigInt(size[1]), -(2n ** 63n), 2n ** 63n - 1n), "a size is too large");
    }
  }
  _d([items], depth) {
    this.mapping(items, depth);
  }
  _o([items], depth) {
    this.mapping(items, depth);
  }
  _m([items, metadata], depth) {
    this.mapping(items, depth);
    this.node(metadata, depth + 1);
  }
  _T([row]) {
    this.row(row);
  }
  _N([row]) {
    this.row(row);
  }
  _n([dtype, bytes]) {
    must(isString(dtype) && Object.hasOwn(DTYPES, dtype), "no dtype of a scalar");
    must(isHex(bytes, 2 * DTYPES[dtype]), "no bytes of a scalar");
  }
  _y([dtype]) {
    must(isString(dtype) && Object.hasOwn(DTYPES, dtype), "no dtype");
  }
  _v([device]) {
    must(isString(device), "no device");
  }
  _x([type, parameter, content], depth) {
    must(isString(type), "no type of a typed value");
    must(Object.hasOwn(TYPES, type), `the type ${type} is unknown`, "unsupported-feature");
    this.hasTyped = true;
    this.node(content, depth + 1);
    must(TYPES[type](parameter, content), `the parameter or content of ${type}`);
  }
}

// An item of a set (§A9).
function isItem(node) {
  if (node === null || typeof node === "boolean" || isString(node) || isInteger(node)) return true;
  if (isTagged(node, "t")) return node[1].every(isItem);
  if (isTagged(node, "x")) return ITEM_TYPES.includes(node[1]) || (node[1] === "enum" && isItem(node[3]));
  return ["i", "f", "c", "b", "z", "n", "y", "v"].includes(node[0]);
}

const ITEM_TYPES = "frozenset path pure-path date time datetime timedelta range".split(" ");
const tuple = (node) => (isTagged(node, "t") ? node[1] : null);
const isSet = (parameter, content) => {
  const items = tuple(content);
  if (parameter !== null || items === null || !items.every(isItem)) return false;
  const texts = items.map(canonical);
  return texts.every((text, index) => index === 0 || texts[index - 1] < text);
};
const isFields = (parameter, content) =>
  isString(parameter) && isTagged(content, "d") && content[1].every(([key]) => isString(key));
const isPath = (parameter, content) => ["posix", "windows"].includes(parameter) && isString(content);

const TIME =
  /^(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.(\d{6}))?(?:[+-](?:[01]\d|2[0-3]):[0-5]\d(?::([0-5]\d)(?:\.(\d{6}))?)?)?$/;

function isTime(text) {
  const found = TIME.exec(text);
  if (found === null || text.includes("\n")) return false;
  const [, fraction, seconds, finer] = found;
  // A fraction that is 0 is left out, and seconds of an offset that are 0.
  return fraction !== "000000" && finer !== "000000" && !(seconds === "00" && finer === undefined);
}

function isDate(text) {
  const found = /^(\d{4})-(\d\d)-(\d\d)$/.exec(text);
  if (found === null || text.includes("\n")) return false;
  const [year, month, day] = found.slice(1).map(Number);
  const isLeap = (year % 4 === 0 && year % 100 !== 0) || year % 400 === 0;
  const days = [31, isLeap ? 29 : 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
  return year >= 1 && month >= 1 && month <= 12 && day >= 1 && day <= days[month - 1];
}

const isFold = (parameter) => parameter === null || parameter === 1n;
const isNullable = (node) => node === null || isIntegerNode(node);
const isIntegers = (items, count) => items?.length === count && items.every(isIntegerNode);

const TYPES = {
  defaultdict: (parameter, content) =>
    (parameter === null || FACTORIES.includes(parameter)) && isTagged(content, "d"),
  deque: (parameter, content) =>
    isTagged(content, "l") &&
    (parameter === null || (inRange(parameter, 0, SAFE - 1n) && BigInt(content[1].length) <= parameter)),
  set: isSet,
  frozenset: isSet,
  namedtuple: isFields,
  dataclass: isFields,
  // The names of a class and a member are not checked further.
  enum: isString,
  path: isPath,
  "pure-path": isPath,
  date: (parameter, content) => parameter === null && isString(content) && isDate(content),
  time: (parameter, content) => isFold(parameter) && isString(content) && isTime(content),
  datetime: (parameter, content) =>
    isFold(parameter) && isString(content) && content[10] === "T" && isDate(content.slice(0, 10)) && isTime(content.slice(11)),
  timedelta: (parameter, content) => {
    const [days, seconds, micros] = tuple(content) ?? [];
    const isLength = tuple(content)?.length === 3;
    return (
      parameter === null && isLength && inRange(days, -999999999, 999999999) &&
      inRange(seconds, 0, 86399) && inRange(micros, 0, 999999)
    );
  },
  range: (parameter, content) => parameter === null && isIntegers(tuple(content), 3) && tuple(content)[2] !== 0n,
  slice: (parameter, content) =>
    parameter === null && tuple(content)?.length === 3 && tuple(content).every(isNullable),
  "torch-generator": (parameter, content) => parameter === "cpu" && isTagged(content, "T"),
  "device-generator": (parameter, content) => parameter === "cuda" && isTagged(content, "T"),
  "nested-tensor": (parameter, content) => {
    if (!isTagged(content, "l") || !content[1].every((item) => isTagged(item, "T"))) return false;
    const count = content[1].length;
    return parameter === "jagged" ? count === 2 || count === 3 : parameter === "strided" && count >= 1;
  },
  "numpy-generator": (parameter, content) => GENERATORS.includes(parameter) && isTagged(content, "d"),
  "python-random": (parameter, content) => {
    const items = tuple(content);
    return (
      parameter === null && items?.length === 3 && isInteger(items[0]) && isTagged(items[1], "N") &&
      (items[2] === null || isTagged(items[2], "f"))
    );
  },
};

// Checks a tree; returns whether it has a typed value.
export function checkTree(node, rows) {
  const tree = new Tree(rows);
  tree.node(node);
  must(tree.named.size === rows, "a row has no name in the tree");
  return tree.hasTyped;
}
