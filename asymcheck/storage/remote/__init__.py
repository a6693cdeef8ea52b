"""Remote tier: packs and manifests in HDFS, an object store or a shared file system, without a catalog."""

from asymcheck.storage.remote.location import RemoteLocation, is_uri, parse_location
from asymcheck.storage.remote.tier import RemoteTier

__all__ = ["RemoteLocation", "RemoteTier", "is_uri", "parse_location"]
