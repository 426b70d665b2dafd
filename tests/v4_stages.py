"""DSpark stages of a small DeepSeek-V4 by their formulas, in float64, without product code."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.v4 import Arrays


@dataclass(frozen=True)
class Stages:
    """The stages among a model's tensors. Contexts are rows of all tokens before a block."""

    c: dict[str, Any]
    w: Arrays

    @property
    def last(self) -> str:
        return f"mtp.{self.c['n_mtp_layers'] - 1}"

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T.astype(np.float64)

    def norm(self, x: np.ndarray, name: str | None = None) -> np.ndarray:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return y if name is None else y * self.w[f"{name}.weight"]

    def rope(self, x: np.ndarray, at: np.ndarray, sign: int = 1) -> np.ndarray:
        """The last channels of x [n, ..., d], neighbours in pairs; sign: -1: rotated back."""
        width = self.c["qk_rope_head_dim"]
        angle = at[:, None] * self.c["rope_theta"] ** -(np.arange(0, width, 2) / width)
        turn = np.exp(1j * sign * angle).reshape(len(at), *(1,) * (x.ndim - 2), width // 2)
        pairs = (x[..., -width::2] + 1j * x[..., 1 - width :: 2]) * turn
        turned = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], width)
        return np.concatenate([x[..., :-width], turned], -1)

    def context(self, taps: np.ndarray) -> np.ndarray:
        """taps: [T, m * D], side by side."""
        return self.norm(self.linear(taps.astype(np.float64), "mtp.0.main_proj"), "mtp.0.main_norm")

    def attention(self, p: str, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        c, (rows, _), length = self.c, x.shape, len(context)
        heads, width, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        at, old = length + np.arange(rows), np.arange(max(length - c["sliding_window"], 0), length)
        low = self.norm(self.linear(x, f"{p}.wq_a"), f"{p}.q_norm")
        q = self.rope(self.norm(self.linear(low, f"{p}.wq_b").reshape(rows, heads, width)), at)

        def row(y: np.ndarray, at: np.ndarray) -> np.ndarray:
            return self.rope(self.norm(self.linear(y, f"{p}.wkv"), f"{p}.kv_norm"), at)

        kv = np.concatenate([row(context[old], old), row(x, at)])
        scores = np.exp(np.einsum("thd,sd->ths", q, kv) * width**-0.5)
        weights = scores / (scores.sum(-1) + np.exp(self.w[f"{p}.attn_sink"]))[..., None]
        mixed = self.rope(np.einsum("ths,sd->thd", weights, kv), at, -1).reshape(rows, groups, -1)
        down = self.w[f"{p}.wo_a.weight"].reshape(groups, c["o_lora_rank"], -1)
        return self.linear(np.einsum("tgi,gri->tgr", mixed, down).reshape(rows, -1), f"{p}.wo_b")

    def expert(self, x: np.ndarray, p: str) -> np.ndarray:
        limit = self.c["swiglu_limit"]
        gate = np.minimum(self.linear(x, f"{p}.w1"), limit)
        up = np.clip(self.linear(x, f"{p}.w3"), -limit, limit)
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{p}.w2")

    def experts(self, p: str, x: np.ndarray) -> np.ndarray:
        scores = np.sqrt(np.logaddexp(0, self.linear(x, f"{p}.gate")))
        out = self.expert(x, f"{p}.shared_experts")
        for i, row in enumerate(scores):
            chosen = np.argsort(-(row + self.w[f"{p}.gate.bias"]))[: self.c["num_experts_per_tok"]]
            for e in chosen:
                share = self.c["routed_scaling_factor"] * row[e] / row[chosen].sum()
                out[i] += share * self.expert(x[i : i + 1], f"{p}.experts.{e}")[0]
        return out

    def gates(self, x: np.ndarray, p: str) -> np.ndarray:
        """All streams of a row, normed together, by a matrix."""
        return self.norm(x.reshape(len(x), -1)) @ self.w[p].T.astype(np.float64)

    def half(self, p: str, x: np.ndarray, sublayer: Any) -> np.ndarray:
        """Streams [n, S, D] after a sublayer with hyper-connections."""
        s, eps, w = self.c["hc_mult"], self.c["hc_eps"], self.w
        scale, base, found = w[f"{p}_scale"], w[f"{p}_base"], self.gates(x, f"{p}_fn")
        into = _sigmoid(found[:, :s] * scale[0] + base[:s]) + eps
        out = 2 * _sigmoid(found[:, s : 2 * s] * scale[1] + base[s : 2 * s])
        mix = np.exp(found[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(-1, s, s)
        mix = mix / mix.sum(-1, keepdims=True) + eps
        for i in range(2 * self.c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(-1 if i % 2 else -2, keepdims=True) + eps)
        result = sublayer(np.einsum("tj,tjd->td", into, x))
        return out[..., None] * result[:, None] + np.einsum("tjk,tjd->tkd", mix, x)

    def block(self, newest: int, context: np.ndarray) -> np.ndarray:
        """Rows [B, D] before the final norm."""
        c = self.c
        ids = [newest] + [c["dspark_noise_token_id"]] * (c["dspark_block_size"] - 1)
        x = np.repeat(self.w["embed.weight"][ids].astype(np.float64)[:, None], c["hc_mult"], axis=1)
        for k in range(c["n_mtp_layers"]):
            p = f"mtp.{k}"
            x = self.half(
                f"{p}.hc_attn",
                x,
                lambda y, p=p: self.attention(f"{p}.attn", self.norm(y, f"{p}.attn_norm"), context),
            )
            x = self.half(
                f"{p}.hc_ffn", x, lambda y, p=p: self.experts(f"{p}.ffn", self.norm(y, f"{p}.ffn_norm"))
            )
        found = self.gates(x, f"{self.last}.hc_head_fn")
        gates = _sigmoid(found * self.w[f"{self.last}.hc_head_scale"] + self.w[f"{self.last}.hc_head_base"])
        return np.einsum("tj,tjd->td", gates + c["hc_eps"], x)

    def drafts(self, newest: int, context: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Drafts, and the logits that each was chosen by."""
        rows, made, chosen_by = self.block(newest, context), [newest], []
        logits = self.linear(self.norm(rows, f"{self.last}.norm"), "head")
        for base in logits:
            before = self.w[f"{self.last}.markov_head.markov_w1.weight"][made[-1]].astype(np.float64)
            chosen_by.append(base + self.linear(before, f"{self.last}.markov_head.markov_w2"))
            made.append(int(chosen_by[-1].argmax()))
        return made[1:], np.stack(chosen_by)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
