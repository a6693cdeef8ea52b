// Manifests of SPEC.md §A8, and the names of §A3.
import {
  checkFeatures, checkParent, checkTime, digest, inRange, isHex, isInteger, isList, isObject, isRun, isString, LIMITS,
  must, parseJson,
} from "./basics.mjs";
import { readMetadata, readRows } from "./arrow.mjs";
import { checkTree, DTYPES } from "./tree.mjs";

const ROLES = "weights first_moment second_moment gradient rng other".split(" ");

const checkpointName = /^(\d{8})-(\d{12})-([0-9a-f]{32})$/;
const manifestName = /^(\d{5})-of-(\d{5})-([0-9a-f]{32})\.manifest$/;

export function parseCheckpointName(name) {
  const found = checkpointName.exec(name);
  return found && Number(found[1]) >= 1 ? { generation: Number(found[1]), step: Number(found[2]), saveId: found[3] } : null;
}

export function parseManifestName(name) {
  const found = manifestName.exec(name);
  if (!found) return null;
  const [rank, worldSize] = [Number(found[1]), Number(found[2])];
  return rank < worldSize ? { rank, worldSize, digest: found[3] } : null;
}

function isMetric(value) {
  if (typeof value === "number" || isInteger(value)) return Number.isFinite(Number(value));
  return ["NaN", "Infinity", "-Infinity"].includes(value);
}

function checkStoreRanks(spans, rank, worldSize) {
  must(isList(spans) && spans.length >= 1, "store_ranks is no list");
  let next = -1n;
  let hasOwn = false;
  for (const span of spans) {
    must(isList(span) && span.length === 2 && span.every(isInteger), "no span of ranks");
    const [first, last] = span;
    // At least one rank is missing between two spans.
    must(first > next && first >= 0n && first <= last && last < worldSize, "no span of ranks");
    next = last + 1n;
    hasOwn ||= first <= rank && rank <= last;
  }
  must(hasOwn, "store_ranks does not have the rank");
}

// Steps 2 and 3 of §A8: a newer program may break any other rule.
function readVersion(bytes) {
  const header = parseJson(bytes, "header");
  must(isObject(header), "the header is no object");
  must(isInteger(header.get("format")), "the header has no format");
  must(header.get("format") === 1n, `the manifest has format ${header.get("format")}`, "unsupported-version");
  checkFeatures(header, "reader_features", ["typed-value", "enum-item", "device-generator", "nested-tensor"]);
  return header;
}

function checkHeader(header) {
  must(isRun(header.get("run")), "the header has no run");
  must(inRange(header.get("generation"), 1, LIMITS.generation), "the header has no generation");
  must(inRange(header.get("step"), 0, LIMITS.step), "the header has no step");
  must(isHex(header.get("save_id"), 32), "the header has no save id");
  must(inRange(header.get("world_size"), 1, LIMITS.world), "the header has no world size");
  must(inRange(header.get("rank"), 0, header.get("world_size") - 1n), "the header has no rank");
  must(header.has("parent"), "the header has no parent");
  checkParent(header.get("parent"), header.get("generation"), "the manifest");
  checkTime(header);
  const metrics = header.get("metrics");
  must(isObject(metrics), "the metrics are no object");
  must(metrics.size <= LIMITS.metrics, "too many metrics", "limit-exceeded");
  must([...metrics.values()].every(isMetric), "no metric");
  const plan = header.get("plan");
  must(isObject(plan) && isInteger(plan.get("number")) && isString(plan.get("kind")), "no plan");
  must(isList(header.get("packs")) && header.get("packs").every((pack) => isHex(pack, 32)), "no packs");
  must(header.has("tree"), "the header has no tree");
  if (header.has("store_ranks")) checkStoreRanks(header.get("store_ranks"), header.get("rank"), header.get("world_size"));
  if (header.has("elsewhere"))
    must(isString(header.get("elsewhere")) && /^([0-9a-f]{2})*$/.test(header.get("elsewhere")), "no elsewhere");
  if (header.has("merged")) must(isObject(header.get("merged")), "merged is no object");
}

function checkRow(row, lengths) {
  must(Object.hasOwn(DTYPES, row.dtype), `the dtype ${row.dtype} is unknown`);
  must(ROLES.includes(row.role), `the role ${row.role} is unknown`);
  const { shape, global_shape: whole, offset } = row;
  must(shape.length === whole.length && shape.length === offset.length, "dimensions differ");
  must(shape.length <= 64, "too many dimensions");
  for (const [index, size] of shape.entries())
    must(size >= 0n && whole[index] >= 0n && offset[index] >= 0n && offset[index] + size <= whole[index], "no box");
  const nbytes = shape.reduce((product, size) => product * size, BigInt(DTYPES[row.dtype]));
  must(row.nbytes === nbytes && nbytes < 2n ** 63n, "nbytes does not follow");
  if (row.inline !== null) {
    must(row.inline.length <= LIMITS.inline, "too many inline bytes", "limit-exceeded");
    must(BigInt(row.inline.length) === nbytes, "no inline bytes");
    must(row.inline_digest !== null && row.extents.length === 0, "inline bytes and extents");
    must(digest(row.inline) === row.inline_digest, "the digest of inline bytes is wrong");
    return;
  }
  must(row.inline_digest === null && nbytes > 0n, "neither inline bytes nor extents");
  let sum = 0n;
  for (const { digest: name, offset: start, length, partition_length: all } of row.extents) {
    must(length >= 1n && start >= 0n && start + length <= all && all <= BigInt(LIMITS.partition), "no extent");
    must((lengths.get(name) ?? all) === all, "a partition has two lengths");
    lengths.set(name, all);
    sum += length;
  }
  must(sum === nbytes, "the extents do not add up");
}

// Returns header, rows and the lengths of partitions by digest.
export function readManifest(bytes, path) {
  const [, run, folder, file] = path.split("/");
  const [ref, name] = [parseCheckpointName(folder), parseManifestName(file)];
  must(ref && name && isRun(run), `${path} is no name of a manifest`);
  must(bytes.length <= LIMITS.manifest, "the manifest is too long", "limit-exceeded");
  must(digest(bytes) === name.digest, "the digest is not that of the name", "bad-checksum");
  const header = readVersion(readMetadata(bytes));
  const rows = readRows(bytes);
  checkHeader(header);
  const expected = {
    run,
    generation: BigInt(ref.generation),
    step: BigInt(ref.step),
    save_id: ref.saveId,
    rank: BigInt(name.rank),
    world_size: BigInt(name.worldSize),
  };
  for (const [key, value] of Object.entries(expected)) must(header.get(key) === value, `${key} is not that of the path`);
  const lengths = new Map();
  for (const row of rows) checkRow(row, lengths);
  checkTree(header.get("tree"), rows.length);
  return { header, rows, lengths };
}
