"""Engines without a model; a recipe may name them like any other."""
