"""Whole models: an embedding, a stack of blocks, a head."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hessiankit.blocks.block import TransformerBlock
from hessiankit.blocks.embeddings import ClassHead, MeanPoolHead, PatchEmbedding, TokenEmbedding, TokenHead
from hessiankit.blocks.initialisation import initialise
from hessiankit.blocks.norms import make_norm
from hessiankit.blocks.placements import placement_of
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_sizes, unknown

HEADS = ("token", "mean", "class")


class _Stack(nn.Module):
    """Embedding -> [norm] -> blocks -> [norm] -> [head]; subclasses make the embedding and the head."""

    embedding: nn.Module
    head: nn.Module | None

    def _stack(self, d_model: int, d_ff: int, n_layers: int, *, final_norm: bool | None, **block: Any) -> None:
        """Make the blocks, each with its layer, and the norms of the stack, of the blocks' kind."""
        check_sizes(type(self).__name__, n_layers=n_layers)
        placement = placement_of(block.get("placement", "post"), caller=type(self).__name__)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, d_ff, layer=layer, n_layers=n_layers, **block) for layer in range(1, n_layers + 1)
        )
        norm = partial(
            make_norm,
            type(self).__name__,
            block.get("norm", "layernorm"),
            d_model,
            eps=block.get("eps", 1e-5),
            affine=block.get("affine", True),
            groups=block.get("groups", 2) if placement.grouped else None,
        )
        self.embedding_norm = norm() if placement.embedding_norm else None
        self.final_norm = norm() if (placement.final_norm if final_norm is None else final_norm) else None

    def forward(self, inputs: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Map inputs to logits, or to tokens where there is no head.

        Args:
            inputs: Inputs of the embedding.
            key_padding_mask: Booleans ``(B, L)``, True where a token is padding, as in ``nn.MultiheadAttention``.
        """
        x = self.embedding(inputs)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, key_padding_mask)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.head is None else self.head(x, key_padding_mask)


class Transformer(_Stack):
    """Token ids -> embedding [+ positions] [-> norm] -> blocks [-> norm] -> logits.

    GPT-2, Llama, Qwen3 and OLMo 2 are settings of this class, and so are the models of HybridNorm and The Curse of Depth.

    Args:
        vocab_size: Number of token ids.
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward networks.
        n_layers: Number of blocks L.
        n_heads: Number of attention heads.
        placement: Norm placement, a name in ``hessiankit.blocks.PLACEMENTS``. It also fixes the differences between layers
            (``hybridnorm*``, ``mix-ln``, ``lns``, ...) and whether the embedding is normalised (``embednorm-hybridnorm``).
        max_len: Number of learned positions, added to the embedding; None for none (pass ``rotary=True``).
        tied: Whether the token head and the embedding are one parameter.
        final_norm: Whether there is a norm before the head. By default as the placement has it: not where each block ends in a
            norm (``post``, ``deepnorm``, ``admin``), else yes. The paper of HybridNorm does not mention it; its code has one.
        head: ``"token"``: logits over the vocabulary for each token; ``"mean"``: class logits of the mean token; ``"class"``: of
            the first token, or the last one with ``causal=True``; None: the tokens themselves.
        n_classes: Number of class logits.
        initialisation: A name in ``hessiankit.blocks.SCHEMES``, or None for the blocks' own, variance 1 / fan-in. More options
            in :func:`hessiankit.blocks.initialise`.
        seed: Fixes the initial parameters; by default torch's global generator gives them.
        block: Options passed on to :class:`TransformerBlock`.

    Shape:
        Integers ``(B, L)`` to ``(B, L, vocab_size)``, ``(B, n_classes)`` or ``(B, L, d_model)``.

    Raises:
        InputError: If a name is not known or sizes do not fit; in ``forward``, if ids are out of range or the sequence is
            longer than ``max_len``.

    >>> model = Transformer(11, d_model=8, d_ff=16, n_layers=2, n_heads=2, placement="hybridnorm*", causal=True, rotary=True)
    >>> [block.own_placement.name for block in model.blocks]
    ['pre-qkv-pre', 'hybridnorm']
    >>> model.head.W_E is model.embedding.W_E
    True
    """

    embedding: TokenEmbedding

    @checked("Transformer", rest=TransformerBlock)
    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        d_ff: int,
        n_layers: int,
        n_heads: int = 1,
        placement: str = "pre",
        *,
        max_len: int | None = None,
        tied: bool = True,
        final_norm: bool | None = None,
        head: str | None = "token",
        n_classes: int | None = None,
        initialisation: str | None = "normal",
        seed: int | None = None,
        **block: Any,
    ) -> None:
        super().__init__()
        if head is not None and head not in HEADS:
            raise unknown("Transformer", "head", head, HEADS)
        if (n_classes is not None) != (head in ("mean", "class")):
            needs = "needs n_classes=" if n_classes is None else "has no classes; drop n_classes="
            raise InputError(f"Transformer: head={head!r} {needs}{'' if n_classes is None else n_classes}")
        self.embedding = TokenEmbedding(vocab_size, d_model, max_len=max_len)
        self._stack(d_model, d_ff, n_layers, final_norm=final_norm, n_heads=n_heads, placement=placement, **block)
        self.head = None
        if head == "token":
            self.head = TokenHead(d_model, vocab_size, tied_to=self.embedding.W_E if tied else None)
        elif n_classes is not None:
            causal = block.get("causal", False)
            self.head = MeanPoolHead(d_model, n_classes) if head == "mean" else ClassHead(d_model, n_classes, last=causal)
        if initialisation is not None:
            initialise(self, initialisation, seed=seed)


class VisionTransformer(_Stack):
    """Patches -> linear embedding + positions -> blocks -> mean over tokens -> class logits.

    The classifier of Closing the Curvature Gap, Section 5: the outputs are averaged over the tokens.

    Args:
        patch_dim: Entries of one patch.
        seq_len: Number of patches L.
        n_classes: Number of logits.
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward networks.
        n_blocks: Number of transformer blocks.
        final_norm: Whether there is a norm before the head; the paper has none. None: as in a ``Transformer`` of this placement.
        block: Options passed on to :class:`TransformerBlock`.

    Shape:
        ``(B, L, patch_dim)`` to ``(B, n_classes)``.

    >>> sum(p.numel() for p in VisionTransformer(4, 16, 10, d_model=16, d_ff=64, bias=True).parameters())
    3466
    """

    embedding: PatchEmbedding
    head: MeanPoolHead

    @checked("VisionTransformer", rest=TransformerBlock)
    def __init__(
        self,
        patch_dim: int,
        seq_len: int,
        n_classes: int,
        *,
        d_model: int,
        d_ff: int,
        n_blocks: int = 1,
        final_norm: bool | None = False,
        **block: Any,
    ) -> None:
        super().__init__()
        sizes = {"patch_dim": patch_dim, "seq_len": seq_len, "n_classes": n_classes, "d_model": d_model, "n_blocks": n_blocks}
        check_sizes("VisionTransformer", **sizes)
        self.embedding = PatchEmbedding(patch_dim, seq_len, d_model)
        self._stack(d_model, d_ff, n_blocks, final_norm=final_norm, **block)
        self.head = MeanPoolHead(d_model, n_classes)
