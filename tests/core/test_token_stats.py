"""Statistics of tokens from logits: golden values, high precision, layouts, hostile values."""

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustregion import cell_divergence
from trustregion.token_stats import CHUNK_BYTES, IGNORE_INDEX, token_stats

from .helpers import golden_tokens, peaked_logits, random_ids, random_logits, reference_cells


def subtracting_entropy(logits):
    """The usual form, exact only where entropy is not small."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def exact_stats(logits, token_id):
    """ln p and entropy of one row with 50 digits."""
    with mp.workdps(50):
        x = [mp.mpf(value) for value in logits.tolist()]
        log_norm = mp.log(mp.fsum(mp.exp(value) for value in x))
        return float(x[token_id] - log_norm), float(mp.fsum(mp.exp(v - log_norm) * (log_norm - v) for v in x))


def test_golden_values():
    golden = golden_tokens()
    inputs, expected = golden["inputs"], golden["expected"]
    tokens = torch.tensor(inputs["tokens"])
    logits, logits_old = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("new_logits", "old_logits"))

    def check(ours, golden):
        torch.testing.assert_close(ours, torch.tensor(golden, dtype=torch.float64), rtol=1e-12, atol=1e-15)

    for K in (5, 20):
        old = token_stats(logits_old, tokens, topk=K)
        new = token_stats(logits, tokens, cell_ids=old.cell_ids)
        check(old.log_prob, expected["logp_old"])
        check(new.log_prob, expected["logp_new"])
        check(old.entropy, expected["entropy_old"])
        check(new.entropy, expected["entropy_new"])
        check(new.entropy / old.entropy, expected["entropy_ratio"])
        for divergence in ("tv", "kl"):
            ours = cell_divergence(new.cell_log_prob, old.cell_log_prob, divergence)
            check(ours, expected["divergence"][f"topk{K}_union"][divergence])


@pytest.mark.parametrize("sampled", [0, 1])
def test_relatively_accurate_down_to_entropies_of_1e_10(sampled):
    logits = peaked_logits([0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 30.0, 32.0, 34.0], V=500)
    stats = token_stats(logits, torch.full((len(logits),), sampled))
    exact = [exact_stats(row, sampled) for row in logits]
    log_prob, entropy = torch.tensor(exact, dtype=torch.float64).T
    assert entropy.min() < 1e-10
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.log_prob.double(), log_prob, rtol=1e-6, atol=0)


@pytest.mark.parametrize("V", [3, 2048])
def test_shifted_logits_change_no_entropy_ratio(V):
    """Nor does any shift flip a decision at 5 %, as it does in the usual form."""
    logits = peaked_logits([step / 8 for step in range(257)], V)
    tokens = torch.zeros(len(logits), dtype=torch.long)
    entropy = token_stats(logits, tokens).entropy
    assert entropy.min() < 1e-8 and entropy.max() > 0.5
    flipped_by_subtraction = 0
    for shift in (-100.0, -37.3, 12.7, 100.0):
        rho = token_stats(logits + shift, tokens).entropy / entropy
        torch.testing.assert_close(rho, torch.ones_like(rho), rtol=0, atol=1e-5)
        subtracting = subtracting_entropy(logits + shift) / subtracting_entropy(logits)
        flipped_by_subtraction += int((~((subtracting - 1).abs() < 0.05)).sum())  # 0/0 too
    assert flipped_by_subtraction > len(logits)  # of 4 times as many


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_of_the_same_values(dtype):
    logits = random_logits(5, 7, 300, dtype=dtype)
    tokens = random_ids(5, 7, V=300)
    results, gradients = [], []
    for x in (logits, logits.float()):
        x.requires_grad_()
        stats = token_stats(x, tokens, temperature=0.7, topk=4)
        (stats.log_prob.sum() + stats.entropy.sum() + stats.cell_log_prob[..., -1].sum()).backward()
        results.append(stats)
        gradients.append(x.grad)
    assert gradients[0].dtype == dtype and results[0].log_prob.dtype == torch.float32
    assert gradients[0].equal(gradients[1].to(dtype))
    for name in ("log_prob", "entropy", "cell_ids", "cell_log_prob"):
        assert getattr(results[0], name).equal(getattr(results[1], name)), name


def every_result(logits, tokens, **arguments):
    logits = logits.clone().requires_grad_()
    stats = token_stats(logits, tokens, **arguments)
    (stats.log_prob.sum() + 0.3 * stats.entropy.sum() + 0.7 * stats.cell_log_prob[..., -1].sum()).backward()
    return stats.log_prob, stats.entropy, stats.cell_ids, stats.cell_log_prob, logits.grad


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_and_company_change_no_bit(monkeypatch, threads, dtype):
    """A row's results depend neither on the chunk it is in nor on the rows around it, a lone row's included."""
    V = 40960  # more than torch sums in one thread, if it has several
    logits, tokens = random_logits(5, V, dtype=dtype), random_ids(5, V=V)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for rows_in_chunk in (1, 2, 3, 9):
            monkeypatch.setitem(CHUNK_BYTES, "cpu", rows_in_chunk * V * 4)
            results.append(every_result(logits, tokens, temperature=0.9, topk=3))
        results.append(
            [
                torch.cat(parts)
                for parts in zip(
                    *(every_result(logits[i : i + 1], tokens[i : i + 1], temperature=0.9, topk=3) for i in range(5)),
                    strict=True,
                )
            ]
        )
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("K", [0, 4])
def test_strides_and_shapes(K):
    V = 24
    whole = random_logits(4, 6, V + 3)
    variants = {
        "rows": whole[:, :-1, :V],
        "columns": whole.transpose(0, 2)[:V].permute(2, 1, 0),
        "every other": whole[::2, ::3, 2 : V + 2],
        "expanded": whole[:1, :, :V].expand(3, 6, V),
        "one row": whole[0, 0, :V],
        "no rows": whole[:0, :, :V],
        "no columns": whole[:, :0, :V],
    }
    for name, logits in variants.items():
        shape = logits.shape[:-1]
        tokens = random_ids(*shape, V=V).to(torch.int32)
        cells = {"cell_ids": logits.topk(K).indices.to(torch.int32)}
        leaf = logits.detach().requires_grad_()
        assert leaf.stride() == logits.stride()
        copy = logits.clone(memory_format=torch.contiguous_format).requires_grad_()
        for x, result in ((leaf, []), (copy, [])):
            stats = token_stats(x, tokens, **cells)
            (gradient,) = torch.autograd.grad((stats.log_prob + stats.cell_log_prob[..., -1]).sum(), x)
            result += [stats.log_prob, stats.entropy, stats.cell_log_prob, gradient]
            assert stats.log_prob.shape == stats.entropy.shape == shape
            assert stats.cell_log_prob.shape == (*shape, K + 2) and stats.cell_ids.shape == (*shape, K)
            if x is leaf:
                ours = result
        assert all(a.equal(b) for a, b in zip(ours, result, strict=True)), name


def test_temperature_divides_the_logits():
    logits, tokens = random_logits(3, 5, 40), random_ids(3, 5, V=40)
    temperature = torch.tensor([0.25, 1.0, 3.0])[:, None]
    ours = token_stats(logits, tokens, temperature, topk=3)
    divided = token_stats(logits / temperature[..., None], tokens, topk=3)
    for name in ("log_prob", "entropy", "cell_log_prob"):
        torch.testing.assert_close(getattr(ours, name), getattr(divided, name), rtol=1e-12, atol=1e-12)
    assert token_stats(logits, tokens, 0.25).entropy[0].equal(ours.entropy[0])
    assert token_stats(logits, tokens, torch.tensor(0.25)).entropy[0].equal(ours.entropy[0])


def test_impossible_tokens_contribute_nothing():
    """Masking half of the vocabulary is the same as not having it: in all values, and in the gradient."""
    logits, tokens = random_logits(4, 32, dtype=torch.float32), random_ids(4, V=32)
    masked = torch.cat([torch.full((4, 16), -torch.inf), logits, torch.full((4, 16), -torch.inf)], -1)
    few, all_ = every_result(logits, tokens, topk=5), every_result(masked, tokens + 16, topk=5)
    torch.testing.assert_close(all_[4][:, 16:48], few[4])
    assert (all_[4][:, :16] == 0).all() and (all_[4][:, 48:] == 0).all()
    assert all_[2].equal(few[2] + 16)
    for a, b in ((all_[0], few[0]), (all_[1], few[1]), (all_[3], few[3])):
        torch.testing.assert_close(a, b)


def test_hostile_rows_stay_alone_and_need_no_gradient():
    logits, tokens = random_logits(6, 40, dtype=torch.float32), random_ids(6, V=40)
    clean = every_result(logits, tokens, topk=3)
    hostile = logits.clone()
    hostile[1, 7], hostile[2, int(tokens[2])], hostile[4], hostile[5, 3] = torch.nan, torch.inf, -torch.inf, torch.inf
    bad = torch.tensor([1, 2, 4, 5])
    leaf = hostile.clone().requires_grad_()
    stats = token_stats(leaf, tokens, topk=3)
    for values, expected in ((stats.log_prob, clean[0]), (stats.entropy, clean[1]), (stats.cell_log_prob, clean[3])):
        assert values[[0, 3]].equal(expected[[0, 3]])
    assert stats.log_prob[bad].isnan().all() and stats.entropy[bad].isnan().all()
    assert stats.cell_log_prob[bad][:, [0, 1, 2, 4]].isnan().all()

    live = torch.tensor([True, False, False, True, False, False])
    torch.where(live, stats.log_prob + stats.entropy, 0.0).sum().backward(retain_graph=True)
    assert leaf.grad[live].ne(0).all() and leaf.grad[~live].eq(0).all()
    (gradient,) = torch.autograd.grad(stats.log_prob.sum(), leaf)
    assert gradient[bad].isnan().all() and gradient[[0, 3]].isfinite().all()


def test_ignored_tokens():
    logits, tokens = random_logits(4, 12).requires_grad_(), torch.tensor([3, IGNORE_INDEX, 0, IGNORE_INDEX])
    stats = token_stats(logits, tokens, cell_ids=torch.tensor([[1], [1], [1], [0]]))
    assert stats.log_prob[1] == stats.log_prob[3] == 0
    (gradient,) = torch.autograd.grad(stats.log_prob.sum(), logits, retain_graph=True)
    assert gradient[[1, 3]].eq(0).all() and gradient[[0, 2]].ne(0).all()
    assert stats.entropy.equal(token_stats(logits, torch.zeros(4, dtype=torch.long)).entropy)
    assert (stats.cell_log_prob[[1, 3], 1] == -torch.inf).all()
    torch.testing.assert_close(stats.cell_log_prob.exp().sum(-1), torch.ones(4, dtype=torch.float64))


def test_rest_keeps_its_digits_when_tiny_and_when_nearly_everything():
    logits, tokens, ids = torch.tensor([[0.0, -1.0, -200.0, -201.0]]), torch.tensor([1]), torch.tensor([[0]])
    logits.requires_grad_()
    rest = token_stats(logits, tokens, cell_ids=ids).cell_log_prob[0, -1]
    exact = reference_cells(logits.double().log_softmax(-1), tokens, ids)[0, -1]
    assert rest.item() == pytest.approx(exact.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(rest, logits)
    torch.testing.assert_close(gradient[0, 2:].double(), logits[0, 2:].double().softmax(-1), rtol=1e-5, atol=0)

    # d ln(1 - p_a) / dx_i = p_i p_a / (1 - p_a), with p_a = e^-40 / t
    logits, ids = torch.tensor([[0.1, 0.2, -0.7, 1.3, -40.0]], requires_grad=True), torch.zeros(1, 0, dtype=torch.long)
    rest = token_stats(logits, torch.tensor([4]), cell_ids=ids).cell_log_prob[0, -1]
    p = logits.detach().double().softmax(-1)[0]
    assert rest.item() == pytest.approx(-p[4].item(), rel=1e-5, abs=0)
    (gradient,) = torch.autograd.grad(rest, logits)
    torch.testing.assert_close(gradient[0, :4].double(), p[:4] * p[4], rtol=1e-5, atol=0)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_cells_equal_their_definition(data):
    V = data.draw(st.integers(1, 24))
    K = data.draw(st.integers(0, V))
    N = data.draw(st.integers(0, 5))
    value = st.floats(-30, 30, width=16) | st.just(-torch.inf)
    logits = torch.tensor(data.draw(st.lists(st.lists(value, min_size=V, max_size=V), min_size=N, max_size=N)))
    logits = logits.double().view(N, V)
    logits[:, 0] = logits[:, 0].clamp(min=-30)  # at least one possible token
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, V - 1), min_size=N, max_size=N)), dtype=torch.long)
    ids = [data.draw(st.permutations(range(V)))[:K] for _ in range(N)]
    ids = torch.tensor(ids, dtype=torch.long).view(N, K)
    stats = token_stats(logits, tokens, cell_ids=ids)
    torch.testing.assert_close(stats.cell_log_prob.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(stats.cell_log_prob, reference_cells(logits.log_softmax(-1), tokens, ids), rtol=1e-12, atol=1e-13)
    among = (ids == tokens[:, None]).any(-1)
    assert (stats.cell_log_prob[among, -2] == -torch.inf).all()
    if 0 < K < V:
        top = token_stats(logits, tokens, topk=K)
        assert top.cell_log_prob.equal(token_stats(logits, tokens, cell_ids=top.cell_ids).cell_log_prob)
        torch.testing.assert_close(logits.gather(-1, top.cell_ids.long()), logits.topk(K).values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": torch.tensor([1.0, -2.0])}, "temperature holds -2.0"),
        ({"temperature": torch.tensor([1.0, torch.nan])}, "temperature holds nan"),
        ({"temperature": torch.ones(3)}, r"temperature of shape \(3,\)"),
        ({"topk": -1}, "topk=-1"),
        ({"topk": 8}, "topk=8"),
        ({"topk": 2, "cell_ids": torch.zeros(2, 1, dtype=torch.long)}, "topk=2 and cell_ids"),
        ({"token_ids": torch.tensor([0, 8])}, "token_ids holds 8"),
        ({"token_ids": torch.tensor([0, -1])}, "token_ids holds -1"),
        ({"token_ids": torch.tensor([0, 1, 2])}, r"token_ids of torch.int64 for \(3,\)"),
        ({"token_ids": torch.tensor([0.0, 1.0])}, "token_ids of torch.float32"),
        ({"cell_ids": torch.tensor([[0], [8]])}, "cell_ids holds 8"),
        ({"cell_ids": torch.tensor([[0], [IGNORE_INDEX]])}, "cell_ids holds -100"),
        ({"cell_ids": torch.tensor([0, 1])}, "cell_ids of torch.int64"),
        ({"logits": torch.zeros(2, 8, dtype=torch.long)}, "logits of torch.int64"),
        ({"logits": torch.zeros(2, 0)}, r"logits of torch.float32 have shape \(2, 0\)"),
    ],
)
def test_errors_name_argument_and_value(change, message):
    arguments = {"logits": torch.zeros(2, 8), "token_ids": torch.tensor([0, 7])}
    token_stats(**arguments)
    with pytest.raises(ValueError, match=message):
        token_stats(**(arguments | change))
