"""The loss in a training loop of one's own: a policy that learns to count.

    python examples/plain_torch.py              # or with another method's name: grpo, dppo_binary_tv, ...

A prompt is a digit; the right response counts on from it and ends: 6 -> 7 8 9 <end>. The policy is a table, the
probability of each token given the one before it, and starts uniform. Each step samples GROUP responses a prompt and
updates several times on them: after the first update ratios are no longer 1, and the trust region starts to matter.
Here every right token is rare at first. A fixed interval (grpo) holds it back; band_kl's is wide where p is small.
"""

import sys

import torch

from trustregion import PolicyLoss, TokenBatch

END, LENGTH, GROUP, UPDATES = 10, 10, 32, 8  # tokens are the digits and END
prompts = torch.arange(10).repeat_interleave(GROUP)


def sample(policy):
    tokens = [prompts]
    for _ in range(LENGTH):
        tokens.append(torch.distributions.Categorical(logits=policy(tokens[-1])).sample())
    return torch.stack(tokens[:-1], 1), torch.stack(tokens[1:], 1)


def train(method="band_kl", steps=12, seed=0):
    """Yields (reward, clip fraction) of each step."""
    torch.manual_seed(seed)
    loss = PolicyLoss.from_preset(method)
    policy = torch.nn.Embedding.from_pretrained(torch.zeros(11, 11), freeze=False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.2)

    def log_prob_of(responses, before):
        return policy(before).log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)

    for _ in range(steps):
        with torch.no_grad():
            before, responses = sample(policy)
            log_prob_old = log_prob_of(responses, before)
        ended = (before == END).cumsum(1) > 0
        right = ((responses == before + 1) & ~ended).cumprod(1).sum(1) / (10 - prompts)  # share before the first error
        groups = right.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        advantages = advantages.view(-1, 1).expand_as(responses)

        stats = []
        for _ in range(UPDATES):
            out = loss(TokenBatch(log_prob_of(responses, before), log_prob_old, advantages, response_mask=~ended))
            optimizer.zero_grad()
            (out.token_loss.sum() / (~ended).sum()).backward()
            optimizer.step()
            stats.append(out.metrics)
        yield right.mean().item(), stats[0].merge(*stats[1:]).summarize()["trust/clip_fraction"]


if __name__ == "__main__":
    print("step  reward  clipped")
    for step, (reward, clipped) in enumerate(train(*sys.argv[1:]), start=1):
        print(f"{step:4d}  {reward:6.3f}  {clipped:7.2%}")
