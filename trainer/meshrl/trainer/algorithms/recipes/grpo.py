"""GRPO: rewards standardised within the group stand in for a critic; each response weighs the same; KL in the loss.

DeepSeekMath, eq. 3 and section 4.2: ε = 0.2, β = 0.04 with the estimator k3, 64 responses a prompt (here 8: raise
`rollout.n` where the engines can afford it).
"""

PAPER = "https://arxiv.org/abs/2402.03300"
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": True,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "low_var_kl",
    },
    "rollout": {"n": 8},
}
