"""Sequences: BERT tags words, GPT-2 and an LSTM predict the next token, T5 reverses a sequence."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import models, networks
from . import grammar
from .task import ACCURACY, LOSS, Task, annealed

_EAGER = {"attn_implementation": "eager"}  # matmul and softmax of attention are ops to decide about


def loss_of_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def bert(seed: int, width: int = 48) -> nn.Module:
    torch.manual_seed(seed)
    return models.of_transformers(
        "BertForTokenClassification",
        vocab_size=len(grammar.WORDS),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        num_labels=len(grammar.TAGS),
        pad_token_id=0,
        **_EAGER,
    )


def _tagging(words: Tensor, tags: Tensor) -> dict[str, Tensor]:
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": tags}


def sentences(seed: int, rows: int = 16) -> list[dict[str, Tensor]]:
    return [_tagging(*grammar.tagged(1000 * seed + number, rows, length=24)) for number in range(40)]


@functools.cache
def _sentences_kept_apart() -> dict[str, Tensor]:
    return _tagging(*grammar.tagged(-1, rows=300, length=24))


def _tags_right(model: nn.Module) -> float:
    batch = _sentences_kept_apart()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        guessed = model(**batch).logits.argmax(-1)
    model.train(was_training)
    asked = batch["labels"] != grammar.IGNORED
    return (guessed == batch["labels"])[asked].float().mean().item()


def gpt2(seed: int, width: int = 64, length: int = 48) -> nn.Module:
    torch.manual_seed(seed)
    return models.of_transformers(
        "GPT2LMHeadModel",
        vocab_size=grammar.CHARACTERS,
        n_embd=width,
        n_layer=2,
        n_head=4,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **_EAGER,
    )


def characters(seed: int, length: int = 48) -> list[dict[str, Tensor]]:
    tokens = grammar.windows(seed, 16 * 40, length)
    return [{"input_ids": part, "labels": part} for part in tokens.split(16)]


_DIGITS, _LONGEST = 10, 8


def t5(seed: int, width: int = 48) -> nn.Module:
    torch.manual_seed(seed)
    return models.of_transformers(
        "T5ForConditionalGeneration",
        vocab_size=_DIGITS + 2,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
        **_EAGER,
    )


def reversals(seed: int, rows: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(40):
        # every digit is within two of the one before it, so that there is something to be learnt before the turning is
        moves = torch.randint(-2, 3, (rows, _LONGEST), generator=generator)
        digits = 2 + (torch.randint(_DIGITS, (rows, 1), generator=generator) + moves.cumsum(1)) % _DIGITS
        target = digits.flip(1)
        start = torch.zeros(len(target), 1, dtype=torch.long)
        found.append({"input_ids": digits, "decoder_input_ids": torch.cat([start, target[:, :-1]], 1), "labels": target})
    return found


def lstm(seed: int, outputs: int = 2 * grammar.BRACKETS) -> nn.Module:
    torch.manual_seed(seed)
    return networks.Recurrent(48, 1, outputs)


def _brackets(seed: int) -> list[tuple[Tensor, Tensor]]:
    tokens = grammar.nested(seed, rows=16 * 40, length=33)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(16)]


def _next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


TASKS = [
    Task(
        "bert",
        "BERT tags the words of a generated grammar, accuracy on 300 sentences kept apart",
        bert,
        sentences,
        loss_of_model,
        annealed(5e-3, 40),
        160,
        ACCURACY,
        metric=_tags_right,
        transformers=True,
    ),
    Task(
        "gpt2",
        "GPT-2 on the characters of argparse's source, loss",
        gpt2,
        characters,
        loss_of_model,
        annealed(1.5e-3, 80),
        160,
        LOSS,
        transformers=True,
    ),
    Task(
        "t5",
        "T5 turns a sequence of digits round, loss",
        t5,
        reversals,
        loss_of_model,
        annealed(3e-3, 40),
        160,
        LOSS,
        transformers=True,
    ),
    Task("lstm", "LSTM on nested brackets of four kinds, loss", lstm, _brackets, _next_token, annealed(1e-2, 40), 160, LOSS),
]
