"""CISPO: the importance weight is clipped and detached, so that no token loses its gradient.

MiniMax-M1, eqs. 4-5: only the upper bound works (a lower bound of 1 is none), token-level loss, no KL, and DAPO's
dynamic sampling and length penalty. The upper bound 5 is the one that reproductions use; the paper gives none.
"""

PAPER = "https://arxiv.org/abs/2506.13585"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "grpo",
        "filter_groups": {"enable": True, "metric": "reward"},
        "overlong_buffer": {"enable": True},
    },
    "actor": {
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "cispo"},
    },
    "rollout": {"n": 16},
}
