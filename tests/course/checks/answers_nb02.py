"""Answers to the exercises of lesson 02."""

import torch

from rlcourse.course.checks.builders import policy_loss


# q2: GAE across a tool's words
def gae_lesson(rewards, values, mask, gamma, lam):
    """The lesson's function, pasted: it takes the mask to have no gaps."""
    values, following = values * mask, torch.cat([values[:, 1:] * mask[:, 1:], torch.zeros(len(values), 1)], 1)
    deltas, found = rewards * mask + gamma * following - values, torch.zeros_like(values)
    carried = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        carried = deltas[:, t] + gamma * lam * carried
        found[:, t] = carried
    return found * mask


# q3: a bound
def bound_weight(new, old, advantages, mask, clip, most):
    """REINFORCE with weights."""
    new, old, a = new[mask], old[mask], advantages[mask]
    r = (new - old).exp().detach()
    gone = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip))
    return -(r.clamp(max=most) * ~gone * a * new).mean()


def bound_ppo(new, old, advantages, mask, clip, most):
    r, a = (new[mask] - old[mask]).exp(), advantages[mask]
    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()


RIGHT = {"q3": bound_weight}
WRONG = {
    "q1": {
        "detached": (lambda new, *rest: policy_loss(new.detach(), *rest), "no gradient flows"),
        "old moves": lambda new, old, *rest: policy_loss(new, new.detach(), *rest),
    },
    "q2": {"pasted": (gae_lesson, "end the answer for you")},
    "q3": {
        "the package's PPO": (bound_ppo, "PPO as it was"),
        "REINFORCE": lambda n, o, a, m, *rest: -(a[m] * n[m]).mean(),
    },
}
