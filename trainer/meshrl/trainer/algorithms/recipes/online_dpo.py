"""Online DPO: the best and the worst response of each group are a preference; the reference stays where it began.

Guo et al. 2024, https://arxiv.org/abs/2402.04792, with the reward as the annotator; β = 0.1.
"""

DEFAULTS = {
    "algorithm": {"adv_estimator": "preference"},
    "actor": {"policy_loss": {"loss_mode": "dpo", "dpo_beta": 0.1}},
    "rollout": {"n": 2},
}
