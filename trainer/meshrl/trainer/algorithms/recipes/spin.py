"""SPIN: preferences between a response and the policy's own weaker one; the opponent is the policy before the step.

Chen et al. 2024, section 4, with a reward as the judge of which of two own responses is the better one: the opponent
is renewed every step, so no reference service is needed. With `adv_estimator: data_answer` and `rollout.n: 1` the
data's own answers are chosen instead, as in the paper.
"""

PAPER = "https://arxiv.org/abs/2401.01335"
DEFAULTS = {
    "algorithm": {"adv_estimator": "preference"},
    "actor": {"policy_loss": {"loss_mode": "spin", "dpo_beta": 0.1}},
    "rollout": {"n": 2},
}
