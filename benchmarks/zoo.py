"""Train six models: four on text, two on images, created from their configurations with random weights.

The text is the source code of Python's standard library, byte by byte. The images are the handwritten digits of
scikit-learn. Nothing is downloaded. A size describes the state, not the quality of the model.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

_CONTEXT = 64
_SPECIAL = 4
"""Tokens that are not bytes: RoBERTa counts positions after its padding token."""
_MASK, _MASKED_SHARE, _IGNORED = 256, 0.15, -100
_IMAGE = 32
_TEN_CLASSES: dict[str, Any] = {"num_labels": 10}


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a model and of its batch."""

    layers: int
    width: int
    batch: int


SIZES: dict[str, Size] = {"tiny": Size(2, 128, 4), "base": Size(12, 768, 1), "large": Size(36, 1280, 8)}
"""``tiny`` for tests, ``base`` for a CPU, ``large`` for a GPU."""


def _transformer(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": max(size.width // 64, 2),
        "intermediate_size": 4 * size.width,
    }


def _gpt2(size: Size, tokens: int) -> nn.Module:
    heads = max(size.width // 64, 2)
    config = GPT2Config(n_layer=size.layers, n_embd=size.width, n_head=heads, n_positions=_CONTEXT, vocab_size=tokens)
    return GPT2LMHeadModel(config)


def _bloom(size: Size, tokens: int) -> nn.Module:
    heads = max(size.width // 64, 2)
    return BloomForCausalLM(BloomConfig(n_layer=size.layers, hidden_size=size.width, n_head=heads, vocab_size=tokens))


def _bert(size: Size, tokens: int) -> nn.Module:
    config = BertConfig(**_transformer(size), vocab_size=tokens, max_position_embeddings=_CONTEXT)
    return BertForMaskedLM(config)


def _roberta(size: Size, tokens: int) -> nn.Module:
    positions = _CONTEXT + _SPECIAL
    return RobertaForMaskedLM(RobertaConfig(**_transformer(size), vocab_size=tokens, max_position_embeddings=positions))


def _resnet(size: Size) -> nn.Module:
    # Match the number of parameters of the other models approximately. Convolutions grow with the square of the width.
    width = size.width // 4
    config = ResNetConfig(
        num_channels=1,
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width, 8 * width],
        depths=[1, 1, max(size.layers // 2, 1), 1],
        layer_type="basic",
        **_TEN_CLASSES,
    )
    return ResNetForImageClassification(config)


def _vit(size: Size) -> nn.Module:
    config = ViTConfig(**_transformer(size), num_channels=1, image_size=_IMAGE, patch_size=4, **_TEN_CLASSES)
    return ViTForImageClassification(config)


_CAUSAL: Mapping[str, Callable[[Size, int], nn.Module]] = {"GPT-2": _gpt2, "BLOOM": _bloom}
_MASKED: Mapping[str, Callable[[Size, int], nn.Module]] = {"BERT": _bert, "RoBERTa": _roberta}
_VISION: Mapping[str, Callable[[Size], nn.Module]] = {"ResNet": _resnet, "ViT": _vit}
MODELS = (*_CAUSAL, *_MASKED, *_VISION)
"""Names of the models."""


class Training:
    """A model in training with AdamW: a pure function of its name, its size and the number of steps."""

    def __init__(self, name: str, size: str) -> None:
        """Create the model and its data, from the same random numbers each time."""
        logging.set_verbosity_error()
        torch.manual_seed(0)
        self._size = SIZES[size]
        self.model = self._made(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._examples = self._text_examples(name) if name not in _VISION else _images()

    def _made(self, name: str) -> nn.Module:
        tokens = 256 + _SPECIAL
        if name in _VISION:
            return _VISION[name](self._size).train()
        make = _CAUSAL.get(name) or _MASKED[name]
        return make(self._size, tokens).train()

    def _text_examples(self, name: str) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
        text = _source_text()

        def examples(chance: torch.Generator) -> dict[str, torch.Tensor]:
            starts = torch.randint(len(text) - _CONTEXT, (self._size.batch,), generator=chance)
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
        return loss.item()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _source_text() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "typing.py"))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def _images() -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(small, size=_IMAGE, mode="bilinear")
    labels = torch.tensor(digits.target)

    def examples(chance: torch.Generator) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(images), (8,), generator=chance)
        return {"pixel_values": images[chosen], "labels": labels[chosen]}

    return examples
