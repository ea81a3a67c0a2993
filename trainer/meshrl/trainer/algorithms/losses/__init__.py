"""From advantages to a policy loss: one loss per file, found by its name (`actor.policy_loss.loss_mode`)."""
