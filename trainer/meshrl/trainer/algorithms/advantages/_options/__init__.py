"""Options of estimators, in a file named like the estimator's. Imports no torch; see `algorithms.options`."""
