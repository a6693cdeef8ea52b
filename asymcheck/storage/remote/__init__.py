"""Remote tier: packs and manifests in HDFS, an object store or a shared file system, without a catalog."""

from asymcheck.storage.remote.location import RemoteLocation, is_uri, parse_location
from asymcheck.storage.remote.tier import RemoteTier
from asymcheck.storage.remote.upload import cut, plan_pack

__all__ = ["RemoteLocation", "RemoteTier", "cut", "is_uri", "parse_location", "plan_pack"]
