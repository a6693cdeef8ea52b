// Stores of SPEC.md §A3 and §A11: lists checkpoints, the line, and the digests of all tensors.
import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { digest, isRun, isUnsupported, must, plain, readDescriptor, readHead, SpecError } from "./basics.mjs";
import { parseCheckpointName, parseManifestName, readManifest } from "./manifest.mjs";
import { Partitions, readPack, scanPack } from "./packs.mjs";
import { DTYPES } from "./tree.mjs";

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

const PACK = /^([0-9a-f]{32})\.pack$/;
const DOOMED = /^([0-9a-f]{32})\.[0-9a-f]{32}\.doomed$/;

const sameKind = (one, other) =>
  one.dtype === other.dtype && String(one.global_shape) === String(other.global_shape);

// Returns the numbers of the elements of a box in the whole, both in row-major order.
function elementsOf(offset, lengths, shape) {
  let found = [0];
  for (const [axis, length] of lengths.entries())
    found = found.flatMap((at) => Array.from({ length }, (_, index) => at * shape[axis] + offset[axis] + index));
  return found;
}

export class Store {
  constructor(root) {
    this.root = root;
    const descriptor = this.load("asymcheck.store");
    must(descriptor !== null, "no descriptor", "store-not-found");
    this.isRemote = readDescriptor(descriptor).get("layout") !== "store";
    this.partitions = new Partitions();
    this.packs = new Set();
    this.unsupported = null;
    this.addPacks();
    const hasManifests = statSync(join(root, "manifests"), { throwIfNoEntry: false })?.isDirectory();
    must(hasManifests || this.packs.size === 0, "the store has lost its manifests");
  }

  // Returns the bytes of a file, or null if the file has disappeared.
  load(...path) {
    try {
      return readFileSync(join(this.root, ...path));
    } catch (error) {
      if (error.code === "ENOENT") return null;
      throw error;
    }
  }

  // Reads the packs that are new since the last listing, and in a remote layout the doomed packs last.
  addPacks() {
    const listed = names(join(this.root, "packs")).filter((name) => !this.packs.has(name));
    const found = [...listed.filter((name) => PACK.test(name)), ...listed.filter((name) => this.isRemote && DOOMED.test(name))];
    for (const name of found) {
      this.packs.add(name);
      this.addPack(name.slice(0, 32), () => this.load("packs", name));
    }
    return found.length > 0;
  }

  addPack(packId, load, before = null) {
    const bytes = load();
    if (bytes === null) return;
    try {
      this.partitions.add(readPack(bytes, packId), bytes, load);
    } catch (error) {
      if (!error.kind) throw error;
      // Without a lock, a writer may have overwritten the file while it was read (§A12).
      if (!before?.equals(bytes)) this.addPack(packId, load, bytes);
      // A pack of a newer program may have any partition.
      else if (isUnsupported(error)) this.unsupported = error;
      else this.partitions.add(scanPack(bytes, packId), bytes, load);
    }
  }

