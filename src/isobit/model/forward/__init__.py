"""The forward and its gradients: layers, attention, MLPs, experts, the output head; for rollout and
learner."""
