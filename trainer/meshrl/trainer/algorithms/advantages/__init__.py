"""From rewards to advantages: one estimator per file, found by its name (`algorithm.adv_estimator`)."""
