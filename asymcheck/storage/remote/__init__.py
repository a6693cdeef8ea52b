"""The remote tier: what survives the loss of the node. The same packs and manifests, and no catalog."""

from asymcheck.storage.remote.location import RemoteLocation, is_uri, parse_location
from asymcheck.storage.remote.tier import RemoteTier
from asymcheck.storage.remote.upload import plan_pack

__all__ = ["RemoteLocation", "RemoteTier", "is_uri", "parse_location", "plan_pack"]
