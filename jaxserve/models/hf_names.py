"""How families name what they share: entries of config.json, tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigNames:
    """config.json's names of each attribute of a ModelConfig, the preferred one first.

    None where there is no such entry: then the family's default holds. All families call the vocabulary's size, the
    special tokens and the tying of embeddings alike.
    """

    hidden_size: tuple[str, ...] = ("hidden_size",)
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()
    ffn_size: tuple[str, ...] = ("intermediate_size",)
    max_position: tuple[str, ...] = ("max_position_embeddings",)
    norm_eps: tuple[str, ...] = ("layer_norm_epsilon",)
    activation: tuple[str, ...] = ("hidden_act",)
    initializer_range: tuple[str, ...] = ("initializer_range",)

    def read(
        self,
        fields: Fields,
        family: str,
        *,
        activation: str,
        tied: bool,
        eos: int | None,
        bos: int | None,
        norm_eps: float = 1e-5,
        alibi: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_ratio: int | None = None,
        max_position: int | None = None,
    ) -> dict[str, Any]:
        """What the family's ModelConfig takes of these entries; the arguments fill absent ones.

        Args:
          tied: whether the head is the token table.
          eos / bos: ids of the tokens that end and begin a text.
          alibi: whether the model has ALiBi, and so no limit of positions.
          num_kv_heads: of the keys and values; None for as many as queries have, which a null entry means always.
          head_dim: the size of a head; None if the heads share the hidden size.
          ffn_ratio: the feed-forward's size in hidden sizes; None if config.json must say it, as with max_position.
        """
        hidden_size, num_heads = fields.count(*self.hidden_size), fields.count(*self.num_heads)
        num_kv_heads = fields.count_or_none(*self.num_kv_heads, default=num_kv_heads) or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads[0]} is {num_kv_heads}; it must divide {self.num_heads[0]}, which is {num_heads}"
            )
        vocab_size = fields.count("vocab_size")
        return {
            "family": family,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_layers": fields.count(*self.num_layers),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": fields.count(*self.head_dim, default=head_dim or 0) or head_size(hidden_size, num_heads),
            "ffn_size": fields.count(*self.ffn_size, default=ffn_ratio and ffn_ratio * hidden_size),
            "max_position": None if alibi else fields.count(*self.max_position, default=max_position),
            "alibi": alibi,
            "norm_eps": fields.number(*self.norm_eps, default=norm_eps),
            "activation": fields.activation(*self.activation, default=activation),
            "tie_embeddings": fields.flag("tie_word_embeddings", default=tied),
            "eos_token_ids": fields.tokens("eos_token_id", vocab_size, default=eos),
            "bos_token_id": fields.token("bos_token_id", vocab_size, default=bos),
            "initializer_range": fields.number(*self.initializer_range, default=0.02),
        }

    def entries(self, config: ModelConfig, architecture: str) -> dict[str, Any]:
        """The entries of a config.json from which `read` makes equal values."""
        names = {names[0]: attribute for attribute in self.__slots__ if (names := getattr(self, attribute))}
        named = {name: getattr(config, attribute) for name, attribute in names.items()}
        return {
            "architectures": [architecture],
            "model_type": config.family,
            "vocab_size": config.vocab_size,
            **{name: value for name, value in named.items() if value is not None},
            "tie_word_embeddings": config.tie_embeddings,
            "eos_token_id": list(config.eos_token_ids) or None,
            "bos_token_id": config.bos_token_id,
        }


def linear(name: str, *, bias: bool = True, transposed: bool = False, **stored: Any) -> dict[str, Stored]:
    """The tensors `name`.weight and `name`.bias of a `Linear`; the rest as in Stored."""
    kernel = {"kernel": Stored(f"{name}.weight", transposed=transposed, **stored)}
    return kernel | {"bias": Stored(f"{name}.bias", **stored)} if bias else kernel


def norm(name: str, *, bias: bool = True) -> dict[str, Stored]:
    """The tensors of a norm."""
    scale = {"scale": Stored(f"{name}.weight")}
    return scale | {"bias": Stored(f"{name}.bias")} if bias else scale


def table(name: str) -> dict[str, Stored]:
    """The tensor of a `Table`."""
    return {"table": Stored(f"{name}.weight")}