  // Checks that a partition is found; a writer may have moved it to a pack that is not listed yet.
  mustFind(isFound, message) {
    while (!isFound()) {
      if (this.addPacks()) continue;
      throw this.unsupported ?? new SpecError("missing-partition", message);
    }
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

  // §A11.1: for each generation on the line, the greatest checkpoint that belongs to it.
  line(run, checkpoints) {
    const folder = join(this.root, "heads", run);
    const numbers = names(folder).flatMap((name) => {
      const found = /^(\d{8})\.head$/.exec(name);
      return found && Number(found[1]) >= 1 ? [Number(found[1])] : [];
    });
    const line = new Map();
    let generation = Math.max(1, ...numbers);
    must(checkpoints.every((one) => one.generation <= generation), "a manifest is of a later generation", "head-record");
    let limit = null;
    for (;;) {
      line.set(generation, limit);
      if (!numbers.includes(generation)) {
        must(generation === 1, `the head record of generation ${generation} is missing`, "head-record");
        return line;
      }
      const parent = this.head(run, generation).get("parent");
      if (parent === null) return line;
      generation = Number(parent.get("generation"));
      limit = order({ generation, step: parent.get("step"), saveId: parent.get("save_id") });
    }
  }

  head(run, generation) {
    try {
      return readHead(this.load("heads", run, `${String(generation).padStart(8, "0")}.head`), run, generation);
    } catch (error) {
      throw error.kind ? new SpecError("head-record", error.message) : error;
    }
  }

  isOnLine(line, checkpoint) {
    const { generation } = checkpoint;
    return line.has(generation) && (line.get(generation) === null || order(checkpoint) <= line.get(generation));
  }

  // §A11.2: returns the manifests of a consistent checkpoint, by rank; null if one has disappeared.
  manifests({ run, folder, files }) {
    const named = files.map(parseManifestName).sort((one, other) => one.rank - other.rank);
    const isWhole = named.every(({ rank, worldSize }, index) => rank === index && worldSize === named.length);
    must(isWhole, "the manifests are not one of each rank", "inconsistent-checkpoint");
    const found = [];
    for (const file of files) {
      const bytes = this.load("manifests", run, folder, file);
      if (bytes === null) return null;
      found.push(readManifest(bytes, ["manifests", run, folder, file].join("/")));
    }
    for (const { lengths } of found)
      for (const [name, length] of lengths) {
        this.mustFind(() => this.partitions.has(name, Number(length)), `partition ${name} is missing`);
        this.mustFind(() => this.partitions.isDecodable(name), `a base of partition ${name} is missing`);
      }
    return found;
  }

  partition(name) {
    for (;;) {
      try {
        return this.partitions.read(name);
      } catch (error) {
        if (!error.kind || !this.addPacks()) throw error;
      }
    }
  }

  tensorBytes(row) {
    if (row.inline !== null) return row.inline;
    const parts = row.extents.map(({ digest: name, offset, length }) =>
      this.partition(name).subarray(Number(offset), Number(offset + length)),
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

  // §A11.4: returns the digest of each whole tensor by name, from the first rank that has each element; null if some
  // element is in no part, and without names that two rows of a rank have.
  wholes(ranks) {
    const rows = ranks.flatMap((manifest, rank) => manifest.rows.map((row) => ({ row, rank })));
    const namesOf = ({ row }) => new Set([row.name, ...row.aliases]);
    const found = new Map();
    for (const one of rows)
      for (const name of namesOf(one)) found.set(name, [...(found.get(name) ?? []), one]);
    for (const [name, all] of found) if (new Set(all.map(({ rank }) => rank)).size < all.length) found.delete(name);
    const wholes = {};
    for (const [name, [first]] of found) {
      const isSame = ({ row, rank }) => row === first.row || (rank !== first.rank && sameKind(row, first.row));
      const shared = [...namesOf(first)].flatMap((other) => found.get(other) ?? []);
      const parts = rows.filter((one) => shared.includes(one) && isSame(one));
      wholes[name] = this.wholeDigest(parts.map(({ row }) => row));
    }
    return wholes;
  }

  wholeDigest(rows) {
    const shape = rows[0].global_shape.map(Number);
    const size = DTYPES[rows[0].dtype];
    const count = shape.reduce((product, length) => product * length, 1);
    const parts = rows.filter(({ nbytes }) => nbytes > 0n);
    // Before any memory is taken: a whole may be of any size.
    if (parts.reduce((sum, { nbytes }) => sum + Number(nbytes), 0) < count * size) return null;
    const places = parts.map((row) => elementsOf(row.offset.map(Number), row.shape.map(Number), shape));
    const [bytes, seen] = [Buffer.alloc(count * size), new Uint8Array(count)];
    for (const place of places) for (const at of place) seen[at] = 1;
    if (seen.includes(0)) return null;
    for (const [number, row] of [...parts.entries()].reverse()) {
      const part = Buffer.from(this.tensorBytes(row));
      places[number].forEach((at, index) => part.copy(bytes, at * size, index * size, (index + 1) * size));
    }
    return digest(bytes);
  }

  // Returns the facts of a checkpoint: tree and tensors of each rank, or a problem; null if it has disappeared.
  facts(checkpoint, line) {
    const { run, generation, step, saveId, files } = checkpoint;
    const isOnLine = line && this.isOnLine(line, checkpoint);
    const facts = { run, generation, step, save_id: saveId, on_line: isOnLine, world_size: files.length };
    try {
      const ranks = this.manifests(checkpoint);
      if (ranks === null) return null;
      facts.metrics = plain(ranks[0].header.get("metrics"));
      facts.parts = ranks.map((manifest) => ({ tree: plain(manifest.header.get("tree")), tensors: this.tensors(manifest) }));
      if (ranks.length > 1) facts.wholes = this.wholes(ranks);
    } catch (error) {
      if (!error.kind) throw error;
      facts.problem = error.message;
      facts.is_unsupported = isUnsupported(error);
    }
    return facts;
  }

  // Returns the facts of all checkpoints of a run, and the newest that can be restored, or why none is known.
  run(run) {
    const found = this.checkpoints(run);
    let [line, problem] = [null, null];
    try {
      line = this.line(run, found);
    } catch (error) {
      if (!error.kind) throw error;
      // The checkpoints can still be read.
      problem = error.message;
    }
    const checkpoints = found.map((checkpoint) => this.facts(checkpoint, line)).filter((facts) => facts !== null);
    // A checkpoint of a newer program stops the search for the newest (§A11.3).
    const newest = checkpoints.findLast((facts) => facts.on_line && (!facts.problem || facts.is_unsupported));
    if (newest?.is_unsupported) problem = newest.problem;
    // When checkpoints are passed over, a newer one may have appeared (§A12).
    const isPassedOver = checkpoints.length < found.length || (line && checkpoints.at(-1) !== newest);
    const listed = isPassedOver ? this.checkpoints(run) : [];
    const isNew = listed.some(({ folder }) => !found.some((one) => one.folder === folder));
    return { checkpoints, newest: problem ? null : newest?.save_id, problem, isNew };
  }

  // Everything in the store, as JSON.
  listing() {
    const [checkpoints, newest, problems] = [[], {}, {}];
    for (const name of this.runs()) {
      let run = this.run(name);
      for (let attempt = 1; run.isNew; attempt += 1) {
        must(attempt < 10, "the store changes while it is read", "inconsistent-checkpoint");
        run = this.run(name);
      }
      checkpoints.push(...run.checkpoints);
      if (run.problem) problems[name] = run.problem;
      else if (run.newest) newest[name] = run.newest;
    }
    return { checkpoints, newest, problems };
  }
}
