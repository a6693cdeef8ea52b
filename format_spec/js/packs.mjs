// Frames and packs of SPEC.md §A6 and §A7.
import { checkVersion, digest, Fields, isUnsupported, LIMITS, must, refuse, SpecError, sum8 } from "./basics.mjs";
import { decode } from "./codecs.mjs";

const ZERO = "0".repeat(32);
const CODECS_OF_KIND = [[0, 1, 2], [3], [4]];
const rounded = (length) => Math.ceil(length / 4096) * 4096;
const ascii = (bytes) => Buffer.from(bytes).toString("latin1");

function checkNumbers(kind, codec, algorithm) {
  must(kind <= 2, `frame kind ${kind} is unknown`, "unsupported-codec");
  must(algorithm === 1, `digest number ${algorithm} is unknown`, "unsupported-codec");
  must(codec <= 4, `codec ${codec} is unknown`, "unsupported-codec");
  must(CODECS_OF_KIND[kind].includes(codec), `kind ${kind} does not go with codec ${codec}`);
}

function checkLengths({ kind, codec, plainLength, storedLength, base, name }) {
  must(plainLength <= BigInt(LIMITS.partition), "the partition is too long", "limit-exceeded");
  must(storedLength <= BigInt(LIMITS.stored), "the payload is too long", "limit-exceeded");
  must(plainLength >= 1n && storedLength >= 1n, "a length is zero");
  must(codec !== 0 || plainLength === storedLength, "the lengths differ");
  must((base === ZERO) === (kind === 0), "the base does not go with the kind");
  must(base !== name, "the frame is its own base");
}

// Checks 1 and 2 of §A6 on the 128 bytes of a header.
export function readFrameHeader(bytes) {
  must(bytes.length >= 128, "the header of a frame is cut", "truncated");
  const fields = new Fields(bytes);
  must(ascii(bytes.subarray(0, 8)) === "ASYMFRAM", "no frame", "bad-magic");
  checkVersion(bytes, 8, { at: 88 }, "frame");
  must(sum8(bytes.subarray(0, 88)) === fields.hex(88, 8), "descriptor_sum is wrong", "bad-checksum");
  must(fields.isZero(13, 16), "reserved bytes of a frame");
  const frame = {
    kind: bytes[10],
    codec: bytes[11],
    algorithm: bytes[12],
    name: fields.hex(16, 16),
    plainLength: fields.u64(32),
    storedLength: fields.u64(40),
    storedSum: fields.hex(48, 8),
    base: fields.hex(56, 16),
    payloadOffset: fields.u32(72),
  };
  checkNumbers(frame.kind, frame.codec, frame.algorithm);
  checkLengths(frame);
  frame.plainLength = Number(frame.plainLength);
  frame.storedLength = Number(frame.storedLength);
  const isSmall = frame.storedLength < LIMITS.aligned;
  const isPlaced = isSmall ? frame.payloadOffset === 128 : frame.payloadOffset >= 4096 && frame.payloadOffset < 8192;
  must(isPlaced, "payload_offset is wrong");
  frame.shift = isSmall ? 0 : frame.payloadOffset - 4096;
  must(fields.isZero(76, 88), "codec_parameters are not zero");
  must(frame.codec !== 0 || frame.storedSum === frame.name.slice(16), "stored_sum is not that of the digest");
  frame.length = rounded(frame.payloadOffset + frame.storedLength);
  return frame;
}

// Checks a frame at the start of some bytes; returns its header and payload.
export function readStored(bytes, placeId, sequence) {
  const frame = readFrameHeader(bytes);
  const fields = new Fields(bytes);
  must(sum8(bytes.subarray(88, 120)) === fields.hex(120, 8), "placement_sum is wrong", "bad-checksum");
  must(fields.hex(96, 16) === placeId, "the frame is of another pack");
  must(fields.u64(112) === BigInt(sequence), "the frame has another number");
  must(bytes.length >= frame.length, "the frame is cut", "truncated");
  const end = frame.payloadOffset + frame.storedLength;
  frame.payload = bytes.subarray(frame.payloadOffset, end);
  if (frame.codec === 0) must(digest(frame.payload) === frame.name, "the digest is wrong", "digest-mismatch");
  else must(sum8(frame.payload) === frame.storedSum, "stored_sum is wrong", "bad-checksum");
  must(fields.isZero(128, frame.payloadOffset) && fields.isZero(end, frame.length), "padding is not zero");
  return frame;
}

