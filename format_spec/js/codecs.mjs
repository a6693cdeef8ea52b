// Payloads of SPEC.md §A10.
import { Decompress } from "fzstd";
import { Fields, LIMITS, must, refuse, xxh64Low } from "./basics.mjs";

// §A10.1: one Zstandard frame that states its content size, names no dictionary, and has nothing behind it.
export function unzstd(bytes, length) {
  must(bytes.length >= 4 && new Fields(bytes).u32(0) === 0xfd2fb528, "no Zstandard frame");
  must(bytes.length >= 6, "the Zstandard frame ends early");
  const flags = bytes[4];
  const isSingle = (flags >> 5) & 1;
  const sizeBytes = [isSingle, 2, 4, 8][flags >> 6];
  must((flags & 8) === 0, "a reserved bit of the Zstandard frame is set");
  must((flags & 3) === 0, "the Zstandard frame names a dictionary");
  must(sizeBytes > 0, "the Zstandard frame states no content size");
  let at = 5 + (isSingle ? 0 : 1);
  must(bytes.length >= at + sizeBytes, "the Zstandard frame ends early");
  let size = 0;
  for (let i = sizeBytes - 1; i >= 0; i -= 1) size = size * 256 + bytes[at + i];
  must(size + (sizeBytes === 2 ? 256 : 0) === length, "the Zstandard frame states another size");
  at += sizeBytes;
  for (let isLast = false; !isLast; ) {
    must(bytes.length >= at + 3, "the Zstandard frame ends early");
    const header = bytes[at] | (bytes[at + 1] << 8) | (bytes[at + 2] << 16);
    const type = (header >> 1) & 3;
    must(type !== 3, "the Zstandard frame has a reserved block");
    at += 3 + (type === 1 ? 1 : header >> 3);
    isLast = (header & 1) === 1;
  }
  const hasChecksum = (flags & 4) !== 0;
  must(bytes.length === at + (hasChecksum ? 4 : 0), "the Zstandard frame ends elsewhere");
  const plain = new Uint8Array(length);
  let filled = 0;
  const take = (part) => {
    must(filled + part.length <= length, "the Zstandard frame is longer than it states");
    plain.set(part, filled);
    filled += part.length;
  };
  try {
    new Decompress(take).push(bytes, true);
  } catch (error) {
    refuse("bad-structure", `the Zstandard frame is damaged: ${error.message}`);
  }
  must(filled === length, "the Zstandard frame is shorter than it states");
  if (hasChecksum) {
    const stated = Buffer.from(bytes.subarray(at, at + 4)).reverse().toString("hex");
    must(xxh64Low(plain) === stated, "the checksum of the Zstandard frame is wrong");
  }
  return plain;
}

// §A10.2: returns the elements of each chunk as [isFloat, width, planes], where a plane is one byte for each element.
function readPlanes(payload, plainLength) {
  const fields = new Fields(payload);
  must(payload.length >= 16, "the header of planes is cut", "truncated");
  const [chunkBytes, segmentCount, planeCount] = [fields.u32(0), fields.u32(4), fields.u32(8)];
  must(fields.u32(12) === 0, "reserved bytes of planes");
  must(chunkBytes <= 8388608, "chunks are too long", "limit-exceeded");
  must(chunkBytes >= 4096 && chunkBytes % 4096 === 0, "no length of chunks");
  must(segmentCount <= LIMITS.planes && planeCount <= LIMITS.planes, "too many planes", "limit-exceeded");
  must(segmentCount >= 1 && planeCount >= 1, "no planes");
  must(payload.length >= 16 + 8 * segmentCount, "the table of segments is cut", "truncated");
  const chunks = [];
  let [sum, planes, last] = [0, 0, ""];
  for (let number = 0; number < segmentCount; number += 1) {
    const at = 16 + 8 * number;
    const [length, width, isFloat] = [fields.u32(at), fields.u8(at + 4), fields.u8(at + 5)];
    must(fields.u16(at + 6) === 0, "reserved bytes of a segment");
    must([1, 2, 4, 8].includes(width) && isFloat <= 1 && (width > 1 || !isFloat), "no elements of a segment");
    must(length >= 1 && length % width === 0, "no length of a segment");
    must(last !== `${width} ${isFloat}`, "neighbours are alike");
    last = `${width} ${isFloat}`;
    sum += length;
    must(sum <= plainLength, "segments are longer than the partition");
    planes += width * Math.ceil(length / chunkBytes);
    must(planes <= planeCount, "planes are missing");
    for (let start = 0; start < length; start += chunkBytes)
      chunks.push({ width, isFloat: isFloat === 1, count: Math.min(chunkBytes, length - start) / width });
  }
  must(sum === plainLength, "segments are shorter than the partition");
  must(planes === planeCount, "too many planes");
  const words = 16 + 8 * segmentCount;
  must(payload.length >= words + 4 * planeCount, "the table of planes is cut", "truncated");
  let [at, number] = [words + 4 * planeCount, 0];
  for (const chunk of chunks) {
    chunk.parts = Array.from({ length: chunk.width }, () => {
      const word = fields.u32(words + 4 * number);
      number += 1;
      const [encoding, value] = [word >>> 24, word & 0xffffff];
      must(encoding <= 2, `encoding of a plane is ${encoding}`);
      if (encoding === 2) {
        must(value <= 255, "the constant of a plane is no byte");
        return { encoding, value };
      }
      must(encoding === 1 ? value >= 1 && value < chunk.count : value === chunk.count, "no length of a plane");
      at += value;
      must(at <= payload.length, "the data of planes is cut", "truncated");
      return { encoding, data: payload.subarray(at - value, at) };
    });
  }
  must(at === payload.length, "bytes behind the planes");
  for (const chunk of chunks)
    chunk.planes = chunk.parts.map(({ encoding, value, data }) => {
      if (encoding === 2) return new Uint8Array(chunk.count).fill(value);
      return encoding === 0 ? data : unzstd(data, chunk.count);
    });
  return chunks;
}

