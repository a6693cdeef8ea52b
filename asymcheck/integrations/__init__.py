"""Optional integrations: torch.distributed.checkpoint, DeepSpeed, Lightning, Accelerate and transformers.

Importing asymcheck imports none of them, so that their libraries stay optional.
"""
