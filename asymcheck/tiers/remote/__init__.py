"""The remote tier: what survives the loss of the node. The same packs and manifests, and no catalog."""

from asymcheck.tiers.remote.location import RemoteLocation, is_uri, parse_location
from asymcheck.tiers.remote.packs import RemotePack
from asymcheck.tiers.remote.tier import RemoteTier
from asymcheck.tiers.remote.upload import PackPlan, PackUpload, plan_pack

__all__ = [
    "PackPlan",
    "PackUpload",
    "RemoteLocation",
    "RemotePack",
    "RemoteTier",
    "is_uri",
    "parse_location",
    "plan_pack",
]