function eachElement(chunks, length, decode) {
  const plain = new Uint8Array(length);
  let at = 0;
  for (const { width, isFloat, count, planes } of chunks) {
    const bits = BigInt(8 * width);
    for (let i = 0; i < count; i += 1) {
      let value = 0n;
      for (let k = width - 1; k >= 0; k -= 1) value = (value << 8n) | BigInt(planes[k][i]);
      value = decode(value, at, width, bits, isFloat);
      for (let k = 0; k < width; k += 1) plain[at + k] = Number((value >> BigInt(8 * k)) & 255n);
      at += width;
    }
  }
  return plain;
}

function decodePlanes(payload, length) {
  // A float was rotated left by one bit.
  return eachElement(readPlanes(payload, length), length, (value, _at, _width, bits, isFloat) =>
    isFloat ? (value >> 1n) | ((value & 1n) << (bits - 1n)) : value,
  );
}

function decodeDelta(payload, length, base) {
  must(base.length === length, "the base has another length");
  return eachElement(readPlanes(payload, length), length, (z, at, width, bits, isFloat) => {
    const mask = (1n << bits) - 1n;
    const order = (x) => (isFloat && x >> (bits - 1n) ? x ^ (mask >> 1n) : x);
    let source = 0n;
    for (let k = width - 1; k >= 0; k -= 1) source = (source << 8n) | BigInt(base[at + k]);
    const d = z & 1n ? (z >> 1n) ^ mask : z >> 1n;
    return order((order(source) + d) & mask);
  });
}

function roundToBfloat16(x) {
  if ((x & 0x7fffffff) >>> 0 > 0x7f800000) return 0x7fc0;
  return ((x + 0x7fff + ((x >>> 16) & 1)) >>> 16) & 0xffff;
}

function roundToFloat16(x) {
  const [sign, rest] = [(x >>> 31) << 15, x & 0x7fffffff];
  if (rest > 0x7f800000) return 0x7e00 | sign;
  const exponent = rest >>> 23;
  if (exponent >= 143) return sign | 0x7c00;
  // The fraction with its leading one; below 2^-14 a half has fewer bits.
  const fraction = (rest & 0x7fffff) | (exponent ? 0x800000 : 0);
  const drop = exponent >= 113 ? 13 : 126 - Math.max(exponent, 1);
  if (drop > 24) return sign;
  const half = 2 ** (drop - 1);
  let kept = Math.floor(fraction / 2 ** drop);
  const lost = fraction - kept * 2 ** drop;
  if (lost > half || (lost === half && kept & 1)) kept += 1;
  // A carry out of the fraction raises the exponent.
  return sign | (exponent >= 113 ? ((exponent - 113) << 10) + kept : kept);
}

function decodeDerived(payload, length, base) {
  must(payload.length >= 16, "the payload is cut", "truncated");
  must(payload.length === 16, "bytes behind the payload");
  const fields = new Fields(payload);
  must([1, 2].includes(payload[0]) && fields.isZero(1, 8), "no derived dtype");
  must(length % 2 === 0, "an odd length");
  const offset = fields.u64(8);
  must(offset + 2n * BigInt(length) <= BigInt(base.length), "the base ends before the elements");
  const source = new DataView(base.buffer, base.byteOffset + Number(offset), 2 * length);
  const plain = new Uint8Array(length);
  const target = new DataView(plain.buffer);
  const round = payload[0] === 1 ? roundToBfloat16 : roundToFloat16;
  for (let at = 0; at < length; at += 2) target.setUint16(at, round(source.getUint32(2 * at, true)), true);
  return plain;
}

export function decode(codec, payload, length, base) {
  if (codec === 0) return payload;
  if (codec === 1) return unzstd(payload, length);
  if (codec === 2) return decodePlanes(payload, length);
  return codec === 3 ? decodeDelta(payload, length, base) : decodeDerived(payload, length, base);
}
