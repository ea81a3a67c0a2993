"""Algorithms made of other papers' estimators and losses: their settings, and what else they compute."""
