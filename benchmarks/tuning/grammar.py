"""Generated text with a structure to learn, and text that ships with Python, drawn from a seed."""

from __future__ import annotations

import functools
import inspect
import random

import torch
from torch import Tensor

IGNORED = -100
_TAGS = "determiner adjective subject object of-preposition verb verb-of-relative preposition adverb that stop".split()
TAGS = {tag: number for number, tag in enumerate(_TAGS)}

_DETERMINERS = "the a this that every some".split()
_ADJECTIVES = "old cold light open clean dry warm slow wild round".split()
_NOUNS = "dog ship river letter king garden watch fish play run paint light cold open clean dry round".split()
_VERBS = "sees likes finds watch fish play run paint light open clean dry round".split()
_PREPOSITIONS = "of with near under for".split()
_ADVERBS = "often slow round never light".split()
WORDS = {
    word: number
    for number, word in enumerate(dict.fromkeys(["", *_DETERMINERS, *_ADJECTIVES, *_NOUNS, *_VERBS, *_PREPOSITIONS, *_ADVERBS, "."]), 0)
}


class _Sentence:
    """Words and tags, written from left to right. Many words are noun, verb and adjective, depending on their position."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.words: list[tuple[str, str]] = []
        self._clause("verb")
        self._say(".", "stop")

    def _say(self, word: str, tag: str) -> None:
        self.words.append((word, tag))

    def _one_of(self, words: list[str], tag: str) -> None:
        self._say(self.draw.choice(words), tag)

    def _clause(self, verb: str) -> None:
        self._noun_phrase("subject", 0)
        self._verb_phrase(verb, 0)

    def _noun_phrase(self, role: str, depth: int) -> None:
        self._one_of(_DETERMINERS, "determiner")
        for _ in range(self.draw.choice((0, 0, 1, 1, 2))):
            self._one_of(_ADJECTIVES, "adjective")
        self._one_of(_NOUNS, role)
        chance = self.draw.random()
        if depth < 2 and chance < 0.25:
            self._one_of(_PREPOSITIONS, "preposition")
            self._noun_phrase("of-preposition", depth + 1)
        elif depth < 2 and chance < 0.5:
            self._say("that", "that")
            self._verb_phrase("verb-of-relative", depth + 1)

    def _verb_phrase(self, verb: str, depth: int) -> None:
        if self.draw.random() < 0.3:
            self._one_of(_ADVERBS, "adverb")
        self._one_of(_VERBS, verb)
        if self.draw.random() < 0.7:
            self._noun_phrase("object", depth + 1)


def tagged(seed: int, rows: int, length: int = 32) -> tuple[Tensor, Tensor]:
    """Return sentences of words and their tags, both (rows, length); the padding is word 0 with the tag IGNORED."""
    draw = random.Random(seed)
    words = torch.zeros(rows, length, dtype=torch.long)
    tags = torch.full((rows, length), IGNORED)
    for row in range(rows):
        sentence = _Sentence(draw).words[:length]
        words[row, : len(sentence)] = torch.tensor([WORDS[word] for word, _ in sentence])
        tags[row, : len(sentence)] = torch.tensor([TAGS[tag] for _, tag in sentence])
    return words, tags


CHARACTERS = 96


@functools.cache
def source_text() -> Tensor:
    """Return the source of argparse, character by character, with spaces for non-printable characters."""
    import argparse

    codes = torch.tensor([ord(character) for character in inspect.getsource(argparse)]) - 32
    codes[codes == ord("\n") - 32] = CHARACTERS - 1
    return codes.where((codes >= 0) & (codes < CHARACTERS), torch.zeros(()).long())


def windows(seed: int, rows: int, length: int) -> Tensor:
    """Return parts of `source_text()`, (rows, length)."""
    text = source_text()
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(seed))
    return text[starts.unsqueeze(1) + torch.arange(length)]


BRACKETS = 4  # kinds of them; token k opens kind k, token BRACKETS + k closes it


def nested(seed: int, rows: int, length: int) -> Tensor:
    """Return brackets of four kinds, each closed by its own kind, at most six deep: (rows, length). Only closing brackets are certain."""
    draw = random.Random(seed)
    found = []
    for _ in range(rows):
        tokens: list[int] = []
        still_open: list[int] = []
        while len(tokens) < length:
            if still_open and (len(still_open) == 6 or draw.random() < 0.5):
                tokens.append(BRACKETS + still_open.pop())
            else:
                # the kind that opens mostly follows the one around it, so that this is worth knowing too
                around = still_open[-1] if still_open else 0
                still_open.append((around + 1) % BRACKETS if draw.random() < 0.7 else draw.randrange(BRACKETS))
                tokens.append(still_open[-1])
        found.append(tokens)
    return torch.tensor(found)
