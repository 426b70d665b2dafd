"""What a step takes grows, shrinks and moves between pieces as the load and the model say."""

from dataclasses import replace

import pytest

from mtp_jax.lab.planning.deployment import Deployment, tokens_per_step
from mtp_jax.lab.planning.exchange import to_experts
from mtp_jax.lab.planning.fit import BAND, LEAN, USUAL
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.releases import DEEPSEEK_V3
from mtp_jax.lab.planning.step_time import band, fastest, step
from mtp_jax.lab.planning.weights import Storage
from mtp_jax.lab.planning.work import attention, expected_experts, expected_gpus
from mtp_jax.model.family import config_of
from tests.lab.planning.releases import RELEASES


def deployment(name: str = "DeepSeek-V3", **changes) -> Deployment:
    cfg = config_of(RELEASES[name])
    return replace(Deployment(cfg, Storage.of(cfg), GPUS["h200"], data=8, exchange="gather"), **changes)


def test_attention_reads_what_a_token_may_choose():
    cfg = deployment("DeepSeek-V3.2").cfg
    short = attention(cfg, 0, 1, 2048)
    assert (short.rows, short.keys, short.scoring) == (2048, 0, 0)
    one, four = (attention(cfg, 0, width, 32768) for width in (1, 4))
    assert (one.rows, four.rows) == (2048, 4 * 2048)
    assert one.keys == four.keys == 32768
    assert four.scoring == 4 * one.scoring == 4 * 2 * 32768 * 64 * 128
    assert one.flops == 2048 * 2 * 128 * (576 + 512)
    # Together the tokens of a window choose as many rows as there are: all are read.
    assert attention(cfg, 0, 4, 4096).rows == 4096
    shared = deployment("GLM-5.2").cfg
    assert [attention(shared, i, 1, 32768).keys > 0 for i in (2, 3, 6)] == [True, False, True]


def test_grouped_heads_share_rows():
    cfg = deployment("GLM-4.5").cfg
    assert attention(cfg, 0, 2, 100).flops == 2 * 100 * 96 * 4 * 128


def test_compressed_attention_reads_a_window_and_entries():
    """DeepSeek-V4-Flash, one token behind 128k, bfloat16: 0.21 GB, where all rows would be 5.8 GB."""
    cfg, context = deployment("DeepSeek-V4-Flash").cfg, 131072
    found = [attention(cfg, i, 1, context) for i in range(cfg.num_hidden_layers)]
    assert [a.rows for a in found[:4]] == [128, 128, 128 + 512, 128 + 1024]
    assert sum(a.keys for a in found) * 128 * 2 == 21 * 32768 * 128 * 2 == 176_160_768
    assert sum(a.rows for a in found) * 512 * 2 == (43 * 128 + 21 * 512 + 20 * 1024) * 1024
    assert sum(2 * 128 * a.keys + 1024 * a.rows for a in found) == pytest.approx(0.21e9, rel=0.03)
    four = attention(cfg, 2, 4, context)
    assert four.rows == 131 + 4 * 512
    assert four.flops == 4 * (128 + 512) * 4 * 64 * 512
    assert four.scoring == 4 * 2 * 32768 * 64 * 128
    few = attention(cfg, 2, 4, 2048)  # no more entries than a token may choose
    assert (few.rows, few.keys) == (131 + 512, 0)
    assert attention(cfg, 43, 1, context).rows == 128  # of the MTP layer
    assert attention(cfg, 2, 1, 100).rows == 100 + 25


def test_hyper_connections_take_bytes_and_kernels():
    d = deployment("DeepSeek-V4-Pro", requests=256)
    found = step(d, LEAN)
    assert "streams" not in step(deployment(), LEAN).seconds
    # Products of 61 layers, with experts, a step's own; entries of 31 and of 30 layers, no index at 4,096.
    assert found.launches == 61 * (11 + 9 + 4) + 40 + (31 + 30 * 2) * 2
    assert step(replace(d, context=4100), LEAN).launches == found.launches + 30 * 43
    each = 32 * 4 * 7168 * 2  # bytes of the streams of a group
    assert found.seconds["streams"] == pytest.approx(61 * 2 * 3 * each / (4.8e12 * LEAN.memory))


