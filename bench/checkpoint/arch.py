"""The embedded checkpoint's architecture: its configuration, its MTP module, its training forward.

The parameters live in transformers' ``Qwen3_5MoeForCausalLM``; the forward here computes the same
function (``check_forward`` proves it) in a form that compiles and trains fast: every expert is
computed densely, the delta rule is all matrix products, and dropout is in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf
from vocabulary import END_OF_TEXT, SPECIALS, TURN_END, VOCABULARY

TOKEN_ID = {token: VOCABULARY - len(SPECIALS) + i for i, token in enumerate(SPECIALS)}

TEXT_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "router_aux_loss_coef": 0.01,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "bos_token_id": TOKEN_ID[END_OF_TEXT],
    "eos_token_id": TOKEN_ID[TURN_END],
    "pad_token_id": TOKEN_ID[END_OF_TEXT],
}


def text_config() -> Qwen3_5MoeTextConfig:
    """``TEXT_CONFIG`` as transformers' class."""
    fields = {k: v for k, v in TEXT_CONFIG.items() if k not in ("model_type", "pad_token_id")}
    config = Qwen3_5MoeTextConfig(**fields)
    config._attn_implementation = "sdpa"
    return config


class MTP(nn.Module):
    """Next-next-token predictor, with the parameter names of the Qwen3-Next family's ``mtp.*``.

    Takes the main model's final (normed) hidden state at position t and the embedding of token
    t+1; its output, through the shared ``lm_head``, predicts token t+2.
    """

    def __init__(self, config: Qwen3_5MoeTextConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        attention = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen3_5MoeRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = hf.Qwen3_5MoeRMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([hf.Qwen3_5MoeDecoderLayer(config, attention)])
        self.norm = hf.Qwen3_5MoeRMSNorm(size, eps=eps)


def build(seed: int = 0) -> tuple[Qwen3_5MoeForCausalLM, MTP]:
    """Model and MTP module with fp32 initial weights, residual outputs scaled by depth."""
    torch.manual_seed(seed)
    config = text_config()
    model = Qwen3_5MoeForCausalLM(config)
    mtp = MTP(config)
    for module in mtp.modules():
        model._init_weights(module)
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *mtp.named_parameters()):
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                p.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model.float(), mtp.float()


def rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """RMS norm with a zero-centred weight, in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (y * (1.0 + norm.weight.float())).type_as(x)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Inverse of unit lower-triangular matrices [..., n, n], n a power of two of at least 8.

    Only matrix products, so that it compiles and batches: (I + N)^-1 = (I - N)(I + N^2)(I + N^4)
    on diagonal blocks of 8 (N^8 = 0), then pairs of blocks merge up to n.
    """

    def diagonal_blocks(size: int) -> Tensor:
        count = a.shape[-1] // size
        blocks = a.unflatten(-1, (count, size)).unflatten(-3, (count, size))
        return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    size = 8
    eye = torch.eye(size, dtype=a.dtype, device=a.device)
    lower = diagonal_blocks(size).tril(-1)
    square = lower @ lower
    inverse = (eye - lower) @ (eye + square) @ (eye + square @ square)
    while size < a.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -second @ diagonal_blocks(2 * size)[..., size:, :size] @ first
        top = torch.cat((first, torch.zeros_like(first)), -1)
        inverse = torch.cat((top, torch.cat((below, second), -1)), -2)
        size *= 2
    return inverse.squeeze(-3)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Chunked gated delta rule (Yang et al., arXiv 2412.06464), fp32.

    q, k [B, H, T, Dk] (normalized, q scaled), v [B, H, T, Dv], g (log decay) and beta [B, H, T];
    T a multiple of ``chunk``. Returns [B, H, T, Dv].
    """
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (x.unflatten(2, (-1, chunk)) for x in (g, beta))
    log_decay = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf)
    pair = pair.exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT) * pair
    right = torch.cat((v * beta[..., None], k_beta * log_decay.exp()[..., None]), -1)
    solved = unit_lower_inverse(system) @ right
    value, key_decayed = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = (q @ k.mT) * pair
    q = q * log_decay.exp()[..., None]
    k = k * (log_decay[..., -1:] - log_decay).exp()[..., None]
    total = log_decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        fresh = value[:, :, i] - key_decayed[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ fresh)
        state = state * total[:, :, i] + k[:, :, i].mT @ fresh
    return torch.cat(out, 2)


def delta_net(m: nn.Module, x: Tensor) -> Tensor:
    """Gated delta net mixer of one layer: [B, T, hidden] to [B, T, hidden]."""
    t = x.shape[1]
    # The depthwise convolution as a sum over its taps: elementwise, so that it fuses.
    taps = m.conv1d.weight.squeeze(1)
    padded = F.pad(m.in_proj_qkv(x), (0, 0, taps.shape[1] - 1, 0)).float()
    mixed = F.silu(sum(padded[:, i : i + t] * taps[:, i] for i in range(taps.shape[1])))
    q, k, v = mixed.split((m.key_dim, m.key_dim, m.value_dim), -1)
    beta = m.in_proj_b(x).float().sigmoid()
    g = -m.A_log.exp() * F.softplus(m.in_proj_a(x).float() + m.dt_bias)
    pad = -t % 64
    with torch.autocast(x.device.type, enabled=False):
        q, k = (y.unflatten(-1, (m.num_k_heads, m.head_k_dim)) for y in (q, k))
        q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(m.num_v_heads // m.num_k_heads, 2) for y in (q, k))
        v = v.unflatten(-1, (m.num_v_heads, m.head_v_dim))
        q, k, v = (F.pad(y.transpose(1, 2), (0, 0, 0, pad)) for y in (q, k, v))
        g, beta = (F.pad(y.transpose(1, 2), (0, pad)) for y in (g, beta))
        y = delta_rule(q * m.head_k_dim**-0.5, k, v, g, beta)[:, :, :t].transpose(1, 2)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + m.layer_norm_epsilon)
        y = (y * m.norm.weight).flatten(2)
    return m.out_proj((y * F.silu(m.in_proj_z(x).float())).to(x.dtype))


def attention(m: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Gated softmax attention of one layer: [B, T, hidden] to [B, T, hidden]."""
    q, gate = m.q_proj(x).unflatten(-1, (-1, 2 * m.head_dim)).chunk(2, -1)
    k = m.k_proj(x).unflatten(-1, (-1, m.head_dim))
    v = m.v_proj(x).unflatten(-1, (-1, m.head_dim)).transpose(1, 2)
    q, k = (rms_norm(y, n).transpose(1, 2) for y, n in ((q, m.q_norm), (k, m.k_norm)))
    q, k = hf.apply_rotary_pos_emb(q, k, rope[0].to(q.dtype), rope[1].to(q.dtype))
    k, v = (y.repeat_interleave(m.num_key_value_groups, 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, scale=m.scaling)
    return m.o_proj(y.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


def experts(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mixture of experts, all computed densely; also the load-balancing loss of this layer.

    The loss is Switch's (arXiv 2101.03961, eq. 4-6): experts x sum(share of tokens x mean
    probability), 1 x top_k when balanced.
    """
    shape, gate, e = x.shape, m.gate, m.experts
    x = x.flatten(0, -2)
    probs = F.linear(x, gate.weight).float().softmax(-1)
    top, index = probs.topk(gate.top_k, -1)
    chosen = torch.zeros_like(probs).scatter(-1, index, 1.0)
    weight = probs * chosen / top.sum(-1, keepdim=True)
    balance = gate.num_experts * (chosen.mean(0) * probs.mean(0)).sum()
    up_gate = F.linear(x, e.gate_up_proj.flatten(0, 1)).unflatten(-1, (e.num_experts, -1))
    a, b = up_gate.chunk(2, -1)
    inner = (F.silu(a) * b * weight.to(x.dtype)[..., None]).flatten(-2)
    y = F.linear(inner, e.down_proj.transpose(0, 1).flatten(1))
    shared = F.sigmoid(m.shared_expert_gate(x)) * m.shared_expert(x)
    return (y + shared).view(shape), balance


def layer(block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], p: float):
    """One decoder layer with dropout ``p`` on each residual branch; (output, balance loss)."""
    h = rms_norm(x, block.input_layernorm)
    if block.block_type == "linear_attention":
        h = delta_net(block.linear_attn, h)
    else:
        h = attention(block.self_attn, h, rope)
    x = x + F.dropout(h, p, p > 0)
    h, balance = experts(block.mlp, rms_norm(x, block.post_attention_layernorm))
    return x + F.dropout(h, p, p > 0), balance


def rope_table(model: Qwen3_5MoeForCausalLM, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [1, length, rotary] of positions 0 to length-1, fp32."""
    weight = model.lm_head.weight
    positions = torch.arange(length, device=weight.device).view(1, 1, -1).expand(3, 1, -1)
    return model.model.rotary_emb(weight.float(), positions)


def forward(model, mtp, ids: Tensor, rope: tuple[Tensor, Tensor], p: float = 0.0, layer=layer):
    """(logits [B, T, V] for t+1, MTP logits [B, T-1, V] for t+2, mean balance loss).

    ``layer`` may be a compiled form of this module's.
    """
    embedded = F.dropout(model.model.embed_tokens(ids), p, p > 0)
    x, balances = embedded, []
    for block in model.model.layers:
        x, balance = layer(block, x, rope, p)
        balances.append(balance)
    x = rms_norm(x, model.model.norm)
    both = (
        rms_norm(embedded[:, 1:], mtp.pre_fc_norm_embedding),
        rms_norm(x[:, :-1], mtp.pre_fc_norm_hidden),
    )
    y = mtp.fc(torch.cat(both, -1))
    y, balance = layer(mtp.layers[0], y, tuple(r[:, :-1] for r in rope), p)
    y = rms_norm(y, mtp.norm)
    aux = torch.stack((*balances, balance)).mean()
    return model.lm_head(x), model.lm_head(y), aux


@torch.no_grad()
def check_forward(model: Qwen3_5MoeForCausalLM, mtp: MTP) -> float:
    """Largest difference of ``forward``'s logits from transformers' own, fp32; raises past 1e-3.

    The logits of an untrained model are of order 1; both sides round at 2^-24 a step.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 83), generator=generator).to(model.lm_head.weight.device)
    ours, _, _ = forward(model, mtp, ids, rope_table(model, ids.shape[1]))
    theirs = model(input_ids=ids, use_cache=False).logits
    error = (ours - theirs).abs().max().item()
    if not error <= 1e-3:
        raise SystemExit(f"the training forward differs from transformers by {error}")
    return error
