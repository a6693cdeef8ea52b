"""Train six models: four on text, two on images, created from their configurations with random weights.

The text is the source code of Python's standard library, byte by byte. The images are the handwritten digits of
scikit-learn. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import dataclasses
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

SizeName = Literal["tiny", "real"]
_CONTEXT = 64
_MASK, _MASKED_SHARE, _IGNORED = 256, 0.15, -100
_TINY_VOCABULARY = 260
"""256 bytes, the mask, and spare tokens: RoBERTa counts positions after its padding token."""
_TINY_TRANSFORMER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
_BLOOM: dict[str, Any] = {"hidden_size": 1024, "n_head": 16, "n_layer": 8, "vocab_size": 65_536}
"""Width of bloom-560m, with 8 of its 24 layers and 65,536 of its 250,880 tokens: a state of 2 GB."""


def _labels(count: int) -> dict[str, Any]:
    return {"num_labels": count}


@dataclasses.dataclass(frozen=True)
class Size:
    """Batch of a size, and the configurations of its models."""

    texts: int
    """Texts of a batch, of 64 tokens each."""
    images: int
    """Images of a batch."""
    pixels: int
    """Width and height of an image."""
    configs: Mapping[str, Callable[[], Any]]
    """Functions that create the configuration of each model."""


SIZES: Mapping[SizeName, Size] = {
    "tiny": Size(
        *(4, 8, 32),
        {
            "GPT-2": lambda: GPT2Config(
                n_layer=2, n_embd=128, n_head=2, n_positions=_CONTEXT, vocab_size=_TINY_VOCABULARY
            ),
            "BLOOM": lambda: BloomConfig(n_layer=2, hidden_size=128, n_head=2, vocab_size=_TINY_VOCABULARY),
            "BERT": lambda: BertConfig(**_TINY_TRANSFORMER, vocab_size=_TINY_VOCABULARY),
            "RoBERTa": lambda: RobertaConfig(**_TINY_TRANSFORMER, vocab_size=_TINY_VOCABULARY),
            "ViT": lambda: ViTConfig(**_TINY_TRANSFORMER, image_size=32, patch_size=4, **_labels(10)),
            "ResNet": lambda: ResNetConfig(
                embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4, layer_type="basic", **_labels(10)
            ),
        },
    ),
    "real": Size(
        *(1, 1, 224),
        {
            "GPT-2": GPT2Config,
            "BLOOM": lambda: BloomConfig(**_BLOOM),
            "BERT": BertConfig,
            "RoBERTa": lambda: RobertaConfig(vocab_size=50_265, max_position_embeddings=514),
            "ViT": lambda: ViTConfig(**_labels(1000)),
            "ResNet": lambda: ResNetConfig(depths=[3, 8, 36, 3], **_labels(1000)),
        },
    ),
}
"""``tiny`` has half a million parameters. ``real`` is GPT-2 124M, BLOOM (see the constant), BERT base, RoBERTa base,
ViT-B/16 and ResNet-152: states of 0.7 to 2 GB with AdamW in float32."""

_CLASSES: Mapping[str, Callable[[Any], nn.Module]] = {
    "GPT-2": GPT2LMHeadModel,
    "BLOOM": BloomForCausalLM,
    "BERT": BertForMaskedLM,
    "RoBERTa": RobertaForMaskedLM,
    "ResNet": ResNetForImageClassification,
    "ViT": ViTForImageClassification,
}
_VISION = ("ResNet", "ViT")
_CAUSAL = ("GPT-2", "BLOOM")
_MIXED = " mixed"
"""Suffix of a model in mixed precision: bfloat16 weights, and AdamW on float32 masters. It computes in float32, because
most processors do so faster; the state and its changes are the same."""
MODELS = (*_CLASSES, f"GPT-2{_MIXED}")
"""Names of the models."""


class Training:
    """A model in training with AdamW: a pure function of its name, its size and the number of steps."""

    def __init__(self, name: str, size: SizeName) -> None:
        """Create the model and its data, from the same random numbers each time."""
        logging.set_verbosity_error()
        torch.manual_seed(0)
        name, mixed, _ = name.partition(_MIXED)
        self._size = SIZES[size]
        self.model = _CLASSES[name](self._size.configs[name]()).train()
        self.state: dict[str, Any] = {"model": self.model}
        self._rounded: nn.Module | None = None
        if mixed:
            self._rounded = copy.deepcopy(self.model).to(torch.bfloat16)
            self.state = {"model": self._rounded, "masters": self.model}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state["optimizer"] = self.optimizer
        self._examples = _images(self._size) if name in _VISION else self._text_examples(name)

    def _text_examples(self, name: str) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
        text = _source_text()

        def examples(chance: torch.Generator) -> dict[str, torch.Tensor]:
            starts = torch.randint(len(text) - _CONTEXT, (self._size.texts,), generator=chance)
            tokens = torch.stack([text[start : start + _CONTEXT] for start in starts.tolist()]).long()
            if name in _CAUSAL:
                return {"input_ids": tokens, "labels": tokens}
            hidden = torch.rand(tokens.shape, generator=chance) < _MASKED_SHARE
            return {
                "input_ids": tokens.masked_fill(hidden, _MASK),
                "labels": tokens.masked_fill(~hidden, _IGNORED),
            }

        return examples

    def iterate(self, step: int, before_optimizer: Callable[[], None] = lambda: None) -> float:
        """Train one step; return the loss. The batch depends on ``step`` only."""
        chance = torch.Generator().manual_seed(step)
        # Dropout draws from this generator.
        torch.manual_seed(step)
        batch = self._examples(chance)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        before_optimizer()
        self.optimizer.step()
        self._round()
        return loss.item()

    @torch.no_grad()
    def _round(self) -> None:
        """Round the masters to the weights in bfloat16, if there are any."""
        if self._rounded is not None:
            for weight, master in zip(self._rounded.parameters(), self.model.parameters(), strict=True):
                weight.copy_(master)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _source_text() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "typing.py"))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def _images(size: Size) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1).expand(-1, 3, -1, -1) / 16
    labels = torch.tensor(digits.target)

    def examples(chance: torch.Generator) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(small), (size.images,), generator=chance)
        images = nn.functional.interpolate(small[chosen], size=size.pixels, mode="bilinear")
        return {"pixel_values": images, "labels": labels[chosen]}

    return examples
