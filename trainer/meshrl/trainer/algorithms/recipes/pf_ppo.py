"""PF-PPO: PPO on rows drawn by how far their reward can be trusted: the ends of a reward model's range.

Shen et al. 2024. After the advantages are computed, the rows of the batch are drawn with replacement with probability
proportional to |reward|²; `pf_ppo.reweight_method` has the paper's other two.
"""

PAPER = "https://arxiv.org/abs/2409.06957"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "use_pf_ppo": True,
        "pf_ppo": {"reweight_method": "pow", "weight_pow": 2.0},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "critic": {"optim": {"lr": 1e-5}, "cliprange_value": 0.5},
    "rollout": {"n": 4},
}
