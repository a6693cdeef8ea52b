"""Program of a test: vLLM follows the releases of a model, and generates the same tokens as the model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import WeightTransferConfig

from asymcheck import Publish
from asymcheck.publish.release import Publisher

PROMPT = [1, 2, 3, 4]
COUNT = 8


def model_of(seed: int, *, width: int = 64, tied: bool) -> LlamaForCausalLM:
    """Return a small model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def expected(model: LlamaForCausalLM) -> list[int]:
    """Return the tokens that transformers generates."""
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False)
    return list(tokens[0][len(PROMPT) :].tolist())


def generated(llm: vllm.LLM) -> list[int]:
    """Return the tokens that vLLM generates."""
    llm.reset_prefix_cache()
    parameters = vllm.SamplingParams(temperature=0, max_tokens=COUNT, detokenize=False)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)[0].outputs[0].token_ids)


def update(llm: vllm.LLM, number: int | None) -> None:
    """Update to a release, or raise."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"number": number}})
    llm.finish_weight_update()


def refused(llm: vllm.LLM, number: int | None) -> str:
    """Return the error of an update."""
    try:
        update(llm, number)
    except Exception as error:  # noqa: BLE001 - printed
        return f"{type(error).__name__} {error}"
    raise AssertionError("not refused")


def publish(folder: Path, model: LlamaForCausalLM, seed: int, *, tied: bool) -> None:
    """Publish a release with other weights."""
    model.load_state_dict(model_of(seed, width=model.config.hidden_size, tied=tied).state_dict())
    with Publisher(Publish(str(folder / "releases"))) as publisher:
        publisher.publish({"model": model}, seed)


def main(folder: Path, *, tied: bool, workers: int) -> None:
    """Follow releases."""
    model = model_of(0, tied=tied)
    model.save_pretrained(folder / "model")
    llm = vllm.LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        tensor_parallel_size=workers,
        weight_transfer_config=WeightTransferConfig(backend="asymcheck"),
    )
    assert generated(llm) == expected(model)
    llm.init_weight_transfer_engine({"init_info": {"location": str(folder / "releases")}})
    # After an error, vLLM takes the answers of several workers for those of the next call.
    if workers == 1:
        assert "has no release yet" in refused(llm, 1)
    for seed in (1, 2):
        publish(folder, model, seed, tied=tied)
        update(llm, seed)
        assert generated(llm) == expected(model)
    before = expected(model)
    update(llm, None)
    assert generated(llm) == before
    if workers == 1:
        meet_errors(llm, folder, model, before, tied=tied)
    print("followed")  # noqa: T201 - the result


def meet_errors(llm: vllm.LLM, folder: Path, model: LlamaForCausalLM, before: list[int], *, tied: bool) -> None:
    """Meet an unknown, a damaged and a foreign release."""
    assert "step 7" in refused(llm, 7)
    publish(folder, model, 3, tied=tied)
    for pack in (folder / "releases" / "packs").iterdir():
        pack.write_bytes(bytes(pack.stat().st_size))
    assert "cannot be restored" in refused(llm, 3)
    assert generated(llm) == before

    other = folder / "other"
    other.mkdir()
    publish(other, model_of(4, width=32, tied=tied), 4, tied=tied)
    llm.init_weight_transfer_engine({"init_info": {"location": str(other / "releases")}})
    refused(llm, 1)
    last = folder / "last"
    last.mkdir()
    publish(last, model, 5, tied=tied)
    llm.init_weight_transfer_engine({"init_info": {"location": str(last / "releases")}})
    update(llm, 1)
    assert generated(llm) == expected(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tied=sys.argv[2] == "tied", workers=int(sys.argv[3]))
