// Stores of SPEC.md §4 and §10: lists checkpoints, the line, and the digests of all tensors.
import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { digest, isRun, must, plain, readDescriptor, readHead } from "./basics.mjs";
import { parseCheckpointName, parseManifestName, readManifest } from "./manifest.mjs";
import { Partitions, readPack, scanPack } from "./packs.mjs";

function names(path) {
  try {
    return readdirSync(path).sort();
  } catch (error) {
    if (error.code === "ENOENT" || error.code === "ENOTDIR") return [];
    throw error;
  }
}

const order = ({ generation, step, saveId }) =>
  `${String(generation).padStart(8, "0")}-${String(step).padStart(12, "0")}-${saveId}`;

export class Store {
  constructor(root) {
    this.root = root;
    this.descriptor = readDescriptor(readFileSync(join(root, "asymcheck.store")));
    const packs = names(join(root, "packs")).filter((name) => /^[0-9a-f]{32}\.pack$/.test(name));
    const hasManifests = statSync(join(root, "manifests"), { throwIfNoEntry: false })?.isDirectory();
    must(hasManifests || packs.length === 0, "the store has lost its manifests");
    this.partitions = new Partitions();
    this.unsupported = null;
    for (const name of packs) {
      this.addPack(name.slice(0, 32), readFileSync(join(root, "packs", name)));
    }
  }

  addPack(packId, bytes) {
    try {
      this.partitions.add(readPack(bytes, packId), bytes);
    } catch (error) {
      if (!error.kind) throw error;
      // A pack of a newer program may have any partition.
      if (error.kind.startsWith("unsupported")) this.unsupported = error;
      else this.partitions.add(scanPack(bytes, packId), bytes);
    }
  }

  mustHave(condition, message) {
    if (!condition && this.unsupported) throw this.unsupported;
    must(condition, message);
  }

  runs() {
    const found = new Set([...names(join(this.root, "heads")), ...names(join(this.root, "manifests"))]);
    return [...found].filter(isRun).sort();
  }

  checkpoints(run) {
    const folder = join(this.root, "manifests", run);
    const found = [];
    for (const name of names(folder)) {
      const ref = parseCheckpointName(name);
      const files = ref ? names(join(folder, name)).filter(parseManifestName) : [];
      if (files.length) found.push({ ...ref, run, folder: name, files });
    }
    return found.sort((one, other) => (order(one) < order(other) ? -1 : 1));
  }

  // §10.1: for each generation on the line, the greatest checkpoint that belongs to it.
  line(run, checkpoints) {
    const folder = join(this.root, "heads", run);
    const numbers = names(folder).flatMap((name) => {
      const found = /^(\d{8})\.head$/.exec(name);
      return found && Number(found[1]) >= 1 ? [Number(found[1])] : [];
    });
    const line = new Map();
    let generation = Math.max(1, ...numbers);
    must(checkpoints.every((one) => one.generation <= generation), "a manifest is of a later generation");
    let limit = null;
    for (;;) {
      line.set(generation, limit);
      if (!numbers.includes(generation)) {
        must(generation === 1, `the head record of generation ${generation} is missing`);
        return line;
      }
      const path = join(folder, `${String(generation).padStart(8, "0")}.head`);
      const parent = readHead(readFileSync(path), run, generation).get("parent");
      if (parent === null) return line;
      generation = Number(parent.get("generation"));
      limit = order({ generation, step: parent.get("step"), saveId: parent.get("save_id") });
    }
  }

  isOnLine(line, checkpoint) {
    const { generation } = checkpoint;
    return line.has(generation) && (line.get(generation) === null || order(checkpoint) <= line.get(generation));
  }

  // §10.2: returns the manifests of a consistent checkpoint, by rank.
  manifests({ run, folder, files }) {
    const found = files.map((file) => {
      const path = ["manifests", run, folder, file];
      return readManifest(readFileSync(join(this.root, ...path)), path.join("/"));
    });
    const size = Number(found[0].header.get("world_size"));
    const ranks = found.map(({ header }) => Number(header.get("rank"))).sort((one, other) => one - other);
    const isWhole = ranks.length === size && ranks.every((rank, index) => rank === index);
    must(isWhole && found.every(({ header }) => Number(header.get("world_size")) === size), "ranks are missing");
    for (const { lengths } of found)
      for (const [name, length] of lengths) {
        this.mustHave(this.partitions.has(name, Number(length)), `partition ${name} is missing`);
        this.mustHave(this.partitions.isDecodable(name), `a base of partition ${name} is missing`);
      }
    return found.sort((one, other) => Number(one.header.get("rank") - other.header.get("rank")));
  }

  tensorBytes(row) {
    if (row.inline !== null) return row.inline;
    const parts = row.extents.map(({ digest: name, offset, length }) =>
      this.partitions.read(name).subarray(Number(offset), Number(offset + length)),
    );
    return Buffer.concat(parts);
  }

  tensors(manifest) {
    return manifest.rows.map((row) => ({
      name: row.name,
      aliases: row.aliases,
      dtype: row.dtype,
      role: row.role,
      shape: row.shape.map(Number),
      nbytes: Number(row.nbytes),
      digest: digest(this.tensorBytes(row)),
    }));
  }

  // Everything in the store, as JSON.
  listing() {
    const checkpoints = [];
    const [newest, problems] = [{}, {}];
    for (const run of this.runs()) {
      const found = this.checkpoints(run);
      let line = null;
      try {
        line = this.line(run, found);
      } catch (error) {
        if (!error.kind) throw error;
        // The checkpoints can still be read, but none of them is known to be the newest.
        problems[run] = error.message;
      }
      for (const checkpoint of found) {
        const { generation, step, saveId } = checkpoint;
        const facts = { run, generation, step, save_id: saveId, on_line: line && this.isOnLine(line, checkpoint) };
        try {
          const ranks = this.manifests(checkpoint);
          facts.metrics = plain(ranks[0].header.get("metrics"));
          facts.tree = plain(ranks[0].header.get("tree"));
          facts.tensors = this.tensors(ranks[0]);
          facts.ranks = ranks.slice(1).map((manifest) => this.tensors(manifest));
          if (facts.on_line) newest[run] = saveId;
        } catch (error) {
          if (!error.kind) throw error;
          facts.problem = error.message;
        }
        checkpoints.push(facts);
      }
    }
    return { checkpoints, newest, problems };
  }
}