// Returns plain bytes; baseOf returns those of a base, or throws damaged-base.
export function plainBytes(frame, baseOf) {
  const base = frame.kind === 0 ? null : baseOf(frame.base);
  const plain = decode(frame.codec, frame.payload, frame.plainLength, base);
  must(digest(plain) === frame.name, "the digest is wrong", "digest-mismatch");
  return plain;
}

// §A7: returns the id and the entries of a pack.
export function readPack(bytes, packId) {
  must(bytes.length >= 4096, "the header of a pack is cut", "truncated");
  const header = new Fields(bytes);
  must(ascii(bytes.subarray(0, 8)) === "ASYMPACK", "no pack", "bad-magic");
  checkVersion(bytes, 8, { at: 120 }, "pack");
  must(sum8(bytes.subarray(0, 120)) === header.hex(120, 8), "header_sum is wrong", "bad-checksum");
  must(header.isZero(10, 16) && header.isZero(104, 120) && header.isZero(128, 4096), "reserved bytes of a pack");
  must(header.hex(16, 16) === packId, "the pack has another id");
  const [count, offset, length, total] = [32, 40, 48, 56].map((at) => header.u64(at));
  must(length <= BigInt(LIMITS.index), "the index is too long", "limit-exceeded");
  must(count >= 1n && offset % 4096n === 0n, "the pack has no frames, or an uneven index");
  must(length === 64n + 64n * count, "index_length does not follow");
  must(total === ((offset + length + 4095n) / 4096n) * 4096n, "pack_length does not follow");
  must(/^[\x01-\x7f]*\0*$/.test(ascii(bytes.subarray(72, 104))), "the writer is no text");
  must(BigInt(bytes.length) >= total, "the pack is cut", "truncated");
  return { packId, entries: readIndex(bytes.subarray(Number(offset), Number(total)), packId, Number(count), Number(offset)) };
}

function readIndex(bytes, packId, count, indexOffset) {
  const fields = new Fields(bytes);
  must(ascii(bytes.subarray(0, 8)) === "ASYMINDX", "no index", "bad-magic");
  checkVersion(bytes, 8, { at: 56 }, "index");
  must(sum8(bytes.subarray(0, 56)) === fields.hex(56, 8), "header_sum of the index is wrong", "bad-checksum");
  must(fields.u16(10) === 64 && fields.isZero(12, 16) && fields.isZero(40, 48), "no header of an index");
  must(fields.hex(16, 16) === packId && fields.u64(32) === BigInt(count), "the index is of another pack");
  const end = 64 + 64 * count;
  must(sum8(bytes.subarray(64, end)) === fields.hex(48, 8), "entries_sum is wrong", "bad-checksum");
  must(fields.isZero(end, bytes.length), "padding of the index");
  let expected = 4096n;
  const entries = Array.from({ length: count }, (_, number) => {
    const at = 64 + 64 * number;
    const entry = {
      sequence: number,
      name: fields.hex(at, 16),
      base: fields.hex(at + 16, 16),
      offset: fields.u64(at + 32),
      storedLength: fields.u64(at + 40),
      plainLength: fields.u64(at + 48),
      kind: bytes[at + 56],
      codec: bytes[at + 57],
      algorithm: bytes[at + 58],
      shift: fields.u16(at + 59),
    };
    must(fields.isZero(at + 61, at + 64), "reserved bytes of an entry");
    checkNumbers(entry.kind, entry.codec, entry.algorithm);
    checkLengths(entry);
    must(entry.shift < (entry.storedLength < BigInt(LIMITS.aligned) ? 1 : 4096), "no shift of a payload");
    must(entry.offset === expected, "frames have gaps or overlap");
    entry.offset = Number(entry.offset);
    entry.storedLength = Number(entry.storedLength);
    entry.plainLength = Number(entry.plainLength);
    const start = entry.storedLength < LIMITS.aligned ? 128 : 4096 + entry.shift;
    entry.length = rounded(start + entry.storedLength);
    expected += BigInt(entry.length);
    return entry;
  });
  must(expected === BigInt(indexOffset), "the index does not begin behind the last frame");
  return entries;
}

