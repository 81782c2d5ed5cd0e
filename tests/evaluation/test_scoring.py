"""The fast path against one forward pass for every choice."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.models import TreeModel
from llmfoundry_lite.evaluation.packing import Row, Separator, pack
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Score, score, score_hidden
from llmfoundry_lite.models import products
from tests.helpers.models import normal_model

CPU = torch.device("cpu")
SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=50)


def with_attention(**options):
    return replace(SMALL, attn_config=AttentionConfig(**options), no_bias=True)


MODELS = {
    "learned positions": (SMALL, "sdpa"),
    "ALiBi": (with_attention(alibi=True), "sdpa"),
    "clamped, normed": (with_attention(qk_ln=True, clip_qkv=6), "sdpa"),
    "RoPE, shared heads": (with_attention(rope=True, attn_type="grouped_query_attention", kv_n_heads=2), "sdpa"),
    "a window": (with_attention(alibi=True, sliding_window_size=5), "sdpa"),
    "untied": (replace(SMALL, tie_word_embeddings=False), "sdpa"),
}
for implementation in ("reference", "blocked", "flex"):
    for name in ("learned positions", "ALiBi", "RoPE, shared heads"):
        MODELS[f"{name}, {implementation}"] = (MODELS[name][0], implementation)


def build(config=SMALL, attn_impl="sdpa", device=CPU):
    return TreeModel(normal_model(config, attn_impl=attn_impl).to(device), device)


def request(context, continuation):
    return Request(tuple(context), tuple(continuation), len(continuation), 0)


def questions(num, num_choices=3, shared=0, seed=0):
    """Groups of requests with a context each, behind `shared` tokens that are the same for all."""
    generator = random.Random(seed)

    def tokens(n):
        return [generator.randrange(50) for _ in range(n)]

    beginning = tokens(shared)
    groups = []
    for _ in range(num):
        context = beginning + tokens(generator.randint(1, 12))
        groups.append([request(context, tokens(generator.randint(1, 6))) for _ in range(num_choices)])
    return groups


def one_by_one(model, groups):
    """No tricks: log-probabilities of the continuation's tokens from the logits of the whole text."""
    scores = {}
    for number, each in enumerate(r for group in groups for r in group):
        text = torch.tensor([[*each.context, *each.continuation]])
        log_p = F.log_softmax(model.model(text)[0].double(), dim=-1)
        at = range(len(each.context) - 1, text.size(1) - 1)
        value = sum(float(log_p[i, text[0, i + 1]]) for i in at)
        scores[number] = Score(value, all(int(log_p[i].argmax()) == int(text[0, i + 1]) for i in at))
    return scores


def all_scores(model, groups, max_batch_tokens=256, world_size=1):
    found = {}
    for rank in range(world_size):
        for part in score(model, groups, max_batch_tokens, rank, world_size):
            assert not found.keys() & part.keys()
            found |= part
    return found


@cache
def asked(name, shared):
    """Questions, and the scores of each choice alone by the reference implementation of attention."""
    groups = questions(15, shared=shared)
    return groups, one_by_one(build(MODELS[name][0], "reference"), groups)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [0, 40])
def test_scores_are_those_of_one_forward_pass_for_each_choice(name, shared):
    first_of_its_kind = next(other for other in MODELS if MODELS[other][0] is MODELS[name][0])
    model, (groups, expected) = build(*MODELS[name]), asked(first_of_its_kind, shared)
    found = all_scores(model, groups)
    assert found.keys() == expected.keys()
    for number, value in expected.items():
        assert found[number].log_probability == pytest.approx(value.log_probability, abs=1e-5, rel=0)
        assert found[number].is_greedy == value.is_greedy
    # Plain rows too, as of a task without choices: those an implementation computes in its own way.
    alone = all_scores(model, [group[:1] for group in groups[:8]], max_batch_tokens=1)
    numbers = itertools.accumulate([0, *(len(group) for group in groups[:7])])
    for i, number in enumerate(numbers):
        assert alone[i].log_probability == pytest.approx(expected[number].log_probability, abs=1e-5, rel=0)
        assert alone[i].is_greedy == expected[number].is_greedy


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("RoPE, shared heads", "sdpa"), *(("ALiBi", name) for name in ("sdpa", "reference", "blocked", "flex"))],
)
def test_after_a_separator_nothing_before_it_is_seen(name, implementation):
    """Positions are relative here, so that what stands after the separator scores as it does by itself."""
    model, separator = build(MODELS[name][0], implementation), 49
    generator = random.Random(1)

    def tokens(n):
        return [generator.randrange(49) for _ in range(n)]

    contexts, rests = [tokens(5) for _ in range(4)], [tokens(3) for _ in range(4)]
    answers = [[tokens(2), tokens(3)] for _ in range(4)]
    whole, alone = (
        [
            [request([*start, *rest], answer) for answer in pair]
            for start, rest, pair in zip(starts, rests, answers, strict=True)
        ]
        for starts in ([[*before, separator] for before in contexts], [[]] * 4)
    )
    expected, seen = one_by_one(model, alone), one_by_one(model, whole)
    for num_choices, max_batch_tokens in ((2, 64), (1, 1)):  # as trees, and as plain rows
        found = {}
        for part in score(
            model, [group[:num_choices] for group in whole], max_batch_tokens, separator=Separator(separator)
        ):
            found |= part
        for number, value in found.items():
            first = number * (3 - num_choices)
            assert value.log_probability == pytest.approx(expected[first].log_probability, abs=1e-5)
            assert abs(value.log_probability - seen[first].log_probability) > 1e-3


