"""What was measured, with the unit in every name: the only thing that policies take."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CodecFacts:
    """How one codec does on tensors of one role and dtype, on one thread."""

    role: str
    """A role of the format, for instance ``weights``."""
    dtype: str
    """Name of the dtype."""
    codec: str
    """Name of the codec."""
    sample_bytes: int
    """Plain bytes that it was measured on."""
    ratio: float
    """Plain bytes by payload bytes; more is better."""
    encode_bytes_per_s: float
    """Plain bytes encoded in a second."""
    decode_bytes_per_s: float
    """Plain bytes decoded in a second."""


@dataclasses.dataclass(frozen=True)
class DriveFacts:
    """What the drive of a store does, by direct I/O where the file system has it."""

    write_bytes_per_s: float
    """Writing over a file that is there, not yet synced."""
    durable_write_bytes_per_s: float
    """The same until it is synced: what recycled packs can reach."""
    durable_new_bytes_per_s: float
    """Writing a new file until it is synced: what new packs can reach."""
    read_bytes_per_s: float
    """Reading it back."""
    write_latency_median_s: float
    """One block written and synced."""
    write_latency_p95_s: float
    """The same: 95 of 100 take no longer."""
    flush_latency_s: float
    """What making one pack durable takes besides its bytes: file, index, header, sync, its name, idling meanwhile."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """A machine and the store on it, as measured at one time."""

    cores: int
    """Processors that this process may use."""
    ring_room_bytes: int
    """Memory that a ring may take: most of what is free in its folder, at most half of what is available."""
    copy_bytes_per_s: float
    """Copying in memory, one thread."""
    digest_bytes_per_s: float
    """Digesting what lies in memory, one thread."""
    drive: DriveFacts
    """The drive of the store."""
    codecs: tuple[CodecFacts, ...]
    """What encoding gives, by role, dtype and codec."""
    sample: str
    """What the codecs were measured on."""
    state_bytes: int | None
    """Bytes of the tensors of the newest checkpoint; None when there is none."""
    device: str | None
    """The accelerator that copies were measured from; None where there is none."""
    device_copy_bytes_per_s: float | None
    """Copying from it into pinned memory; None where there is none."""
    written_bytes: int
    """How much measuring wrote to the drive; nothing of it is left."""
    took_s: float
    """How long measuring took."""
