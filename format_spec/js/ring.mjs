// Rings of SPEC.md §B8.
import { checkTime, Fields, inRange, isHex, isInteger, isObject, isRun, isString, LIMITS, must, readRecord, sum8 } from "./basics.mjs";
import { plainBytes, readFrameHeader, readStored } from "./packs.mjs";

function isOwner(owner) {
  return (
    isObject(owner) && isString(owner.get("boot_id")) && isString(owner.get("pid_namespace")) &&
    isInteger(owner.get("pid")) && isInteger(owner.get("start_ticks"))
  );
}

export function readRing(bytes, name) {
  must(bytes.length >= 8192, "the header of a ring is cut", "truncated");
  const record = readRecord(bytes.subarray(0, 8192), "ring");
  must(isHex(record.get("ring_id"), 32) && isHex(record.get("store_id"), 32), "no ids of a ring");
  must(name === `asymcheck-${record.get("store_id")}-${record.get("ring_id")}.ring`, "the ring has another name");
  must(isString(record.get("store")) && isRun(record.get("run")), "no store or run of a ring");
  must(inRange(record.get("rank"), 0, LIMITS.world - 1), "no rank of a ring");
  must(isOwner(record.get("owner")), "no owner of a ring");
  const length = record.get("data_bytes");
  must(inRange(length, 4096, 2n ** 64n - 1n) && length % 4096n === 0n, "no length of a ring");
  checkTime(record);
  must(BigInt(bytes.length) >= 12288n + length, "the ring is cut", "truncated");
  const end = 12288 + Number(length);
  const captures = [];
  for (let at = 8192; at < 12288; at += 64) {
    const fields = new Fields(bytes.subarray(at, at + 64));
    const [offset, state] = [fields.u64(0), fields.u64(24)];
    const isIntact = sum8(fields.bytes.subarray(0, 56)) === fields.hex(56, 8) && fields.isZero(32, 56);
    const isPlace = offset % 4096n === 0n && offset >= 12288n && offset < BigInt(end);
    if (isIntact && isPlace && (state === 1n || state === 2n))
      captures.push({ offset: Number(offset), save_id: fields.hex(8, 16), state: Number(state) });
  }
  const frames = [];
  for (let at = 12288; at < end; at += 4096) {
    try {
      const { length: size } = readFrameHeader(bytes.subarray(at, end));
      const frame = readStored(bytes.subarray(at, at + size), record.get("ring_id"), at / 4096);
      must(at + size <= end && frame.codec === 0 && frame.shift === 0, "no frame of a ring");
      plainBytes(frame, () => null);
      frames.push({ offset: at, digest: frame.name, length: frame.plainLength });
    } catch (error) {
      if (!error.kind) throw error;
    }
  }
  return { record, captures, frames };
}
