"""SPPO: the log-ratio of a response is regressed on its distance from the group's soft mean.

Wu et al. 2024; the reward stands in for the win rate. η is 1 as in verl's recipe (the paper writes 1e3 and divides by
it elsewhere). The group's own soft mean is subtracted, not the batch's.
"""

PAPER = "https://arxiv.org/abs/2405.00675"
DEFAULTS = {
    "algorithm": {"adv_estimator": "sppo", "sppo_beta": 1.0},
    "actor": {"policy_loss": {"loss_mode": "sppo", "sppo_eta": 1.0}},
    "rollout": {"n": 5},
}
