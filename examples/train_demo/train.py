"""`python -m examples.train_demo.train` trains the demo model, in an hour on two cores.

A tokenizer and a small BLOOM are trained on the novels of `corpus`, the held-out figures are measured on the rounded
weights as they are stored, and the Hugging Face directory is written with its model card. The forward is the engine's
own model code; training adds a dense attention and the optimiser. A run that was stopped goes on from its last
checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_demo import evaluate
from examples.train_demo.baselines import KneserNey, unigram_loss
from examples.train_demo.corpus import CorpusError, Split, fetch_words, read_documents, read_text, split
from examples.train_demo.sequences import mean_loss, next_token_losses, sample
from jaxserve.demo import DEMO_MODEL
from jaxserve.models import Model, Params, build, parse_config
from jaxserve.weights import write_hf

END_OF_TEXT = "</s>"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "README.md", "held_out.txt")
SAVE_EVERY = 100  # steps between checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the result depends on, besides the text.

    The learning rate rises over `warmup` steps, stays, and falls to zero over the last `decay` (a share of the steps).
    """

    vocab_size: int = 4096
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    sequence: int = 128
    batch: int = 24
    steps: int = 960
    learning_rate: float = 5e-3
    warmup: int = 30
    decay: float = 0.5
    weight_decay: float = 0.1
    seed: int = 20


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; token 0 ends a text, and nothing is put before one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """int32[tokens]: the documents, with an end-of-text token before the first and after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.array([end, *(t for text in documents for t in (*tokenizer.encode(text).ids, end))], np.int32)


def model_entries(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of config.json."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": recipe.hidden_size,
        "n_layer": recipe.num_layers,
        "n_head": recipe.num_heads,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float16",
    }


def initial_params(model: Model, seed: int) -> Params:
    """Weights normal(0, 0.02), smaller by sqrt(2 * layers) at the end of residual branches."""
    rng = np.random.default_rng(seed)
    last = ("out", "down")

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        names = [str(getattr(key, "key", "")) for key in path]
        if names[-1] == "scale":
            return np.ones(leaf.shape, np.float32)
        if names[-1] == "bias":
            return np.zeros(leaf.shape, np.float32)
        deviation = 0.02 / (2 * model.config.num_layers) ** 0.5 if names[-2] in last else 0.02
        shape = leaf.shape[::-1] if names[-1] == "kernel" else leaf.shape  # kernels are drawn [in, out], kept [out, in]
        drawn = rng.normal(0, deviation, shape).astype(np.float32)
        return drawn.T if names[-1] == "kernel" else drawn

    return jax.tree_util.tree_map_with_path(draw, model.shapes(jnp.dtype(jnp.float32)))


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Muon (optax.contrib) on the layers' kernels, Adam on the embedding, norms and biases."""
    falling = max(round(recipe.steps * recipe.decay), 1)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0, recipe.learning_rate, recipe.warmup),
            optax.constant_schedule(recipe.learning_rate),
            optax.linear_schedule(recipe.learning_rate, 0, falling),
        ],
        [recipe.warmup, recipe.steps - falling],
    )

    def kernels(params: Any) -> Any:
        muon = contrib.MuonDimensionNumbers()
        return jax.tree_util.tree_map_with_path(lambda path, _: muon if path[-1].key == "kernel" else None, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        contrib.muon(
            rate,
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=kernels,
        ),
    )


def batches(stream: np.ndarray, recipe: Recipe, first_step: int) -> Iterator[np.ndarray]:
    """int32[batch, sequence + 1] for each step; every epoch cuts and shuffles the stream anew."""
    per_epoch = (len(stream) - recipe.sequence - 1) // recipe.sequence // recipe.batch
    if per_epoch < 1:
        raise CorpusError(
            f"the training text has {len(stream)} tokens; a batch of {recipe.batch} sequences of {recipe.sequence} "
            f"needs {(recipe.batch + 1) * recipe.sequence + 1}"
        )
    for step in range(first_step, recipe.steps):
        epoch, index = divmod(step, per_epoch)
        rng = np.random.default_rng([recipe.seed, epoch])
        offset = rng.integers(recipe.sequence)
        pieces = rng.permutation(per_epoch * recipe.batch)[index * recipe.batch : (index + 1) * recipe.batch]
        yield np.stack([stream[offset + p * recipe.sequence :][: recipe.sequence + 1] for p in pieces])


def run_name(recipe: Recipe, stream: np.ndarray) -> str:
    """Equal for runs that give the same result."""
    return json.dumps(dataclasses.asdict(recipe) | {"text": zlib.crc32(stream.tobytes())})


def save_checkpoint(path: Path, run: str, step: int, state: Any) -> None:
    """Writes all arrays, then renames: a run stopped while writing keeps the checkpoint before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    arrays |= {"run": np.array(run), "step": np.array(step)}
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **arrays)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, run: str, like: Any) -> tuple[int, Any]:
    """(steps done, state); 0 and `like` without a checkpoint. ValueError for another run's."""
    if not path.exists():
        return 0, like
    with np.load(path) as stored:
        if str(stored["run"]) != run:
            raise ValueError(f"{path} belongs to a run with other settings or text; remove it to start anew")
        leaves = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(jax.tree.leaves(like)))]
        return int(stored["step"]), jax.tree.unflatten(jax.tree.structure(like), leaves)


