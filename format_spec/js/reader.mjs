// A reader of asymcheck stores, from SPEC.md alone: node reader.mjs STORE, or node reader.mjs --check < REQUESTS
//
// A request is a line of JSON: `structure`, `data` in base64, and the facts that reading needs (README.md of
// format_spec). The answer is a line with `kind`, null if the bytes are well-formed. A request with `store` is a path.
import { createInterface } from "node:readline";
import { must, parseJson, readDescriptor, readHead } from "./basics.mjs";
import { readManifest } from "./manifest.mjs";
import { Partitions, plainBytes, readPack, readStored } from "./packs.mjs";
import { readRing } from "./ring.mjs";
import { Store } from "./store.mjs";
import { checkTree } from "./tree.mjs";

function readAllOfPack(bytes, path) {
  const pack = readPack(bytes, path.split("/").at(-1).slice(0, 32));
  const partitions = new Partitions();
  partitions.add(pack, bytes);
  return pack.entries.map((entry) => partitions.readPlace({ pack, bytes, entry, load: () => null }));
}

const READERS = {
  descriptor: (bytes) => readDescriptor(bytes),
  head: (bytes, { path }) => readHead(bytes, path.split("/")[1], Number(path.split("/")[2].slice(0, 8))),
  frame: (bytes, { place_id: place, sequence }) => {
    const frame = readStored(bytes, place, sequence);
    must(bytes.length === frame.length, "bytes behind the frame");
    plainBytes(frame, () => must(false, "no base", "damaged-base"));
  },
  pack: (bytes, { path }) => readAllOfPack(bytes, path),
  codec: (bytes, { path }) => readAllOfPack(bytes, path),
  manifest: (bytes, { path }) => readManifest(bytes, path),
  tree: (bytes, { rows }) => checkTree(parseJson(bytes, "tree"), rows),
  ring: (bytes, { path }) => readRing(bytes, path.split("/").at(-1)),
};

function answer({ structure, data, store, ...facts }) {
  try {
    if (store !== undefined) return { kind: null, value: new Store(store).listing() };
    READERS[structure](Uint8Array.from(Buffer.from(data, "base64")), facts);
    return { kind: null };
  } catch (error) {
    return { kind: error.kind ?? `crash: ${error.stack}`, message: error.message };
  }
}

if (process.argv[2] === "--check") {
  for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(answer(JSON.parse(line))));
} else {
  console.log(JSON.stringify(new Store(process.argv[2]).listing(), null, 1));
}
