"""GPG: the plain policy gradient of group-centred rewards, scaled up by the share of prompts that teach something.

Chu et al. 2025: no surrogate, no clip, no KL, no critic; `queue.max_staleness` is 0, because the loss has no ratio.
"""

PAPER = "https://arxiv.org/abs/2504.02546"
DEFAULTS = {
    "algorithm": {"adv_estimator": "gpg"},
    "actor": {
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "gpg"},
        "use_kl_loss": False,
    },
    "rollout": {"n": 8},
    "queue": {"max_staleness": 0},
}