def train(recipe: Recipe, model: Model, stream: np.ndarray, validation: np.ndarray, checkpoint: Path | None) -> Params:
    """Runs the recipe and returns float32 parameters; reports to stderr."""
    transform = optimiser(recipe)
    params = jax.tree.map(jnp.asarray, initial_params(model, recipe.seed))
    state = (params, transform.init(params))
    done = 0
    if checkpoint is not None:
        done, state = load_checkpoint(checkpoint, run_name(recipe, stream), state)

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(lambda params: next_token_losses(model, params, tokens).mean())(params)
        updates, moments = transform.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    began, first, recent = time.monotonic(), done, []
    for step, tokens in enumerate(batches(stream, recipe, done), start=done + 1):
        state, value = update(state, tokens)
        recent = [*recent[-49:], float(value)]
        speed = (step - first) / (time.monotonic() - began)
        print(
            f"\rstep {step}/{recipe.steps}  loss {sum(recent) / len(recent):.3f}  "
            f"{speed * recipe.batch * recipe.sequence:,.0f} tokens/s  "
            f"{(recipe.steps - step) / speed / 60:.1f} min left ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if step % SAVE_EVERY == 0 or step == recipe.steps:
            print(f"\nvalidation loss {mean_loss(model, state[0], validation):.4f}", file=sys.stderr, flush=True)
            if checkpoint is not None:
                save_checkpoint(checkpoint, run_name(recipe, stream), step, state)
    return state[0]


def measure(
    model: Model, params: Params, tokenizer: Tokenizer, parts: Split, words: frozenset[str]
) -> evaluate.Figures:
    """The figures of the card, of the parameters as given."""
    train_stream, test_stream = token_stream(tokenizer, parts.train), token_stream(tokenizer, parts.test)
    size = tokenizer.get_vocab_size()
    losses = {
        "unigram": unigram_loss(train_stream, test_stream, size),
        "trigram": KneserNey(train_stream, size, 3).loss(test_stream),
        "5-gram": KneserNey(train_stream, size, 5).loss(test_stream),
        "this model": mean_loss(model, params, test_stream),
    }
    prompts = evaluate.held_out_prompts(parts.test)
    drawn = sample(
        model,
        params,
        [tokenizer.encode(prompt).ids for prompt in prompts],
        count=evaluate.SAMPLE_TOKENS,
        temperature=evaluate.TEMPERATURE,
        seed=0,
    )
    texts = [evaluate.whole_words(tokenizer.decode(tokens)) for tokens in drawn]
    lexicon = evaluate.Lexicon.of(words, parts.train)
    return evaluate.Figures(
        losses=losses,
        tokens=len(test_stream) - 1,
        words=sum(len(text.split()) for text in parts.test),
        word_share=lexicon.share(texts),
        text_share=lexicon.share(parts.test),
        samples=list(zip(prompts, texts, strict=True)),
    )


def make(recipe: Recipe, documents: list[str], words: frozenset[str], out: Path, checkpoint: Path | None) -> None:
    """Trains, and writes config, weights, tokenizer, card and held-out text to `out`."""
    parts = split(documents)
    tokenizer = train_tokenizer(parts.train, recipe.vocab_size)
    entries = model_entries(recipe, tokenizer)
    model = build(parse_config(entries))
    params = train(
        recipe, model, token_stream(tokenizer, parts.train), token_stream(tokenizer, parts.validation), checkpoint
    )
    stored = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float16), params)
    figures = measure(model, jax.tree.map(lambda leaf: leaf.astype(np.float32), stored), tokenizer, parts, words)
    out.mkdir(parents=True, exist_ok=True)
    write_hf(out, model.config, stored)
    (out / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    text = evaluate.card(
        figures,
        parts,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        shape=(
            f"{recipe.num_layers} layers, hidden size {recipe.hidden_size}, {recipe.num_heads} heads, a byte-level BPE "
            f"of {tokenizer.get_vocab_size():,} tokens"
        ),
        training=(
            f"{recipe.steps:,} steps of {recipe.batch} sequences of {recipe.sequence} tokens in float32, with optax: "
            f"Muon on the layers' kernels, Adam on the rest, learning rate {recipe.learning_rate}, weight decay "
            f"{recipe.weight_decay} on the kernels, no dropout, seed {recipe.seed}."
        ),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    (out / "held_out.txt").write_text("\n\f\n".join(parts.test) + "\n", encoding="utf-8")


def main() -> None:
    """Entry point of `python -m examples.train_demo.train`."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo.train", description=__doc__)
    parser.add_argument("--corpus", type=Path, help="UTF-8 text, documents parted by form feeds (default: the novels)")
    parser.add_argument("--words", type=Path, help="word list, one a line (default: Debian's wamerican and wbritish)")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL, help="folder to write the model to (%(default)s)")
    default = Path("build/demo-model.npz")
    parser.add_argument("--checkpoint", type=Path, default=default, help="where a run stopped goes on (%(default)s)")
    options = parser.parse_args()
    try:
        documents = read_documents(options.corpus)
        words = fetch_words() if options.words is None else frozenset(read_text(options.words).split())
        make(Recipe(), documents, words, options.out, options.checkpoint)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
