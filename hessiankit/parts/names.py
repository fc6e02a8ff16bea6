"""What names say about a parameter, where neither the modules nor the flow of data do."""

from __future__ import annotations

import re

from hessiankit.parts.finding import Finding, Owner

_RULES = (
    (r"sinks?$", "Other", "attention sink"),
    (r"(pos|position)[a-z_]*(emb|embed|embedding|embeddings|bias|table|encoding)", "Emb", "position embedding"),
    (r"(cls|class|reg|register|mask|dist|distill?ation|prompt|query)_?(token|tokens|embed|embedding)$", "Emb", "learned token"),
    (r"(^|\.)(probe|latents?)$", "Emb", "learned token"),
    (r"(^|\.)(lm_head|heads?|classifier|score|pooler|predictions?|output_projection|unembed\w*)(\.|$)", "Head", "head"),
    (r"(^|\.)(wte|wpe|\w*embed\w*|tok\w*_emb\w*)(\.|$)", "Emb", "embedding"),
    (r"(^|[._])(ln|norm|layernorm|layer_norm|rmsnorm)[\w.]*\.?(weight|bias|gain|scale|g)?$", "Norm", "gain"),
    (r"(^|\.)(gamma|lambda|lambda_\d|layer_?scale\w*|ls\d?|res_?scale\w*)(_\w+)?(\.\w+)?$", "Norm", "scale"),
    (r"(^|\.)q_bias$", "QK", "query bias"),
    (r"(^|\.)k_bias$", "QK", "key bias"),
    (r"(^|\.)v_bias$", "VO", "value bias"),
    (r"(^|\.)(query|key|q_proj|k_proj|wq|wk|w_q|w_k)(\.|$)", "QK", "query or key"),
    (r"(^|\.)(value|v_proj|o_proj|out_proj|wv|wo|w_v|w_o)(\.|$)", "VO", "value or output"),
    (r"(^|\.)(mlp|ffn?|feed_?forward|experts?|fc\d?|c_fc|linear[12]|w[123])(\.|$)", "FFN", "feed-forward"),
    (r"(^|\.)(router|gate)(\.|$)", "Other", "router"),
)


def by_name(owner: Owner) -> Finding | None:
    """Return the first of a list of name rules that matches, or None.

    >>> from torch import nn
    >>> by_name(Owner("", nn.Identity(), "pos_embed")).role, by_name(Owner("mixer", nn.Identity(), "A_log"))
    ('position embedding', None)
    """
    name = owner.name.lower()
    for rule, block_type, role in _RULES:
        if re.search(rule, name):
            if owner.leaf == "bias":
                role = "norm bias" if role == "gain" else f"{role} bias"
            return Finding(block_type, role, f"the name {owner.name!r}", firm=False)
    return None