def test_a_separator_that_begins_a_document_is_seen_in_it():
    model, begin, rest, answer = build(MODELS["ALiBi"][0], "sdpa"), 49, [3, 4], [6, 8]
    expected = one_by_one(model, [[request([begin, *rest], answer)]])[0]
    whole = [[request([5, 7, 9, begin, *rest], answer)]]
    (found,) = score(model, whole, 64, separator=Separator(begin, begins=True))
    assert found[0].log_probability == pytest.approx(expected.log_probability, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("implementation", ["sdpa", "flex"])
@pytest.mark.parametrize("name", ["learned positions", "ALiBi", "RoPE, shared heads"])
def test_scores_on_a_gpu_are_those_of_one_forward_pass_for_each_choice_on_a_cpu(name, implementation):
    config = replace(MODELS[name][0], d_model=256)  # heads as wide as kernels like them
    groups = questions(23, shared=40)
    expected = one_by_one(build(config), groups)
    found = all_scores(build(config, implementation, torch.device("cuda")), groups)
    for number, value in expected.items():
        assert found[number].log_probability == pytest.approx(value.log_probability, abs=1e-3, rel=1e-4)


def test_results_do_not_depend_on_how_many_ranks_share_the_work():
    model, groups = build(), questions(17)
    alone = all_scores(model, groups)
    for world_size in (2, 3, 5):
        assert all_scores(model, groups, world_size=world_size) == alone


def test_every_rank_takes_as_many_steps_as_the_others():
    model, groups = build(), questions(9)
    steps = {len(list(score(model, groups, 64, rank, 4))) for rank in range(4)}
    assert len(steps) == 1


def test_equal_choices_score_equally_to_the_last_bit():
    model = build()
    groups = [[request([1, 2, 3], [4, 5]), request([1, 2, 3], [6]), request([1, 2, 3], [4, 5])]]
    found = all_scores(model, groups)
    assert found[0] == found[2]


def test_nothing_is_computed_twice():
    """LLM Foundry and lm-evaluation-harness read the context again for every choice."""
    context = list(range(10))
    row = Row()
    for number, continuation in enumerate(([20, 21, 22], [20, 21, 23], [30])):
        row.add(request(context, continuation), number)
    # The context, then 20 and 21, which two continuations share; the last token of each is predicted, never read.
    assert row.tokens == [*context, 20, 21]
    assert sorted(row.targets) == [
        (9, 20, 0),
        (9, 20, 1),
        (9, 30, 2),
        (10, 21, 0),
        (10, 21, 1),
        (11, 22, 0),
        (11, 23, 1),
    ]


def test_a_token_sees_what_came_before_it_and_no_sibling():
    row = Row()
    row.add(request([1, 2], [3, 4]), 0)
    row.add(request([1, 2], [5, 6]), 1)
    assert row.tokens == [1, 2, 3, 5]
    assert row.positions == [0, 1, 2, 2]
    assert row.attention_mask(5).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_a_fixed_beginning_is_shared_by_many_items():
    groups = questions(40, shared=60)
    num_tokens = sum(len(row) for batch in pack(groups, 4096) for row in batch)
    longest_of_each = sum(max(len(r.context) + len(r.continuation) for r in group) for group in groups)
    assert num_tokens < 0.6 * longest_of_each


def test_batches_are_little_more_than_their_tokens():
    """LLM Foundry pads every item to the model's length."""
    batches = pack(questions(200, seed=3), 512)
    used = sum(len(row) for batch in batches for row in batch)
    computed = [max(map(len, batch)) * len(batch) for batch in batches]
    assert used / sum(computed) > 0.9
    assert max(computed) <= 512


def test_log_probabilities_of_a_bf16_model_come_from_fp32_logits():
    """LLM Foundry takes them from bf16 logits, where steps of 0.06 nats decide between choices."""
    model, text = build(), [3, 1, 4]
    model.model.to(torch.bfloat16)
    found = all_scores(model, [[request(text, [token])] for token in range(50)], max_batch_tokens=1)
    logits_v = model.model(torch.tensor([text]), head=lambda hidden, weight: hidden[0, -1].double() @ weight.double().T)
    expected = logits_v.log_softmax(-1).tolist()
    assert [found[token].log_probability for token in range(50)] == pytest.approx(expected, abs=1e-5)


def test_each_generated_token_is_the_likeliest():
    model = build()
    written = list(model.generate([3, 1, 4], 9))
    for i, token in enumerate(written):
        assert token == int(model.model(torch.tensor([[3, 1, 4, *written[:i]]]))[0, -1].argmax())
    with torch.autocast("cpu", torch.bfloat16):  # as in a run whose residual stream is fp32
        assert len(list(model.generate([3, 1, 4], 9))) == 9


def test_attention_of_rows_of_many_widths_leaves_cudnn_alone(monkeypatch):
    """On GPUs that try it first it plans for seconds, anew for each width."""
    is_asked: list[bool] = []
    attend = F.scaled_dot_product_attention

    def noted(*args, **options):
        is_asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model = build()
    all_scores(model, questions(3))
    for _ in model.generate([3, 1, 4], 2):
        assert torch.backends.cuda.cudnn_sdp_enabled(), "between two tokens others may compute"
    assert is_asked and not any(is_asked)


def test_autocast_touches_no_logits():
    torch.manual_seed(1)
    hidden, unembedding = torch.randn(1, 3, 8), torch.randn(50, 8)
    zeros, positions = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    wanted = AnswerTokens(zeros, positions, positions, torch.tensor([7, 0, 49]))
    plain = score_hidden(hidden, unembedding, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(score_hidden(hidden, unembedding, wanted).log_probability_n, plain.log_probability_n)


def test_the_vocabulary_is_read_in_parts_without_a_trace(monkeypatch):
    torch.manual_seed(2)
    hidden, unembedding = torch.randn(1, 40, 8), torch.randn(1000, 8)
    at = torch.arange(40)
    logits = hidden[0].double() @ unembedding.double().T
    best = logits.argmax(-1)
    wanted = AnswerTokens(torch.zeros_like(at), at, torch.cat([at, at]), torch.cat([best, torch.randint(1000, (40,))]))
    monkeypatch.setattr(products, "CPU_LOGITS_BYTES", 1)  # 256 words at a time
    found = score_hidden(hidden, unembedding, wanted)
    expected = logits.log_softmax(-1)[wanted.position_n, wanted.token_n]
    assert found.log_probability_n.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert found.is_argmax_n[:40].all() and found.is_argmax_n.sum() < 45


@pytest.mark.parametrize(("first", "second"), [(3, 700), (300, 301), (0, 999)])
def test_the_first_of_equal_logits_is_the_likeliest_in_whichever_parts_they_are(monkeypatch, first, second):
    unembedding = torch.zeros(1000, 2)
    unembedding[[first, second]] = 1.0
    at = torch.zeros(2, dtype=torch.int64)
    wanted = AnswerTokens(at[:1], at[:1], at, torch.tensor([first, second]))
    monkeypatch.setattr(products, "CPU_LOGITS_BYTES", 1)  # 256 words at a time
    assert score_hidden(torch.ones(1, 1, 2), unembedding, wanted).is_argmax_n.tolist() == [True, False]


def test_a_token_generated_in_bf16_is_what_scoring_calls_the_likeliest():
    """Logits rounded to bf16 would tie, and the first of equals would be written."""
    mpt = normal_model(ModelConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=16, vocab_size=4096))
    model = TreeModel(mpt.to(torch.bfloat16), torch.device("cpu"))
    contexts = [tuple((7 * i + 31 * j) % 4096 for j in range(5)) for i in range(150)]
    requests = [Request(context, tuple(model.generate(context, 1)), 0, 0) for context in contexts]
    assert all(next(iter(score(model, [[request]], 64)))[0].is_greedy for request in requests)