// §A7: finds the frames of a pack whose header or index is damaged.
export function scanPack(bytes, packId) {
  const entries = [];
  for (let offset = 4096; offset < bytes.length; ) {
    try {
      const frame = readFrameHeader(bytes.subarray(offset));
      const fields = new Fields(bytes.subarray(offset, offset + 128));
      must(sum8(fields.bytes.subarray(88, 120)) === fields.hex(120, 8), "placement_sum is wrong", "bad-checksum");
      must(fields.hex(96, 16) === packId && fields.u64(112) === BigInt(entries.length), "a frame of another place");
      entries.push({ ...frame, offset, sequence: entries.length });
      offset += frame.length;
    } catch (error) {
      if (!error.kind) throw error;
      break;
    }
  }
  return { packId, entries };
}

export function readEntry(bytes, pack, entry) {
  const frame = readStored(bytes.subarray(entry.offset, entry.offset + entry.length), pack.packId, entry.sequence);
  const shared = ["name", "base", "storedLength", "plainLength", "kind", "codec", "algorithm", "shift"];
  for (const key of shared) must(frame[key] === entry[key], `${key} of frame and entry differ`);
  return frame;
}

// Decodes partitions of several packs, with the bases of §A10.5.
export class Partitions {
  constructor() {
    this.places = new Map();
  }

  // Adds a pack. load reads its file again: a writer may have overwritten the file while it was read.
  add(pack, bytes, load = () => null) {
    for (const entry of pack.entries) {
      if (!this.places.has(entry.name)) this.places.set(entry.name, []);
      this.places.get(entry.name).push({ pack, bytes, entry, load });
    }
  }

  has(name, length) {
    return (this.places.get(name) ?? []).some(({ entry }) => entry.plainLength === length);
  }

  // Whether a frame of the partition can be decoded, by the indexes.
  isDecodable(name, deltas = 0) {
    return (this.places.get(name) ?? []).some(({ entry }) => {
      const depth = deltas + (entry.kind === 1 ? 1 : 0);
      return entry.kind === 0 || (depth <= LIMITS.chain && this.isDecodable(entry.base, depth));
    });
  }

  read(name, chain = []) {
    const places = [...(this.places.get(name) ?? [])].sort((one, other) => one.entry.kind - other.entry.kind);
    let problem = null;
    for (const place of places) {
      try {
        return this.readPlace(place, chain);
      } catch (error) {
        if (!error.kind) throw error;
        // A copy that needs a newer program may be the only intact one (§A11.3).
        if (!problem || isUnsupported(error)) problem = error;
      }
    }
    throw problem ?? new SpecError("missing-partition", `partition ${name} is missing`);
  }

  readFrame({ pack, bytes, entry, load }) {
    try {
      return readEntry(bytes, pack, entry);
    } catch (error) {
      const again = error.kind ? load() : null;
      if (!again || again.equals(bytes)) throw error;
      return readEntry(again, pack, entry);
    }
  }

  readPlace(place, chain = []) {
    const frame = this.readFrame(place);
    const deltas = [...chain, frame].filter(({ kind }) => kind === 1).length;
    must(deltas <= LIMITS.chain, "the chain is too long", "damaged-base");
    must(chain.length === 0 || frame.kind !== 2, "a base is derived", "damaged-base");
    return plainBytes(frame, (base) => {
      must(![...chain, frame].some(({ name }) => name === base), "the chain leads back", "damaged-base");
      try {
        return this.read(base, [...chain, frame]);
      } catch (error) {
        if (!error.kind || isUnsupported(error)) throw error;
        return refuse("damaged-base", error.message);
      }
    });
  }
}