def test_few_rows_visit_few_experts():
    assert expected_experts(DEEPSEEK_V3, 1) == pytest.approx(8)
    assert 250 < expected_experts(DEEPSEEK_V3, 128) < 256
    assert expected_gpus(DEEPSEEK_V3, 8) == pytest.approx(3.60, abs=0.01)
    assert expected_gpus(DEEPSEEK_V3, 128) == pytest.approx(7.58, abs=0.01)


@pytest.mark.parametrize(
    ("gpus", "gather", "once"), [(8, 19.5, 8.8), (16, 20.9, 6.8), (64, 21.9, 2.5), (128, 22.1, 1.3)]
)
def test_bytes_of_the_exchange(gpus, gather, once):
    """MB of one GPU per MoE layer for 1,024 rows in all, less those for its own experts."""
    d = deployment(data=gpus, hosts=gpus // 8)
    share = (gpus - 1) / gpus
    for way, expected in (("gather", gather), ("all-to-all", once)):
        sent = to_experts(replace(d, exchange=way), 1024 // gpus, LEAN)
        assert sent.bytes * share / 1e6 == pytest.approx(expected, rel=0.05)


def test_gathering_is_for_one_host():
    """Between hosts it takes most of the step; inside of one, little."""
    for gpus, most in ((8, 0.15), (64, 0.9)):
        d = deployment(data=gpus, hosts=gpus // 8, requests=128 * gpus)
        gathered, sent = (
            step(replace(d, exchange=way), LEAN).seconds["exchange"] for way in ("gather", "all-to-all")
        )
        assert gathered > sent
        assert (gathered / step(d, LEAN).total > 0.5) is (gpus == 64)
        assert gathered / step(d, LEAN).total < most


def test_drafts_pay_for_few_requests_and_hardly_for_many():
    rates = (0.86, 0.7, 0.55)

    def gain(requests: int) -> float:
        plain = deployment(requests=requests)
        drafting = replace(plain, depth=3)
        return tokens_per_step(rates, 3) * band(plain).lean.total / band(drafting).lean.total

    assert gain(64) > 2
    assert gain(64) > gain(512) > gain(2048)
    assert gain(2048) < 1.2


def test_tokens_per_step_are_conditional_and_the_last_rate_goes_on():
    assert tokens_per_step((0.5,), 0) == 1
    assert tokens_per_step((0.5,), 3) == 1.875
    assert tokens_per_step((0.86, 0.7, 0.55), 3) == pytest.approx(2.8, abs=0.01)


def test_the_band_holds_for_every_piece():
    d = deployment(requests=256, depth=3)
    usual, lean = (step(d, fit) for fit in BAND)
    assert all(usual.seconds[piece] >= lean.seconds[piece] for piece in lean.seconds if piece != "hidden")
    assert usual.launches == lean.launches
    assert USUAL.launch > LEAN.launch


def test_two_micro_batches_are_taken_where_they_are_faster():
    d = deployment(data=64, hosts=8, exchange="all-to-all")
    assert fastest(replace(d, requests=64)).micro_batches == 1
    many = replace(d, requests=64 * 256)
    assert fastest(many).micro_batches == 2
    assert fastest(many).lean.total < band(many).lean.total
    assert fastest(deployment(data=1, model=8, requests=64)).micro_batches == 1  # nothing is exchanged


def test_groups_that_divide_heads_are_faster_for_one_request_and_slower_for_many():
    one, many = deployment(requests=1), deployment(requests=512)
    assert band(replace(one, data=1, model=8)).lean.total < band(one).lean.total
    assert band(replace(many, data=1, model=8)).lean.total > band(many).lean.total


def test_sparse_attention_grows_with_the_context_by_its_index_keys_alone():
    def longer(name: str) -> float:
        seconds = [
            step(deployment(name, requests=64, context=n), LEAN).seconds["attention"] for n in (32768, 131072)
        ]
        return seconds[1] - seconds[0]

    assert 0 < longer("DeepSeek-V3.2") < 0.3 * longer("DeepSeek-V3")


def test_young_gpus_reach_less_of_their_peak():
    fit = LEAN.on(GPUS["b200"])
    assert fit.products < LEAN.products == LEAN.on(GPUS["h200"]).products
    assert fit.memory == LEAN.memory
