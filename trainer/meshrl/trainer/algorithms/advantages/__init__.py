"""From rewards to advantages: one estimator per file, found by its name (`algorithm.adv_estimator`)."""

ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Names of verl's for the same formula."""
