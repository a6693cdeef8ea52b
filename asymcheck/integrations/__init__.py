"""Optional integrations: torch.distributed.checkpoint, DeepSpeed, Lightning and Hugging Face transformers.

Importing asymcheck imports none of them, so that their libraries stay optional.
"""
