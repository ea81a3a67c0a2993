"""The frozen model of KL terms, and the stage that computes with it."""
