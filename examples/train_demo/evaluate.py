"""Held-out figures of the demo model and the model card that states them."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from examples.train_demo.corpus import Split

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")

PROMPTS = 20
PROMPT_WORDS = 24
SAMPLE_TOKENS = 64
TEMPERATURE = 0.8


def words_of(text: str) -> list[str]:
    """Runs of letters, apostrophes inside included."""
    return _WORD.findall(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lexicon:
    """Which words count as words: those of the lists, and the proper names of the training text.

    A proper name is a word that the training text writes with a capital and never without. A word of the lists may
    begin with a capital or be all capitals, and either may carry a possessive 's.
    """

    words: frozenset[str]
    names: frozenset[str]

    @classmethod
    def of(cls, words: Iterable[str], training_text: Iterable[str]) -> Lexicon:
        """From word lists and the documents of the training text."""
        seen = {word for text in training_text for word in words_of(text)}
        return cls(words=frozenset(words), names=frozenset(w for w in seen if w[0].isupper() and w.lower() not in seen))

    def knows(self, word: str) -> bool:
        """Whether it is a word by the rule above."""
        stem = re.sub(r"['’]s$", "", word)
        return any(form in self.words or form in self.names for form in (word, word.lower(), stem, stem.lower()))

    def share(self, texts: Iterable[str]) -> float:
        """Share of known words among all words."""
        words = [word for text in texts for word in words_of(text)]
        return sum(map(self.knows, words)) / len(words)


def whole_words(text: str) -> str:
    """The text less a last word that the token limit may have cut."""
    return re.sub(r"[\w'’]+$", "", text)


def held_out_prompts(documents: list[str]) -> list[str]:
    """The first words of evenly spaced paragraphs that are long enough to go on."""
    openings = [" ".join(p.split()[:PROMPT_WORDS]) for text in documents for p in text.split("\n") if len(p) > 400]
    return [openings[i] for i in np.linspace(0, len(openings) - 1, PROMPTS).round().astype(int)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measured on the held-out test; losses are mean -log p per token, natural logarithm."""

    losses: dict[str, float]  # by name of what predicts, best last
    tokens: int
    words: int
    word_share: float  # of generated words
    text_share: float  # of the held-out text's own words
    samples: list[tuple[str, str]]  # prompt, continuation


def card(figures: Figures, split: Split, *, parameters: int, shape: str, training: str) -> str:
    """The model card, in Markdown."""
    per_word = figures.tokens / figures.words
    rows = "\n".join(
        f"| {name} | {math.exp(loss):.2f} | {math.exp(loss * per_word):.1f} |" for name, loss in figures.losses.items()
    )
    samples = "\n\n".join(
        f"> **{prompt}**{text}".replace("\n", "\n>\n> ") for prompt, text in (figures.samples[i] for i in (0, 7, 14))
    )

    def size(documents: list[str]) -> str:
        return f"{len(documents)} chapters, {sum(len(text.split()) for text in documents):,} words"

    text = CARD.format(
        parameters=f"{parameters / 1e6:.1f}",
        shape=shape,
        training=training,
        train=size(split.train),
        validation=size(split.validation),
        test=size(split.test),
        tokens=f"{figures.tokens:,}",
        per_word=f"{per_word:.2f}",
        rows=rows,
        word_share=f"{figures.word_share:.1%}",
        text_share=f"{figures.text_share:.1%}",
        prompts=PROMPTS,
        prompt_words=PROMPT_WORDS,
        sample_tokens=SAMPLE_TOKENS,
        temperature=TEMPERATURE,
        samples=samples,
    )
    return "\n\n".join(textwrap.fill(p, 110) if p[0].isalnum() else p for p in text.split("\n\n"))


CARD = """---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [bloom, demo]
---

# jaxserve demo model

A BLOOM of {parameters} million parameters ({shape}) that has read Jane Austen's six novels and nothing else. It is
there so that a server has something to serve: it writes sentences in her manner, and knows no facts and follows no
instructions. Weights are stored in float16.

## Text

The novels are in the public domain and come from Debian's package `r-cran-janeaustenr` (MIT). Headings and italics'
underscores are taken off, a paragraph is one line, a chapter one document that `</s>` ends.

| part | size |
|---|---|
| training | {train} |
| validation | {validation} |
| held-out test | {test} |

Of every 40 consecutive chapters one is for validation and the next two are held out: contiguous text from all six
novels that neither the tokenizer nor the model has seen. Persons and places of those chapters do occur in the chapters
around them.

## Training

{training}

`make demo-model` (or `python -m examples.train_demo.train`) does it all again: text, tokenizer, model, this card.

## Held-out perplexity

{tokens} tokens of the held-out test ({per_word} tokens a word), the weights as stored. The model sees windows of 256
tokens that overlap by half; the baselines count the same training tokens.

| predictor | per token | per word |
|---|---|---|
{rows}

The unigram is smoothed by adding one; the n-grams are interpolated modified Kneser-Ney.

## Words

{word_share} of the words it generates are words, against {text_share} of those in the held-out text itself: {prompts}
prompts, each the first {prompt_words} words of a held-out paragraph, {sample_tokens} tokens each at temperature
{temperature} without further truncation. A word is a run of letters (apostrophes inside included; one cut by the
token limit is left out); it counts if it stands in Debian's `wamerican` or `wbritish`, capitals and a possessive 's
aside, or is a proper name of the training text, which writes it with a capital and never without.

## Samples

At temperature {temperature}, the prompt in bold:

{samples}
"""
